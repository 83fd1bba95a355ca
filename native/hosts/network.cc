#include "hosts/network.h"

#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread.h"
#include "hosts/words.h"

namespace photinus {
namespace {

// A thread that waits polls far more often; what others say in between may come so late.
constexpr auto kPark = std::chrono::milliseconds(2);
// Who is about to sleep polls as often at most.
constexpr uint64_t kFewPolls = 4;
constexpr double kTendEvery_s = 0.01, kSleep_s = 0.1;

Connections::Options options_of(const std::vector<SocketAddress>& listen) {
  Connections::Options options;
  options.listen = listen;
  options.streams = static_cast<uint8_t>(std::min<size_t>(kCollectiveStreams + listen.size(), UINT8_MAX));
  return options;
}

bool is_same(const std::vector<SocketAddress>& a, const std::vector<SocketAddress>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.text() == y.text(); });
}

}  // namespace

Network::Network(const std::vector<SocketAddress>& listen)
    : connections_(options_of(listen)), listen_(listen) {
  thread_ = start_thread("photinus-net", [this] { run(); });
}

Network::~Network() {
  {
    std::lock_guard lock(mutex_);
    ending_.store(true);
    resumed_.notify_all();
  }
  connections_.ring();
  thread_.join();
}

std::shared_ptr<Network> Network::of_this_process(const std::vector<SocketAddress>& listen) {
  static std::mutex mutex;
  static pid_t owner = 0;
  static auto* network = new std::shared_ptr<Network>;  // leaked: its thread may outlive static destruction
  std::lock_guard lock(mutex);
  if (*network && owner != getpid()) {
    new std::shared_ptr<Network>(*network);  // the parent's thread is not the forked child's to join
    network->reset();
  }
  if (!*network) {
    if (listen.empty())
      throw Error(
          ErrorKind::invalid_argument,
          "this process listens for ranks of other hosts nowhere yet; it must be told on which addresses "
          "before it joins a group with ranks on other hosts");
    *network = std::make_shared<Network>(listen);
    owner = getpid();
  } else if (!listen.empty() && !is_same(listen, (*network)->listen_)) {
    throw Error(
        ErrorKind::invalid_argument,
        text("this process listens for other hosts on %s already, and was asked to on %s: one listener "
             "serves all groups of a process",
             (*network)->listen_[0].text().c_str(), listen[0].text().c_str()));
  }
  return *network;
}

bool Network::poll() {
  const uint64_t polls = polls_.fetch_add(1, std::memory_order_relaxed);
  // The own thread, asleep, has the connections; it gives way.
  if (sleeping_.load(std::memory_order_relaxed)) {
    if (polls - polls_at_sleep_.load(std::memory_order_relaxed) < kFewPolls) return false;
    if (sleeping_.exchange(false)) connections_.ring();
  }
  return connections_.poll();
}

void Network::resume() {
  wanted_.store(true, std::memory_order_seq_cst);
  if (!parked_.load(std::memory_order_seq_cst)) return;
  std::lock_guard lock(mutex_);
  resumed_.notify_one();
}

void Network::attend() {
  attended_.store(true);
  connections_.ring();
}

void Network::add(Member* member, Futex* futex) {
  std::lock_guard lock(tending_);
  members_.push_back({member, futex});
}

void Network::remove(Member* member) {
  std::lock_guard lock(tending_);
  std::erase_if(members_, [&](const Entry& entry) { return entry.member == member; });
}

void Network::run() {
  double tended_s = 0;
  bool soon = false;
  uint64_t polls = polls_.load();
  while (!ending_.load()) {
    const uint64_t before = polls_.load(std::memory_order_relaxed);
    bool moved = false;
    if (before - polls < kFewPolls) {
      polls = before;
      polls_at_sleep_.store(before, std::memory_order_relaxed);
      sleeping_.store(true);
      moved = connections_.poll(soon ? kTendEvery_s : kSleep_s);
      sleeping_.store(false);
    } else {
      polls = park() ? polls_.load() : before;
    }
    if (const double now = now_s(); now - tended_s > kTendEvery_s || attended_.exchange(false)) {
      tended_s = now;
      soon = tend();
    } else {
      soon |= moved;  // what came has not been looked after yet
    }
    if (!moved) continue;
    std::lock_guard lock(tending_);
    for (const Entry& entry : members_)
      if (entry.futex->asleep.load(std::memory_order_seq_cst)) wake(*entry.futex);
  }
}

// Whether it ended because a thread that polled is about to sleep.
bool Network::park() {
  std::unique_lock lock(mutex_);
  parked_.store(true, std::memory_order_seq_cst);
  const bool resumed = resumed_.wait_for(lock, kPark, [&] { return wanted_.load() || ending_.load(); });
  parked_.store(false, std::memory_order_relaxed);
  wanted_.store(false);
  return resumed;
}

bool Network::tend() {
  std::lock_guard lock(tending_);
  bool soon = false;
  for (const Entry& entry : members_) soon |= entry.member->tend(now_s());
  return soon;
}

}  // namespace photinus
