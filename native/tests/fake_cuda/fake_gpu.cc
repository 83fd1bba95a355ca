#include "fake_gpu.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <thread>

namespace photinus::test {
namespace {

thread_local std::vector<CUcontext> current;  // the last is the thread's
thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

constexpr unsigned kWorkers = 4;  // copies to the host, copies to the GPU, kernels, the rest

// After which a context is of no more use.
bool is_fault_of_kernel(int code) {
  return (code >= 700 && code <= 719 && code != 712 && code != 713) || code == 214 || code == 220;
}

template <class Ranges>
bool holds(const Ranges& ranges, const void* from, size_t bytes) {
  const auto* first = static_cast<const std::byte*>(from);
  auto after = ranges.upper_bound(first);
  if (after == ranges.begin()) return false;
  --after;
  return first + bytes <= after->first + after->second;
}

}  // namespace

FakeGpu& FakeGpu::instance() {
  static auto* gpu = new FakeGpu;  // leaked: its threads run until the process ends
  return *gpu;
}

FakeGpu::FakeGpu() {
  const char* words = std::getenv("PHOTINUS_FAKE_CUDA");
  configure(words ? words : "");
  for (unsigned worker = 0; worker < kWorkers; ++worker)
    std::thread([this, worker] { run(worker); }).detach();
}

void FakeGpu::configure(const std::string& words) {
  std::unique_lock lock(mutex_);
  generation_ += 1;
  changed_.notify_all();
  changed_.wait(lock, [&] { return busy_ == 0; });
  gpus = 1, version = 12040, compute_mode = 0;
  initialized = false;
  copies_begun_ = 0;
  dead_ = CUDA_SUCCESS;
  for (auto* things : {&registered, &registered_again, &allocated}) things->clear();
  without.clear(), retained.clear(), contexts.clear(), streams.clear(), events.clear(), faults_.clear(),
      calls_.clear();
  streams.push_back({.blocking = true});
  uint64_t seed = 0;
  std::istringstream all(words);
  for (std::string word; all >> word;) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals), value = word.substr(equals + 1);
    Fault fault;
    char name[64] = "";
    int number = 0;
    if (std::sscanf(value.c_str(), "%63[^:]:%lu:%d", name, &fault.call, &number) == 3) fault.name = name;
    if (key == "seed") {
      seed = std::stoull(value);
    } else if (key == "gpus") {
      gpus = std::stoi(value);
    } else if (key == "version") {
      version = std::stoi(value);
    } else if (key == "mode") {
      compute_mode = std::stoi(value);
    } else if (key == "without") {
      without.insert(value);
    } else if ((key == "fail" || key == "lasts") && !fault.name.empty()) {
      (key == "fail" ? fault.code : number) = number;
      if (key == "lasts") fault.lasts_s = number / 1e3;
      faults_.push_back(fault);
    } else {
      std::fprintf(stderr, "the fake CUDA driver does not understand '%s'\n", word.c_str());
      std::abort();
    }
  }
  random_.seed(seed);
  const double longest_s[] = {0, 20e-6, 500e-6};
  longest_s_ = longest_s[random_() % std::size(longest_s)];
  for (int gpu = 0; gpu < gpus; ++gpu)
    contexts.push_back(reinterpret_cast<CUcontext>(uintptr_t{0x1000} + static_cast<uintptr_t>(gpu)));
}

std::string FakeGpu::alive() {
  std::lock_guard lock(mutex_);
  std::string out;
  auto count = [&](auto number, const char* what) {
    if (number > 0) out += (out.empty() ? "" : ", ") + std::to_string(number) + " " + what;
  };
  for (const auto& [gpu, times] : retained) count(times, "contexts");
  count(std::count_if(streams.begin(), streams.end(), [](auto& s) { return s.ours && !s.destroyed; }),
        "streams");
  count(std::count_if(events.begin(), events.end(), [](auto& e) { return !e.destroyed; }), "events");
  count(registered.size(), "registrations");
  return out;
}

uint64_t FakeGpu::registered_bytes() {
  std::lock_guard lock(mutex_);
  uint64_t sum = 0;
  for (const auto& [at, bytes] : registered) {
    const auto again = registered_again.find(at);
    sum += bytes * (1 + (again == registered_again.end() ? 0 : again->second));
  }
  return sum;
}

std::map<std::string, uint64_t> FakeGpu::calls() {
  std::lock_guard lock(mutex_);
  return calls_;
}

uint64_t FakeGpu::copies_begun() {
  std::lock_guard lock(mutex_);
  return copies_begun_;
}

// --- what others do

void* FakeGpu::allocate(size_t bytes) {
  std::lock_guard lock(mutex_);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  allocated[static_cast<std::byte*>(memory)] = bytes;
  return memory;
}

// Stays mapped, so that a copy that comes too late is found, and no address comes twice.
void FakeGpu::free(void* memory) {
  std::lock_guard lock(mutex_);
  allocated.erase(static_cast<std::byte*>(memory));
}

void FakeGpu::release(void* memory) {
  std::lock_guard lock(mutex_);
  const auto found = allocated.find(static_cast<std::byte*>(memory));
  munmap(memory, found->second);
  allocated.erase(found);
}

CUstream FakeGpu::make_stream(bool blocking) {
  std::lock_guard lock(mutex_);
  streams.push_back({.blocking = blocking});
  return reinterpret_cast<CUstream>(&streams.back());
}

void FakeGpu::launch(CUstream stream, double lasts_s, std::function<void()> kernel, int fault) {
  std::lock_guard lock(mutex_);
  put(stream, {.kind = Operation::kernel, .lasts_s = lasts_s, .body = std::move(kernel), .fault = fault});
}

void FakeGpu::begin_capture(CUstream stream) {
  std::lock_guard lock(mutex_);
  find(stream)->capturing = true;
  find(stream)->harmed = false;
}

bool FakeGpu::end_capture(CUstream stream) {
  std::lock_guard lock(mutex_);
  find(stream)->capturing = false;
  return !find(stream)->harmed;
}

void* FakeGpu::current_context() {
  return current.empty() ? nullptr : current.back();
}

void FakeGpu::set_current_context(void* context) {
  current.clear();
  if (context) current.push_back(static_cast<CUcontext>(context));
}

int FakeGpu::capture_mode() {
  return mode;
}

// --- calls

CUresult FakeGpu::enter(const char* name, unsigned traits, const std::function<CUresult()>& body) {
  std::unique_lock lock(mutex_);
  const uint64_t call = ++calls_[name];
  CUresult failure = CUDA_SUCCESS;
  for (const Fault& fault : std::vector(faults_)) {
    if (fault.name != name || fault.call != call) continue;
    failure = static_cast<CUresult>(fault.code);
    if (fault.lasts_s > 0 && std::strncmp(name, "cuMemcpy", 8) != 0) sleep(lock, fault.lasts_s);
  }
  if (!initialized && !(traits & kAlways)) return CUDA_ERROR_NOT_INITIALIZED;
  if (is_fault_of_kernel(failure)) dead_ = failure;
  if (dead_ != CUDA_SUCCESS && !(traits & kAlways)) failure = dead_;
  if (failure != CUDA_SUCCESS && !(traits & kGivesBack)) return failure;
  if ((traits & kContext) && current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if ((traits & kHarms) && mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
    for (Stream& stream : streams)
      if (stream.capturing) {
        stream.harmed = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
      }
  const CUresult result = body();
  changed_.notify_all();
  return failure != CUDA_SUCCESS ? failure : result;
}

// Whose thread it is, as cuCtxPushCurrent and its like want to know.
std::vector<CUcontext>& contexts_of_thread() {
  return current;
}
CUstreamCaptureMode& mode_of_thread() {
  return mode;
}

Stream* FakeGpu::find(CUstream handle) {
  if (!handle) return &streams.front();
  for (Stream& stream : streams)
    if (&stream == reinterpret_cast<Stream*>(handle) && !stream.destroyed) return &stream;
  return nullptr;
}

CUresult FakeGpu::put(CUstream handle, Operation operation) {
  Stream* const stream = find(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  for (Stream& other : streams) {
    const bool own = &other == stream, implied = !handle && other.blocking;
    if (!other.capturing || !(own || implied)) continue;
    other.harmed = true;
    return own ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  stream->operations.push_back(std::move(operation));
  changed_.notify_all();
  return CUDA_SUCCESS;
}

CUresult FakeGpu::start_copy(const char* name, Operation::Kind kind, void* to, const void* from, size_t bytes,
                             CUstream stream) {
  return enter(name, kContext, [&] {
    const bool to_host = kind == Operation::to_host;
    const bool within = std::strcmp(name, "cuMemcpyDtoDAsync") == 0;
    if (!(within ? is_on_gpu(from, bytes) : is_registered(to_host ? to : from, bytes)) ||
        !is_on_gpu(to_host ? from : to, bytes))
      return CUDA_ERROR_INVALID_VALUE;
    double lasts_s = longest_s_ * std::uniform_real_distribution()(random_);
    for (const Fault& fault : faults_)
      if (fault.name == name && fault.call == calls_[name]) lasts_s = fault.lasts_s;
    return put(stream, {.kind = kind, .to = to, .from = from, .bytes = bytes, .lasts_s = lasts_s});
  });
}

bool FakeGpu::is_registered(const void* from, size_t bytes) const {
  return holds(registered, from, bytes);
}

bool FakeGpu::is_on_gpu(const void* from, size_t bytes) const {
  return holds(allocated, from, bytes);
}

// --- what carries out

// False when another configuration came meanwhile.
bool FakeGpu::sleep(std::unique_lock<std::mutex>& lock, double seconds) {
  const uint64_t generation = generation_;
  const auto until = std::chrono::system_clock::now() + std::chrono::duration_cast<std::chrono::microseconds>(
                                                            std::chrono::duration<double>(seconds));
  return !changed_.wait_until(lock, until, [&] { return generation_ != generation; });
}

bool FakeGpu::is_due(const Stream& stream, unsigned worker) const {
  if (stream.busy || stream.operations.empty()) return false;
  const Operation& first = stream.operations.front();
  const unsigned whose = first.kind == Operation::to_host  ? 0
                         : first.kind == Operation::to_gpu ? 1
                         : first.kind == Operation::kernel ? 2
                                                           : 3;
  return whose == worker && (first.kind != Operation::wait || *first.reached);
}

// Whether there was something to do.
bool FakeGpu::carry_out(std::unique_lock<std::mutex>& lock, unsigned worker) {
  if (dead_ != CUDA_SUCCESS) return false;
  const auto stream =
      std::find_if(streams.begin(), streams.end(), [&](const Stream& s) { return is_due(s, worker); });
  if (stream == streams.end()) return false;
  const uint64_t generation = generation_;
  const Operation operation = stream->operations.front();
  stream->busy = true;
  busy_ += 1;
  const bool copies = operation.kind == Operation::to_host || operation.kind == Operation::to_gpu;
  auto is_there = [&] {
    const bool to_host = operation.kind == Operation::to_host;
    const void* const here = to_host ? operation.to : operation.from;
    return (is_registered(here, operation.bytes) || (!to_host && is_on_gpu(here, operation.bytes))) &&
           is_on_gpu(to_host ? operation.from : operation.to, operation.bytes);
  };
  auto unlocked = [&](auto&& what) {
    lock.unlock();
    what();
    lock.lock();
  };
  bool goes_on = true;
  if (copies && is_there()) unlocked([&] { std::memset(operation.to, 0xee, operation.bytes); });
  if (copies) copies_begun_ += 1;
  if (operation.lasts_s > 0) goes_on = sleep(lock, operation.lasts_s);
  if (goes_on && dead_ == CUDA_SUCCESS) {
    if (copies && !is_there())
      dead_ = CUDA_ERROR_ILLEGAL_ADDRESS;
    else if (copies)
      unlocked([&] { std::memcpy(operation.to, operation.from, operation.bytes); });
    if (operation.kind == Operation::write) operation.word->store(operation.value, std::memory_order_release);
    if (operation.kind == Operation::record) *operation.reached = true;
    if (operation.kind == Operation::kernel && operation.body) unlocked(operation.body);
    if (operation.fault) dead_ = static_cast<CUresult>(operation.fault);
  }
  busy_ -= 1;
  if (generation == generation_ && dead_ == CUDA_SUCCESS) {
    stream->busy = false;
    stream->operations.pop_front();
  }
  changed_.notify_all();
  return true;
}

void FakeGpu::run(unsigned worker) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (!carry_out(lock, worker)) changed_.wait(lock);
  }
}

}  // namespace photinus::test
