#include "net/handshake.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/error.h"

namespace photinus {
namespace {

constexpr char kMagic[16] = "PHOTINUS-LINK\r\n";  // a relay that changes line ends breaks it
constexpr size_t kNonceBytes = 32, kProofBytes = 32, kReasonBytes = 384;

// Numbers are little endian in all messages. Where a field lies does not change in later versions as far as
// the byte order, so that each can tell the other.
struct At {
  static constexpr size_t magic = 0, version = 16, byte_order = 20;
  static constexpr size_t challenge_nonce = 32;
  static constexpr size_t stream = 21, streams = 22, attempt = 24, from = 28, to = 32, ranks = 36, pid = 40;
  static constexpr size_t token = 48, nonce = 64, job = 96, group = job + kNameBytes,
                          host = group + kNameBytes;
  static constexpr size_t answer = 21, verdict_attempt = 24, verdict_rank = 28, verdict_pid = 32,
                          verdict_host = 64, reason = verdict_host + kNameBytes;
};
static_assert(At::host + kNameBytes + kProofBytes <= std::tuple_size_v<Claim>);
static_assert(At::reason + kReasonBytes + kProofBytes <= std::tuple_size_v<Verdict>);

void put(uint8_t* at, uint32_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(value >> 8 * i);
}
uint32_t number(const uint8_t* at) {
  return uint32_t{at[0]} | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16 | uint32_t{at[3]} << 24;
}
void put(uint8_t* at, const std::string& words, size_t bytes) {
  std::memcpy(at, words.data(), std::min(words.size(), bytes - 1));
}
std::string raw(const uint8_t* at, size_t bytes) {
  const auto* const text = reinterpret_cast<const char*>(at);
  return {text, strnlen(text, bytes)};
}
std::string words(const uint8_t* at, size_t bytes) {
  return printable(raw(at, bytes));
}

template <size_t kBytes>
void begin(std::array<uint8_t, kBytes>& message, const Dialect& dialect) {
  message.fill(0);
  std::memcpy(message.data() + At::magic, kMagic, sizeof kMagic);
  put(message.data() + At::version, dialect.version);
  message[At::byte_order] = static_cast<uint8_t>(dialect.byte_order);
}
template <size_t kBytes>
bool is_photinus(const std::array<uint8_t, kBytes>& message) {
  return std::memcmp(message.data() + At::magic, kMagic, sizeof kMagic) == 0;
}
template <size_t kBytes>
Dialect dialect_of(const std::array<uint8_t, kBytes>& message) {
  return {number(message.data() + At::version), static_cast<char>(message[At::byte_order])};
}

template <size_t kBytes>
uint8_t* proof_in(std::array<uint8_t, kBytes>& message) {
  return message.data() + kBytes - kProofBytes;
}
template <size_t kBytes>
const uint8_t* proof_in(const std::array<uint8_t, kBytes>& message) {
  return message.data() + kBytes - kProofBytes;
}

Digest proof_of(const Claim& claim, const Challenge& heard, const Digest& key) {
  return HmacSha256(key)
      .update("photinus caller")
      .update(heard.data(), heard.size())
      .update(claim.data(), claim.size() - kProofBytes)
      .finish();
}
Digest proof_of(const Verdict& verdict, const Claim& claim, const Challenge& said, const Digest& key) {
  return HmacSha256(key)
      .update("photinus listener")
      .update(said.data(), said.size())
      .update(claim.data(), claim.size())
      .update(verdict.data(), verdict.size() - kProofBytes)
      .finish();
}

std::string group_text(const Membership& member) {
  return member.of_group() + text(", attempt %u", member.attempt);
}

}  // namespace

std::string printable(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

char Dialect::own_byte_order() {
  return std::endian::native == std::endian::little ? 'l' : 'b';
}

std::string Dialect::text() const {
  const char* order = byte_order == 'l'   ? "little endian"
                      : byte_order == 'b' ? "big endian"
                                          : "no byte order";
  return photinus::text("version %u, %s", version, order);
}

std::string Membership::who() const {
  return text("rank %u (pid %d on %s)", rank, pid, host.c_str());
}

std::string Membership::of_group() const {
  return "group " + printable(group) + " of job " + printable(job);
}

Digest key_of(const std::string& secret, const std::string& job) {
  static constexpr char kPurpose[] = "photinus-link";
  return Sha256()
      .update(kPurpose, sizeof kPurpose)
      .update(secret.c_str(), secret.size() + 1)
      .update(job.data(), job.size())
      .finish();
}

Challenge make_challenge(const Dialect& dialect) {
  Challenge made;
  begin(made, dialect);
  fill_random(made.data() + At::challenge_nonce, kNonceBytes);
  return made;
}

std::string fault_of(const Challenge& challenge, const Dialect& own) {
  if (!is_photinus(challenge))
    return "it answers '" + words(challenge.data(), 16) + "', which is not Photinus";
  if (dialect_of(challenge) != own)
    return "it speaks " + dialect_of(challenge).text() + " of the links' protocol, and this process " +
           own.text() + ": all hosts need the same version of Photinus and processors of one byte order";
  return "";
}

Claim make_claim(const Challenge& heard, const Membership& own, uint32_t to, uint8_t stream, uint8_t streams,
                 const Token& token, const Dialect& dialect) {
  Claim made;
  begin(made, dialect);
  uint8_t* const at = made.data();
  at[At::stream] = stream;
  at[At::streams] = streams;
  put(at + At::attempt, own.attempt);
  put(at + At::from, own.rank);
  put(at + At::to, to);
  put(at + At::ranks, own.ranks);
  put(at + At::pid, static_cast<uint32_t>(own.pid));
  std::memcpy(at + At::token, token.data(), token.size());
  fill_random(at + At::nonce, kNonceBytes);
  put(at + At::job, own.job, kNameBytes);
  put(at + At::group, own.group, kNameBytes);
  put(at + At::host, own.host, kNameBytes);
  const Digest proof = proof_of(made, heard, own.key);
  std::memcpy(proof_in(made), proof.data(), proof.size());
  return made;
}

Claimed read(const Claim& claim) {
  Claimed said;
  said.is_photinus = is_photinus(claim);
  if (!said.is_photinus) return said;
  said.dialect = dialect_of(claim);
  if (said.dialect.version != kLinkVersion) return said;
  const uint8_t* const at = claim.data();
  said.stream = at[At::stream];
  said.streams = at[At::streams];
  said.from.attempt = number(at + At::attempt);
  said.from.rank = number(at + At::from);
  said.to = number(at + At::to);
  said.from.ranks = number(at + At::ranks);
  said.from.pid = static_cast<int>(number(at + At::pid));
  std::memcpy(said.token.data(), at + At::token, said.token.size());
  said.from.job = raw(at + At::job, kNameBytes);
  said.from.group = raw(at + At::group, kNameBytes);
  said.from.host = words(at + At::host, kNameBytes);
  return said;
}

bool is_proved(const Claim& claim, const Challenge& said, const Digest& key) {
  const Digest proof = proof_of(claim, said, key);
  return equal_in_constant_time(proof.data(), proof_in(claim), kProofBytes);
}

Judgement judge(const Claim& claim, const Challenge& said, const Membership* own, uint8_t streams,
                const Dialect& dialect) {
  const Claimed claimed = read(claim);
  const Membership& from = claimed.from;
  if (!claimed.is_photinus) return {Answer::refused, "it is not Photinus"};
  if (claimed.dialect != dialect)
    return {Answer::refused,
            "it speaks " + claimed.dialect.text() + " of the links' protocol, and this process " +
                dialect.text() +
                ": all hosts need the same version of Photinus and processors of one byte order"};
  if (!own) return {Answer::not_yet, "there is no " + group_text(from) + " here"};
  if (!is_proved(claim, said, own->key)) {
    std::string reason = "it does not know the secret of " + group_text(*own);
    if (from.attempt != own->attempt) reason += text("; it says that it is of attempt %u", from.attempt);
    return {Answer::refused, reason};
  }
  Judgement judgement{Answer::refused, "", true};
  if (from.attempt != own->attempt)
    judgement.reason =
        text("it is of attempt %u, and here is attempt %u of the job", from.attempt, own->attempt);
  else if (claimed.to != own->rank)
    judgement.reason = text("it wants rank %u, and here is rank %u", claimed.to, own->rank);
  else if (from.ranks != own->ranks)
    judgement.reason =
        text("it takes the group for one of %u ranks, and here it has %u", from.ranks, own->ranks);
  else if (from.rank >= own->ranks || from.rank == own->rank)
    judgement.reason =
        text("it says that it is rank %u of %u, and here is rank %u", from.rank, from.ranks, own->rank);
  else if (claimed.streams != streams || claimed.stream > streams)
    judgement.reason = text(
        "it makes links of %u streams for data, and here they have %u: all ranks must listen on as many "
        "addresses (PHOTINUS_INTERFACE, engine.listen)",
        claimed.streams, streams);
  else
    judgement.answer = Answer::accepted;
  return judgement;
}

Verdict make_verdict(const Judgement& judgement, const Membership* own, const Claim& heard,
                     const Challenge& said, const Dialect& dialect) {
  Verdict made;
  begin(made, dialect);
  uint8_t* const at = made.data();
  at[At::answer] = static_cast<uint8_t>(judgement.answer);
  put(at + At::reason, judgement.reason, kReasonBytes);
  if (!own || !judgement.is_member) return made;  // strangers are told no names
  put(at + At::verdict_attempt, own->attempt);
  put(at + At::verdict_rank, own->rank);
  put(at + At::verdict_pid, static_cast<uint32_t>(own->pid));
  put(at + At::verdict_host, own->host, kNameBytes);
  const Digest proof = proof_of(made, heard, said, own->key);
  std::memcpy(proof_in(made), proof.data(), proof.size());
  return made;
}

Heard read(const Verdict& verdict, const Claim& said, const Challenge& heard, const Membership& own) {
  Heard read;
  read.is_photinus = is_photinus(verdict);
  if (!read.is_photinus) return read;
  const uint8_t* const at = verdict.data();
  const Digest proof = proof_of(verdict, said, heard, own.key);
  read.is_proved = equal_in_constant_time(proof.data(), proof_in(verdict), kProofBytes);
  read.answer = static_cast<Answer>(at[At::answer]);
  read.reason = words(at + At::reason, kReasonBytes);
  if (!read.is_proved) return read;
  read.from.attempt = number(at + At::verdict_attempt);
  read.from.rank = number(at + At::verdict_rank);
  read.from.pid = static_cast<int>(number(at + At::verdict_pid));
  read.from.host = words(at + At::verdict_host, kNameBytes);
  return read;
}

}  // namespace photinus
