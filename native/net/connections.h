// All links of a process: one listener, the dialling, and one poll() for everything.
//
// Whoever wants links joins a group (what it knows of itself, and the secret), then, for each peer, one of
// the two dials and the other awaits. Nothing here blocks: what is asked for is an Opening, which some later
// poll() completes.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "net/dialing.h"
#include "net/events.h"
#include "net/handshake.h"
#include "net/incoming.h"
#include "net/link.h"
#include "net/socket_address.h"
#include "net/tcp_stream.h"

namespace photinus {

// A link that is being made.
class Opening {
 public:
  // The link, or null while it is under way. Throws why it failed: Error(timeout) names who was not reached,
  // and what was met instead; Error(invalid_argument) when the peer refused this process, or something else
  // sits at its address; Error(aborted) when the group was left.
  std::shared_ptr<Link> link() const;

 private:
  friend class Connections;
  Opening(const Deadline& deadline) : deadline_(deadline) {}
  bool is_under_way() const { return !link_ && error_text_.empty(); }

  // All is guarded by the mutex of Connections, but for `is_over_` and what is set before it.
  const Deadline deadline_;
  double until_s_ = 0;  // the same, as a point in time
  bool has_said_why_ = false;
  Membership own_;
  uint32_t peer_ = 0;
  Link::Handler handler_;
  std::atomic<bool> is_over_{false};
  std::shared_ptr<Link> link_;
  ErrorKind error_kind_ = ErrorKind::timeout;
  std::string error_text_;

  bool is_dialled_ = false;
  Dialing::Order order_;                         // of what is dialled
  std::vector<std::unique_ptr<Dialing>> dials_;  // by stream
  std::vector<PrivateDescriptor> sockets_;       // by stream, that have come
  std::vector<bool> promised_;                   // of those awaited: accepted, the socket comes at once
  Membership other_;                             // the peer, as it has proved itself
  Token token_{};
};

class Connections {
 public:
  struct Options {
    std::vector<SocketAddress> listen;  // addresses of this host and their ports, 0 for any; none: only dials
    uint8_t streams = 1;                // for data, of each link
    TcpOptions tcp;
    Incoming::Limits incoming;
    // So long may something else sit at a peer's address: what is left of the job before, for instance.
    double stranger_s = 1.5;
    double gone_s = 3;     // so long nobody may listen at a peer's addresses before it has ended
    double say_why_s = 5;  // after which a line says what answers at a peer's address
    Dialect dialect;       // another one only in tests
  };

  // Throws as Incoming::listen() does, or Error(system) when the process may not open enough descriptors.
  explicit Connections(const Options& options);
  ~Connections();
  Connections(const Connections&) = delete;
  Connections& operator=(const Connections&) = delete;

  // All methods may be called from any thread.

  // Whether bytes of data have left this process, on whichever link, that nobody has acknowledged.
  bool have_data_under_way();
  // Where others reach this process.
  const std::vector<SocketAddress>& addresses() const { return addresses_; }
  // Accepts, dials, greets, and polls all links. Whether something is done that somebody may wait for: a
  // frame, a link, an end; false too when another thread is at it. If nothing is to be done at first, it
  // sleeps for at most `limit_s`, until something is, or ring().
  bool poll(double limit_s = 0);
  void ring() { events_.ring(); }

  // Sees to it that this process may open so many more links. Throws Error(system) if it may not.
  void reserve(size_t links) const;
  // From now on this process is such a member; claims for other groups hear "not yet". Throws
  // Error(invalid_argument) for names that are too long, or a group that it is in already.
  void join(const Membership& member);
  // The group's openings fail, its listener's ear closes; its links live on.
  void leave(const std::string& job, const std::string& group);
  // A link with a peer of a group that was joined; exactly one of the two dials. `addresses`: of the peer;
  // streams for data spread over them. `handler` is the link's. Who awaits may do so for ever (an infinite
  // deadline).
  std::shared_ptr<Opening> dial(const std::string& job, const std::string& group, uint32_t peer,
                                const std::vector<SocketAddress>& addresses, const Deadline& deadline,
                                Link::Handler handler);
  std::shared_ptr<Opening> await(const std::string& job, const std::string& group, uint32_t peer,
                                 const Deadline& deadline, Link::Handler handler);

 private:
  using GroupName = std::pair<std::string, std::string>;  // job, group
  struct Group {
    Membership own;
    std::map<uint32_t, std::shared_ptr<Opening>> openings;  // by peer; those that are done stay
  };
  using Links = std::vector<std::weak_ptr<Link>>;

  Group& group_of(const std::string& job, const std::string& group);
  std::shared_ptr<Opening> open(const std::string& job, const std::string& group, uint32_t peer,
                                const Deadline& deadline, Link::Handler handler);
  Incoming::Decision decide(const Claim& claim, const Challenge& said);
  Opening* opening_of(const Claimed& claimed);
  void take(PrivateDescriptor socket, const Claim& claim);
  void drop(const Claim& claim);
  void work(double now);
  void work_on(Opening& opening, double now);
  void complete(Opening& opening);
  void fail(Opening& opening, ErrorKind kind, const std::string& text);
  void dispatch(std::span<const epoll_event> events);
  enum class Moved : uint8_t { nothing, bytes, completed };
  Moved poll_links();
  void rest_links();
  std::shared_ptr<const Links> links();

  const Options options_;
  const int owner_;
  Events events_;
  std::vector<SocketAddress> addresses_;

  std::mutex poll_mutex_;  // held by the one thread that polls
  std::mutex mutex_;       // guards what follows; never held while links are polled
  Incoming incoming_;
  uint64_t next_id_ = 1;
  std::map<GroupName, Group> groups_;
  std::vector<std::weak_ptr<Opening>> under_way_;
  std::unordered_map<uint64_t, Dialing*> dials_;  // by id, to be worked on
  std::unordered_map<uint64_t, std::weak_ptr<Readiness>> streams_;
  std::shared_ptr<const Links> links_ = std::make_shared<Links>();
  std::atomic<bool> busy_{false};   // something is under way beside links
  std::vector<std::string> lines_;  // to be said
};

}  // namespace photinus
