// What the groups of a process that span several hosts have in common: its connections, and a thread that
// polls them while nobody else does.
//
// A thread that waits for something polls by itself, as long as it spins: so what comes needs no other
// thread. Meanwhile the own thread stays away. It comes back when the waiting thread is about to sleep
// (resume), or when nobody has polled for a while, and wakes those that sleep when something has come.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/futex.h"
#include "net/connections.h"

namespace photinus {

class Network {
 public:
  // A group that wants to look after its links now and then.
  class Member {
   public:
    // On the own thread, every tenth of a second, and within 10 ms while anything comes and after attend().
    // Whether it wants to be called within 10 ms again.
    virtual bool tend(double now_s) = 0;

   protected:
    ~Member() = default;
  };

  // Listens on these addresses; throws as Connections does.
  explicit Network(const std::vector<SocketAddress>& listen);
  ~Network();
  // That of this process (in a forked child a new one). Opened by the first call, whose addresses later ones
  // must repeat; none: those of the first call. Throws Error(invalid_argument) for others, or when none were
  // given yet.
  static std::shared_ptr<Network> of_this_process(const std::vector<SocketAddress>& listen = {});

  Connections& connections() { return connections_; }
  // By a thread that waits; whether something is done that it may wait for. A few times while the own thread
  // sleeps on the connections this does nothing, for that one is as quick: only who spins takes them.
  bool poll();
  // The thread that polled is about to sleep.
  void resume();
  // Something has happened beside the connections.
  void attend();

  // `futex`: what threads sleep on that want to know when something has come. The member lives until remove()
  // returns, and is not tended afterwards.
  void add(Member* member, Futex* futex);
  void remove(Member* member);

 private:
  struct Entry {
    Member* member;
    Futex* futex;
  };
  void run();
  bool tend();
  bool park();

  Connections connections_;
  const std::vector<SocketAddress> listen_;
  std::atomic<uint64_t> polls_{0};           // by others
  std::atomic<uint64_t> polls_at_sleep_{0};  // when the own thread went to sleep
  std::atomic<bool> sleeping_{false}, parked_{false}, wanted_{false}, ending_{false}, attended_{false};

  std::mutex tending_;  // guards members_, held while they are tended
  std::vector<Entry> members_;
  std::mutex mutex_;
  std::condition_variable resumed_;
  std::thread thread_;
};

}  // namespace photinus
