// Notices that a peer's process has gone, by its closing lifeline and its process handle: shared memory
// alone never tells. One thread sleeps on all of them, and beats meanwhile.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "peers/peers.h"
#include "shm/local_group.h"

namespace photinus {

class PeerWatch {
 public:
  // `on_loss(rank)` runs on the watching thread, at most once for each peer, after how() is set. The thread
  // also advances `heartbeat`, by which peers see that this process runs.
  PeerWatch(const std::vector<Peer>& peers, const Peers& known, std::atomic<uint64_t>& heartbeat,
            std::function<void(uint32_t)> on_loss);
  ~PeerWatch();

  bool is_lost(uint32_t rank) const { return lost_[rank].load(std::memory_order_acquire); }
  // How a lost peer went: "was killed by SIGKILL", "exited with code 1", ...
  std::string how(uint32_t rank) const;
  void stop();

 private:
  void run();
  // Whether the peer is really gone; an end of file alone may be an orderly leave.
  bool examine(const Peer& peer);

  const std::vector<Peer>& peers_;
  const Peers& known_;
  std::atomic<uint64_t>& heartbeat_;
  std::function<void(uint32_t)> on_loss_;
  FileDescriptor wake_;
  FileDescriptor epoll_;
  std::vector<std::atomic<bool>> lost_;
  mutable std::mutex mutex_;
  std::vector<std::string> how_;
  std::thread thread_;
};

}  // namespace photinus
