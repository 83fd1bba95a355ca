// The first page of a process's arena: what its peers need to know of the process as a whole, in whichever
// group they meet it.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/futex.h"
#include "peers/shared_text.h"

namespace photinus {

// What a process's thread is stuck in: enough for a peer to see that two processes wait for each other, and
// to say so. Written rarely (before a sleep), read more rarely; every word is atomic and a version tells torn
// reads.
class WaitRecord {
 public:
  struct Facts {
    uint64_t lane = 0;                // which queue of operations, by an id that all ranks of its group share
    std::vector<uint64_t> waits_for;  // ids of processes (at most kProcesses are kept)
    std::string text;                 // "all_reduce #3 of float32[8] (sum) in group a called at train.py:10"
    uint64_t version = 0;             // changes whenever the process moved
    uint64_t affirmed = 0;            // how often it has looked again and found itself still stuck
  };
  // A wait of a process: its record, by its version.
  struct Wait {
    uint64_t process = 0, version = 0;
    bool operator==(const Wait&) const = default;
  };
  static constexpr size_t kProcesses = 8, kTextBytes = 320;

  uint64_t write(const Facts& facts);  // returns the version
  void clear();
  void affirm() { affirmed_.fetch_add(1, std::memory_order_seq_cst); }
  uint64_t version() const { return version_.load(std::memory_order_seq_cst); }
  // The waits of the newest deadlock that this process has found itself in (at most kProcesses are kept).
  // They stay when it goes on: whoever is in one of these waits can never go on either.
  void set_deadlocked(const std::vector<Wait>& waits);
  std::vector<Wait> deadlocked() const;
  std::optional<Facts> read() const;  // nothing when it is not stuck, or moved while it was read
  // What another process's record holds, as it was told; lane 0: it is not stuck.
  void mirror(const Facts& facts);

 private:
  std::atomic<uint64_t> version_{0};  // odd while it is written
  std::atomic<uint64_t> lane_{0};     // 0: not stuck
  std::atomic<uint64_t> affirmed_{0};
  struct Deadlocked {
    std::atomic<uint64_t> process{0}, version{0};  // version 0: none, or being written
  };
  std::array<Deadlocked, kProcesses> deadlocked_{};
  std::array<std::atomic<uint64_t>, kProcesses> waits_for_{};
  SharedText<kTextBytes> text_;
};

struct ProcessPage {
  static constexpr size_t kBytes = 4096;

  Futex futex;
  alignas(64) std::atomic<uint64_t> heartbeat{
      0};                       // grows while the process runs, whatever its threads wait for
  std::atomic<uint64_t> id{0};  // of the process, drawn at random
  alignas(64) WaitRecord wait_record;
  SharedText<1024> end_reason;  // why the process gave up, for all its groups
};
static_assert(sizeof(ProcessPage) <= ProcessPage::kBytes);

}  // namespace photinus
