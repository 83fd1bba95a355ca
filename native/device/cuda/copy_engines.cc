#include "device/cuda/copy_engines.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/clock.h"

namespace photinus::cuda {
namespace {

constexpr double kLook_s = 0.01;   // how often a copy that lasts is asked after through the driver
constexpr double kSettle_s = 1;    // for copies that nobody waits for any more
constexpr double kNapShare = 0.1;  // of the time that a copy has taken so far
constexpr double kNapLeast_s = 20e-6, kNapMost_s = 1e-3;
constexpr size_t kPage = 4096, kLine = 64;

// Shared with forked children: a page that they had a copy of would be another one than the GPU writes to.
std::shared_ptr<std::byte> page() {
  void* const at = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw_errno("a page for the landing of copies");
  return {static_cast<std::byte*>(at), [](std::byte* page) { munmap(page, kPage); }};
}

}  // namespace

CopyEngines::CopyEngines(std::shared_ptr<const Gpu> gpu) : CopyEngines(std::move(gpu), Unmade{}) {
  const auto words = page();
  add_memory(words, kPage);
  gpu_->within([&] {
    const Driver& driver = gpu_->driver();
    CUdeviceptr at = 0;
    gpu_->call(driver.cuMemHostGetDevicePointer, &at, words.get(), 0);
    for (size_t i = 0; i < engines_.size(); ++i) {
      engines_[i].landed = new (words.get() + i * kLine) std::atomic<uint32_t>(0);
      engines_[i].landed_at = at + i * kLine;
      gpu_->call(driver.cuStreamCreate, &engines_[i].stream, CU_STREAM_NON_BLOCKING);
    }
    gpu_->call(driver.cuEventCreate, &event_, CU_EVENT_DISABLE_TIMING);
  });
}

CopyEngines::~CopyEngines() {
  if (gpu_->is_forked()) return;
  bool idle = true;
  for (const Engine& engine : engines_) idle &= !engine.stream || settle(engine, kSettle_s);
  if (!idle) {
    static std::mutex mutex;
    static auto* retired = new std::vector<std::pair<std::shared_ptr<const Gpu>, std::vector<Memory>>>;
    std::lock_guard lock(mutex);
    retired->emplace_back(gpu_, std::move(memories_));
    return;
  }
  gpu_->tidy([&] {
    const Driver& driver = gpu_->driver();
    for (const Engine& engine : engines_)
      if (engine.stream) gpu_->give_back(driver.cuStreamDestroy, engine.stream);
    if (event_) gpu_->give_back(driver.cuEventDestroy, event_);
    for (const Memory& memory : memories_) gpu_->give_back(driver.cuMemHostUnregister, memory.bytes.get());
  });
}

void CopyEngines::add_memory(std::shared_ptr<std::byte> memory, size_t bytes) {
  std::lock_guard lock(mutex_);
  memories_.reserve(memories_.size() + 1);
  gpu_->within([&] {
    const auto& entry = gpu_->driver().cuMemHostRegister;
    const CUresult result =
        entry(memory.get(), bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result != CUDA_SUCCESS)
      throw gpu_->error(
          entry, result,
          text(", for %zu bytes of host memory at %p", bytes, static_cast<void*>(memory.get())));
    memories_.push_back({std::move(memory), bytes});
  });
}

bool CopyEngines::is_added(const void* from, size_t bytes) const {
  const auto* first = static_cast<const std::byte*>(from);
  return std::any_of(memories_.begin(), memories_.end(), [&](const Memory& memory) {
    return std::less_equal<>()(memory.bytes.get(), first) && bytes <= memory.size &&
           std::less_equal<>()(first, memory.bytes.get() + (memory.size - bytes));
  });
}

// --- order among streams

void CopyEngines::check_capture(CUstream caller) const {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const auto& entry = gpu_->driver().cuStreamIsCapturing;
  const CUresult result = entry(caller, &status);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || status != CU_STREAM_CAPTURE_STATUS_NONE)
    throw Error(
        ErrorKind::invalid_argument,
        text("the current stream of %s is being captured into a CUDA graph, where Photinus's operations "
             "cannot run, for the host takes part in them: call them outside of the capture "
             "(cuStreamIsCapturing: "
             "%s).",
             gpu_->name().c_str(),
             result == CUDA_SUCCESS ? "captured" : "the default stream beside a captured one"));
  if (result != CUDA_SUCCESS) throw gpu_->error(entry, result);
}

void CopyEngines::wait_for(CUstream caller) {
  std::lock_guard lock(mutex_);
  gpu_->within([&] {
    check_capture(caller);
    gpu_->call(gpu_->driver().cuEventRecord, event_, caller);
    for (const Engine& engine : engines_)
      gpu_->call(gpu_->driver().cuStreamWaitEvent, engine.stream, event_, 0);
  });
}

void CopyEngines::make_wait(CUstream caller) {
  std::lock_guard lock(mutex_);
  gpu_->within([&] {
    check_capture(caller);
    for (const Engine& engine : engines_) {
      gpu_->call(gpu_->driver().cuEventRecord, event_, engine.stream);
      gpu_->call(gpu_->driver().cuStreamWaitEvent, caller, event_, 0);
    }
  });
}

// --- copies

uint64_t CopyEngines::start_copy(void* to, const void* from, size_t bytes, bool) {
  if (bytes == 0) return 0;
  std::lock_guard lock(mutex_);
  const bool to_host = is_added(to, bytes);
  if (to_host == is_added(from, bytes))
    throw Error(
        ErrorKind::invalid_argument,
        text("a copy of %zu bytes from %p to %p: exactly one of them must lie in host memory that was added "
             "for copies with %s, and the other one in the GPU's memory",
             bytes, from, to, gpu_->name().c_str()));
  Engine& engine = engines_[to_host ? 0 : 1];
  const uint32_t number = ++engine.begun;  // also when what follows fails: it may be written nevertheless
  try {
    gpu_->within([&] {
      const Driver& driver = gpu_->driver();
      if (to_host)
        gpu_->call(driver.cuMemcpyDtoHAsync, to, reinterpret_cast<CUdeviceptr>(from), bytes, engine.stream);
      else
        gpu_->call(driver.cuMemcpyHtoDAsync, reinterpret_cast<CUdeviceptr>(to), from, bytes, engine.stream);
      gpu_->call(driver.cuStreamWriteValue32, engine.stream, engine.landed_at, number,
                 CU_STREAM_WRITE_VALUE_DEFAULT);
    });
  } catch (const Error& error) {  // the copy may be under way
    if (settle(engine, kSettle_s)) throw;
    throw Error(error.kind(),
                text("%s The copy, which may have begun, has not ended after %.0f s: the tensor may "
                     "still be written to.",
                     error.what(), kSettle_s));
  }
  engine.begun_s.store(now_s(), std::memory_order_relaxed);
  return uint64_t{number} << 1 | (to_host ? 0 : 1) | uint64_t{1} << 33;
}

bool CopyEngines::poll(uint64_t ticket) {
  Engine& engine = engines_[ticket & 1];
  if (engine.has_landed(static_cast<uint32_t>(ticket >> 1))) return true;
  const double now = now_s();
  const double asked_s = std::max(engine.looked_s.load(std::memory_order_relaxed),
                                  engine.begun_s.load(std::memory_order_relaxed));
  if (now - asked_s < kLook_s) return false;
  engine.looked_s.store(now, std::memory_order_relaxed);
  const auto& entry = gpu_->driver().cuStreamQuery;
  CUresult result = CUDA_ERROR_NOT_READY;
  gpu_->within([&] { result = entry(engine.stream); });
  if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) throw gpu_->error(entry, result);
  return result == CUDA_SUCCESS;
}

double CopyEngines::nap_s(uint64_t ticket) const {
  const double lasts_s = now_s() - engines_[ticket & 1].begun_s.load(std::memory_order_relaxed);
  return std::clamp(lasts_s * kNapShare, kNapLeast_s, kNapMost_s);
}

// Whether nothing of an engine is under way any more; a context that is dead copies nothing.
bool CopyEngines::settle(const Engine& engine, double limit_s) const {
  const auto& entry = gpu_->driver().cuStreamQuery;
  const Deadline deadline = Deadline::in(limit_s);
  while (true) {
    CUresult result = CUDA_ERROR_NOT_READY;
    gpu_->tidy([&] { result = entry(engine.stream); });
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) gpu_->complain(gpu_->error(entry, result));
    if (result == CUDA_SUCCESS || gpu_->is_dead()) return true;
    if (deadline.passed()) return false;
    usleep(200);
  }
}

}  // namespace photinus::cuda
