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

}  // namespace

std::shared_ptr<std::byte> shared_pages(size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw_errno(text("%zu bytes for copies to and from a GPU", bytes));
  return {static_cast<std::byte*>(at), [bytes](std::byte* pages) { munmap(pages, bytes); }};
}

CopyEngines::CopyEngines(std::shared_ptr<const Gpu> gpu) : CopyEngines(std::move(gpu), Unmade{}) {
  const auto words = shared_pages(kPage);
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
    for (const CUevent event : events_->idle) gpu_->give_back(driver.cuEventDestroy, event);
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

void CopyEngines::remove_memory(const std::byte* memory) {
  if (gpu_->is_forked()) return;
  std::lock_guard lock(mutex_);
  const auto found = std::find_if(memories_.begin(), memories_.end(),
                                  [&](const Memory& added) { return added.bytes.get() == memory; });
  if (found == memories_.end()) return;
  for (const Engine& engine : engines_)
    if (!settle(engine, kSettle_s)) return;
  gpu_->tidy([&] { gpu_->give_back(gpu_->driver().cuMemHostUnregister, found->bytes.get()); });
  memories_.erase(found);
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

// Within the context. One that was waited for may be recorded anew at once: who waits has the earlier place.
Event CopyEngines::take_event() {
  CUevent event = nullptr;
  {
    std::lock_guard lock(events_->mutex);
    if (!events_->idle.empty()) {
      event = events_->idle.back();
      events_->idle.pop_back();
    }
  }
  if (!event) gpu_->call(gpu_->driver().cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
  return {event, [events = events_](CUevent idle) {
            std::lock_guard lock(events->mutex);
            events->idle.push_back(idle);
          }};
}

Event CopyEngines::record(CUstream caller) {
  Event event;
  gpu_->within([&] {
    check_capture(caller);
    event = take_event();
    gpu_->call(gpu_->driver().cuEventRecord, event.get(), caller);
  });
  return event;
}

Event CopyEngines::record(Way way) {
  Event event;
  gpu_->within([&] {
    event = take_event();
    gpu_->call(gpu_->driver().cuEventRecord, event.get(), engines_[index_of(way)].stream);
  });
  return event;
}

void CopyEngines::wait_for(const Event& event, Way way) {
  gpu_->within(
      [&] { gpu_->call(gpu_->driver().cuStreamWaitEvent, engines_[index_of(way)].stream, event.get(), 0); });
}

void CopyEngines::make_wait(CUstream caller, const Event& event) {
  gpu_->within([&] {
    check_capture(caller);
    gpu_->call(gpu_->driver().cuStreamWaitEvent, caller, event.get(), 0);
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
  const auto there = reinterpret_cast<CUdeviceptr>(to_host ? from : to);
  return start(to_host ? Way::to_host : Way::to_gpu, [&](const Driver& driver, CUstream stream) {
    if (to_host)
      gpu_->call(driver.cuMemcpyDtoHAsync, to, there, bytes, stream);
    else
      gpu_->call(driver.cuMemcpyHtoDAsync, there, from, bytes, stream);
  });
}

uint64_t CopyEngines::start_copy_within(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return 0;
  std::lock_guard lock(mutex_);
  return start(Way::to_gpu, [&](const Driver& driver, CUstream stream) {
    if (to == from) return;  // what stands before it in the stream is waited for all the same
    gpu_->call(driver.cuMemcpyDtoDAsync, reinterpret_cast<CUdeviceptr>(to),
               reinterpret_cast<CUdeviceptr>(from), bytes, stream);
  });
}

// With the lock held.
template <class Copy>
uint64_t CopyEngines::start(Way way, const Copy& copy) {
  Engine& engine = engines_[index_of(way)];
  const uint64_t number = ++engine.begun;  // also when what follows fails: it may be written nevertheless
  try {
    gpu_->within([&] {
      copy(gpu_->driver(), engine.stream);
      gpu_->call(gpu_->driver().cuStreamWriteValue32, engine.stream, engine.landed_at,
                 static_cast<uint32_t>(number), CU_STREAM_WRITE_VALUE_DEFAULT);
    });
  } catch (const Error& error) {  // the copy may be under way
    if (settle(engine, kSettle_s)) {
      engine.landed->store(static_cast<uint32_t>(number),
                           std::memory_order_release);  // nothing else is there
      throw;
    }
    throw Error(error.kind(),
                text("%s The copy, which may have begun, has not ended after %.0f s: the tensor may "
                     "still be written to.",
                     error.what(), kSettle_s));
  }
  engine.begun_s.store(now_s(), std::memory_order_relaxed);
  return ticket_of(number, way);
}

bool CopyEngines::poll(uint64_t ticket) {
  Engine& engine = engines_[ticket & 1];
  if (engine.has_landed(ticket >> 1)) return true;
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

bool CopyEngines::has_ended(uint64_t ticket) noexcept {
  if (engines_[ticket & 1].has_landed(ticket >> 1) || gpu_->is_dead()) return true;
  try {
    return poll(ticket);
  } catch (const Error&) {  // of asking, not of the copy
    return gpu_->is_dead();
  }
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
