#include "check.h"
#include "data.h"
#include "kernels/reduce.h"

using namespace photinus;
using namespace photinus::test;

// Every kernel of every instruction set that this processor has, against the naive reference: odd lengths,
// unaligned addresses, one or several destinations, results on top of a source.
TEST(every_kernel_of_every_instruction_set_equals_the_naive_reference) {
  std::mt19937_64 random(7);
  for (InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    if (!has(set)) continue;
    for (Dtype dtype : kAllDtypes) {
      for (Reduction reduction : kAllReductions) {
        if (!exists(dtype, reduction)) continue;
        for (uint32_t ranks : {1u, 2u, 3u, 5u}) {
          for (uint64_t elems : {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{64}, uint64_t{333}}) {
            const size_t size = size_bytes(dtype), shift = size;  // off the vector's alignment
            std::vector<Bytes> inputs;
            for (uint32_t r = 0; r < ranks; ++r) inputs.push_back(random_elements(dtype, elems, random));
            Call call{Operation::all_reduce, dtype, reduction, 0, elems};
            const Bytes expected = naive(call, inputs)[0];
            std::vector<Bytes> buffers;
            std::vector<const void*> sources;
            for (const Bytes& input : inputs) {
              buffers.emplace_back(shift + input.size());
              if (!input.empty()) std::memcpy(buffers.back().data() + shift, input.data(), input.size());
            }
            for (Bytes& buffer : buffers) sources.push_back(buffer.data() + shift);
            Bytes other(elems * size);
            void* destinations[] = {buffers[ranks - 1].data() + shift, other.data()};
            find_reduce(dtype, reduction, set)({sources.data(), ranks, destinations, 2, elems, ranks});
            CHECK(same(dtype, static_cast<std::byte*>(destinations[0]), expected.data(), elems));
            CHECK(same(dtype, other.data(), expected.data(), elems));
          }
        }
      }
    }
  }
}

TEST(every_half_survives_widening_and_narrowing_on_every_instruction_set) {
  for (InstructionSet set : {InstructionSet::baseline, InstructionSet::avx2, InstructionSet::avx512}) {
    if (!has(set)) continue;
    for (Dtype dtype : {Dtype::float16, Dtype::bfloat16}) {
      std::vector<uint16_t> all(65536), out(65536);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
      const void* sources[] = {all.data()};
      void* destinations[] = {out.data()};
      find_reduce(dtype, Reduction::max, set)({sources, 1, destinations, 1, all.size(), 1});
      CHECK(same(dtype, reinterpret_cast<std::byte*>(out.data()), reinterpret_cast<std::byte*>(all.data()),
                 all.size()));
    }
  }
}

TEST(the_average_of_booleans_has_no_kernel) {
  CHECK(find_reduce(Dtype::boolean, Reduction::avg, InstructionSet::baseline) == nullptr);
}

TEST(integer_averages_do_not_overflow_on_the_way) {
  uint8_t a = 200, b = 201, out = 0;
  const void* sources[] = {&a, &b};
  void* destinations[] = {&out};
  find_reduce(Dtype::uint8, Reduction::avg, best_instruction_set())({sources, 2, destinations, 1, 1, 2});
  CHECK(out == 200);
}
