#include "collectives/levels.h"

#include "check.h"
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
      const Call call{Operation::all_reduce, dtype, reduction, 0, 200};
      std::vector<Bytes> inputs;
      for (int r = 0; r < 8; ++r) inputs.push_back(random_elements(dtype, call.elems, random));
      const std::vector<double> factors = {0.3, 1.7, -0.9, 1e-3, 0.1, 12.3, 1.1, -1.0 / 3};
      const Bytes expected = naive(call, inputs, factors)[0];
      for (Levels& levels : all) {
        check(levels);
        levels.exact = true;
        const auto results = naive(call, inputs, factors, levels);
        for (const Bytes& result : results) CHECK(same(dtype, result.data(), expected.data(), call.elems));
      }
    }
  }
}

TEST(a_16_bit_sum_is_rounded_once_a_level_unless_it_is_to_be_exact) {
  // 1 + 2^-8 lies between two bfloat16 numbers, nearer (by ties) to 1; 1 + 2^-7 is one.
  const uint16_t one = 0x3f80, tiny = 0x3b80, more = 0x3f81;  // 1, 2^-8, 1 + 2^-7
  std::vector<Bytes> inputs(4, Bytes(2));
  const uint16_t values[] = {one, tiny, tiny, 0};
  for (int r = 0; r < 4; ++r) std::memcpy(inputs[r].data(), &values[r], 2);
  const Call call{Operation::all_reduce, Dtype::bfloat16, Reduction::sum, 0, 1};
  auto sum = [&](const Levels& levels) {
    uint16_t result;
    std::memcpy(&result, naive(call, inputs, {}, levels)[3].data(), 2);
    return result;
  };
  CHECK(sum({}) == more);
  Levels two = in_blocks({2, 2}, {2});
  CHECK(sum(two) == one);  // host 0's 1 + 2^-8 has become 1, and so has 1 + 2^-8 of both hosts
  two.exact = true;
  CHECK(sum(two) == more);
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
