// What the fake driver's entry points do things to: streams of operations, carried out late by threads.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <vector>

#include "fake_cuda.h"

namespace photinus::test {

using namespace cuda;

struct Event {
  std::shared_ptr<bool> reached;  // of the last record; who waits for an earlier one has that one's
  bool destroyed = false;
};

struct Operation {
  enum Kind { to_host, to_gpu, write, record, wait, kernel } kind;
  void* to = nullptr;
  const void* from = nullptr;
  size_t bytes = 0;
  double lasts_s = 0;
  std::atomic<uint32_t>* word = nullptr;
  uint32_t value = 0;
  std::shared_ptr<bool> reached = {};
  std::function<void()> body = {};
  int fault = 0;
};

struct Stream {
  bool ours = false, blocking = false, destroyed = false;
  bool capturing = false, harmed = false;
  bool busy = false;  // its first operation is being carried out
  std::deque<Operation> operations = {};
};

struct Fault {
  std::string name;
  uint64_t call = 0;
  int code = 0;  // 0: none
  double lasts_s = 0;
};

class FakeGpu final : public FakeCuda {
 public:
  static FakeGpu& instance();

  void configure(const std::string& words) override;
  std::string alive() override;
  uint64_t registered_bytes() override;
  std::map<std::string, uint64_t> calls() override;
  uint64_t copies_begun() override;
  void* allocate(size_t bytes) override;
  void free(void* memory) override;
  void release(void* memory) override;
  CUstream make_stream(bool blocking) override;
  void launch(CUstream stream, double lasts_s, std::function<void()> kernel, int fault) override;
  void begin_capture(CUstream stream) override;
  bool end_capture(CUstream stream) override;
  void* current_context() override;
  void set_current_context(void* context) override;
  int capture_mode() override;

  // What a call needs, and what it does beside others.
  enum Trait : unsigned {
    kPlain = 0,
    kContext = 1,    // a current context
    kHarms = 2,      // a capture elsewhere
    kGivesBack = 4,  // acts even when it returns an error, as the manual says of errors of earlier launches
    kAlways = 8,     // works with a dead context, and before cuInit
  };
  CUresult enter(const char* name, unsigned traits, const std::function<CUresult()>& body);
  CUresult start_copy(const char* name, Operation::Kind kind, void* to, const void* from, size_t bytes,
                      CUstream stream);

  // The rest is for entry points, in enter()'s body.
  CUresult put(CUstream stream, Operation operation);
  Stream* find(CUstream stream);
  bool is_registered(const void* from, size_t bytes) const;
  bool is_on_gpu(const void* from, size_t bytes) const;
  static Event* event(CUevent handle) { return reinterpret_cast<Event*>(handle); }

  int gpus = 1, version = 12040, compute_mode = 0;
  bool initialized = false;
  std::set<std::string> without;
  std::map<CUdevice, int> retained;
  std::vector<CUcontext> contexts;  // by GPU
  std::list<Stream> streams;        // the first is the legacy default one
  std::list<Event> events;
  std::map<const std::byte*, size_t> registered, registered_again, allocated;

 private:
  FakeGpu();
  void run(unsigned worker);
  bool carry_out(std::unique_lock<std::mutex>& lock, unsigned worker);
  bool is_due(const Stream& stream, unsigned worker) const;
  bool sleep(std::unique_lock<std::mutex>& lock, double seconds);

  std::mutex mutex_;  // guards all
  std::condition_variable changed_;
  std::mt19937_64 random_;
  double longest_s_ = 0;
  std::vector<Fault> faults_;
  std::map<std::string, uint64_t> calls_;
  uint64_t copies_begun_ = 0;
  CUresult dead_ = CUDA_SUCCESS;
  uint64_t generation_ = 0;  // of the configuration: what was under way in an earlier one is dropped
  int busy_ = 0;
};

}  // namespace photinus::test
