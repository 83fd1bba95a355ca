// A GPU's copy engines as a device (device/device.h): copies between the memory of the GPU and memory of the
// host that was added. No kernel runs, and no memory of the GPU is taken.
//
// How a landing is seen. Behind each copy its stream writes the copy's number into a word of locked host
// memory, and poll() is a load of that word: no lock of the driver is taken from the thread that launches
// kernels. (An event's or a stream's query goes through the driver; a host function comes late, on a thread
// of the driver that holds up the stream, and not at all after a fault.) Nobody wakes a futex, so nap_s()
// says how long a sleeper may sleep. The word alone would never tell of a fault: a copy that is under way for
// long is asked after through the driver, too, every 10 ms.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "device/cuda/gpu.h"
#include "device/device.h"

namespace photinus::cuda {

// The direction of copies; each has a stream of its own, in which they run one after the other.
enum class Way : uint8_t { to_host, to_gpu };

// A place in a stream that others wait for. It goes back to be used again when nobody holds it any more.
using Event = std::shared_ptr<CUevent_st>;

// Memory of the host that can be locked. Shared with forked children: a page that they had a copy of would be
// another one than the GPU writes to.
std::shared_ptr<std::byte> shared_pages(size_t bytes);

class CopyEngines final : public Device {
 public:
  explicit CopyEngines(std::shared_ptr<const Gpu> gpu);
  // Waits for copies under way, for at most a second. If one does not end, what it uses is kept for ever.
  ~CopyEngines() override;

  // Locks memory of the host in place, so that copies reach it, for as long as this object lives; keeps it
  // alive. It begins on a page, and its pages are never given back meanwhile (as those of an arena are): the
  // GPU would go on with the old ones, unseen.
  void add_memory(std::shared_ptr<std::byte> memory, size_t bytes);

  // Gives it back once no copy is under way; if one does not end within a second, it is kept for ever.
  void remove_memory(const std::byte* memory);

  // Behind all that is in the caller's stream now. Throws Error(invalid_argument) when the stream is being
  // captured into a graph; the capture is not harmed.
  Event record(CUstream caller);
  // Behind all copies of that way that were started.
  Event record(Way way);
  // Copies of that way that are started from now on begin after the event.
  void wait_for(const Event& event, Way way);
  // What is put into the caller's stream from now on runs after the event. The host does not wait. Throws as
  // record does.
  void make_wait(CUstream caller, const Event& event);

  // One of the two lies in added memory, the other one in the GPU's.
  uint64_t start_copy(void* to, const void* from, size_t bytes, bool past_caches) override;
  // Both lie in the GPU's: it stands in line with those to the GPU.
  uint64_t start_copy_within(void* to, const void* from, size_t bytes);
  bool poll(uint64_t ticket) override;
  double nap_s(uint64_t ticket) const override;
  // The ticket of the copy of that way that was begun last, even if beginning it failed.
  uint64_t newest(Way way) const { return ticket_of(engines_[index_of(way)].begun.load(), way); }
  // Whether a copy is under way no more, for whoever has its error already: it has landed, or the context is
  // dead, where nothing is copied.
  bool has_ended(uint64_t ticket) noexcept;

  const std::string& gpu_name() const { return gpu_->name(); }

 private:
  struct Engine {  // of one direction
    CUstream stream = nullptr;
    std::atomic<uint32_t>* landed = nullptr;  // the number of its last copy that has landed
    CUdeviceptr landed_at = 0;                // the same word, for the GPU
    std::atomic<uint64_t> begun{0};           // written under the lock
    std::atomic<double> begun_s{0}, looked_s{0};

    // The word has the lower half of a number; fewer copies than that can count are under way.
    bool has_landed(uint64_t number) const {
      const uint32_t word = landed->load(std::memory_order_acquire);
      const uint64_t last = begun.load(std::memory_order_relaxed);
      return last - (static_cast<uint32_t>(last) - word) >= number;
    }
  };
  struct Memory {
    std::shared_ptr<std::byte> bytes;
    size_t size;
  };
  struct Events {  // that nobody holds
    std::mutex mutex;
    std::vector<CUevent> idle;
  };
  struct Unmade {};

  CopyEngines(std::shared_ptr<const Gpu> gpu, Unmade) : gpu_(std::move(gpu)) {}
  static size_t index_of(Way way) { return static_cast<size_t>(way); }
  static uint64_t ticket_of(uint64_t number, Way way) { return number << 1 | index_of(way); }
  template <class Copy>
  uint64_t start(Way way, const Copy& copy);
  Event take_event();
  bool is_added(const void* from, size_t bytes) const;
  void check_capture(CUstream caller) const;
  bool settle(const Engine& engine, double limit_s) const;

  const std::shared_ptr<const Gpu> gpu_;
  mutable std::mutex mutex_;       // guards what follows, but for atomics
  std::array<Engine, 2> engines_;  // to the host, to the GPU
  const std::shared_ptr<Events> events_ = std::make_shared<Events>();
  std::vector<Memory> memories_;
};

}  // namespace photinus::cuda
