// Operations on tensors in a GPU's memory, over the driver that is none: the bits of the CPU path, and order
// among streams.
#include <time.h>

#include <atomic>
#include <latch>
#include <set>

#include "cuda_ranks.h"

using namespace photinus;
using namespace photinus::cuda;
using namespace photinus::test;

namespace {

constexpr uint64_t kHelpedElems = 200'001;  // in large chunks worth a second thread

constexpr uint64_t kTwoBlocks = CudaDevice::kBlockBytes / 4 * 2 + 7;  // elements, and a little of a third

// Elements for which there are not blocks enough at a time, and how many pieces they are.
constexpr uint64_t kMoreThanBlocks = CudaDevice::kBlocks * CudaDevice::kBlockBytes / 4 + 7;
constexpr uint64_t kPieces = CudaDevice::kBlocks + 1;

}  // namespace

TEST_ANY_HOSTS(every_operation_on_every_type_has_the_bits_of_the_cpu_path) {
  for (const uint32_t ranks : {2u, 3u, 4u}) {
    run_gpu_ranks(
        ranks, text("seed=%u", ranks),
        [&](Communicator& communicator, const GpuRank& seat) {
          const uint32_t me = communicator.rank();
          std::mt19937_64 random(7);  // the same on all ranks
          for (const Dtype dtype : kAllDtypes)
            for (const Operation operation : {Operation::all_reduce, Operation::reduce, Operation::broadcast,
                                              Operation::all_gather, Operation::reduce_scatter})
              for (const uint64_t elems :
                   {uint64_t{1}, uint64_t{1021}, 6000 + random() % 500, uint64_t{0}, kHelpedElems}) {
                if (elems == kHelpedElems && (operation != Operation::all_reduce || ranks != 2)) continue;
                Call call{operation, dtype, Reduction::sum, static_cast<uint32_t>(random() % ranks), elems};
                do call.reduction = kAllReductions[random() % std::size(kAllReductions)];
                while (!exists(dtype, call.reduction));
                const bool scatters = operation == Operation::reduce_scatter;
                std::vector<Bytes> inputs;
                std::vector<double> factors;
                for (uint32_t rank = 0; rank < ranks; ++rank) {
                  inputs.push_back(random_elements(dtype, scatters ? elems * ranks : elems, random));
                  factors.push_back(call.reduction == Reduction::premul_sum ? rank + 0.5 : 1);
                }
                const Bytes expected = naive(call, inputs, factors, levels_of(hosts_of(ranks)))[me];
                Submission given;
                given.call = call;
                given.factor = factors[me];
                std::byte* const send = seat.tensor(inputs[me], random() % 3 ? 0 : 1e-3);
                const bool in_place = operation == Operation::broadcast || operation == Operation::reduce ||
                                      (operation == Operation::all_reduce && random() % 2);
                std::byte* const recv = in_place ? send : seat.tensor(Bytes(expected.size()));
                given.send = send;
                given.recv = recv;
                given.asynchronous = random() % 2;
                const auto work = communicator.submit(seat.on(given));
                work->wait();
                work->order(seat.stream);
                const bool gets = operation != Operation::reduce || call.root == me;
                CHECK(same(dtype, seat.read(recv, expected.size()).data(),
                           (gets ? expected : inputs[me]).data(), expected.size() / size_bytes(dtype)));
                CHECK(work->has_landed());
              }
        },
        ranks == 2 ? DeviceSizes{} : kSmallRings);
  }
}

TEST_ANY_HOSTS(parts_of_different_sizes_arrive) {
  for (const uint32_t ranks : {2u, 3u})
    run_gpu_ranks(ranks, text("seed=%u", ranks + 3), [&](Communicator& communicator, const GpuRank& seat) {
      const uint32_t me = communicator.rank();
      auto elems = [&](Operation operation, uint32_t from, uint32_t to) -> uint64_t {
        if (operation == Operation::gather && to != 1) return 0;
        if (operation == Operation::scatter && from != 1) return 0;
        return operation == Operation::all_gather ? 50000 * from + 3 : (from * 7 + to * 3) % 4 * 20001;
      };
      for (const Operation operation :
           {Operation::all_to_all, Operation::gather, Operation::scatter, Operation::all_gather}) {
        Submission given;
        given.call = {operation, Dtype::int32, Reduction::sum, 1, 0};
        std::byte* whole = nullptr;  // all_gather sends one tensor to all
        for (uint32_t peer = 0; peer < ranks; ++peer) {
          const uint64_t out = elems(operation, me, peer), in = elems(operation, peer, me);
          if (operation != Operation::all_gather || !whole) whole = seat.tensor(ints(out, int(me * 100)));
          given.send_parts.push_back({whole, out});
          given.recv_parts.push_back({seat.tensor(Bytes(in * 4)), in});
        }
        const auto work = communicator.submit(seat.on(given));
        work->wait();
        work->order(seat.stream);
        for (uint32_t peer = 0; peer < ranks; ++peer)
          CHECK(seat.read(static_cast<std::byte*>(given.recv_parts[peer].buffer),
                          given.recv_parts[peer].elems * 4) ==
                ints(given.recv_parts[peer].elems, int(peer * 100)));
      }
    });
}

TEST_ANY_HOSTS(messages_arrive_and_wait_for_the_streams_of_both_ends) {
  run_gpu_ranks(2, "seed=5", [&](Communicator& communicator, const GpuRank& seat) {
    const uint32_t me = communicator.rank();
    for (const uint64_t elems : {uint64_t{0}, uint64_t{1}, uint64_t{40001}, kTwoBlocks}) {
      MessageCall out, in;
      out.dtype = in.dtype = Dtype::int32;
      out.elems = in.elems = elems;
      out.peer = in.peer = 1 - me;
      out.device = in.device = seat.device;
      out.stream = in.stream = seat.stream;
      in.operation = Operation::recv;
      out.buffer = seat.tensor(ints(elems, int(me)), 2e-3);
      in.buffer = seat.tensor(Bytes(elems * 4), 2e-3);
      const auto sent = communicator.submit(out), received = communicator.submit(in);
      received->wait();
      received->order(seat.stream);
      CHECK(seat.read(static_cast<std::byte*>(in.buffer), elems * 4) == ints(elems, int(1 - me)));
      sent->wait();
      CHECK(sent->has_landed() && received->has_landed());
    }
  });
}

TEST_ANY_HOSTS(what_waits_for_blocks_that_are_under_way_comes_back_whole) {
  const std::string words =
      text("lasts=cuMemcpyHtoDAsync:1:60 lasts=cuMemcpyHtoDAsync:%llu:60", (unsigned long long)(kPieces + 1));
  run_gpu_ranks(2, words, [](Communicator& communicator, const GpuRank& seat) {
    const bool sends = communicator.rank() == 0;
    for (const bool by_message : {false, true}) {
      std::byte* const at = seat.tensor(sends ? ints(kMoreThanBlocks, 5) : Bytes(kMoreThanBlocks * 4));
      Submission given;
      given.call = {Operation::all_to_all, Dtype::int32, Reduction::sum, 0, 0};
      given.send_parts.resize(2);
      given.recv_parts.resize(2);
      (sends ? given.send_parts : given.recv_parts)[sends ? 1 : 0] = {at, kMoreThanBlocks};
      MessageCall message;
      message.operation = sends ? Operation::send : Operation::recv;
      message.dtype = Dtype::int32;
      message.elems = kMoreThanBlocks;
      message.peer = sends ? 1 : 0;
      message.buffer = at;
      message.device = seat.device;
      message.stream = seat.stream;
      const auto work =
          by_message ? communicator.submit(message) : communicator.submit(seat.on(std::move(given)));
      work->wait();
      work->order(seat.stream);
      CHECK(seat.read(at, kMoreThanBlocks * 4) == ints(kMoreThanBlocks, 5));
    }
  });
}

TEST_ANY_HOSTS(works_that_nobody_waits_for_and_large_tensors_get_done) {
  run_gpu_ranks(
      2, "seed=1",
      [&](Communicator& communicator, const GpuRank& seat) {
        std::vector<std::byte*> tensors;
        for (int i = 0; i < 40; ++i) {
          tensors.push_back(seat.tensor(ints(100 + i, int(communicator.rank())), i % 4 ? 0 : 1e-3));
          communicator.submit(seat.all_reduce(tensors.back(), 100 + i));
        }
        tensors.push_back(seat.tensor(ints(kTwoBlocks, int(communicator.rank()))));
        const auto last = communicator.submit(seat.all_reduce(tensors.back(), kTwoBlocks));
        last->wait();
        last->order(seat.stream);
        for (int i = 0; i < 40; ++i) CHECK(seat.read(tensors[i], (100 + i) * 4) == sum_of_ints(100 + i, 2));
        CHECK(seat.read(tensors.back(), kTwoBlocks * 4) == sum_of_ints(kTwoBlocks, 2));
      },
      kSmallRings);
}

TEST(wait_returns_when_the_last_copy_is_queued_and_another_stream_may_be_ordered_behind_it) {
  run_gpu_ranks(2, "lasts=cuMemcpyHtoDAsync:1:1000 lasts=cuMemcpyHtoDAsync:2:1000",
                [](Communicator& communicator, const GpuRank& seat) {
                  std::byte* const at = seat.tensor(ints(100, int(communicator.rank())));
                  const double start = now_s();
                  const auto work = communicator.submit(seat.all_reduce(at, 100));
                  work->wait();
                  CHECK(now_s() - start < 0.9);
                  CHECK(!work->has_landed());
                  GpuRank other{seat.device};
                  work->order(other.stream);
                  work->order(seat.stream);
                  CHECK(other.read(at, 400) == sum_of_ints(100, 2));
                  CHECK(seat.read(at, 400) == sum_of_ints(100, 2));
                });
}

TEST(a_gradient_that_is_late_holds_up_no_copies_of_the_call_before_it) {
  run_gpu_ranks(2, "seed=0", [](Communicator& communicator, const GpuRank& seat) {
    const GpuRank late{seat.device};
    std::byte* const first = seat.tensor(ints(kTwoBlocks, int(communicator.rank())), 0.02);
    seat.read(first, 4);  // kernels run one at a time
    communicator.submit({Operation::barrier}, nullptr, nullptr)->wait();
    std::byte* const second = late.tensor(ints(50, int(communicator.rank())), 1);
    const double start = now_s();
    const auto one = communicator.submit(seat.all_reduce(first, kTwoBlocks));
    const auto two = communicator.submit(late.all_reduce(second, 50));
    one->wait();
    while (!one->has_landed()) usleep(100);
    CHECK(now_s() - start < 0.9);
    one->order(seat.stream);
    CHECK(seat.read(first, kTwoBlocks * 4) == sum_of_ints(kTwoBlocks, 2));
    two->wait();
    two->order(late.stream);
    CHECK(late.read(second, 200) == sum_of_ints(50, 2));
  });
}

TEST(nothing_is_locked_before_the_first_tensor) {
  run_gpu_ranks(1, "", [](Communicator& communicator, const GpuRank& seat) {
    CHECK_CONTAINS(fake().alive(), "1 registrations");
    std::byte* const at = seat.tensor(ints(10, 5));
    const auto work = communicator.submit(seat.all_reduce(at, 10));
    work->wait();
    work->order(seat.stream);
    CHECK(seat.read(at, 40) == ints(10, 5));
    std::byte* const other = seat.tensor(ints(10, 0));
    Submission gather = seat.all_reduce(at, 10);
    gather.call.operation = Operation::all_gather;
    gather.recv = other;
    const auto moved = communicator.submit(gather);
    CHECK(moved->is_completed());
    moved->order(seat.stream);
    CHECK(seat.read(other, 40) == ints(10, 5));
    CHECK_CONTAINS(fake().alive(), "1 registrations");  // a rank alone moves tensors within its GPU
  });
  run_gpu_ranks(2, "", [](Communicator& communicator, const GpuRank& seat) {
    std::byte* const at = seat.tensor(ints(10, int(communicator.rank())));
    communicator.submit({Operation::barrier}, nullptr, nullptr)->wait();
    CHECK_CONTAINS(fake().alive(), "2 registrations");
    communicator.submit({Operation::barrier}, nullptr, nullptr)->wait();
    const auto work = communicator.submit(seat.all_reduce(at, 10));
    work->wait();
    work->order(seat.stream);
    CHECK(seat.read(at, 40) == sum_of_ints(10, 2));
    CHECK_CONTAINS(fake().alive(), "5 registrations");  // two landing rings, and one for results
    communicator.submit({Operation::barrier}, nullptr, nullptr)->wait();
  });
  CHECK(fake().alive().empty());
}

TEST_ANY_HOSTS(a_group_of_cpu_tensors_makes_no_driver_call) {
  fake().configure("");
  run_ranks(3, [](Communicator& communicator) {
    std::vector<int32_t> x(100, 1);
    communicator
        .submit({Operation::all_reduce, Dtype::int32, Reduction::sum, 0, x.size()}, x.data(), x.data())
        ->wait();
    CHECK(x == std::vector<int32_t>(100, 3));
  });
  CHECK(fake().calls().empty());
  CHECK(fake().alive().empty());
}

// By all that locks memory: rings, and blocks for what no plan carries.
TEST_ANY_HOSTS(an_idle_group_takes_no_processor_time_and_has_32_MiB_locked_for_a_rank_at_most) {
  constexpr uint64_t kLimitBytes = 32 << 20;
  auto process_cpu_s = [] {
    timespec spent{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
    return static_cast<double>(spent.tv_sec) + static_cast<double>(spent.tv_nsec) * 1e-9;
  };
  std::latch are_idle(2), are_looked_at(2);
  run_gpu_ranks(2, "seed=6", [&](Communicator& communicator, const GpuRank& seat) {
    const uint32_t me = communicator.rank();
    std::byte* const at = seat.tensor(ints(kHelpedElems, int(me)));
    Submission exchange;
    exchange.call = {Operation::all_to_all, Dtype::int32, Reduction::sum, 0, 0};
    for (uint32_t peer = 0; peer < 2; ++peer) {
      exchange.send_parts.push_back({seat.tensor(ints(kTwoBlocks, int(me))), kTwoBlocks});
      exchange.recv_parts.push_back({seat.tensor(Bytes(kTwoBlocks * 4)), kTwoBlocks});
    }
    for (const Submission& given : {seat.all_reduce(at, kHelpedElems), seat.on(exchange)}) {
      const auto work = communicator.submit(given);
      work->wait();
      for (const Deadline deadline = Deadline::in(20); !work->has_landed(); usleep(100))
        CHECK(!deadline.passed());
    }
    are_idle.arrive_and_wait();
    if (me == 0) {
      CHECK(fake().registered_bytes() > 0 && fake().registered_bytes() <= 2 * kLimitBytes);
      usleep(50'000);
      const auto calls = fake().calls();
      const double before_s = process_cpu_s();
      usleep(500'000);
      CHECK(process_cpu_s() - before_s < 0.01);
      CHECK(fake().calls() == calls);
    }
    are_looked_at.arrive_and_wait();
  });
}

// --- what goes wrong

TEST_ANY_HOSTS(a_cpu_tensor_against_a_cuda_tensor_is_a_mismatch_that_quotes_both) {
  run_gpu_ranks(2, "", [](Communicator& communicator, const GpuRank& seat) {
    const bool on_gpu = communicator.rank() == 0;
    std::vector<int32_t> here(10, 1);
    std::byte* const there = seat.tensor(ints(10, 0));
    Submission given = seat.all_reduce(on_gpu ? there : reinterpret_cast<std::byte*>(here.data()), 10);
    if (!on_gpu) given.device = nullptr;
    auto [kind, message] = error_of([&] { communicator.submit(given)->wait(); });
    CHECK(kind == ErrorKind::mismatch);
    CHECK_CONTAINS(message, "rank 0 called all_reduce of CUDA int32[10] (sum)");
    CHECK_CONTAINS(message, "rank 1 called all_reduce of int32[10] (sum)");
    MessageCall call;
    call.operation = on_gpu ? Operation::send : Operation::recv;
    call.dtype = Dtype::int32;
    call.elems = 10;
    call.peer = on_gpu ? 1 : 0;
    call.buffer = on_gpu ? static_cast<void*>(there) : here.data();
    if (on_gpu) call.device = seat.device, call.stream = seat.stream;
    std::tie(kind, message) = error_of([&] { communicator.submit(call)->wait(); });
    CHECK(kind == ErrorKind::mismatch);
    CHECK_CONTAINS(message, "called send of CUDA int32[10]");
    CHECK_CONTAINS(message, "called recv of int32[10]");
    CHECK(here == std::vector<int32_t>(10, 1));
    std::byte* const again = seat.tensor(ints(10, int(communicator.rank())));  // the group is usable
    const auto work = communicator.submit(seat.all_reduce(again, 10));
    work->wait();
    work->order(seat.stream);
    CHECK(seat.read(again, 40) == sum_of_ints(10, 2));
    communicator.submit({Operation::barrier}, nullptr, nullptr)->wait();
  });
}

TEST(a_stream_under_capture_is_refused_and_the_group_goes_on) {
  run_gpu_ranks(2, "", [](Communicator& communicator, const GpuRank& seat) {
    std::byte* const at = seat.tensor(ints(10, int(communicator.rank())));
    fake().begin_capture(seat.stream);
    auto [kind, message] = error_of([&] { communicator.submit(seat.all_reduce(at, 10)); });
    CHECK(kind == ErrorKind::invalid_argument);
    CHECK_CONTAINS(message, "captured into a CUDA graph");
    CHECK(fake().end_capture(seat.stream));
    const auto work = communicator.submit(seat.all_reduce(at, 10));
    work->wait();
    work->order(seat.stream);
    CHECK(seat.read(at, 40) == sum_of_ints(10, 2));
  });
}
