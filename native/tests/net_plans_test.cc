// The plans of several hosts, run by the simulator over links that carry bytes when they like.
#include "check.h"
#include "collectives/choose.h"
#include "data.h"
#include "simulator.h"

using namespace photinus;
using namespace photinus::test;

namespace {

const SlotSizes kTinySlots{512, 1024, 4};  // many chunks with little data
const NetSizes kTinyNet{64 << 10, 512, 2048, 128};
const NetSizes kFastNet{.latency_s = 10e-6, .bytes_per_s = 5e9};

struct Case {
  std::string name;
  Levels levels;
};

// Ranks one host after the other.
Levels in_blocks(const std::vector<uint32_t>& counts, std::vector<uint32_t> sizes) {
  Levels levels;
  uint32_t rank = 0;
  for (uint32_t count : counts) {
    levels.hosts.emplace_back();
    while (count-- > 0) levels.hosts.back().push_back(rank++);
  }
  levels.sizes = std::move(sizes);
  check(levels);
  return levels;
}

std::vector<Case> cases() {
  return {{"2x1", in_blocks({1, 1}, {2})},
          {"2x2", in_blocks({2, 2}, {2})},
          {"3x1", in_blocks({1, 1, 1}, {3})},
          {"3+1", in_blocks({3, 1}, {2})},
          {"1+2+3", in_blocks({1, 2, 3}, {3})},
          {"4x1 at once", in_blocks({1, 1, 1, 1}, {4})},
          {"2+1+2+1 by halves", in_blocks({2, 1, 2, 1}, {2, 2})},
          {"4x1 by halves", in_blocks({1, 1, 1, 1}, {2, 2})},
          {"4x2 by halves", in_blocks({2, 2, 2, 2}, {2, 2})},
          {"3x2", in_blocks({2, 2, 2}, {3})},
          {"2x4", in_blocks({4, 4}, {2})},
          {"6x1", in_blocks({1, 1, 1, 1, 1, 1}, {2, 3})},
          {"8x1", in_blocks(std::vector<uint32_t>(8, 1), {2, 2, 2})},
          {"8x1, four at once", in_blocks(std::vector<uint32_t>(8, 1), {4, 2})},
          {"round-robin", {{{0, 2, 4}, {1, 3, 5}}, {2}}},
          {"uneven and round-robin by halves", {{{0, 4, 6}, {1, 5}, {2}, {3, 7}}, {2, 2}}}};
}

const std::vector<double> kFactors = {0.3, 1.7, -0.9, 1e-3, 0.1, 12.3, 1.1, -1.0 / 3};

void run(const Call& call, const Levels& levels, Algorithm algorithm, bool in_place, std::mt19937_64& random,
         const SlotSizes& sizes = kTinySlots, const NetSizes& net = kTinyNet) {
  const uint32_t ranks = levels.ranks();
  const uint64_t elems = call.operation == Operation::reduce_scatter ? call.elems * ranks : call.elems;
  std::vector<Plan> plans;
  std::vector<Bytes> inputs;
  for (uint32_t r = 0; r < ranks; ++r) {
    // On which way a host shares its work is its own affair.
    const bool other = algorithm != Algorithm::flat && levels.host_of(r) == 1;
    plans.push_back(net_plan(call, levels, r, other ? Algorithm::arena : algorithm, sizes, net));
    inputs.push_back(random_elements(call.dtype, elems, random));
  }
  const auto expected = naive(call, inputs, kFactors, levels);
  Simulator simulator(call, std::move(plans), in_place, inputs, sizes, levels, kFactors, net.landing_bytes);
  simulator.run(random);
  for (uint32_t r = 0; r < ranks; ++r)
    CHECK(same(call.dtype, simulator.result(r).data(), expected[r].data(),
               expected[r].size() / size_bytes(call.dtype)));
}

}  // namespace

TEST(all_reduce_over_several_hosts_gives_the_naive_result_in_every_interleaving_tried) {
  std::mt19937_64 random(17);
  for (const auto& [name, levels] : cases())
    for (Algorithm algorithm : {Algorithm::flat, Algorithm::arena, Algorithm::staged})
      for (uint64_t elems : {0, 1, 16, 33, 128, 129, 700, 2500}) {
        if (algorithm == Algorithm::flat && elems * 4 > kTinySlots.flat_bytes) continue;
        for (int seed = 0; seed < 6; ++seed)
          run({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, elems}, levels, algorithm, seed % 2,
              random);
      }
}

TEST(slices_of_long_tensors_grow_with_them_and_results_stay_right) {
  NetSizes slow, fast;
  slow.bytes_per_s = 10e6, fast.bytes_per_s = 100e6;
  const Levels two = in_blocks({1, 1}, {2}), eight = in_blocks({2, 2, 2, 2}, {4});
  for (const NetSizes& net : {NetSizes{}, slow, fast}) {
    CHECK(longest_slice(net, two, 8 << 20) == 256 << 10);
    CHECK(longest_slice(net, two, 16 << 20) == 512 << 10);
    CHECK(longest_slice(net, two, uint64_t{1} << 30) == (net.bytes_per_s == 10e6 ? 750'000 : 1 << 20));
    CHECK(longest_slice(net, eight, uint64_t{1} << 30) == (net.bytes_per_s == 10e6 ? 128 << 10 : 1 << 20));
  }
  std::mt19937_64 random(31);
  const SlotSizes sizes{512, 16 << 10, 4};
  NetSizes growing = kTinyNet, fixed = kTinyNet;
  growing.landing_bytes = fixed.landing_bytes = 1 << 20;
  fixed.most_slice_bytes = fixed.slice_bytes;
  for (const auto& [name, levels] : cases())
    for (Algorithm algorithm : {Algorithm::arena, Algorithm::staged}) {
      const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 40'000};
      run(call, levels, algorithm, random() % 2, random, sizes, growing);
      auto frames = [&](const NetSizes& net) {
        const auto steps = net_plan(call, levels, 0, algorithm, sizes, net).after;
        return std::count_if(steps.begin(), steps.end(),
                             [](const Step& step) { return step.kind == Step::Kind::send; });
      };
      CHECK(4 * frames(growing) < 3 * frames(fixed));
    }
}

TEST(frames_on_a_slow_card_are_as_long_in_fewer_bits) {
  NetSizes slow;
  slow.bytes_per_s = 12e6;
  for (const Levels& levels : {in_blocks({1, 1}, {2}), in_blocks({2, 2, 2, 2}, {4})}) {
    Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 16 << 20};
    auto mean_bytes = [&] {
      double bytes = 0, frames = 0;
      for (const Step& step :
           net_plan(call, levels, 0, Algorithm::staged, sizes_for({}, 8, true), slow).after)
        if (step.kind == Step::Kind::send) bytes += static_cast<double>(step.bytes), ++frames;
      return bytes / frames;
    };
    const double wide = mean_bytes();
    call.wire = Dtype::bfloat16;
    CHECK(mean_bytes() > 0.95 * wide);
  }
}

TEST(two_hosts_that_exchange_a_tensor_are_less_ahead_of_each_other_on_a_slow_card) {
  NetSizes unknown, slow, far, fast;
  slow.bytes_per_s = far.bytes_per_s = 118e6, fast.bytes_per_s = 5e9;
  slow.latency_s = fast.latency_s = 10e-6, far.latency_s = 10e-3;
  CHECK(exchanged_chunk(slow, 1 << 20) == 128 << 10);
  CHECK(exchanged_chunk(slow, 16 << 20) == 256 << 10);
  CHECK(exchanged_chunk(slow, uint64_t{1} << 30) == 512 << 10);
  for (const NetSizes& net : {unknown, far, fast}) CHECK(exchanged_chunk(net, 1 << 20) == 1 << 20);
}

TEST(all_reduce_gives_the_naive_result_in_whatever_type_it_crosses) {
  std::mt19937_64 random(23);
  for (const auto& [name, levels] : cases())
    for (Dtype dtype : {Dtype::float32, Dtype::float16, Dtype::bfloat16})
      for (Reduction reduction : {Reduction::sum, Reduction::avg, Reduction::premul_sum, Reduction::product})
        for (Algorithm algorithm : {Algorithm::flat, Algorithm::arena, Algorithm::staged})
          for (uint64_t elems : {1, 33, 60, 1500, 2500}) {
            Call call{Operation::all_reduce, dtype, reduction, 0, elems};
            if (algorithm == Algorithm::flat && elems > 60) continue;
            for (const auto& wire : wires_of(call)) {
              call.wire = wire;
              run(call, levels, algorithm, random() % 2, random);
            }
          }
}

TEST(all_reduce_over_several_hosts_knows_all_types_and_reductions) {
  std::mt19937_64 random(19);
  for (const auto& [name, levels] : cases())
    for (Dtype dtype : kAllDtypes)
      for (Reduction reduction : kAllReductions) {
        if (!exists(dtype, reduction)) continue;
        for (Algorithm algorithm : {Algorithm::flat, Algorithm::arena, Algorithm::staged}) {
          const uint64_t elems = algorithm == Algorithm::flat ? 60 : 1000 + random() % 1000;
          run({Operation::all_reduce, dtype, reduction, 0, elems}, levels, algorithm, random() % 2, random);
        }
      }
}

namespace {

// What hosts send to others and receive, against what they must, given for hosts of `ranks` on average.
void check_bytes(const Call& call, double must(double hosts, double ranks), bool uneven) {
  std::vector<Case> all = cases();
  all.push_back({"4x2 at once", in_blocks({2, 2, 2, 2}, {4})});
  all.push_back({"16x2", in_blocks(std::vector<uint32_t>(16, 2), {4, 4})});
  for (const auto& [name, levels] : all) {
    const auto hosts = levels.hosts.size();
    if (!uneven && levels.ranks() != hosts * levels.slices()) continue;
    const SlotSizes sizes = sizes_for({}, levels.ranks(), true);
    std::vector<uint64_t> out(hosts), in(hosts);
    for (uint32_t r = 0; r < levels.ranks(); ++r)
      for (const Step& step : net_plan(call, levels, r, Algorithm::arena, sizes, {}).after) {
        if (step.kind == Step::Kind::send) out[levels.host_of(r)] += step.bytes;
        if (step.kind == Step::Kind::receive) in[levels.host_of(r)] += step.bytes;
      }
    const double bound = must(static_cast<double>(hosts), levels.ranks() / static_cast<double>(hosts)) *
                         static_cast<double>(call.elems * size_bytes(call.dtype));
    const double most = static_cast<double>(
        std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end())));
    std::printf("  %s, %s: %.5f of the bound\n", photinus::name(call.operation), name.c_str(), most / bound);
    CHECK(most <= 1.002 * bound);
  }
}

}  // namespace

TEST(plans_of_several_hosts_move_the_least_bytes) {
  auto of = [](Operation operation, uint64_t elems) {
    return Call{operation, Dtype::float32, Reduction::sum, 0, elems};
  };
  check_bytes(of(Operation::all_reduce, 16 << 20), [](double h, double) { return 2 * (h - 1) / h; }, true);
  check_bytes(of(Operation::reduce_scatter, 1 << 20), [](double h, double l) { return (h - 1) * l; }, false);
  check_bytes(of(Operation::reduce, 4 << 20), [](double h, double) { return 2 * (h - 1) / h; }, true);
  check_bytes(of(Operation::broadcast, 4 << 20), [](double h, double) { return 2 * (h - 1) / h; }, true);
  check_bytes(of(Operation::all_gather, 1 << 20), [](double h, double l) { return (h - 1) * l; }, false);
}

TEST(float32_that_crosses_in_16_bits_takes_half_the_bytes_and_16_bits_in_float32_one_and_a_half_times) {
  auto of = [](Operation operation, Dtype dtype, Dtype wire, uint64_t elems) {
    return Call{operation, dtype, Reduction::avg, 0, elems, wire};
  };
  for (Dtype half : {Dtype::bfloat16, Dtype::float16}) {
    const Dtype whole = Dtype::float32;
    check_bytes(
        of(Operation::all_reduce, whole, half, 16 << 20), [](double h, double) { return (h - 1) / h; }, true);
    check_bytes(
        of(Operation::reduce, whole, half, 4 << 20), [](double h, double) { return (h - 1) / h; }, true);
    check_bytes(
        of(Operation::reduce_scatter, whole, half, 1 << 20),
        [](double h, double l) { return (h - 1) * l / 2; }, false);
    check_bytes(
        of(Operation::all_reduce, half, whole, 16 << 20), [](double h, double) { return 3 * (h - 1) / h; },
        true);
  }
}

TEST(reduce_scatter_and_all_gather_over_several_hosts_give_the_naive_result) {
  std::mt19937_64 random(29);
  for (const auto& [name, levels] : cases())
    for (Operation operation : {Operation::reduce_scatter, Operation::all_gather})
      for (Algorithm algorithm : {Algorithm::flat, Algorithm::arena, Algorithm::staged})
        for (uint64_t elems : {0, 1, 15, 16, 17, 100, 333}) {
          if (algorithm == Algorithm::flat && operation == Operation::reduce_scatter && elems > 15) continue;
          for (int seed = 0; seed < 6; ++seed)
            run({operation, Dtype::float32, Reduction::sum, 0, elems}, levels, algorithm, false, random);
        }
}

TEST(reduce_scatter_over_several_hosts_knows_all_types_and_reductions) {
  std::mt19937_64 random(31);
  for (const auto& [name, levels] : cases())
    for (Dtype dtype : kAllDtypes)
      for (Reduction reduction : kAllReductions) {
        if (!exists(dtype, reduction)) continue;
        Call call{Operation::reduce_scatter, dtype, reduction, 0, 300};
        for (const auto& wire : wires_of(call)) {
          call.wire = wire;
          run(call, levels, random() % 2 ? Algorithm::arena : Algorithm::staged, false, random);
        }
      }
}

TEST(reduce_and_broadcast_over_several_hosts_give_the_naive_result_for_any_root) {
  std::mt19937_64 random(41);
  for (const auto& [name, levels] : cases())
    for (Operation operation : {Operation::reduce, Operation::broadcast})
      for (Algorithm algorithm : {Algorithm::flat, Algorithm::arena, Algorithm::staged})
        for (uint32_t root = 0; root < levels.ranks(); ++root)
          for (uint64_t elems : {0, 1, 33, 100, 1500}) {
            if (algorithm == Algorithm::flat && operation == Operation::reduce && elems > 100) continue;
            run({operation, Dtype::float32, Reduction::sum, root, elems}, levels, algorithm,
                operation == Operation::broadcast, random);
          }
}

TEST(reduce_over_several_hosts_knows_all_types_and_reductions) {
  std::mt19937_64 random(43);
  for (const auto& [name, levels] : cases())
    for (Dtype dtype : kAllDtypes)
      for (Reduction reduction : kAllReductions) {
        if (!exists(dtype, reduction)) continue;
        const Algorithm all[] = {Algorithm::flat, Algorithm::arena, Algorithm::staged};
        const Algorithm algorithm = all[random() % 3];
        Call call{Operation::reduce, dtype, reduction, static_cast<uint32_t>(random() % levels.ranks()),
                  algorithm == Algorithm::flat ? 60u : 900u};
        for (const auto& wire : wires_of(call)) {
          call.wire = wire;
          run(call, levels, algorithm, false, random);
        }
      }
}

TEST(a_barrier_over_several_hosts_hears_from_all) {
  std::mt19937_64 random(37);
  for (const auto& [name, levels] : cases()) run({}, levels, Algorithm::flat, false, random);
}

TEST(hosts_that_call_different_things_hear_of_each_other_and_touch_no_output) {
  std::mt19937_64 random(47);
  const Operation operations[] = {Operation::all_reduce, Operation::reduce_scatter, Operation::all_gather,
                                  Operation::reduce,     Operation::broadcast,      Operation::barrier};
  const Algorithm algorithms[] = {Algorithm::flat, Algorithm::arena, Algorithm::staged};
  for (const auto& [name, levels] : cases())
    for (Operation operation : operations)
      for (Operation other : operations)
        for (int seed = 0; seed < 6; ++seed) {
          if (operation == other) continue;
          const uint32_t ranks = levels.ranks(), odd = static_cast<uint32_t>(random() % levels.hosts.size());
          const uint64_t elems = seed % 2 ? 300 : 15;
          std::vector<Plan> plans;
          std::vector<Bytes> inputs(ranks, Bytes(elems * ranks * 4));
          for (uint32_t r = 0; r < ranks; ++r)
            plans.push_back(net_plan(
                {levels.host_of(r) == odd ? other : operation, Dtype::float32, Reduction::sum, 0, elems},
                levels, r, algorithms[seed % 2 ? 1 + seed / 2 % 2 : 0], kTinySlots, kTinyNet));
          const Call longest{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, elems * ranks};
          Simulator simulator(longest, std::move(plans), false, inputs, kTinySlots, levels, {},
                              kTinyNet.landing_bytes, odd);
          simulator.run(random);
          for (uint32_t r = 0; r < ranks; ++r) CHECK(simulator.result(r) == Bytes(elems * ranks * 4));
        }
}

TEST(small_tensors_that_do_not_fit_the_landing_of_many_hosts_are_cut) {
  const Levels levels = in_blocks(std::vector<uint32_t>(120, 1), {120});
  const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 150};
  CHECK(net_plan(call, levels, 0, Algorithm::flat, kTinySlots, kTinyNet).algorithm == Algorithm::staged);
  CHECK(net_plan(call, levels, 0, Algorithm::flat, kTinySlots, {}).algorithm == Algorithm::flat);
}

TEST(sizes_that_do_not_hold_the_chunks_of_a_plan_are_refused) {
  const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 1000};
  auto [kind, message] = error_of(
      [&] { net_plan(call, in_blocks({2, 2}, {2}), 0, Algorithm::staged, kTinySlots, {1024, 512, 128}); });
  CHECK(kind == ErrorKind::invalid_argument);
  CHECK_CONTAINS(message, "4096 bytes for slots and 1024 for landing do not hold 8 chunks of 2 parts");
}

TEST(what_is_chosen_for_several_hosts_can_be_planned_and_is_flat_on_all_or_none) {
  std::mt19937_64 random(53);
  std::vector<Case> all = cases();
  all.push_back({"1+600", in_blocks({1, 600}, {2})});
  all.push_back({"100x8", in_blocks(std::vector<uint32_t>(100, 8), choose_levels(100))});
  all.push_back({"1024x1", in_blocks(std::vector<uint32_t>(1024, 1), choose_levels(1024))});
  for (const auto& [name, levels] : all) {
    const uint32_t ranks = levels.ranks();
    for (Operation operation : {Operation::all_reduce, Operation::reduce_scatter, Operation::all_gather,
                                Operation::reduce, Operation::broadcast, Operation::barrier})
      for (Dtype dtype : {Dtype::float32, Dtype::int8})
        for (uint64_t elems : {1, 1000, 5000}) {
          const NetSizes net = random() % 2 ? kFastNet : NetSizes{};
          const Call call{operation, dtype, Reduction::avg, 0, elems};
          std::vector<CallDescriptor> descriptors(ranks);
          for (auto& d : descriptors) {
            d.send_offset = random() % 8 ? 0 : kNowhere;
            d.recv_offset = random() % 8 ? 0 : kNowhere;
          }
          const bool flat = is_flat(call, levels, {}, net);
          for (uint32_t rank = 0; rank < ranks; rank += std::max(ranks / 3, 1u)) {
            const Algorithm algorithm = choose(call, levels, rank, descriptors, {}, net).algorithm;
            CHECK((algorithm == Algorithm::flat) == flat);
            const Plan plan = net_plan(call, levels, rank, algorithm, {}, net);
            CHECK(operation == Operation::barrier || plan.algorithm == algorithm);
            for (const Step& step : plan.before)
              CHECK(step.to.place == Place::flat && step.bytes <= SlotSizes{}.flat_bytes);
          }
        }
  }
}

TEST(a_small_tensor_goes_whole_if_a_round_takes_as_long_as_the_bytes_that_it_saves) {
  const Levels four = in_blocks({1, 1, 1, 1}, {4});
  const NetSizes slow{.latency_s = 10e-6, .bytes_per_s = 118e6};
  auto flat = [&](uint64_t bytes, const NetSizes& net) {
    return is_flat({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, bytes / 4}, four, {}, net);
  };
  for (const NetSizes& net : {NetSizes{}, slow}) CHECK(flat(4 << 10, net) && !flat(8 << 10, net));
  CHECK(flat(32 << 10, kFastNet) && !flat(64 << 10, kFastNet));
}

TEST(the_choice_for_several_hosts_says_why) {
  const Levels levels = in_blocks({2, 2, 1}, {3});
  std::vector<CallDescriptor> descriptors(5);
  for (CallDescriptor& d : descriptors) d.send_offset = d.recv_offset = 0;
  auto chosen = [&](Operation operation, uint64_t elems, uint32_t rank) {
    return choose({operation, Dtype::float32, Reduction::sum, 0, elems}, levels, rank, descriptors, {}, {});
  };
  CHECK(chosen(Operation::all_reduce, 2048, 0).algorithm == Algorithm::flat);
  CHECK(chosen(Operation::all_reduce, 2049, 0).algorithm == Algorithm::arena);
  CHECK_CONTAINS(chosen(Operation::all_reduce, 1 << 20, 4).reason, "only rank");
  descriptors[1].recv_offset = kNowhere;
  CHECK(chosen(Operation::all_reduce, 1 << 20, 0).algorithm == Algorithm::staged);
  CHECK_CONTAINS(chosen(Operation::all_reduce, 1 << 20, 0).reason, "ordinary memory on this host");
  CHECK(chosen(Operation::all_reduce, 1 << 20, 2).algorithm == Algorithm::arena);
  CHECK(chosen(Operation::all_gather, 1 << 20, 1).algorithm == Algorithm::staged);
  CHECK(chosen(Operation::reduce_scatter, 1 << 20, 0).algorithm == Algorithm::arena);
  CHECK(chosen(Operation::reduce, 1 << 20, 0).algorithm == Algorithm::arena);  // rank 1 is not the root
  CHECK(chosen(Operation::broadcast, 1 << 20, 0).algorithm == Algorithm::arena);
  descriptors[0].recv_offset = descriptors[2].send_offset = kNowhere;
  CHECK(chosen(Operation::reduce, 1 << 20, 0).algorithm == Algorithm::staged);
  CHECK(chosen(Operation::reduce, 1 << 20, 3).algorithm == Algorithm::staged);
  CHECK(chosen(Operation::broadcast, 1 << 20, 3).algorithm == Algorithm::arena);
}

TEST(a_plan_of_several_hosts_can_be_read) {
  const Call call{Operation::all_reduce, Dtype::bfloat16, Reduction::avg, 0, 64};
  const std::string text = print(net_all_reduce(call, in_blocks({2, 2}, {2}), 2, Algorithm::flat, {}, {}));
  CHECK_CONTAINS(text, "reduce (sum) 128 landing[2]+0 <- send[2]+0 flat[3]+0");
  CHECK_CONTAINS(text, "tell level 0\n  send 128 to rank 0 <- landing[2]+0\n  hear level 0");
  CHECK_CONTAINS(text, "receive 128 from rank 0 -> landing[2]+128");
  CHECK_CONTAINS(text, "wait until rank 0 has sent 1");
  CHECK_CONTAINS(text, "reduce (avg) 128 recv[2]+0 slot[2]+0 <- landing[2]+128 landing[2]+0");
  CHECK_CONTAINS(text, "wait until rank 0 was sent 1");
}
