// What tests in Python do with the fake driver's GPU (tests/fake_cuda.py), as plain functions: all that torch
// would do on a real one beside the engine.
#include <unistd.h>

#include <chrono>
#include <cstring>

#include "fake_gpu.h"

using namespace photinus::cuda;
using photinus::test::FakeGpu;
using photinus::test::Operation;

namespace {

using Reached = std::shared_ptr<bool>;

CUstream handle(uintptr_t stream) {
  return reinterpret_cast<CUstream>(stream);
}

// Also while the context is of no more use, and uncounted beside the driver's calls.
template <class Body>
void locked(Body&& body) {
  FakeGpu::instance().enter("(a test)", FakeGpu::kAlways, [&] { return body(), CUDA_SUCCESS; });
}

}  // namespace

extern "C" {

void fake_cuda_configure(const char* words) {
  FakeGpu::instance().configure(words);
}
uintptr_t fake_cuda_make_stream() {
  return reinterpret_cast<uintptr_t>(FakeGpu::instance().make_stream(false));
}
uintptr_t fake_cuda_allocate(size_t bytes) {
  return reinterpret_cast<uintptr_t>(FakeGpu::instance().allocate(bytes));
}
// Frees memory when all these streams have come by, as torch's allocator gives it to the next, who fills it.
void fake_cuda_free(uintptr_t memory, size_t bytes, const uintptr_t* streams, int count) {
  auto left = std::make_shared<std::atomic<int>>(count);
  for (int i = 0; i < count; ++i)
    FakeGpu::instance().launch(
        handle(streams[i]), 0,
        [=] {
          if (left->fetch_sub(1) > 1) return;
          std::memset(reinterpret_cast<void*>(memory), 0xdd, bytes);
          FakeGpu::instance().free(reinterpret_cast<void*>(memory));
        },
        0);
}
// Puts a kernel into a stream; without one it is busy for so long.
void fake_cuda_launch(uintptr_t stream, double seconds, void (*kernel)()) {
  FakeGpu::instance().launch(handle(stream), seconds, kernel, 0);
}
// An event that is recorded in a stream; for ever.
void* fake_cuda_record(uintptr_t stream) {
  auto* const event = new Reached(std::make_shared<bool>(false));
  locked([&] { FakeGpu::instance().put(handle(stream), {.kind = Operation::record, .reached = *event}); });
  return event;
}
void fake_cuda_follow(uintptr_t stream, void* event) {
  const Reached reached = *static_cast<Reached*>(event);
  locked([&] { FakeGpu::instance().put(handle(stream), {.kind = Operation::wait, .reached = reached}); });
}
int fake_cuda_query(void* event) {
  bool reached = false;
  locked([&] { reached = **static_cast<Reached*>(event); });
  return reached;
}
// Waits for what is in a stream; 0 when it is not done after some seconds.
int fake_cuda_settle(uintptr_t stream, double limit_s) {
  void* const event = fake_cuda_record(stream);
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(limit_s);
  while (!fake_cuda_query(event)) {
    if (std::chrono::steady_clock::now() > until) return 0;
    usleep(50);
  }
  return 1;
}
}
