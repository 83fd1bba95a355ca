#include "shm/local_group.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <list>
#include <type_traits>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/process.h"
#include "shm/unix_socket.h"

namespace photinus {
namespace {

constexpr uint64_t kMagic = 0x70686f74696e7573;  // "photinus"
constexpr uint32_t kProtocol = 4;
constexpr const char* kPrefix = "photinus2:";
constexpr double kHelloLimit_s = 2;  // a connection that says nothing for so long is dropped

constexpr int kSendLimit_s = 10;
constexpr size_t kOwnDescriptors = 8;  // listener, segment, the watching thread's, and one or two in passing
constexpr size_t kRefusalsTold = 200;  // bytes of text

struct Secret {
  unsigned char bytes[16];
};

// The only thing parsed from a stranger: a fixed-size message.
struct Hello {
  uint64_t magic;
  uint32_t protocol, rank, world_size, reserved;
  Secret secret;
  uint64_t arena_bytes, shared_bytes, settings;
  char host[64];
};

struct Admission {
  uint32_t accepted, why_not;  // an ErrorKind
  char reason[504];
};

struct PeerFacts {
  uint32_t rank;
  int32_t pid;
  uint64_t arena_bytes;
  char host[64];
  uint32_t has_process, reserved;
};

template <class T>
std::optional<T> as(const Message& message) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (message.data.size() != sizeof(T)) return std::nullopt;
  T value;
  std::memcpy(&value, message.data.data(), sizeof value);
  return value;
}

template <size_t N>
void put(char (&field)[N], const std::string& value) {
  std::memset(field, 0, N);
  std::memcpy(field, value.data(), std::min(value.size(), N - 1));
}

template <size_t N>
std::string get(const char (&field)[N]) {
  return std::string(field, strnlen(field, N));
}

struct Address {
  std::string socket_name;
  Secret secret;
};

Address parse(const std::string& address) {
  Error bad(ErrorKind::invalid_argument,
            "'" + address + "' is no address of a group; make one with new_address()");
  size_t colon = address.rfind(':');
  if (address.rfind(kPrefix, 0) != 0 || colon + 33 != address.size()) throw bad;
  Address parsed{"photinus-" + address.substr(std::strlen(kPrefix), colon - std::strlen(kPrefix)), {}};
  for (size_t i = 0; i < 16; ++i) {
    unsigned value;
    if (std::sscanf(address.c_str() + colon + 1 + 2 * i, "%2x", &value) != 1) throw bad;
    parsed.secret.bytes[i] = static_cast<unsigned char>(value);
  }
  return parsed;
}

// Takes the same time wherever the secrets differ.
bool equal(const Secret& a, const Secret& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < sizeof a.bytes; ++i) difference |= static_cast<unsigned>(a.bytes[i] ^ b.bytes[i]);
  return difference == 0;
}

std::string list_of(const std::vector<uint32_t>& ranks) {
  std::string out = "[";
  for (size_t i = 0; i < ranks.size(); ++i) out += text(i ? ", %u" : "%u", ranks[i]);
  return out + "]";
}

// A pipe whose reading end sees the end of the process that keeps the other.
struct Lifeline {
  FileDescriptor seen, kept;
  Lifeline() {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
      throw_errno("making a pipe (are there enough file descriptors, ulimit -n?)");
    seen = FileDescriptor(ends[0]);
    kept = FileDescriptor(ends[1]);
  }
};

struct Guest {
  FileDescriptor connection;
  Deadline hello_by;
};

void refuse(const FileDescriptor& connection, const std::string& reason,
            ErrorKind why = ErrorKind::invalid_argument) {
  Admission verdict{};
  verdict.why_not = static_cast<uint32_t>(why);
  put(verdict.reason, reason);
  send_message(connection, &verdict, sizeof verdict);
}

// Rank 0's side: collects one connection for each other rank.
class Host {
 public:
  Host(uint32_t world_size, const Address& address, std::string name, const Layout& layout,
       const std::shared_ptr<Arena>& arena)
      : world_size_(world_size),
        secret_(address.secret),
        name_(std::move(name)),
        layout_(layout),
        listener_(listen_on(address.socket_name)) {
    peers_.resize(world_size);
    connections_.resize(world_size);
    peers_[0].lifeline = std::move(own_.seen);
    peers_[0].pid = getpid();
    peers_[0].host = host_name();
    peers_[0].arena = arena->segment();
  }

  LocalGroup gather(const Deadline& deadline, double waiting_s) {
    std::list<Guest> guests;
    bool spoke = false;
    while (!missing().empty()) {
      std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
      for (const Guest& guest : guests) entries.push_back({guest.connection.get(), POLLIN, 0});
      const size_t come = entries.size();  // where those who are in begin: they say nothing until they go
      for (const FileDescriptor& connection : connections_) entries.push_back({connection.get(), POLLIN, 0});
      double wait_s = std::min(deadline.left_s(), 0.1);
      if (poll(entries.data(), entries.size(), static_cast<int>(std::ceil(wait_s * 1000))) < 0 &&
          errno != EINTR)
        throw_errno("waiting for ranks to join");
      check_interrupt("ranks to join group " + name_);
      for (uint32_t rank = 1; rank < world_size_; ++rank)
        if (entries[come + rank].revents != 0) end_without(rank);
      size_t i = 1;
      for (auto guest = guests.begin(); guest != guests.end(); ++i) {
        bool has_spoken = (entries[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
        if (has_spoken) welcome(std::move(guest->connection));
        guest = has_spoken || guest->hello_by.passed() ? guests.erase(guest) : std::next(guest);
      }
      if (entries[0].revents & POLLIN) {
        FileDescriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!connection.valid() && (errno == EMFILE || errno == ENFILE))
          throw_errno("letting a rank in (are there enough file descriptors, ulimit -n?)");
        const timeval patience{kSendLimit_s, 0};  // a guest that does not read must not hold everybody up
        if (connection.valid())
          setsockopt(connection.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        if (connection.valid()) guests.push_back({std::move(connection), Deadline::in(kHelloLimit_s)});
      }
      if (deadline.passed() && !missing().empty()) give_up(deadline);
      if (!spoke && deadline.elapsed_s() >= waiting_s && !missing().empty()) {
        spoke = true;
        say(
            text("rank 0 of %u has been waiting for %.0f s for ranks %s to join group %s%s; it gives up in "
                 "%.0f s",
                 world_size_, deadline.elapsed_s(), list_of(missing()).c_str(), name_.c_str(),
                 come_so_far().c_str(), deadline.left_s()));
      }
    }
    return hand_out();
  }

 private:
  std::vector<uint32_t> missing() const {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 1; rank < world_size_; ++rank)
      if (!connections_[rank].valid()) ranks.push_back(rank);
    return ranks;
  }

  std::string come_so_far() const {
    std::string out;
    for (uint32_t rank = 1; rank < world_size_ && out.size() < kRefusalsTold; ++rank)
      if (connections_[rank].valid()) out += (out.empty() ? "; came: " : ", ") + who(rank);
    return out;
  }

  std::string who(uint32_t rank) const {
    return text("rank %u (pid %d on %s)", rank, peers_[rank].pid, peers_[rank].host.c_str());
  }

  [[noreturn]] void end(ErrorKind kind, const std::string& reason) {
    for (uint32_t rank = 1; rank < world_size_; ++rank)
      if (connections_[rank].valid()) refuse(connections_[rank], reason, kind);
    throw Error(kind, reason);
  }

  [[noreturn]] void end_without(uint32_t rank) {
    connections_[rank].reset();
    const double patience_s = 0.05;
    const std::string how = has_ended(peers_[rank].process, patience_s)
                                ? how_it_ended(peers_[rank].process, peers_[rank].pid, patience_s)
                                : "went away";
    end(ErrorKind::peer_lost,
        who(rank) + " " + how + " while group " + name_ + " was formed. Its own output says more.");
  }

  [[noreturn]] void give_up(const Deadline& deadline) {
    std::string reason = text(
        "group %s: ranks %s of %u did not join within %.1f s. Were all %u processes started, on this host? "
        "Their own output says more.%s",
        name_.c_str(), list_of(missing()).c_str(), world_size_, deadline.limit_s(), world_size_,
        refused_.c_str());
    end(ErrorKind::timeout, reason);
  }

  // Tells a rank why it cannot take part, and remembers it for whoever waits for that rank.
  void refuse_guest(const FileDescriptor& connection, const std::string& reason) {
    refuse(connection, reason);
    if (refused_.size() < kRefusalsTold) refused_ += " Refused: " + reason + ".";
  }

  // Reads the hello of a connection that has something to read, and takes it in or drops it.
  void welcome(FileDescriptor connection) {
    std::optional<Message> message = receive_message(connection, sizeof(Hello) + 1, Deadline::in(0));
    std::optional<Hello> hello = message ? as<Hello>(*message) : std::nullopt;
    Credentials who = credentials_of(connection);
    if (!hello || hello->magic != kMagic || !equal(hello->secret, secret_) || who.user != geteuid()) return;
    std::string given = text("rank %u (pid %d on %s)", hello->rank, who.pid, get(hello->host).c_str());
    if (hello->protocol != kProtocol)
      return refuse_guest(
          connection, text("%s speaks protocol %u, rank 0 speaks %u: install the same Photinus everywhere",
                           given.c_str(), hello->protocol, kProtocol));
    if (hello->world_size != world_size_)
      return refuse_guest(connection, text("%s believes in a world of %u ranks, rank 0 in one of %u",
                                           given.c_str(), hello->world_size, world_size_));
    if (hello->shared_bytes != layout_.bytes || hello->settings != layout_.settings)
      return refuse_guest(
          connection,
          given + " came with other slot sizes than rank 0 (chunk_bytes must be equal on all ranks)");
    if (hello->rank == 0 || hello->rank >= world_size_)
      return refuse_guest(connection,
                          text("%s is not one of the ranks 1 to %u", given.c_str(), world_size_ - 1));
    Peer& peer = peers_[hello->rank];
    if (connections_[hello->rank].valid())
      return refuse_guest(connection, text("%s came second: rank %u is pid %d on %s already", given.c_str(),
                                           hello->rank, peer.pid, peer.host.c_str()));
    if (message->files.size() != 2)
      return refuse_guest(connection, given + " brought no arena, or no lifeline");
    peer.rank = hello->rank;
    peer.pid = who.pid;
    peer.host = get(hello->host);
    peer.arena = Segment::map(std::move(message->files[0]), hello->arena_bytes);
    peer.lifeline = std::move(message->files[1]);
    peer.process = process_of(connection);
    connections_[hello->rank] = std::move(connection);
  }

  LocalGroup hand_out() {
    LocalGroup group;
    group.shared = Segment::create("photinus-group", layout_.bytes);
    FileDescriptor myself = open_process(getpid());
    for (uint32_t a = 1; a < world_size_; ++a) {
      Admission verdict{};
      verdict.accepted = 1;
      bool ok = send_message(connections_[a], &verdict, sizeof verdict, {group.shared->file()});
      for (uint32_t b = 0; ok && b < world_size_; ++b) {
        if (b == a) continue;
        const FileDescriptor& process = b == 0 ? myself : peers_[b].process;
        PeerFacts facts{};
        facts.rank = b;
        facts.pid = peers_[b].pid;
        facts.arena_bytes = peers_[b].arena->bytes();
        put(facts.host, peers_[b].host);
        std::vector<int> files{peers_[b].arena->file(), peers_[b].lifeline.get()};
        facts.has_process = process.valid();
        if (process.valid()) files.push_back(process.get());
        ok = send_message(connections_[a], &facts, sizeof facts, files);
      }
      if (!ok) end_without(a);
    }
    peers_[0].lifeline.reset();
    group.own_lifeline = std::move(own_.kept);
    group.peers = std::move(peers_);
    return group;
  }

  uint32_t world_size_;
  Secret secret_;
  std::string name_;
  Layout layout_;
  FileDescriptor listener_;
  std::string refused_;
  Lifeline own_;
  std::vector<Peer> peers_;
  std::vector<FileDescriptor> connections_;
};

LocalGroup join_as_guest(uint32_t rank, uint32_t world_size, const Address& address, const std::string& name,
                         const Layout& layout, const std::shared_ptr<Arena>& arena, const Deadline& deadline,
                         double waiting_s) {
  auto lost = [&](const char* when) {
    return Error(
        deadline.passed() ? ErrorKind::timeout : ErrorKind::peer_lost,
        text("group %s: rank %u of %u %s (waited %.1f s). Is rank 0 running on this host? Its own output "
             "says more.",
             name.c_str(), rank, world_size, when, deadline.elapsed_s()));
  };
  auto say_that_it_waits = [&](const char* what) {
    say(text(
        "rank %u of %u has been waiting for %.0f s for rank 0%s, to join group %s; it gives up in %.0f s",
        rank, world_size, deadline.elapsed_s(), what, name.c_str(), deadline.left_s()));
  };
  auto connection =
      connect_to(address.socket_name, Deadline::in(std::clamp(deadline.left_s(), 1e-3, waiting_s)));
  if (!connection && !deadline.passed()) {
    say_that_it_waits(", which does not listen yet");
    connection = connect_to(address.socket_name, deadline);
  }
  if (!connection) throw lost("could not reach rank 0, which did not begin to listen");
  // Before the secret goes there: any user of this host may listen on a name that is free.
  if (const unsigned user = credentials_of(*connection).user; user != geteuid())
    throw Error(
        ErrorKind::system,
        text("group %s: the process that listens at rank 0's address belongs to user %u, and rank %u runs as "
             "user %u; nothing was sent to it. Run all ranks of a host as one user.",
             name.c_str(), user, rank, geteuid()));
  Hello hello{};
  hello.magic = kMagic;
  hello.protocol = kProtocol;
  hello.rank = rank;
  hello.world_size = world_size;
  hello.secret = address.secret;
  hello.arena_bytes = arena->segment()->bytes();
  hello.shared_bytes = layout.bytes;
  hello.settings = layout.settings;
  put(hello.host, host_name());
  Lifeline own;
  if (!send_message(*connection, &hello, sizeof hello, {arena->segment()->file(), own.seen.get()}))
    throw lost("was dropped by rank 0 before it could introduce itself");

  const double until_spoken_s = std::min(waiting_s - deadline.elapsed_s(), deadline.left_s());
  if (until_spoken_s > 0 && !await_message(*connection, Deadline::in(until_spoken_s)) && !deadline.passed())
    say_that_it_waits(", which waits for others");
  std::optional<Message> answer = receive_message(*connection, sizeof(Admission), deadline);
  std::optional<Admission> verdict = answer ? as<Admission>(*answer) : std::nullopt;
  if (!verdict) throw lost("got no answer from rank 0, which waits for other ranks or has ended");
  if (!verdict->accepted) throw Error(static_cast<ErrorKind>(verdict->why_not), get(verdict->reason));
  LocalGroup group;
  group.shared = Segment::map(std::move(answer->files.at(0)), layout.bytes);
  group.peers.resize(world_size);
  for (uint32_t i = 1; i < world_size; ++i) {
    std::optional<Message> message = receive_message(*connection, sizeof(PeerFacts), deadline);
    std::optional<PeerFacts> facts = message ? as<PeerFacts>(*message) : std::nullopt;
    if (!facts || facts->rank >= world_size) throw lost("lost rank 0 while it introduced the others");
    Peer& peer = group.peers[facts->rank];
    peer.rank = facts->rank;
    peer.pid = facts->pid;
    peer.host = get(facts->host);
    peer.arena = Segment::map(std::move(message->files.at(0)), facts->arena_bytes);
    peer.lifeline = std::move(message->files.at(1));
    if (facts->has_process) peer.process = std::move(message->files.at(2));
  }
  group.own_lifeline = std::move(own.kept);
  group.peers[rank] = Peer{rank, getpid(), host_name(), arena->segment(), {}, {}};
  return group;
}

}  // namespace

std::string new_address() {
  unsigned char random[24];
  if (getrandom(random, sizeof random, 0) != sizeof random) throw_errno("asking the kernel for random bytes");
  std::string address = kPrefix;
  for (size_t i = 0; i < sizeof random; ++i) {
    if (i == 8) address += ':';
    address += text("%02x", random[i]);
  }
  return address;
}

LocalGroup join_local_group(uint32_t rank, uint32_t world_size, const std::string& address,
                            const std::string& name, const Layout& layout,
                            const std::shared_ptr<Arena>& arena, const Deadline& deadline, double waiting_s) {
  // For each peer its arena, its process and its lifeline; rank 0 has a connection to each besides.
  if (world_size > 1)
    need_descriptors((rank == 0 ? 4 : 3) * world_size + kOwnDescriptors,
                     text("group %s of %u ranks", name.c_str(), world_size));
  if (rank != 0)
    return join_as_guest(rank, world_size, parse(address), name, layout, arena, deadline, waiting_s);
  if (world_size > 1)
    return Host(world_size, parse(address), name, layout, arena).gather(deadline, waiting_s);
  LocalGroup alone;
  alone.shared = Segment::create("photinus-group", layout.bytes);
  alone.peers.push_back(Peer{0, getpid(), host_name(), arena->segment(), {}, {}});
  return alone;
}

}  // namespace photinus
