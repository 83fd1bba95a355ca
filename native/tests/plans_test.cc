// The plans of one host. See simulator.h for how they are run; net_plans_test.cc has those of several hosts.
#include "check.h"
#include "collectives/choose.h"
#include "collectives/device_plans.h"
#include "collectives/shm.h"
#include "collectives/slices.h"
#include "data.h"
#include "fake_peers.h"
#include "simulator.h"
#include "slow_device.h"

using namespace photinus;
using namespace photinus::test;

namespace {

std::vector<Plan> plans_of(const Call& call, uint32_t ranks, Algorithm algorithm, const SlotSizes& sizes) {
  std::vector<Plan> plans;
  for (uint32_t r = 0; r < ranks; ++r)
    plans.push_back(algorithm == Algorithm::device ? device_plan(call, {r, ranks}, Simulator::kRings)
                                                   : shm_plan(call, {r, ranks}, algorithm, sizes));
  return plans;
}

}  // namespace

TEST(plans_give_the_naive_result_in_every_interleaving_tried) {
  std::mt19937_64 random(11);
  const SlotSizes tiny{512, 512, 4};  // many chunks with little data
  int runs = 0;
  for (Operation operation : {Operation::all_reduce, Operation::reduce, Operation::broadcast,
                              Operation::all_gather, Operation::reduce_scatter}) {
    for (Algorithm algorithm : {Algorithm::flat, Algorithm::arena, Algorithm::staged, Algorithm::device}) {
      for (uint32_t ranks : {2u, 3u, 4u, 7u}) {
        for (uint64_t elems : {1, 5, 64, 65, 200, 1000, 1025}) {
          const uint64_t input_elems = operation == Operation::reduce_scatter ? elems * ranks : elems;
          if (algorithm == Algorithm::flat && input_elems * 4 > tiny.flat_bytes) continue;
          for (int seed = 0; seed < 6; ++seed) {
            Call call{operation, Dtype::float32, Reduction::sum, static_cast<uint32_t>(random() % ranks),
                      elems};
            std::vector<Bytes> inputs;
            for (uint32_t r = 0; r < ranks; ++r)
              inputs.push_back(random_elements(call.dtype, input_elems, random));
            const bool in_place =
                operation == Operation::broadcast || (operation == Operation::all_reduce && seed % 2);
            Simulator simulator(call, plans_of(call, ranks, algorithm, tiny), in_place, inputs, tiny);
            simulator.run(random);
            const auto expected = naive(call, inputs);
            for (uint32_t r = 0; r < ranks; ++r)
              CHECK(same(call.dtype, simulator.result(r).data(), expected[r].data(), expected[r].size() / 4));
            ++runs;
          }
        }
      }
    }
  }
  CHECK(runs > 1000);
}

namespace {

// all_reduce of a small tensor on four ranks by a tree: 0 adds 0 and 1 while 2 adds 2 and 3, then 0 adds
// both.
Plan tree(uint32_t me, uint64_t bytes) {
  Plan plan{Algorithm::flat, {}, {}};
  auto& steps = plan.after;
  plan.before.push_back(copy_step({Place::flat, me}, {Place::send, me}, bytes));
  if (me % 2 == 0) {
    steps.push_back(reduce_step({{Place::slot, me}}, {{Place::flat, me}, {Place::flat, me + 1}}, bytes));
    steps.push_back(advance_step(Counter::staged, 1));
  }
  if (me == 0) {
    steps.push_back(wait_step(Counter::staged, 1, 2));
    steps.push_back(reduce_step({{Place::recv, 0}, {Place::slot, 0, bytes}},
                                {{Place::slot, 0}, {Place::slot, 2}}, bytes));
    steps.push_back(advance_step(Counter::reduced, 1));
  } else {
    steps.push_back(wait_step(Counter::reduced, 1, 0));
    steps.push_back(copy_step({Place::recv, me}, {Place::slot, 0, bytes}, bytes));
  }
  return plan;
}

}  // namespace

TEST(a_plan_may_name_any_sources_in_the_simulator_and_on_real_memory) {
  const Call call{Operation::all_reduce, Dtype::int32, Reduction::sum, 0, 25};
  const uint64_t bytes = 100, ranks = 4;
  const SlotSizes sizes{512, 512, 4};
  std::mt19937_64 random(3);
  std::vector<Plan> plans;
  for (uint32_t r = 0; r < ranks; ++r) plans.push_back(tree(r, bytes));
  for (uint64_t seed = 0; seed < 40; ++seed) {
    std::vector<Bytes> inputs;
    for (uint32_t r = 0; r < ranks; ++r) inputs.push_back(random_elements(call.dtype, call.elems, random));
    const auto expected = naive(call, inputs);
    Simulator simulator(call, plans, false, inputs, sizes);
    simulator.run(random);
    for (uint32_t r = 0; r < ranks; ++r) CHECK(simulator.result(r) == expected[r]);

    std::vector<std::shared_ptr<Arena>> arenas(ranks);
    for (auto& arena : arenas) arena = std::make_shared<Arena>(1 << 20);
    auto network = std::make_shared<FakeNetwork>(arenas, sizes.bytes(), seed);
    std::vector<Bytes> results(ranks, Bytes(bytes));
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        FakePeers peers(network, r);
        SlowDevice device(arenas[r]->page().futex, seed);
        Operands operands;
        Executor executor(peers, device, operands, nullptr);
        Memory memory;
        memory.send = inputs[r].data();
        memory.recv = results[r].data();
        memory.sizes = sizes;
        memory.sequence = 1;
        auto run = [&](const std::vector<Step>& steps) {
          for (size_t next = 0; !executor.run(steps, next, call, memory);) std::this_thread::yield();
        };
        run(plans[r].before);
        run({advance_step(Counter::finished, 1), wait_step(Counter::finished, 1)});  // the meeting
        run(plans[r].after);
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(results == expected);
  }
}

TEST(slices_cover_a_message_without_gaps_on_cache_lines) {
  for (uint64_t elems : {0, 1, 15, 16, 17, 1000, 4096}) {
    for (uint64_t count : {1, 2, 3, 8, 128}) {
      uint64_t end = 0;
      for (uint64_t i = 0; i < count; ++i) {
        Slice slice = slice_of(elems, count, i, 16);
        CHECK(slice.first == end);
        CHECK(slice.first % 16 == 0 || slice.first == elems);
        end = slice.first + slice.elems;
      }
      CHECK(end == elems);
    }
  }
}

TEST(the_choice_says_why) {
  std::vector<CallDescriptor> ordinary(2), shared(2);
  for (CallDescriptor& d : shared) d.send_offset = d.recv_offset = 0;
  Call large{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 1 << 20};
  Call small = large;
  small.elems = 16;
  CHECK(choose(small, shared, {}).algorithm == Algorithm::flat);
  CHECK(choose(large, shared, {}).algorithm == Algorithm::arena);
  CHECK(choose(large, ordinary, {}).algorithm == Algorithm::staged);
  CHECK_CONTAINS(choose(large, ordinary, {}).reason, "ordinary memory");
  shared[1].recv_offset = kNowhere;
  CHECK(choose(large, shared, {}).algorithm == Algorithm::staged);
}

TEST(a_plan_can_be_read) {
  Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 8};
  std::string text = print(shm_plan(call, {1, 2}, Algorithm::flat, {}));
  CHECK_CONTAINS(text, "copy 32 flat[1]+0 <- send[1]+0");
  CHECK_CONTAINS(text, "meet");
  CHECK_CONTAINS(text, "reduce 32 recv[1]+0 <- flat[0]+0 send[1]+0");
  text = print(device_plan(call, {0, 2}, {}));
  CHECK_CONTAINS(text, "start to copy 32 landing_ring[0]+0 <- send[0]+0");
  CHECK_CONTAINS(text, "wait until 1 copies to the host have landed");
  CHECK_CONTAINS(text, "wait until there is room for result 0");
  CHECK_CONTAINS(text, "let go of result 0");
}
