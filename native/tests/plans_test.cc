// Plans run here without memory, sockets or time: a simulator keeps every rank's tensors and counters as
// plain data and picks which rank does its next step at random. Whatever the interleaving, no rank may get
// stuck, and the result must be the naive one. A step that reads what another rank has not written yet, or
// writes what another still needs, shows up as a wrong result in some interleaving.
#include <algorithm>
#include <map>

#include "check.h"
#include "collectives/choose.h"
#include "collectives/shm.h"
#include "collectives/slices.h"
#include "data.h"
#include "kernels/reduce.h"

using namespace photinus;
using namespace photinus::test;

namespace {

struct Rank {
  Bytes send, recv, flat, slot;
  uint64_t counters[kCounterCount] = {};
  Plan plan;
  size_t next = 0;  // of before, then the meeting, then after
};

class Simulator {
 public:
  Simulator(const Call& call, Algorithm algorithm, bool in_place, const std::vector<Bytes>& inputs,
            const SlotSizes& sizes)
      : call_(call), in_place_(in_place), ranks_(inputs.size()) {
    const auto expected = naive(call, inputs);
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].send = inputs[r];
      ranks_[r].recv.resize(expected[r].size());
      ranks_[r].flat.resize(sizes.flat_bytes);
      ranks_[r].slot.resize(sizes.chunks * sizes.chunk_bytes);
      ranks_[r].plan = shm_plan(call, {r, static_cast<uint32_t>(ranks_.size())}, algorithm, sizes);
    }
  }

  // Runs these plans, one for each rank, in place of the engine's own.
  void take(const std::vector<Plan>& plans) {
    for (uint32_t r = 0; r < ranks_.size(); ++r) ranks_[r].plan = plans[r];
  }

  void run(std::mt19937_64& random) {
    std::vector<uint32_t> busy;
    for (uint32_t r = 0; r < ranks_.size(); ++r) busy.push_back(r);
    while (!busy.empty()) {
      // A rank runs on for a random while, so that ranks get far apart too.
      std::vector<uint32_t> ready;
      for (uint32_t r : busy)
        if (can_step(r)) ready.push_back(r);
      CHECK(!ready.empty());  // nobody can go on: a deadlock
      uint32_t r = ready[random() % ready.size()];
      for (uint64_t burst = random() % 20 + 1; burst > 0 && !done(r) && can_step(r); --burst) step(r);
      if (done(r)) busy.erase(std::find(busy.begin(), busy.end(), r));
    }
  }

  const Bytes& result(uint32_t r) const { return in_place_ ? ranks_[r].send : ranks_[r].recv; }

 private:
  size_t meeting(const Rank& rank) const { return rank.plan.before.size(); }
  bool done(uint32_t r) const {
    return ranks_[r].next == meeting(ranks_[r]) + 1 + ranks_[r].plan.after.size();
  }

  bool can_step(uint32_t r) const {
    const Rank& rank = ranks_[r];
    if (rank.next < meeting(rank)) return true;
    if (rank.next == meeting(rank))  // all have done their `before`
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [&](const Rank& other) { return other.next >= meeting(other); });
    const Step& s = rank.plan.after[rank.next - meeting(rank) - 1];
    if (s.kind != Step::Kind::wait) return true;
    for (uint32_t other = 0; other < ranks_.size(); ++other)
      if ((s.rank == kEveryone || s.rank == other) &&
          ranks_[other].counters[static_cast<size_t>(s.counter)] < s.value)
        return false;
    return true;
  }

  std::byte* at(const Region& region) {
    Rank& r = ranks_[region.rank];
    switch (region.place) {
      case Place::send:
        return r.send.data() + region.offset_bytes;
      case Place::recv:
        return (in_place_ ? r.send : r.recv).data() + region.offset_bytes;
      case Place::flat:
        return r.flat.data() + region.offset_bytes;
      case Place::slot:
        return r.slot.data() + region.offset_bytes;
      default:
        break;
    }
    return nullptr;
  }

  void step(uint32_t r) {
    Rank& rank = ranks_[r];
    size_t index = rank.next++;
    if (index == meeting(rank)) return;
    const Step& s =
        index < meeting(rank) ? rank.plan.before[index] : rank.plan.after[index - meeting(rank) - 1];
    switch (s.kind) {
      case Step::Kind::copy:
        std::memmove(at(s.to), at(s.from), s.bytes);
        break;
      case Step::Kind::advance:
        rank.counters[static_cast<size_t>(s.counter)] = s.value;
        break;
      case Step::Kind::wait:
        break;
      case Step::Kind::reduce: {
        std::vector<const void*> sources;
        for (const Region& source : s.sources) sources.push_back(at(source));
        std::vector<void*> destinations;
        for (const Region& result : s.results) destinations.push_back(at(result));
        find_reduce(call_.dtype, call_.reduction, InstructionSet::baseline)(
            {sources.data(), static_cast<uint32_t>(sources.size()), destinations.data(),
             static_cast<uint32_t>(destinations.size()), s.bytes / size_bytes(call_.dtype),
             static_cast<uint32_t>(ranks_.size())});
        break;
      }
    }
  }

  Call call_;
  bool in_place_;
  std::vector<Rank> ranks_;
};

}  // namespace

TEST(plans_give_the_naive_result_in_every_interleaving_tried) {
  std::mt19937_64 random(11);
  const SlotSizes tiny{512, 512, 4};  // many chunks with little data
  int runs = 0;
  for (Operation operation : {Operation::all_reduce, Operation::reduce, Operation::broadcast,
                              Operation::all_gather, Operation::reduce_scatter}) {
    for (Algorithm algorithm : {Algorithm::flat, Algorithm::arena, Algorithm::staged}) {
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
            Simulator simulator(call, algorithm, in_place, inputs, tiny);
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
    Simulator simulator(call, Algorithm::flat, false, inputs, sizes);
    simulator.take(plans);
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
        Executor executor(peers, device, operands);
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
}
