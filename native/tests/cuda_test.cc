#include <atomic>
#include <random>

#include "cuda_rig.h"

using namespace photinus;
using namespace photinus::cuda;
using namespace photinus::test;

namespace {

// Until a kernel, which says so by `flag`, has run.
void await(const std::atomic<bool>& flag) {
  const Deadline deadline = Deadline::in(10);
  while (!flag.load()) {
    CHECK(!deadline.passed());
    usleep(100);
  }
}

}  // namespace

// --- copies

TEST(copies_arrive_in_both_directions_whatever_their_size_and_place) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const Rig rig("seed=" + std::to_string(seed));
    std::mt19937_64 random(seed);
    for (int round = 0; round < 20; ++round) {
      const size_t bytes = random() % 3 == 0 ? random() % 70 : random() % (kBytes / 2);
      const size_t from = random() % (kBytes - bytes), to = random() % (kBytes - bytes);
      const bool to_host = random() % 2;
      std::byte *const source = to_host ? rig.tensor : rig.ring.get(), *const target = to_host
                                                                                           ? rig.ring.get()
                                                                                           : rig.tensor;
      for (size_t i = 0; i < kBytes; ++i) source[i] = static_cast<std::byte>(random());
      std::vector<std::byte> expected(target, target + kBytes);
      std::copy_n(source + from, bytes, expected.begin() + static_cast<long>(to));
      rig.await(rig.engines->start_copy(target + to, source + from, bytes, false));
      CHECK(std::equal(expected.begin(), expected.end(), target));
    }
  }
}

TEST(copies_of_one_direction_land_one_after_the_other_and_those_of_the_other_meanwhile) {
  const Rig rig("lasts=cuMemcpyDtoHAsync:1:400");
  std::byte *const host = rig.ring.get(), *const half = host + kBytes / 2;
  fill(rig.tensor, 5);
  fill(half, 6, kBytes / 2);
  const uint64_t first = rig.engines->start_copy(host, rig.tensor, 100, false);
  const uint64_t second = rig.engines->start_copy(host + 100, rig.tensor, 100, false);
  const uint64_t back = rig.engines->start_copy(rig.tensor + kBytes / 2, half, 100, false);
  rig.await(back);
  CHECK(!rig.engines->poll(first));
  CHECK(!rig.engines->poll(second));
  rig.await(second);
  CHECK(rig.engines->poll(first));
  CHECK(all_are(host, 5, 200));
  CHECK(all_are(rig.tensor + kBytes / 2, 6, 100));
}

TEST(threads_may_copy_at_the_same_time) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    const Rig rig("seed=" + std::to_string(seed));
    std::vector<std::thread> threads;
    for (size_t part = 0; part < 3; ++part)
      threads.emplace_back([&, part] {
        const size_t bytes = 1000, at = part * bytes;
        for (int value = 0; value < 60; ++value) {
          fill(rig.ring.get() + at, value, bytes);
          rig.await(rig.engines->start_copy(rig.tensor + at, rig.ring.get() + at, bytes, false));
          fill(rig.ring.get() + at, 0, bytes);
          rig.await(rig.engines->start_copy(rig.ring.get() + at, rig.tensor + at, bytes, false));
          CHECK(all_are(rig.ring.get() + at, value, bytes));
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
}

TEST(looking_for_a_landing_asks_the_driver_every_10_ms_at_most) {
  const Rig rig("lasts=cuMemcpyDtoHAsync:1:150");
  const uint64_t ticket = rig.engines->start_copy(rig.ring.get(), rig.tensor, kBytes, false);
  uint64_t looks = 0;
  const double start = now_s();
  while (!rig.engines->poll(ticket)) ++looks;
  CHECK(fake().calls()["cuStreamQuery"] <= 1 + static_cast<uint64_t>((now_s() - start) / 0.01));
  CHECK(looks > 100);
  const auto before = fake().calls();
  for (int i = 0; i < 1000; ++i) CHECK(rig.engines->poll(ticket));
  CHECK(fake().calls() == before);
}

TEST(memory_that_was_not_added_and_memory_that_was_freed_are_errors) {
  const Rig rig;
  std::vector<std::byte> heap(100);
  for (auto [to, from] : {std::pair<void*, void*>{heap.data(), rig.tensor},
                          {rig.ring.get(), rig.ring.get() + 200},
                          {rig.ring.get() + kBytes - 50, rig.tensor}}) {
    auto [kind, message] = error_of([&] { rig.engines->start_copy(to, from, 100, false); });
    CHECK(kind == ErrorKind::invalid_argument);
    CHECK_CONTAINS(message,
                   "must lie in host memory that was added for copies with GPU 0 (Fake, 0000:01:00.0)");
  }
  fake().free(rig.tensor);
  auto [kind, message] = error_of([&] { rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false); });
  CHECK(kind == ErrorKind::system);
  CHECK_CONTAINS(message, "cuMemcpyDtoHAsync failed on GPU 0");
  CHECK(rig.engines->start_copy(rig.ring.get(), rig.tensor, 0, false) == 0);
}

// --- order among streams

TEST(copies_wait_for_what_is_in_the_callers_stream) {
  const Rig rig;
  fill(rig.tensor, 3);
  fill(rig.ring.get() + 100, 9, 100);
  std::atomic<int> read{0};
  fake().launch(rig.caller, 0.03, [&] {
    read = static_cast<int>(rig.tensor[100]);
    fill(rig.tensor, 7, 100);
  });
  wait_for(*rig.engines, rig.caller);
  const uint64_t back = rig.engines->start_copy(rig.tensor + 100, rig.ring.get() + 100, 100, false);
  rig.await(rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false));
  rig.await(back);
  CHECK(all_are(rig.ring.get(), 7, 100));
  CHECK(read == 3);
}

TEST(the_callers_stream_waits_for_copies_of_either_direction_and_the_host_does_not) {
  for (const char* slow : {"cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync"}) {
    const Rig rig(text("lasts=%s:1:1000", slow));  // which a busy machine does not come near
    fill(rig.tensor, 3);
    fill(rig.ring.get() + 100, 9, 100);
    std::atomic<int> read{0};
    std::atomic<bool> ran{false};
    const double start = now_s();
    const uint64_t out = rig.engines->start_copy(rig.ring.get(), rig.tensor, 100, false);
    const uint64_t in = rig.engines->start_copy(rig.tensor + 100, rig.ring.get() + 100, 100, false);
    make_wait(*rig.engines, rig.caller);
    fake().launch(rig.caller, 0, [&] {
      read = static_cast<int>(rig.tensor[100]);
      fill(rig.tensor, 4, 100);
      ran = true;
    });
    CHECK(now_s() - start < 0.9);
    await(ran);
    CHECK(read == 9);
    CHECK(rig.engines->poll(out) && rig.engines->poll(in));
    CHECK(all_are(rig.ring.get(), 3, 100));
  }
}

TEST(a_capture_of_a_graph_elsewhere_is_not_harmed) {
  const Rig other("lasts=cuMemcpyDtoHAsync:1:40");
  fake().begin_capture(other.caller);
  {
    auto engines = std::make_unique<CopyEngines>(std::make_shared<const Gpu>(driver(), 0));
    const auto ring = shared_pages(kBytes);
    engines->add_memory(ring, kBytes);
    const CUstream caller = fake().make_stream(false);
    wait_for(*engines, caller);
    const uint64_t ticket = engines->start_copy(ring.get(), other.tensor, 100, false);
    usleep(15000);  // so that it is asked after through the driver
    while (!engines->poll(ticket)) usleep(100);
    make_wait(*engines, caller);
  }
  CHECK(fake().end_capture(other.caller));
}

TEST(a_stream_under_capture_is_refused_and_the_capture_goes_on) {
  const Rig rig;
  for (const CUstream caller : {rig.caller, CUstream{nullptr}}) {
    fake().begin_capture(rig.caller);
    for (const bool before : {true, false}) {
      auto [kind, message] =
          error_of([&] { before ? wait_for(*rig.engines, caller) : make_wait(*rig.engines, caller); });
      CHECK(kind == ErrorKind::invalid_argument);
      CHECK_CONTAINS(message, "is being captured into a CUDA graph");
      CHECK_CONTAINS(message, "call them outside of the capture");
    }
    CHECK(fake().end_capture(rig.caller));
  }
  wait_for(*rig.engines, rig.caller);
}

// --- below the engine

static void run_over(const std::shared_ptr<Device>& device, const std::function<void(Communicator&)>& body) {
  run_ranks(1, body, 60, {}, {}, [&](Communicator::Options& options) { options.device = device; });
}

// all_gather in a world of one is a copy, here from the GPU.
static void copy_by_engine(Communicator& communicator, const Rig& rig, double timeout_s) {
  communicator
      .submit({Operation::all_gather, Dtype::float32, Reduction::sum, 0, 100}, rig.tensor, rig.ring.get(),
              timeout_s)
      ->wait();
}

TEST(an_operation_that_waits_for_a_copy_sleeps_and_sees_it_soon) {
  struct Counting final : Device {
    std::shared_ptr<Device> device;
    mutable std::atomic<int> naps{0};
    explicit Counting(std::shared_ptr<Device> counted) : device(std::move(counted)) {}
    uint64_t start_copy(void* to, const void* from, size_t bytes, bool past_caches) override {
      return device->start_copy(to, from, bytes, past_caches);
    }
    bool poll(uint64_t ticket) override { return device->poll(ticket); }
    double nap_s(uint64_t ticket) const override { return ++naps, device->nap_s(ticket); }
  };
  std::string words;
  for (int copy = 1; copy <= 20; ++copy) words += text("lasts=cuMemcpyDtoHAsync:%d:10 ", copy);
  Rig rig(words);
  fill(rig.tensor, 6);
  const auto counting = std::make_shared<Counting>(rig.engines);
  const double start = now_s();
  run_over(counting, [&](Communicator& communicator) {
    for (int i = 0; i < 20; ++i) copy_by_engine(communicator, rig, 60);
  });
  // 0.2 s, and more on a busy machine; 2 s if it slept for 0.1 s each time.
  CHECK(now_s() - start < 1.5);
  CHECK(counting->naps < 20 * 60);
  CHECK(fake().calls()["cuMemcpyDtoHAsync"] == 20);
  CHECK(all_are(rig.ring.get(), 6, 400));
}

TEST(an_operation_ends_with_the_fault_of_a_kernel_or_when_its_copy_does_not_end) {
  for (const bool faults : {true, false}) {
    Rig rig(faults ? "" : "lasts=cuMemcpyDtoHAsync:1:1000000");
    if (faults) fake().launch(rig.caller, 0.01, {}, CUDA_ERROR_ILLEGAL_ADDRESS);
    wait_for(*rig.engines, rig.caller);
    run_over(rig.engines, [&](Communicator& communicator) {
      auto [kind, message] = error_of([&] { copy_by_engine(communicator, rig, faults ? 60 : 0.2); });
      CHECK(kind == (faults ? ErrorKind::system : ErrorKind::timeout));
      CHECK_CONTAINS(message, faults ? "on GPU 0 (Fake, 0000:01:00.0): CUDA_ERROR_ILLEGAL_ADDRESS (700)"
                                     : "for a copy of its own tensor");
    });
    rig.engines.reset();
    fake().configure("");
  }
}
