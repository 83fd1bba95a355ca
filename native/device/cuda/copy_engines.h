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

class CopyEngines final : public Device {
 public:
  explicit CopyEngines(std::shared_ptr<const Gpu> gpu);
  // Waits for copies under way, for at most a second. If one does not end, what it uses is kept for ever.
  ~CopyEngines() override;

  // Locks memory of the host in place, so that copies reach it, for as long as this object lives; keeps it
  // alive. It begins on a page, and its pages are never given back meanwhile (as those of an arena are): the
  // GPU would go on with the old ones, unseen.
  void add_memory(std::shared_ptr<std::byte> memory, size_t bytes);

  // Copies started from now on begin after all that is in the caller's stream now. Throws
  // Error(invalid_argument) when the stream is being captured into a graph; the capture is not harmed.
  void wait_for(CUstream caller);
  // What is put into the caller's stream from now on runs after all copies that were started. The host does
  // not wait. Throws as wait_for does.
  void make_wait(CUstream caller);

  // One of the two lies in added memory, the other one in the GPU's.
  uint64_t start_copy(void* to, const void* from, size_t bytes, bool past_caches) override;
  bool poll(uint64_t ticket) override;
  double nap_s(uint64_t ticket) const override;

 private:
  struct Engine {  // of one direction
    CUstream stream = nullptr;
    std::atomic<uint32_t>* landed = nullptr;  // the number of its last copy that has landed
    CUdeviceptr landed_at = 0;                // the same word, for the GPU
    uint32_t begun = 0;
    std::atomic<double> begun_s{0}, looked_s{0};

    bool has_landed(uint32_t number) const {
      return static_cast<int32_t>(landed->load(std::memory_order_acquire) - number) >= 0;
    }
  };
  struct Memory {
    std::shared_ptr<std::byte> bytes;
    size_t size;
  };
  struct Unmade {};

  CopyEngines(std::shared_ptr<const Gpu> gpu, Unmade) : gpu_(std::move(gpu)) {}
  bool is_added(const void* from, size_t bytes) const;
  void check_capture(CUstream caller) const;
  bool settle(const Engine& engine, double limit_s) const;

  const std::shared_ptr<const Gpu> gpu_;
  mutable std::mutex mutex_;       // guards what follows, but for atomics
  std::array<Engine, 2> engines_;  // to the host, to the GPU
  CUevent event_ = nullptr;        // recorded anew for each order between streams
  std::vector<Memory> memories_;
};

}  // namespace photinus::cuda
