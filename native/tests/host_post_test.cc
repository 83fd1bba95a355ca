// What ranks tell each other over hosts: merged in any order it is the same, and no bytes of a stranger do
// harm.
#include "collectives/host_post.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <random>

#include "check.h"
#include "collectives/levels.h"
#include "net/frame.h"

using namespace photinus;
using namespace photinus::test;

static_assert(HostPost::kMostBytes <= kControlBytes, "a post goes into one control frame");

namespace {

CallDescriptor sum_of(uint64_t elems, uint32_t site = 7) {
  CallDescriptor facts;
  facts.elems = elems;
  facts.operation = Operation::all_reduce;
  facts.site = site;
  facts.updates = 3;
  return facts;
}

HostPost again(const HostPost& post) {
  std::byte bytes[HostPost::kMostBytes];
  const size_t length = encode(post, bytes);
  CHECK(length <= sizeof bytes);
  return decode(bytes, length).value();
}

// All ranks tell and hear in all levels; returns what each knows then. `call` says what a rank calls.
std::vector<HostPost> meet(const Levels& levels, const std::function<CallDescriptor(uint32_t)>& call,
                           const std::function<std::string(uint32_t)>& site) {
  std::map<uint32_t, HostPost> known;
  for (const auto& host : levels.hosts)
    for (uint32_t rank : host)
      for (uint32_t local : host) {
        known[rank].sequence = 5;
        add(known[rank], call(local), site(local).c_str(), "", local);
        known[rank].parts_sum += local * 1000;
      }
  for (size_t level = 0; level < levels.sizes.size(); ++level) {
    const auto told = known;
    for (auto& [rank, post] : known)
      for (uint32_t peer : levels.counterparts(rank, level)) merge(post, again(told.at(peer)));
  }
  std::vector<HostPost> posts;
  for (auto& [rank, post] : known) posts.push_back(post);
  return posts;
}

const Levels kUneven{{{0, 2, 4}, {1}, {3, 5}, {6, 7, 8}}, {2, 2}};

}  // namespace

TEST(alike_calls_become_one_line_with_all_ranks) {
  for (const HostPost& post :
       meet(kUneven, [](uint32_t) { return sum_of(100); }, [](uint32_t) { return "train.py:41"; })) {
    CHECK(post.sequence == 5 && agrees(post) && post.calls.size() == 1);
    CHECK(post.ranks().list().size() == 9 && post.left_out.is_empty());
    CHECK(post.calls[0].site == "train.py:41" && post.calls[0].facts.elems == 100);
    CHECK(post.updates.least == 3 && post.updates.most == 3 && post.updates.told);
    CHECK(post.parts_sum == 36000);  // every rank once, however often it was heard of
    CHECK(calls_by_rank(post).size() == 1);
  }
}

TEST(every_side_of_a_mismatch_is_named_on_all_ranks) {
  auto call = [](uint32_t rank) { return sum_of(rank == 4 || rank == 6 ? 99 : 100, rank == 6 ? 8 : 7); };
  auto site = [](uint32_t rank) { return rank == 6 ? "other.py:2" : "train.py:41"; };
  for (const HostPost& post : meet(kUneven, call, site)) {
    CHECK(!agrees(post) && post.calls.size() == 3);
    const std::string text = mismatch_text("g", 5, post.calls, post.left_out);
    CHECK_CONTAINS(text, "ranks 0-3, 5, 7, 8 called all_reduce of float32[100] (sum) at train.py:41;");
    CHECK_CONTAINS(text, " rank 4 called all_reduce of float32[99] (sum) at train.py:41;");
    CHECK_CONTAINS(text, " rank 6 called all_reduce of float32[99] (sum) at other.py:2;");
  }
}

TEST(a_mismatch_names_the_functions_of_the_program_where_they_differ) {
  auto call = [](uint32_t rank) { return sum_of(rank ? 29 : 1); };
  auto named = [](uint32_t rank) {
    return rank ? "my (1)/a.py:2 (photinus.Loop)" : "a.py:5 (photinus.evaluate)";
  };
  auto partly = [](uint32_t rank) { return rank ? "my (1)/a.py:2" : "a.py:5 (photinus.evaluate)"; };
  auto same = [](uint32_t) { return "a.py:5 (photinus.evaluate)"; };
  auto text_of = [&](auto site) {
    const HostPost post = meet(kUneven, call, site)[0];
    return mismatch_text("g", 5, post.calls, post.left_out);
  };
  CHECK_CONTAINS(text_of(named),
                 "called different functions as #5: rank 0 called photinus.evaluate at a.py:5 (");
  CHECK_CONTAINS(text_of(named),
                 "; ranks 1-8 called photinus.Loop at my (1)/a.py:2 (all_reduce of float32[29] (sum));");
  CHECK_CONTAINS(text_of(partly), "; ranks 1-8 called all_reduce of float32[29] (sum) at my (1)/a.py:2;");
  CHECK_CONTAINS(text_of(same),
                 "different collectives as #5: rank 0 called all_reduce of float32[1] (sum) at a.py:5 (");
}

TEST(calls_that_do_not_fit_still_count) {
  const Levels levels = levels_of({"a", "a", "b", "b", "c", "c", "d", "d"});
  auto site = [](uint32_t rank) { return std::string(127, static_cast<char>('a' + rank)); };
  for (const HostPost& post : meet(levels, [](uint32_t rank) { return sum_of(rank); }, site)) {
    CHECK(!agrees(post) && post.calls.size() == HostPost::kMostCalls && post.left_out.list().size() == 4);
    CHECK(post.ranks().list().size() == 8);
    CHECK_CONTAINS(mismatch_text("g", 5, post.calls, post.left_out), " called still others;");
  }
  for (const HostPost& post : meet(levels, [](uint32_t rank) { return sum_of(100, rank + 1); }, site)) {
    CHECK(agrees(post) && !post.has_all_sites && post.ranks().list().size() == 8);
    CHECK(calls_by_rank(post).empty());  // no suspicion from half of the lines
  }
}

TEST(lines_of_equal_calls_are_compared_over_hosts_like_inside_one) {
  SiteHistory history;
  auto look = [&](uint32_t site_of_rank_3, uint32_t site) {
    const auto posts = meet(
        kUneven, [&](uint32_t rank) { return sum_of(100, rank == 3 ? site_of_rank_3 : site); },
        [](uint32_t) { return ""; });
    const auto calls = calls_by_rank(posts[0]);
    CHECK(calls.size() == (site_of_rank_3 == site ? 1 : 9) && calls.back().site == site);
    return history.look_out_of_step(calls, true);
  };
  CHECK(!look(1, 1) && !look(2, 2) && !look(9, 1));
  CHECK(look(2, 1));  // both lines are known as common ones: rank 3 has skipped one
}

TEST(updates_that_differ_over_hosts_are_noticed) {
  UpdateHistory history;
  auto step = [&](int32_t of_rank_1, int32_t others) {
    UpdateRange range;
    for (int32_t updates : {others, of_rank_1, others}) range.add(updates);
    return history.unequal_updates(range);
  };
  CHECK(!step(1, 1) && !step(2, 2) && !step(-3, 2));  // told that it may differ
  CHECK(!step(4, 3));
  const auto since = step(5, 3).value();
  CHECK(since.least == 0 && since.most == 1);
  CHECK_CONTAINS(updates_text("g", 9, {sum_of(1), "", "", {}}, since),
                 "some made 0 optimizer steps, others 1 optimizer step.");
  CHECK(!step(0, 4) && !step(5, 5));  // who has not told cannot be compared
}

TEST(bytes_that_are_no_post_are_refused) {
  std::mt19937_64 random(3);
  HostPost post;
  for (uint32_t rank : {0u, 511u, 1023u})
    add(post, sum_of(rank, rank), "a rather long name of a file.py:1234", rank ? "label" : "", rank);
  std::vector<std::byte> bytes(HostPost::kMostBytes);
  bytes.resize(encode(post, bytes.data()));
  CHECK(decode(bytes.data(), bytes.size())->ranks().list() == std::vector<uint32_t>({0, 511, 1023}));
  for (size_t length = 0; length < bytes.size(); ++length) {
    const std::vector<std::byte> part(bytes.begin(), bytes.begin() + static_cast<long>(length));
    CHECK(!decode(part.data(), part.size()));  // in memory of its own: a sanitizer sees what is read behind
  }
  bytes.push_back({});
  CHECK(!decode(bytes.data(), bytes.size()));
  bytes.pop_back();
  int taken = 0;
  for (int run = 0; run < 20000; ++run) {
    std::vector<std::byte> wrong = bytes;
    for (int change = 0; change < 3; ++change)
      wrong[random() % wrong.size()] = static_cast<std::byte>(random());
    const auto heard = decode(wrong.data(), wrong.size());
    if (!heard) continue;
    ++taken;  // and does no harm
    HostPost own;
    add(own, sum_of(1), "x", "", 5);
    merge(own, *heard);
    CHECK(!mismatch_text("g", 1, own.calls, own.left_out).empty());
    calls_by_rank(own);
    again(own);
    UpdateHistory history;
    history.unequal_updates(own.updates);
    history.unequal_updates(heard->updates);
  }
  CHECK(taken > 0 && taken < 20000);
}

TEST(the_largest_post_fits_and_the_usual_one_is_small) {
  HostPost large;
  const std::string text(RankBlock::kTextBytes, 'x');
  for (uint32_t rank = 0; rank < RankSet::kMostRanks; ++rank)
    add(large, sum_of(rank % 5, rank % 5), text.c_str(), text.c_str(), rank);
  std::byte bytes[HostPost::kMostBytes];
  std::printf("  the largest has %zu bytes\n", encode(large, bytes));
  CHECK(again(large).ranks().list().size() == RankSet::kMostRanks);

  HostPost own, other;
  for (uint32_t rank = 0; rank < 8; ++rank) add(own, sum_of(100), "src/train.py:1041", "loss", rank);
  for (uint32_t rank = 8; rank < 16; ++rank) add(other, sum_of(100), "src/train.py:1041", "loss", rank);
  const size_t length = encode(other, bytes);
  CHECK(length < 300);
  double least_ns = 1e9;
  for (int batch = 0; batch < 50; ++batch) {
    const auto start = std::chrono::steady_clock::now();
    for (int run = 0; run < 1000; ++run) {
      HostPost post = own;
      merge(post, *decode(bytes, length));
      std::byte out[HostPost::kMostBytes];
      CHECK(agrees(post) && encode(post, out) == length);
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    least_ns = std::min(least_ns, took.count() / 1000);
  }
  std::printf("  the usual one has %zu, and takes %.0f ns to decode, merge, compare and encode\n", length,
              least_ns);
}
