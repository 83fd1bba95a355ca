#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <type_traits>

#include "check.h"
#include "data.h"
#include "kernels/reduce.h"
#include "kernels/reduce_threads.h"
#include "kernels/subnormals.h"

using namespace photinus;
using namespace photinus::test;

// Every kernel of every instruction set that this processor has, against the naive reference: odd lengths,
// unaligned addresses, one or several destinations, results on top of a source.
TEST(every_kernel_of_every_instruction_set_equals_the_naive_reference) {
  std::mt19937_64 random(7);
  // Neither powers of two nor exact in any type: a fused multiplication and addition would show.
  std::vector<double> factors = {1.0 / 3, -0.7, 1e-3, 1234.567, 0.1};
  while (factors.size() < 23) factors.push_back(factors[factors.size() % 5] * 1.3);
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    for (Dtype dtype : kAllDtypes) {
      for (Reduction reduction : kAllReductions) {
        if (!exists(dtype, reduction)) continue;
        for (uint32_t ranks : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 12u, 23u}) {
          for (uint64_t elems : {uint64_t{0}, uint64_t{1}, uint64_t{7}, uint64_t{64}, uint64_t{333}}) {
            const size_t size = size_bytes(dtype), shift = size;  // off the vector's alignment
            std::vector<Bytes> inputs;
            for (uint32_t r = 0; r < ranks; ++r) inputs.push_back(random_elements(dtype, elems, random));
            Call call{Operation::all_reduce, dtype, reduction, 0, elems};
            const Bytes expected = naive(call, inputs, factors)[0];
            std::vector<Bytes> buffers;
            std::vector<const void*> sources;
            for (const Bytes& input : inputs) {
              buffers.emplace_back(shift + input.size());
              if (!input.empty()) std::memcpy(buffers.back().data() + shift, input.data(), input.size());
            }
            for (Bytes& buffer : buffers) sources.push_back(buffer.data() + shift);
            Bytes other(elems * size);
            void* destinations[] = {buffers[ranks - 1].data() + shift, other.data()};
            find_reduce(dtype, reduction,
                        set)({sources.data(), ranks, destinations, 2, elems, ranks, factors.data()});
            CHECK(same(dtype, static_cast<std::byte*>(destinations[0]), expected.data(), elems));
            CHECK(same(dtype, other.data(), expected.data(), elems));
          }
        }
      }
    }
  }
}

// Ranks on different processors add for themselves where tensors are small.
TEST(a_result_that_is_nan_has_the_same_bits_on_every_instruction_set) {
  std::mt19937_64 random(11);
  for (Dtype dtype : {Dtype::float32, Dtype::float64, Dtype::float16, Dtype::bfloat16}) {
    for (Reduction reduction : kAllReductions) {
      if (!exists(dtype, reduction)) continue;
      for (uint32_t ranks : {1u, 2u, 3u, 5u}) {
        constexpr uint64_t kElems = 145;  // blocks, vectors and a rest
        std::vector<Bytes> inputs(ranks, Bytes(kElems * size_bytes(dtype)));
        std::vector<const void*> sources;
        for (Bytes& input : inputs) {
          for (std::byte& byte : input)
            byte = random() % 4 ? std::byte{0xff} : static_cast<std::byte>(random());
          for (uint64_t i = 0; i < kElems; ++i)  // either sign
            input[(i + 1) * size_bytes(dtype) - 1] = random() % 2 ? std::byte{0xff} : std::byte{0x7f};
          sources.push_back(input.data());
        }
        Bytes first;
        for (InstructionSet set : kAllInstructionSets) {
          if (!has(set)) continue;
          Bytes out(kElems * size_bytes(dtype));
          void* destinations[] = {out.data()};
          find_reduce(dtype, reduction, set)({sources.data(), ranks, destinations, 1, kElems, ranks});
          if (first.empty()) first = out;
          CHECK(out == first);
        }
      }
    }
  }
}

// By hand, so that kernels and reference cannot share a mistake.
TEST(sources_are_added_as_a_binary_tree) {
  volatile float a = 1e8f, b = 3.7f, c = -1e8f, d = 0.1f, e = 5e7f, f = 7.3f, g = 1.0f / 3;
  const std::vector<float> values = {a, b, c, d, e, f, g};
  const float four = (a + b) + (c + d);
  const std::vector<float> sums = {a,        a + b,          (a + b) + c,         four,
                                   four + e, four + (e + f), four + ((e + f) + g)};
  CHECK(four != ((a + b) + c) + d);
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    for (uint64_t elems : {1, 100}) {  // less than a vector; blocks, vectors and a rest
      std::vector<std::vector<float>> inputs;
      std::vector<const void*> sources;
      for (float value : values) inputs.emplace_back(elems, value);
      for (const auto& input : inputs) sources.push_back(input.data());
      for (uint32_t ranks = 1; ranks <= values.size(); ++ranks) {
        std::vector<float> out(elems);
        void* destinations[] = {out.data()};
        find_reduce(Dtype::float32, Reduction::sum,
                    set)({sources.data(), ranks, destinations, 1, elems, ranks});
        for (float value : out) CHECK(value == sums[ranks - 1]);
      }
    }
  }
}

TEST(every_half_survives_widening_and_narrowing_on_every_instruction_set) {
  for (InstructionSet set : kAllInstructionSets) {
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

TEST(sources_and_results_of_two_types_are_added_in_the_wider_one) {
  std::mt19937_64 random(13);
  struct Pair {
    Dtype narrow, wide;
    Reduction reduction;
  };
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    for (auto [narrow, wide, reduction] :
         {Pair{Dtype::float16, Dtype::float32, Reduction::sum},
          Pair{Dtype::bfloat16, Dtype::float32, Reduction::premul_sum},
          Pair{Dtype::int8, Dtype::int32, Reduction::avg}, Pair{Dtype::uint8, Dtype::int32, Reduction::avg},
          Pair{Dtype::int16, Dtype::int32, Reduction::avg},
          Pair{Dtype::int32, Dtype::int64, Reduction::avg}}) {
      // Two hosts of two ranks, as their plan does it.
      for (uint64_t elems : {1, 7, 512, 1300}) {
        const std::vector<double> factors = {1.0 / 3, -0.7, 1e-3, 1234.567};
        std::vector<Bytes> inputs;
        for (int r = 0; r < 4; ++r) inputs.push_back(random_elements(narrow, elems, random));
        const Bytes expected =
            naive({Operation::all_reduce, narrow, reduction, 0, elems}, inputs, factors)[0];
        const Reduction sum = reduction == Reduction::avg ? Reduction::sum : reduction;
        std::vector<Bytes> sums(2, Bytes(elems * size_bytes(wide)));
        std::vector<Bytes> results(2, Bytes(elems * size_bytes(narrow)));
        for (int host = 0; host < 2; ++host) {
          const void* sources[] = {inputs[2 * host].data(), inputs[2 * host + 1].data()};
          void* destinations[] = {sums[host].data()};
          reduce_between(narrow, wide, sum, set,
                         {sources, 2, destinations, 1, elems, 4, factors.data() + 2 * host});
        }
        const void* sources[] = {sums[0].data(), sums[1].data()};
        void* destinations[] = {results[0].data(), results[1].data()};
        reduce_between(wide, narrow, reduction == Reduction::avg ? reduction : Reduction::sum, set,
                       {sources, 2, destinations, 2, elems, 4});
        for (const Bytes& result : results) CHECK(same(narrow, result.data(), expected.data(), elems));
      }
    }
  }
}

TEST(a_reduction_divided_among_threads_has_the_same_bits) {
  std::mt19937_64 random(11);
  for (const uint32_t helpers : {0u, 1u, 3u}) {
    ReduceThreads threads(helpers);
    for (const auto& [dtype, elems] : {std::pair{Dtype::float32, 40'001u},
                                       {Dtype::bfloat16, 70'000u},
                                       {Dtype::float64, 4096u * 9},
                                       {Dtype::float32, 100u}}) {
      const uint64_t count = elems, size = size_bytes(dtype);
      const Dtype type = dtype;
      std::vector<Bytes> inputs;
      for (int r = 0; r < 3; ++r) inputs.push_back(random_elements(type, count, random));
      const Bytes expected = naive({Operation::all_reduce, type, Reduction::avg, 0, count}, inputs)[0];
      // Two callers, of which one at a time is helped.
      std::vector<Bytes> results(2, Bytes(count * size));
      std::vector<std::thread> callers;
      for (Bytes& result : results)
        callers.emplace_back([&] {
          const void* sources[] = {inputs[0].data(), inputs[1].data(), inputs[2].data()};
          void* destinations[] = {result.data()};
          for (int i = 0; i < 20; ++i)
            threads.reduce(type, type, Reduction::avg, best_instruction_set(),
                           {sources, 3, destinations, 1, count, 3});
        });
      for (std::thread& caller : callers) caller.join();
      for (const Bytes& result : results) CHECK(same(type, result.data(), expected.data(), count));
    }
  }
}

TEST(helpers_have_cores_of_their_own_or_are_none) {
  CHECK(ReduceThreads::spare(2, 2) == 0);
  CHECK(ReduceThreads::spare(8, 4) == 0);
  CHECK(ReduceThreads::spare(16, 4) == 2);
  CHECK(ReduceThreads::spare(128, 8) == ReduceThreads::kMost);
  CHECK(ReduceThreads::spare(1, 4) == 0);
}

TEST(reductions_that_mean_nothing_on_a_type_have_no_kernel) {
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    for (Dtype dtype : kAllDtypes)
      for (Reduction reduction : kAllReductions)
        CHECK((find_reduce(dtype, reduction, set) != nullptr) == exists(dtype, reduction));
  }
}

TEST(any_byte_but_zero_is_true_and_results_are_0_or_1) {
  std::vector<Bytes> inputs(3, Bytes(200));
  std::mt19937_64 random(11);
  for (Bytes& input : inputs)
    for (std::byte& byte : input) byte = static_cast<std::byte>(random() % 2 ? random() : 0);
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    for (Reduction reduction : kAllReductions) {
      if (!exists(Dtype::boolean, reduction)) continue;
      for (uint32_t ranks : {1u, 2u, 3u}) {
        const std::vector<Bytes> present(inputs.begin(), inputs.begin() + ranks);
        const Bytes expected = naive({Operation::all_reduce, Dtype::boolean, reduction, 0, 200}, present)[0];
        const void* sources[] = {inputs[0].data(), inputs[1].data(), inputs[2].data()};
        Bytes out(200);
        void* destinations[] = {out.data()};
        find_reduce(Dtype::boolean, reduction, set)({sources, ranks, destinations, 1, 200, ranks});
        CHECK(out == expected);
      }
    }
  }
}

TEST(a_factor_is_rounded_to_the_type_of_accumulation_and_none_means_1) {
  const float one = 1.0f, three = 3.0f;
  const double factors[] = {0.1, 1.0};
  const void* sources[] = {&three, &one};
  float out = 0;
  void* destinations[] = {&out};
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    auto premul_sum = find_reduce(Dtype::float32, Reduction::premul_sum, set);
    premul_sum({sources, 2, destinations, 1, 1, 2, factors});
    volatile float product = 3.0f * 0.1f;  // rounded before the addition
    CHECK(out == product + 1.0f);
    premul_sum({sources, 2, destinations, 1, 1, 2});
    CHECK(out == 4.0f);
  }
}

TEST(a_wish_for_an_instruction_set_is_granted_or_refused_with_the_choices) {
  const InstructionSet best = choose_instruction_set(nullptr);
  CHECK(has(best) && choose_instruction_set("") == best);
  for (InstructionSet set : kAllInstructionSets) {
    if (has(set)) {
      CHECK(choose_instruction_set(name(set)) == set);
    } else {
      auto [kind, message] = error_of([&] { choose_instruction_set(name(set)); });
      CHECK(kind == ErrorKind::invalid_argument);
    }
  }
  auto [kind, message] = error_of([] { choose_instruction_set("avx1024"); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "PHOTINUS_INSTRUCTION_SET=avx1024");
  CHECK_CONTAINS(message, std::string("the choices are ") + name(InstructionSet::baseline));
}

#if defined(__x86_64__)
TEST(a_processor_has_the_instruction_sets_that_linux_lists) {
  std::ifstream file("/proc/cpuinfo");
  const std::string listed{std::istreambuf_iterator<char>(file), {}};
  auto lists = [&](const char* flag) { return listed.find(std::string(" ") + flag) != std::string::npos; };
  CHECK(has(InstructionSet::avx2) == (lists("avx2") && lists("fma") && lists("f16c")));
  CHECK(has(InstructionSet::avx512) ==
        (lists("avx512f") && lists("avx512bw") && lists("avx512vl") && lists("avx512dq")));
}
#endif

TEST(integer_averages_do_not_overflow_on_the_way) {
  uint8_t a = 200, b = 201, out = 0;
  const void* sources[] = {&a, &b};
  void* destinations[] = {&out};
  find_reduce(Dtype::uint8, Reduction::avg, best_instruction_set())({sources, 2, destinations, 1, 1, 2});
  CHECK(out == 200);
}

// What averages as floating-point numbers could get wrong: quotients just below a whole number, extremes,
// many ranks.
template <class T>
static void check_average(const std::vector<T>& values, int64_t expected) {
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    for (int64_t sign : {1, -1}) {
      if (std::is_unsigned_v<T> && sign < 0) continue;
      std::vector<T> signed_values;
      for (T value : values) signed_values.push_back(static_cast<T>(sign * static_cast<int64_t>(value)));
      std::vector<const void*> sources;
      for (const T& value : signed_values) sources.push_back(&value);
      const auto count = static_cast<uint32_t>(values.size());
      const Dtype dtype = sizeof(T) == 4          ? Dtype::int32
                          : sizeof(T) == 2        ? Dtype::int16
                          : std::is_unsigned_v<T> ? Dtype::uint8
                                                  : Dtype::int8;
      T out = 0;
      void* destinations[] = {&out};
      find_reduce(dtype, Reduction::avg, set)({sources.data(), count, destinations, 1, 1, count});
      CHECK(static_cast<int64_t>(out) == sign * expected);
    }
  }
}

TEST(integer_averages_are_exact_sums_truncated_towards_zero) {
  constexpr int32_t top = std::numeric_limits<int32_t>::max();
  check_average<int32_t>({top, top, top}, top);
  check_average<int32_t>({top, top, top - 1}, top - 1);
  for (uint32_t ranks : {2u, 7u, 1000u, 1024u, 65536u}) {
    std::vector<int32_t> wide(ranks, top);
    check_average<int32_t>(wide, top);
    wide[0] -= 1;
    check_average<int32_t>(wide, top - 1);
    std::vector<int16_t> middle(ranks, 32767);
    check_average<int16_t>(middle, 32767);
    middle[0] = 32766;
    check_average<int16_t>(middle, 32766);
    std::vector<uint8_t> narrow(ranks, 255);
    check_average<uint8_t>(narrow, 255);
    narrow[ranks - 1] = 254;
    check_average<uint8_t>(narrow, 254);
    std::vector<int8_t> signs(ranks, 127);
    signs[0] = 126;
    check_average<int8_t>(signs, 126);
  }
}

#if defined(__x86_64__)
TEST(subnormal_numbers_are_added_also_by_a_thread_that_takes_them_for_zero) {
  constexpr unsigned kFlush = 1 << 15 | 1 << 6;
  const uint32_t bits[] = {1000, 234};  // of two subnormal floats, whose sum has the sum of these
  uint32_t out = 0;
  const void* sources[] = {&bits[0], &bits[1]};
  void* destinations[] = {&out};
  const unsigned before = _mm_getcsr();
  for (InstructionSet set : kAllInstructionSets) {
    if (!has(set)) continue;
    _mm_setcsr(before | kFlush);
    reduce_between(Dtype::float32, Dtype::float32, Reduction::sum, set, {sources, 2, destinations, 1, 1, 2});
    const bool as_before = (_mm_getcsr() & kFlush) == kFlush;
    _mm_setcsr(before);
    CHECK(as_before);
    CHECK(out == 1234);
  }
}
#endif
