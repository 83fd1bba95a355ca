// Connections that others make to this process, up to the end of the handshake. A stranger costs a state of
// fixed size for at most two seconds, and nobody waits for it.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "net/events.h"
#include "net/handshake.h"
#include "net/private_descriptor.h"
#include "net/socket_address.h"
#include "net/tcp_stream.h"

namespace photinus {

// Lines about strangers, in a flood of them at most one every five seconds.
class Complaints {
 public:
  void add(const SocketAddress& from, const std::string& what);
  // Those that are to be said now.
  std::vector<std::string> take() { return std::exchange(lines_, {}); }

 private:
  std::vector<std::string> lines_;
  double said_s_ = 0;
  uint64_t unsaid_ = 0;
};

class Incoming {
 public:
  // A claim that has come: what is answered. With an accepted one the connection is then handed over.
  struct Decision {
    Judgement judgement;
    const Membership* own = nullptr;  // lives until the call returns; null: of no group here
  };
  using Decide = std::function<Decision(const Claim&, const Challenge&)>;
  using Take = std::function<void(PrivateDescriptor, const Claim&)>;
  // An accepted one went away before it was taken.
  using Drop = std::function<void(const Claim&)>;

  struct Limits {
    size_t pending = 1000;
    double handshake_s = 2;
  };

  Incoming(Events& events, const Limits& limits, const Dialect& dialect, Decide decide, Take take, Drop drop)
      : events_(events),
        limits_(limits),
        dialect_(dialect),
        decide_(std::move(decide)),
        take_(std::move(take)),
        drop_(std::move(drop)) {}

  // Listens on one address of this host; port 0: any free one. Gives the address with its port. Throws
  // Error(invalid_argument) when it is no address of this host, Error(system) when the port is taken.
  SocketAddress listen(const SocketAddress& address, const TcpOptions& tcp, uint64_t id);

  void note_listener(uint64_t id);  // one of them may have connections
  void note_pending(uint64_t id);   // one of those, or
  bool has(uint64_t id) const { return pending_.contains(id); }
  // Accepts, talks, and gives up on those whose time is over. `next_id` names new ones.
  void work(uint64_t& next_id, double now);
  // When work() must be called again at the latest; 0: no such time.
  double due_s() const;
  Complaints& complaints() { return complaints_; }

 private:
  struct Listener {
    PrivateDescriptor socket;
    uint64_t id = 0;
    bool may_accept = true;
    double retry_s = 0;
  };
  struct Pending {
    PrivateDescriptor socket;
    SocketAddress from;
    double until_s = 0;
    Challenge challenge{};
    Claim claim{};
    Verdict verdict{};
    size_t sent = 0, heard = 0, answered = 0;
    bool is_judged = false, is_accepted = false;
  };
  enum class Step : uint8_t { waits, over, taken };

  void accept(Listener& listener, uint64_t& next_id, double now);
  bool evict();
  void forget(uint64_t id, const char* why);
  Step advance(Pending& one);
  void decide(Pending& one);

  Events& events_;
  const Limits limits_;
  const Dialect dialect_;
  const Decide decide_;
  const Take take_;
  const Drop drop_;
  std::vector<Listener> listeners_;
  std::map<uint64_t, Pending> pending_;  // by id, so the oldest first
  std::vector<uint64_t> moved_;          // of them, that may go on
  Complaints complaints_;
};

}  // namespace photinus
