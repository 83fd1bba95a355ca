#include "shm/peer_watch.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "base/error.h"
#include "base/process.h"
#include "base/thread.h"

namespace photinus {
namespace {

constexpr uint64_t kWake = UINT64_MAX;
// An exiting process closes its files a little before its handle says that it has ended.
constexpr double kLifelineToProcess_s = 0.1;
// How it ended is known as long as nobody has reaped it, or from Linux 6.15 on; elsewhere there is no use in
// waiting.
constexpr double kHowPatience_s = 0.05;
constexpr int kBeat_ms = 250;

}  // namespace

PeerWatch::PeerWatch(const std::vector<Peer>& peers, const Peers& known, std::atomic<uint64_t>& heartbeat,
                     std::function<void(uint32_t)> on_loss)
    : peers_(peers),
      known_(known),
      heartbeat_(heartbeat),
      on_loss_(std::move(on_loss)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      lost_(peers.size()),
      how_(peers.size()) {
  if (!wake_.valid() || !epoll_.valid()) throw_errno("making an epoll set to watch peers");
  auto watch = [&](int file, uint64_t mark) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
    event.data.u64 = mark;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, file, &event) != 0) throw_errno("watching a peer");
  };
  watch(wake_.get(), kWake);
  for (const Peer& peer : peers_) {
    if (peer.rank == known_.rank()) continue;
    if (peer.lifeline.valid()) watch(peer.lifeline.get(), peer.rank);
    if (peer.process.valid()) watch(peer.process.get(), peer.rank);
  }
  thread_ = start_thread("photinus-watch", [this] { run(); });
}

PeerWatch::~PeerWatch() {
  stop();
}

void PeerWatch::stop() {
  if (!thread_.joinable()) return;
  uint64_t one = 1;
  while (write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
  thread_.join();
}

std::string PeerWatch::how(uint32_t rank) const {
  std::lock_guard lock(mutex_);
  return how_[rank];
}

void PeerWatch::run() {
  while (true) {
    epoll_event event{};
    int count = epoll_wait(epoll_.get(), &event, 1, kBeat_ms);
    heartbeat_.fetch_add(1, std::memory_order_relaxed);
    if (count == 0 || (count < 0 && errno == EINTR)) continue;
    if (count < 0 || event.data.u64 == kWake) return;
    auto rank = static_cast<uint32_t>(event.data.u64);
    if (is_lost(rank) || !examine(peers_[rank])) continue;
    lost_[rank].store(true, std::memory_order_release);
    on_loss_(rank);
  }
}

bool PeerWatch::examine(const Peer& peer) {
  bool left = known_.presence(peer.rank) == Presence::left;
  std::string how;
  if (has_ended(peer.process, left ? 0 : kLifelineToProcess_s))
    how = how_it_ended(peer.process, peer.pid, kHowPatience_s);
  else if (left)
    return false;  // an orderly leave of a process that lives on; its presence says so
  else
    how = peer.process.valid() ? "closed its lifeline, though its process has not ended"
                               : "closed its lifeline (this kernel does not tell how its process ended)";
  std::lock_guard lock(mutex_);
  how_[peer.rank] = how;
  return true;
}

}  // namespace photinus
