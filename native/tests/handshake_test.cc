#include "net/handshake.h"

#include <cstdlib>

#include "check.h"
#include "net/sha256.h"

using namespace photinus;
using namespace photinus::test;

namespace {

std::string hex(const Digest& digest) {
  std::string made;
  for (uint8_t byte : digest) made += text("%02x", byte);
  return made;
}

std::string sha256(const std::string& message) {
  return hex(Sha256().update(message.data(), message.size()).finish());
}

std::string hmac(const std::string& key, const std::string& message) {
  return hex(HmacSha256(key.data(), key.size()).update(message).finish());
}

Membership member(uint32_t rank, const std::string& secret = "secret", const std::string& job = "job",
                  uint32_t attempt = 2) {
  Membership made;
  made.job = job;
  made.group = "world";
  made.attempt = attempt;
  made.rank = rank;
  made.ranks = 4;
  made.pid = 100 + static_cast<int>(rank);
  made.host = text("host-%u", rank);
  made.key = key_of(secret, job);
  return made;
}

const Token kToken{1, 2, 3};

Judgement judged(const Membership& caller, const Membership& listener, uint32_t to = 0, uint8_t streams = 1,
                 const Dialect& dialect = {}) {
  const Challenge challenge = make_challenge();
  return judge(make_claim(challenge, caller, to, 0, streams, kToken, dialect), challenge, &listener, 1);
}

}  // namespace

TEST(sha256_gives_the_published_digests) {  // FIPS 180-4's examples, as in NIST's and RFC 6234's test data
  CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  CHECK(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnop"
               "qrsmnop"
               "qrstnopqrstu") == "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  const std::string million(1000000, 'a');
  CHECK(sha256(million) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  Sha256 torn;  // the same however it comes
  for (size_t at = 0, piece = 1; at < million.size(); at += piece, piece = piece * 7 % 191 + 1)
    torn.update(million.data() + at, std::min(piece, million.size() - at));
  CHECK(hex(torn.finish()) == sha256(million));
}

TEST(hmac_gives_the_published_digests) {  // RFC 4231, cases 1 to 4, 6, 7
  CHECK(hmac(std::string(20, '\x0b'), "Hi There") ==
        "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  CHECK(hmac("Jefe", "what do ya want for nothing?") ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  CHECK(hmac(std::string(20, '\xaa'), std::string(50, '\xdd')) ==
        "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
  std::string counting;
  for (char c = 1; c <= 25; ++c) counting += c;
  CHECK(hmac(counting, std::string(50, '\xcd')) ==
        "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
  CHECK(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First") ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  CHECK(hmac(std::string(131, '\xaa'),
             "This is a test using a larger than block-size key and a larger than block-size data. The key "
             "needs to "
             "be hashed before being used by the HMAC algorithm.") ==
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST(comparing_finds_every_single_difference) {
  const Digest one = key_of("a", "b");
  CHECK(equal_in_constant_time(one.data(), one.data(), one.size()));
  for (size_t bit = 0; bit < 256; ++bit) {
    Digest other = one;
    other[bit / 8] = static_cast<uint8_t>(other[bit / 8] ^ 1 << bit % 8);
    CHECK(!equal_in_constant_time(one.data(), other.data(), one.size()));
  }
  CHECK(key_of("ab", "c") != key_of("a", "bc"));
  CHECK(key_of("a", "b") != key_of("a", "c"));
}

TEST(a_claim_of_the_group_is_accepted_and_both_sides_prove_themselves) {
  const Membership caller = member(1), listener = member(0);
  const Challenge challenge = make_challenge();
  CHECK(fault_of(challenge).empty());
  const Claim claim = make_claim(challenge, caller, 0, 1, 1, kToken);
  const Claimed claimed = read(claim);
  CHECK(claimed.is_photinus && claimed.from.who() == "rank 1 (pid 101 on host-1)");
  CHECK(claimed.from.job == "job" && claimed.from.group == "world" && claimed.from.attempt == 2);
  CHECK(claimed.to == 0 && claimed.stream == 1 && claimed.streams == 1 && claimed.token == kToken);
  const Judgement judgement = judge(claim, challenge, &listener, 1);
  CHECK(judgement.answer == Answer::accepted && judgement.is_member);
  const Verdict verdict = make_verdict(judgement, &listener, claim, challenge);
  const Heard heard = read(verdict, claim, challenge, caller);
  CHECK(heard.is_proved && heard.answer == Answer::accepted);
  CHECK(heard.from.who() == "rank 0 (pid 100 on host-0)");
  CHECK(!read(verdict, claim, challenge, member(1, "other")).is_proved);
  CHECK(!read(verdict, claim, make_challenge(), caller).is_proved);
  CHECK(!read(verdict, make_claim(challenge, caller, 0, 1, 1, kToken), challenge, caller).is_proved);
}

TEST(no_bit_of_a_claim_or_a_verdict_can_be_changed) {
  const Membership caller = member(1), listener = member(0);
  const Challenge challenge = make_challenge();
  const Claim claim = make_claim(challenge, caller, 0, 0, 1, kToken);
  for (size_t bit = 0; bit < claim.size() * 8; bit += 3) {
    Claim changed = claim;
    changed[bit / 8] = static_cast<uint8_t>(changed[bit / 8] ^ 1 << bit % 8);
    CHECK(judge(changed, challenge, &listener, 1).answer == Answer::refused);
    CHECK(!is_proved(changed, challenge, listener.key));
  }
  const Verdict verdict = make_verdict(judge(claim, challenge, &listener, 1), &listener, claim, challenge);
  for (size_t bit = 0; bit < verdict.size() * 8; bit += 3) {
    Verdict changed = verdict;
    changed[bit / 8] = static_cast<uint8_t>(changed[bit / 8] ^ 1 << bit % 8);
    CHECK(!read(changed, claim, challenge, caller).is_proved);
  }
}

TEST(a_replayed_claim_is_refused) {
  const Membership caller = member(1), listener = member(0);
  const Challenge first = make_challenge(), second = make_challenge();
  CHECK(first != second);
  const Claim claim = make_claim(first, caller, 0, 0, 1, kToken);
  CHECK(judge(claim, first, &listener, 1).answer == Answer::accepted);
  const Judgement replayed = judge(claim, second, &listener, 1);
  CHECK(replayed.answer == Answer::refused && !replayed.is_member);
  CHECK_CONTAINS(replayed.reason, "does not know the secret");
}

TEST(who_does_not_fit_is_refused_with_what_was_said_and_what_is_here) {
  struct {
    Judgement judgement;
    const char* reason;
    bool is_member;
  } refused[] = {
      {judged(member(1, "other"), member(0)),
       "it does not know the secret of group world of job job, attempt 2", false},
      {judged(member(1, "other", "job", 1), member(0)), "it says that it is of attempt 1", false},
      {judged(member(1, "secret", "job", 1), member(0)),
       "it is of attempt 1, and here is attempt 2 of the job", true},
      {judged(member(1), member(0), 3), "it wants rank 3, and here is rank 0", true},
      {judged(member(0), member(0)), "it says that it is rank 0 of 4, and here is rank 0", true},
      {judged(member(9), member(0)), "it says that it is rank 9 of 4", true},
      {judged(member(1), member(0), 0, 3), "it makes links of 3 streams for data, and here they have 1",
       true},
      {judged(member(1), member(0), 0, 1, {7, 'l'}), "it speaks version 7, little endian", false},
      {judged(member(1), member(0), 0, 1, {kLinkVersion, 'b'}), "it speaks version 2, big endian", false},
  };
  for (const auto& each : refused) {
    CHECK(each.judgement.answer == Answer::refused);
    CHECK_CONTAINS(each.judgement.reason, each.reason);
    CHECK(each.judgement.is_member == each.is_member);
  }
  Membership of_three = member(1);
  of_three.ranks = 3;
  CHECK_CONTAINS(judged(of_three, member(0)).reason, "takes the group for one of 3 ranks, and here it has 4");
  const Challenge challenge = make_challenge();
  const Claim claim = make_claim(challenge, member(1), 0, 0, 1, kToken);
  const Judgement nobody = judge(claim, challenge, nullptr, 1);
  CHECK(nobody.answer == Answer::not_yet);
  CHECK_CONTAINS(nobody.reason, "there is no group world of job job, attempt 2 here");
  CHECK_CONTAINS(fault_of(make_challenge({3, 'l'})), "it speaks version 3, little endian");
  CHECK_CONTAINS(fault_of(make_challenge({kLinkVersion, 'b'})), "big endian");
  Challenge http{};
  std::memcpy(http.data(), "HTTP/1.1 400 Bad\r\n", 18);
  CHECK_CONTAINS(fault_of(http), "it answers 'HTTP/1.1 400 Bad', which is not Photinus");
}

TEST(random_bytes_and_texts_without_an_end_are_read_safely) {
  for (int round = 0; round < 2000; ++round) {
    Claim claim;
    Verdict verdict;
    Challenge challenge;
    fill_random(claim.data(), claim.size());
    fill_random(verdict.data(), verdict.size());
    fill_random(challenge.data(), challenge.size());
    if (round % 2) {  // one that gets further
      const Claim good = make_claim(challenge, member(1), 0, 0, 1, kToken);
      const Challenge said = make_challenge();
      std::memcpy(claim.data(), good.data(), 24);
      std::memcpy(verdict.data(), said.data(), 21);
      for (uint8_t& byte : claim) byte = byte ? byte : 1;
    }
    const Membership listener = member(0);
    CHECK(judge(claim, challenge, &listener, 1).answer == Answer::refused);
    const Claimed claimed = read(claim);
    CHECK(claimed.from.host.size() <= kNameBytes);
    for (char c : claimed.from.host + read(verdict, claim, challenge, listener).reason)
      CHECK(c >= ' ' && c <= '~');
  }
}
