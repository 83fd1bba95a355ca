#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <numeric>

#include "check.h"
#include "data.h"

using namespace photinus;
using namespace photinus::test;

namespace {

// What ranks send in a call, and what each has to receive.
struct Reference {
  Reference(const Call& call_, uint32_t ranks, uint64_t seed_) : call(call_), seed(seed_) {
    const bool scatters = call.operation == Operation::reduce_scatter;
    std::mt19937_64 random(seed);
    for (uint32_t r = 0; r < ranks; ++r) {
      inputs.push_back(random_elements(call.dtype, call.elems * (scatters ? ranks : 1), random));
      factors.push_back(0.25 * (r + 1));
    }
    expected = naive(call, inputs, factors, levels_of(hosts_of(ranks)));
  }

  const Call call;
  const uint64_t seed;
  std::vector<Bytes> inputs, expected;  // by rank
  std::vector<double> factors;
};

// Made by the rank that comes first, for all of them, who are threads: it takes longer than the call.
std::shared_ptr<const Reference> find_reference(const Call& call, uint32_t ranks, uint64_t seed) {
  static std::mutex mutex;
  static std::deque<std::shared_ptr<const Reference>> newest;
  std::lock_guard lock(mutex);
  for (const auto& each : newest)
    if (each->seed == seed && each->inputs.size() == ranks && each->call == call) return each;
  if (newest.size() == 4) newest.pop_front();
  return newest.emplace_back(std::make_shared<Reference>(call, ranks, seed));
}

// Runs one call on all ranks and compares with the naive reference.
void compare(Communicator& communicator, const Call& call, bool in_arena, bool asynchronous, uint64_t seed) {
  const uint32_t me = communicator.rank();
  const uint64_t size = size_bytes(call.dtype);
  const auto reference = find_reference(call, communicator.world_size(), seed);
  const Bytes &input = reference->inputs[me], &expected = reference->expected[me];
  const bool in_place = call.operation == Operation::reduce || call.operation == Operation::all_reduce ||
                        call.operation == Operation::broadcast;
  std::vector<std::byte> own(2 * std::max(expected.size(), input.size()) + 128);
  std::byte* send = in_arena ? communicator.arena()->allocate(input.size() + 1) : own.data();
  std::byte* recv = in_place   ? send
                    : in_arena ? communicator.arena()->allocate(expected.size() + 1)
                               : own.data() + own.size() / 2;
  if (!input.empty()) std::memcpy(send, input.data(), input.size());
  Submission given;
  given.call = call;
  given.send = send;
  given.recv = recv;
  given.asynchronous = asynchronous;
  given.factor = reference->factors[me];
  communicator.submit(given)->wait();
  if (!same(call.dtype, recv, expected.data(), expected.size() / size))
    std::fprintf(stderr, "%s of %u, rank %u\n", describe(call).c_str(), communicator.world_size(), me);
  CHECK(same(call.dtype, recv, expected.data(), expected.size() / size));
  if (in_arena) {
    communicator.arena()->free(send);
    if (!in_place) communicator.arena()->free(recv);
  }
}

}  // namespace

// Under a sanitizer, where the naive reference takes most of the time, without those that differ from the sum
// in nothing but their kernel: kernels_test takes all of them through all kernels there too.
TEST_ANY_HOSTS(every_collective_and_type_equals_the_naive_reference) {
  for (uint32_t ranks : {1u, 2u, 3u, 4u}) {
    run_ranks(
        ranks,
        [&](Communicator& communicator) {
          uint64_t seed = 0;
          for (Operation operation : {Operation::all_reduce, Operation::reduce, Operation::broadcast,
                                      Operation::all_gather, Operation::reduce_scatter}) {
            for (Dtype dtype : kAllDtypes) {
              for (Reduction reduction : kAllReductions) {
                if (!has_reduction(operation) && reduction != Reduction::sum) continue;
                if (kSanitized && reduction > Reduction::avg && reduction != Reduction::premul_sum) continue;
                if (!exists(dtype, reduction)) continue;
                for (const auto& wire : wires_of({operation, dtype, reduction})) {
                  for (bool in_arena : {false, true}) {
                    for (uint64_t elems : {0, 1, 300, 5000}) {
                      ++seed;
                      compare(communicator,
                              {operation, dtype, reduction,
                               static_cast<uint32_t>(seed % communicator.world_size()), elems, wire},
                              in_arena, seed % 2 == 0, seed);
                    }
                  }
                }
              }
            }
          }
        },
        60, SlotSizes{1024, 2048, 4});  // many chunks with little data
  }
}

// The usual list of four hosts is 4; speeds like these make it 2,2 but for what is rounded in each level.
TEST_ANY_HOSTS(bits_follow_from_no_measurement_and_those_of_whole_sums_from_no_list) {
  const bool apart = layout() == "apart";
  for (const bool asked : {false, true})
    run_ranks(
        4,
        [&](Communicator& communicator) {
          if (apart) CHECK_CONTAINS(communicator.about_hosts(), "levels 2,2 (");
          CHECK(layout().has_value() || communicator.about_hosts().empty());
          uint64_t seed = 0;
          for (Operation operation : {Operation::all_reduce, Operation::reduce, Operation::broadcast,
                                      Operation::all_gather, Operation::reduce_scatter})
            for (Dtype dtype : {Dtype::float32, Dtype::bfloat16, Dtype::int16})
              for (Reduction reduction : {Reduction::sum, Reduction::avg, Reduction::min})
                for (const uint64_t elems : {1, 300, 5000}) {
                  const Call call{operation, dtype, reduction, 1, elems};
                  if (asked && apart && is_rounded_in_levels(call)) continue;
                  ++seed;
                  compare(communicator, call, seed % 2 == 0, false, seed);
                }
          // Whose lists differ hear of each other all the same.
          std::vector<float> tensor(16);
          const Call own{Operation::all_reduce, communicator.rank() == 2 ? Dtype::bfloat16 : Dtype::float32,
                         Reduction::sum, 0, 16};
          const auto [kind, message] =
              error_of([&] { communicator.submit(own, tensor.data(), tensor.data())->wait(); });
          CHECK(kind == ErrorKind::mismatch);
          CHECK_CONTAINS(message, "bfloat16");
          compare(communicator, {Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 300}, true, false,
                  7);
        },
        60, SlotSizes{1024, 2048, 4}, {},
        [&](Communicator::Options& options) {
          if (asked && apart) options.levels = {2, 2};
          options.speeds = {1e-6, 1e6};
        });
}

TEST_ANY_HOSTS(ranks_that_ask_for_different_levels_are_told_so) {
  if (layout() != "apart") return;
  std::atomic<int> told{0};
  run_ranks(4, [&](Communicator&) {
    Communicator::Options options = own_options();
    options.name = "other";
    options.levels = options.rank == 3 ? std::vector<uint32_t>{} : std::vector<uint32_t>{2, 2};
    const auto [kind, message] = error_of([&] { Communicator::create(options); });
    CHECK(kind == ErrorKind::invalid_argument);
    CHECK_CONTAINS(message, "PHOTINUS_LEVELS must be the same on all ranks");
    ++told;
  });
  CHECK(told == 4);
}

TEST_ANY_HOSTS(hosts_are_measured_and_all_ranks_know_the_same) {
  const std::string wanted = "/s between them";
  std::vector<std::string> said;
  // On a busy machine too little may come in time, but not every time.
  for (int tries = 0; tries < 20; ++tries) {
    said.clear();
    std::mutex mutex;
    run_ranks(4, [&](Communicator& communicator) {
      std::lock_guard lock(mutex);
      said.push_back(communicator.about_hosts());
    });
    CHECK(std::all_of(said.begin(), said.end(), [&](const auto& each) { return each == said[0]; }));
    if (!layout() || kSanitized || said[0].find(wanted) != std::string::npos) break;
  }
  if (layout()) CHECK_CONTAINS(said[0], "; levels ");
  if (layout() && !kSanitized) CHECK_CONTAINS(said[0], wanted);
}

TEST_ANY_HOSTS(default_slot_sizes_carry_large_messages) {
  run_ranks(3, [](Communicator& communicator) {
    for (uint64_t elems : {uint64_t{8192}, uint64_t{65537}, uint64_t{1500003}})
      for (bool in_arena : {false, true})
        for (const std::optional<Dtype> wire : {std::optional<Dtype>{}, {Dtype::bfloat16}})
          compare(communicator, {Operation::all_reduce, Dtype::float32, Reduction::avg, 0, elems, wire},
                  in_arena, true, elems);
  });
}

TEST_ANY_HOSTS(float32_that_crosses_as_bfloat16_takes_half_the_bytes_of_the_links) {
  if (!layout()) return;
  constexpr uint32_t kRanks = 4;
  const Levels levels = levels_of(hosts_of(kRanks));
  auto join = [&](Communicator::Options& options) {
    std::vector<uint32_t> counterparts;
    for (size_t level = 0; level < levels.sizes.size(); ++level)
      for (uint32_t rank : levels.counterparts(options.rank, level)) counterparts.push_back(rank);
    const ShmPeers::Options ranks{options.rank,
                                  kRanks,
                                  options.address,
                                  options.name,
                                  options.sizes.bytes(),
                                  0,
                                  options.limits.timeout_s,
                                  options.limits.waiting_s,
                                  options.progress->arena()};
    options.peers = std::make_shared<NetPeers>(NetPeers::Options{
        ranks, options.places, counterparts, "", 0, options.network, &options.progress->processes()});
  };
  auto body = [&](Communicator& communicator) {
    Peers& peers = *own_options().peers;
    auto received = [&] {
      uint64_t bytes = 0;
      for (size_t level = 0; level < levels.sizes.size(); ++level)
        for (uint32_t rank : levels.counterparts(communicator.rank(), level))
          bytes += peers.link(rank, LinkUse::collective)->counts().received_bytes;
      return static_cast<double>(bytes);
    };
    std::vector<float> data(1 << 20, 1.0f), out(data.size());
    auto meet = [&] { communicator.submit({}, nullptr, nullptr)->wait(); };
    auto bytes_of = [&](Operation operation, std::optional<Dtype> wire) {
      const uint64_t elems = operation == Operation::reduce_scatter ? data.size() / kRanks : data.size();
      meet();
      const double before = received();
      meet();  // others send no sooner
      communicator
          .submit({operation, Dtype::float32, Reduction::avg, 0, elems, wire}, data.data(), out.data())
          ->wait();
      meet();
      return received() - before;
    };
    for (Operation operation : {Operation::all_reduce, Operation::reduce_scatter})
      for (Dtype half : {Dtype::bfloat16, Dtype::float16}) {
        const double whole = bytes_of(operation, std::nullopt), halved = bytes_of(operation, half);
        CHECK(whole > 1e6 && halved > 0.499 * whole && halved < 0.502 * whole);
      }
    meet();  // links are there until all have looked
  };
  run_ranks(kRanks, body, 60, {}, {}, join);
}

TEST_ANY_PEERS(calls_run_in_order_and_many_may_be_queued) {
  run_ranks(2, [](Communicator& communicator) {
    std::vector<std::vector<float>> buffers(200, std::vector<float>(100, 1.0f));
    std::vector<std::shared_ptr<Work>> works;
    for (auto& buffer : buffers)
      works.push_back(communicator.submit({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 100},
                                          buffer.data(), buffer.data()));
    works.back()->wait();
    for (auto& work : works) CHECK(work->is_completed());
    for (auto& buffer : buffers)
      for (float value : buffer) CHECK(value == 2.0f);
  });
}

TEST_ANY_HOSTS(several_threads_of_a_rank_share_a_communicator_of_their_own_each) {
  const std::vector<std::string> addresses{new_address(), new_address()};
  run_ranks(2, [&](Communicator&) {
    std::vector<std::thread> threads;
    for (const std::string& address : addresses) {
      Communicator::Options options = own_options();
      options.address = address;
      options.name = "of a thread";
      threads.emplace_back([options] {
        auto communicator = Communicator::create(options);
        std::vector<float> data(20000, 1.0f);
        for (int i = 0; i < 50; ++i) {
          std::fill(data.begin(), data.end(), 1.0f);
          communicator
              ->submit({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, data.size()}, data.data(),
                       data.data(), 0, i % 2)
              ->wait();
          CHECK(std::accumulate(data.begin(), data.end(), 0.0f) == 40000.0f);
        }
        communicator->close();
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_ANY_PEERS(barrier_returns_only_when_all_have_come) {
  std::atomic<int> come{0};
  run_ranks(4, [&](Communicator& communicator) {
    for (int round = 1; round <= 20; ++round) {
      come.fetch_add(1);
      communicator.submit({}, nullptr, nullptr)->wait();
      CHECK(come.load() >= 4 * round);
      communicator.submit({}, nullptr, nullptr)->wait();
    }
  });
}

TEST_ANY_PEERS(wrong_arguments_are_refused_before_anything_is_exchanged) {
  run_ranks(2, [](Communicator& communicator) {
    float x = 1;
    auto refused = [&](const Call& call, void* buffer) {
      auto [kind, message] = error_of([&] { communicator.submit(call, buffer, buffer); });
      CHECK(kind == ErrorKind::invalid_argument);
      return message;
    };
    CHECK_CONTAINS(refused({Operation::broadcast, Dtype::float32, Reduction::sum, 2, 1}, &x), "root 2");
    CHECK_CONTAINS(refused({Operation::all_reduce, Dtype::boolean, Reduction::avg, 0, 1}, &x),
                   "means nothing");
    CHECK_CONTAINS(refused({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 1}, nullptr),
                   "buffer is missing");
    auto crossing = [&](Operation operation, Dtype dtype, Reduction reduction, Dtype wire) {
      return refused({operation, dtype, reduction, 0, 1, wire}, &x);
    };
    CHECK_CONTAINS(crossing(Operation::all_reduce, Dtype::float64, Reduction::sum, Dtype::bfloat16),
                   "all_reduce of float64[1] (sum) as bfloat16 between hosts: nothing crosses so: where "
                   "all_reduce, reduce");
    CHECK_CONTAINS(crossing(Operation::all_reduce, Dtype::float16, Reduction::sum, Dtype::bfloat16),
                   "float32 may cross between hosts as bfloat16 or float16, and these as float32");
    CHECK_CONTAINS(crossing(Operation::all_reduce, Dtype::float32, Reduction::max, Dtype::bfloat16),
                   "where all_reduce, reduce and reduce_scatter add or multiply");
    CHECK_CONTAINS(crossing(Operation::broadcast, Dtype::float32, Reduction::sum, Dtype::bfloat16),
                   "nothing crosses so");
    // The group is still in step.
    communicator.submit({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 1}, &x, &x)->wait();
    CHECK(x == 2.0f);
  });
}

TEST_ANY_HOSTS(more_ranks_than_cores_finish) {
  run_ranks(16, [](Communicator& communicator) {
    std::vector<float> data(16384, 1.0f);
    for (int i = 0; i < 10; ++i) {
      std::fill(data.begin(), data.end(), 1.0f);
      communicator
          .submit({Operation::all_reduce, Dtype::float32, Reduction::sum, 0, data.size()}, data.data(),
                  data.data())
          ->wait();
      CHECK(data[i] == 16.0f);
    }
  });
}
