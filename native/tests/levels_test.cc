#include "collectives/levels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <set>

#include "check.h"
#include "collectives/choose.h"
#include "data.h"

using namespace photinus;
using namespace photinus::test;

namespace {

// Ranks one host after the other.
Levels in_blocks(const std::vector<uint32_t>& counts, std::vector<uint32_t> sizes) {
  Levels levels;
  uint32_t rank = 0;
  for (uint32_t count : counts) {
    levels.hosts.emplace_back();
    while (count-- > 0) levels.hosts.back().push_back(rank++);
  }
  levels.sizes = std::move(sizes);
  return levels;
}

}  // namespace

TEST(equal_blocks_of_a_power_of_two_ranks_give_the_bits_of_one_host_whatever_the_levels) {
  std::mt19937_64 random(5);
  std::vector<Levels> all = {in_blocks({4, 4}, {2}),
                             in_blocks({2, 2, 2, 2}, {4}),
                             in_blocks({2, 2, 2, 2}, {2, 2}),
                             in_blocks(std::vector<uint32_t>(8, 1), {8}),
                             in_blocks(std::vector<uint32_t>(8, 1), {4, 2}),
                             in_blocks(std::vector<uint32_t>(8, 1), {2, 2, 2})};
  for (Dtype dtype : kAllDtypes) {
    for (Reduction reduction : kAllReductions) {
      if (!exists(dtype, reduction)) continue;
      Call call{Operation::all_reduce, dtype, reduction, 0, 200};
      std::vector<Bytes> inputs;
      for (int r = 0; r < 8; ++r) inputs.push_back(random_elements(dtype, call.elems, random));
      const std::vector<double> factors = {0.3, 1.7, -0.9, 1e-3, 0.1, 12.3, 1.1, -1.0 / 3};
      const Bytes expected = naive(call, inputs, factors)[0];
      if (can_cross_as(call, Dtype::float32)) call.wire = Dtype::float32;
      for (const Levels& levels : all) {
        check(levels);
        const auto results = naive(call, inputs, factors, levels);
        for (const Bytes& result : results) CHECK(same(dtype, result.data(), expected.data(), call.elems));
      }
    }
  }
}

TEST(a_16_bit_sum_is_rounded_once_a_level_unless_it_crosses_in_float32) {
  // 1 + 2^-8 lies between two bfloat16 numbers, nearer (by ties) to 1; 1 + 2^-7 is one.
  const uint16_t one = 0x3f80, tiny = 0x3b80, more = 0x3f81;  // 1, 2^-8, 1 + 2^-7
  std::vector<Bytes> inputs(4, Bytes(2));
  const uint16_t values[] = {one, tiny, tiny, 0};
  for (int r = 0; r < 4; ++r) std::memcpy(inputs[r].data(), &values[r], 2);
  Call call{Operation::all_reduce, Dtype::bfloat16, Reduction::sum, 0, 1};
  auto sum = [&](const Levels& levels) {
    uint16_t result;
    std::memcpy(&result, naive(call, inputs, {}, levels)[3].data(), 2);
    return result;
  };
  CHECK(sum({}) == more);
  const Levels two = in_blocks({2, 2}, {2});
  CHECK(sum(two) == one);  // host 0's 1 + 2^-8 has become 1, and so has 1 + 2^-8 of both hosts
  call.wire = Dtype::float32;
  CHECK(sum(two) == more);
}

TEST(a_float32_sum_that_crosses_in_16_bits_is_rounded_once_a_level_and_where_it_goes_to_others_once_more) {
  const float half_step = std::ldexp(1.0f, -9), values[] = {1, half_step, 1, 3 * half_step};
  std::vector<Bytes> inputs(4, Bytes(4 * sizeof(float)));
  for (int r = 0; r < 4; ++r)
    for (int i = 0; i < 4; ++i) std::memcpy(&inputs[r][i * sizeof(float)], &values[r], sizeof(float));
  auto sum = [&](Operation operation, const Levels& levels) {
    const uint64_t elems = operation == Operation::reduce_scatter ? 1 : 4;
    const Call call{operation, Dtype::float32, Reduction::sum, 0, elems, Dtype::bfloat16};
    float result;
    std::memcpy(&result, naive(call, inputs, {}, levels)[0].data(), sizeof result);
    return result;
  };
  // bfloat16 has steps of 2^-7 from 1 on, of 2^-6 from 2 on. Hosts bring 1 + 2^-9, which becomes 1, and
  // 1 + 3 * 2^-9, which becomes 1 + 2^-7. Their sum lies between two numbers, and 2 is the even one.
  const Levels two = in_blocks({2, 2}, {2});
  for (Operation operation : {Operation::all_reduce, Operation::reduce}) {
    CHECK(sum(operation, two) == 2);
    CHECK(sum(operation, {}) == 2 + 4 * half_step);  // one host: nothing crosses
  }
  CHECK(sum(Operation::reduce_scatter, two) == 2 + std::ldexp(1.0f, -7));
}

TEST(counterparts_are_found_level_by_level) {
  const Levels levels = in_blocks({1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {2, 2, 3});
  check(levels);
  CHECK(levels.stride(0) == 1 && levels.stride(1) == 2 && levels.stride(2) == 4);
  CHECK(levels.member_of(7, 0) == 1 && levels.member_of(7, 1) == 1 && levels.member_of(7, 2) == 1);
  CHECK(levels.peer(7, 0, 0) == 6 && levels.peer(7, 1, 0) == 5 && levels.peer(7, 2, 2) == 11);
  const Levels uneven{{{0, 2, 4}, {1, 3}}, {2}};
  check(uneven);
  CHECK(uneven.slices() == 3 && uneven.host_of(3) == 1 && uneven.local_index(3) == 1);
  CHECK(uneven.carrier(0, 2) == 4 && uneven.carrier(1, 2) == 1);
}

TEST(two_ranks_are_each_others_counterparts_in_one_level_at_most) {
  const std::vector<Levels> all = {
      in_blocks({3, 1}, {2}),          in_blocks({3, 1, 2}, {3}),
      in_blocks({3, 1, 2, 5}, {2, 2}), in_blocks(std::vector<uint32_t>(12, 2), {4, 3}),
      {{{0, 2, 4}, {1, 3, 5}}, {2}},   {{{0, 4, 6}, {1, 5}, {2}, {3, 7}}, {2, 2}}};
  for (const Levels& levels : all) {
    check(levels);
    std::map<std::pair<uint32_t, uint32_t>, int> met;
    for (uint32_t host = 0; host < levels.hosts.size(); ++host)
      for (uint32_t rank : levels.hosts[host])
        for (size_t level = 0; level < levels.sizes.size(); ++level) {
          const auto ranks = levels.counterparts(rank, level);
          CHECK(std::is_sorted(ranks.begin(), ranks.end()));
          std::set<uint32_t> hosts;
          for (uint32_t other : ranks) {
            hosts.insert(levels.host_of(other));
            CHECK((++met[std::pair(rank, other)] == 1));
            const auto back = levels.counterparts(other, level);
            CHECK(std::count(back.begin(), back.end(), rank) == 1);
          }
          CHECK(hosts.size() == levels.sizes[level] - 1 && hosts.count(host) == 0);
        }
  }
  CHECK(all[0].counterparts(3, 0) == std::vector<uint32_t>({0, 1, 2}));
  CHECK(all[1].counterparts(0, 0) == std::vector<uint32_t>({3, 4}));
  CHECK(all[1].counterparts(2, 0) == std::vector<uint32_t>({3, 4}));
  CHECK(all[4].counterparts(2, 0) == std::vector<uint32_t>({3}));
}

TEST(levels_are_few_and_so_are_links_where_the_number_of_hosts_allows_it) {
  for (uint32_t hosts = 2; hosts <= 1024; ++hosts) {
    Levels levels = in_blocks(std::vector<uint32_t>(hosts, 1), choose_levels(hosts));
    check(levels);
    double links = 0;
    for (uint32_t size : levels.sizes) links += size - 1;
    const uint32_t twos = static_cast<uint32_t>(std::countr_zero(hosts)), odd = hosts >> twos;
    const double fewest = twos + odd - 1, limit = 4 + 2 * std::log2(hosts);
    CHECK(fewest > limit || links <= limit);
  }
  using Sizes = std::vector<uint32_t>;
  CHECK(choose_levels(1) == Sizes{} && choose_levels(7) == Sizes{7} && choose_levels(8) == Sizes{8});
  CHECK(choose_levels(9) == Sizes{9} && choose_levels(12) == Sizes({4, 3}) &&
        choose_levels(16) == Sizes({4, 4}));
  CHECK(choose_levels(64) == Sizes({8, 8}) && choose_levels(88) == Sizes({4, 2, 11}));
  CHECK(choose_levels(1024) == Sizes({8, 8, 4, 4}) && choose_levels(101) == Sizes{101});
}

TEST(lists_that_may_be_chosen_need_no_links_but_those_of_the_usual_one) {
  using Lists = std::vector<std::vector<uint32_t>>;
  CHECK(finer_lists({3}) == Lists({{3}}));
  CHECK(finer_lists({8}) == Lists({{8}, {4, 2}, {2, 4}, {2, 2, 2}}));
  CHECK(finer_lists({6}) == Lists({{6}, {2, 3}}));
  CHECK(finer_lists({4, 3}) == Lists({{4, 3}, {2, 2, 3}}));
  for (const auto& ranks : std::vector<std::vector<uint32_t>>{
           std::vector<uint32_t>(64, 1), {3, 1, 2, 5}, std::vector<uint32_t>(12, 2), {1, 2, 3, 4, 5, 6}}) {
    const Levels usual = in_blocks(ranks, choose_levels(static_cast<uint32_t>(ranks.size())));
    for (uint32_t rank = 0; rank < usual.ranks(); ++rank) {
      std::set<uint32_t> linked;
      for (size_t level = 0; level < usual.sizes.size(); ++level)
        for (const uint32_t other : usual.counterparts(rank, level)) linked.insert(other);
      for (const auto& list : finer_lists(usual.sizes)) {
        const Levels finer = in_blocks(ranks, list);
        check(finer);
        for (size_t level = 0; level < list.size(); ++level)
          for (const uint32_t other : finer.counterparts(rank, level)) CHECK(linked.count(other) == 1);
      }
    }
  }
}

TEST(far_hosts_exchange_in_few_rounds_and_slow_frames_in_many) {
  const SlotSizes slots{32 << 10, 256 << 10, 16};
  auto chosen = [&](uint32_t hosts, double latency_us, double frame_us, double rate_gbit) {
    Model model;
    model.latency_us = latency_us;
    model.send_us = model.receive_us = frame_us / 2;
    model.rate_gbit = rate_gbit;
    return choose_list(model, in_blocks(std::vector<uint32_t>(hosts, 1), choose_levels(hosts)), slots, {});
  };
  using Sizes = std::vector<uint32_t>;
  CHECK(chosen(8, 10'000, 2, 10).sizes == Sizes{8} && chosen(64, 1000, 2, 100).sizes == Sizes({8, 8}));
  CHECK(chosen(8, 1, 20, 100).sizes == Sizes({2, 2, 2}));
  CHECK_CONTAINS(chosen(8, 1, 20, 100).reason, "% less time than with 8");
  CHECK_CONTAINS(chosen(8, 10'000, 2, 10).reason, "no other list would gain");
  CHECK_CONTAINS(chosen(3, 10, 2, 10).reason, "the only list");
}

TEST(hosts_stand_in_the_order_of_their_first_ranks) {
  const Levels levels = levels_of({"b", "a", "b", "c", "a"});
  CHECK(levels.hosts == std::vector<std::vector<uint32_t>>({{0, 2}, {1, 4}, {3}}));
  CHECK(levels.sizes == std::vector<uint32_t>{3});
  CHECK(levels_of({"x", "x"}).sizes.empty());
}

TEST(placements_and_levels_that_do_not_fit_are_refused_with_the_reason) {
  auto refused = [](const Levels& levels, const char* why) {
    auto [kind, message] = error_of([&] { check(levels); });
    CHECK(kind == ErrorKind::invalid_argument);
    CHECK_CONTAINS(message, why);
  };
  refused(in_blocks({2, 0}, {2}), "has no rank");
  refused({{{0, 1}, {1}}, {2}}, "rank 1 is named twice");
  refused({{{0, 1}, {3}}, {2}}, "rank 2 is missing");
  refused(in_blocks({1, 1, 1}, {2}), "the levels are for 2 hosts, and there are 3");
  refused(in_blocks({1, 1, 1, 1, 1, 1}, {3, 2}), "a power of two");
  refused(in_blocks({1, 1}, {2, 1}), "level 2 has groups of 1 hosts");
}
