#include "transport/local_group.h"

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
#include "base/process.h"
#include "transport/unix_socket.h"

namespace photinus {
namespace {

constexpr uint64_t kMagic = 0x70686f74696e7573;  // "photinus"
constexpr uint32_t kProtocol = 1;
constexpr const char* kPrefix = "photinus1:";
constexpr double kHelloLimit_s = 2;  // a connection that says nothing for so long is dropped

struct Secret {
  unsigned char bytes[16];
};

// The only thing parsed from a stranger: a fixed-size message.
struct Hello {
  uint64_t magic;
  uint32_t protocol, rank, world_size, reserved;
  Secret secret;
  uint64_t arena_bytes, shared_bytes;
  char host[64];
};

struct Verdict {
  uint32_t accepted, reserved;
  char reason[504];
};

struct PeerFacts {
  uint32_t rank;
  int32_t pid;
  uint64_t arena_bytes;
  char host[64];
  uint32_t has_arena, has_process, has_connection, reserved;
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

struct Guest {
  FileDescriptor connection;
  Deadline hello_by;
};

void refuse(const FileDescriptor& connection, const std::string& reason) {
  Verdict verdict{};
  put(verdict.reason, reason);
  send_message(connection, &verdict, sizeof verdict);
}

// Rank 0's side: collects one connection for each other rank.
class Host {
 public:
  Host(uint32_t world_size, const Address& address, std::string name, size_t shared_bytes,
       const std::shared_ptr<Arena>& arena)
      : world_size_(world_size),
        secret_(address.secret),
        name_(std::move(name)),
        shared_bytes_(shared_bytes),
        listener_(listen_on(address.socket_name)) {
    peers_.resize(world_size);
    peers_[0].pid = getpid();
    peers_[0].host = host_name();
    peers_[0].arena = arena->segment();
  }

  LocalGroup gather(const Deadline& deadline) {
    std::list<Guest> guests;
    while (!missing().empty()) {
      std::vector<pollfd> entries{{listener_.get(), POLLIN, 0}};
      for (const Guest& guest : guests) entries.push_back({guest.connection.get(), POLLIN, 0});
      double wait_s = std::min(deadline.left_s(), 0.1);
      if (poll(entries.data(), entries.size(), static_cast<int>(std::ceil(wait_s * 1000))) < 0 &&
          errno != EINTR)
        throw_errno("waiting for ranks to join");
      size_t i = 1;
      for (auto guest = guests.begin(); guest != guests.end(); ++i) {
        bool spoke = (entries[i].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
        if (spoke) welcome(std::move(guest->connection));
        guest = spoke || guest->hello_by.passed() ? guests.erase(guest) : std::next(guest);
      }
      if (entries[0].revents & POLLIN) {
        FileDescriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (connection.valid()) guests.push_back({std::move(connection), Deadline::in(kHelloLimit_s)});
      }
      if (deadline.passed() && !missing().empty()) give_up(deadline);
    }
    return hand_out();
  }

 private:
  std::vector<uint32_t> missing() const {
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 1; rank < world_size_; ++rank)
      if (!peers_[rank].connection.valid()) ranks.push_back(rank);
    return ranks;
  }

  [[noreturn]] void give_up(const Deadline& deadline) {
    std::string reason = text(
        "group %s: ranks %s of %u did not join within %.1f s. Were all %u processes started, on this host? "
        "Their own output says more.",
        name_.c_str(), list_of(missing()).c_str(), world_size_, deadline.limit_s(), world_size_);
    for (uint32_t rank = 1; rank < world_size_; ++rank)
      if (peers_[rank].connection.valid()) refuse(peers_[rank].connection, reason);
    throw Error(ErrorKind::timeout, reason);
  }

  // Reads the hello of a connection that has something to read, and takes it in or drops it.
  void welcome(FileDescriptor connection) {
    std::optional<Message> message = receive_message(connection, sizeof(Hello) + 1, Deadline::in(0));
    std::optional<Hello> hello = message ? as<Hello>(*message) : std::nullopt;
    Credentials who = credentials_of(connection);
    if (!hello || hello->magic != kMagic || !equal(hello->secret, secret_) || who.user != geteuid()) return;
    std::string given = text("rank %u (pid %d on %s)", hello->rank, who.pid, get(hello->host).c_str());
    if (hello->protocol != kProtocol)
      return refuse(connection,
                    text("%s speaks protocol %u, rank 0 speaks %u: install the same Photinus everywhere",
                         given.c_str(), hello->protocol, kProtocol));
    if (hello->world_size != world_size_ || hello->shared_bytes != shared_bytes_)
      return refuse(connection, text("%s believes in a world of %u ranks, rank 0 in one of %u", given.c_str(),
                                     hello->world_size, world_size_));
    if (hello->rank == 0 || hello->rank >= world_size_)
      return refuse(connection, text("%s is not one of the ranks 1 to %u", given.c_str(), world_size_ - 1));
    Peer& peer = peers_[hello->rank];
    if (peer.connection.valid())
      return refuse(connection, text("%s came second: rank %u is pid %d on %s already", given.c_str(),
                                     hello->rank, peer.pid, peer.host.c_str()));
    if (message->files.size() != 1) return refuse(connection, given + " brought no arena");
    peer.rank = hello->rank;
    peer.pid = who.pid;
    peer.host = get(hello->host);
    peer.arena = Segment::map(std::move(message->files[0]), hello->arena_bytes);
    peer.process = process_of(connection);
    peer.connection = std::move(connection);
  }

  LocalGroup hand_out() {
    LocalGroup group;
    group.shared = Segment::create("photinus-group", shared_bytes_);
    FileDescriptor myself = open_process(getpid());
    // One connection for each pair that does not include rank 0, which keeps the connections it has.
    std::vector<std::vector<FileDescriptor>> ends(world_size_);
    for (auto& row : ends) row.resize(world_size_);
    for (uint32_t a = 1; a < world_size_; ++a) {
      for (uint32_t b = a + 1; b < world_size_; ++b) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
          throw_errno("connecting ranks with each other (are there enough file descriptors, ulimit -n?)");
        ends[a][b] = FileDescriptor(pair[0]);
        ends[b][a] = FileDescriptor(pair[1]);
      }
      Verdict verdict{};
      verdict.accepted = 1;
      bool ok = send_message(peers_[a].connection, &verdict, sizeof verdict, {group.shared->file()});
      for (uint32_t b = 0; ok && b < world_size_; ++b) {
        if (b == a) continue;
        const FileDescriptor& process = b == 0 ? myself : peers_[b].process;
        PeerFacts facts{};
        facts.rank = b;
        facts.pid = peers_[b].pid;
        facts.arena_bytes = peers_[b].arena->bytes();
        put(facts.host, peers_[b].host);
        std::vector<int> files{peers_[b].arena->file()};
        facts.has_process = process.valid();
        if (process.valid()) files.push_back(process.get());
        facts.has_connection = b != 0;
        if (b != 0) files.push_back(ends[a][b].get());
        ok = send_message(peers_[a].connection, &facts, sizeof facts, files);
      }
      if (!ok)
        throw Error(ErrorKind::peer_lost, text("rank %u (pid %d on %s) went away while group %s was formed",
                                               a, peers_[a].pid, peers_[a].host.c_str(), name_.c_str()));
      for (uint32_t b = 0; b < world_size_; ++b) ends[a][b].reset();
    }
    group.peers = std::move(peers_);
    return group;
  }

  uint32_t world_size_;
  Secret secret_;
  std::string name_;
  size_t shared_bytes_;
  FileDescriptor listener_;
  std::vector<Peer> peers_;
};

LocalGroup join_as_guest(uint32_t rank, uint32_t world_size, const Address& address, const std::string& name,
                         size_t shared_bytes, const std::shared_ptr<Arena>& arena, const Deadline& deadline) {
  auto lost = [&](const char* when) {
    return Error(
        deadline.passed() ? ErrorKind::timeout : ErrorKind::peer_lost,
        text("group %s: rank %u of %u %s (waited %.1f s). Is rank 0 running on this host? Its own output "
             "says more.",
             name.c_str(), rank, world_size, when, deadline.elapsed_s()));
  };
  std::optional<FileDescriptor> connection = connect_to(address.socket_name, deadline);
  if (!connection) throw lost("could not reach rank 0, which did not begin to listen");
  Hello hello{};
  hello.magic = kMagic;
  hello.protocol = kProtocol;
  hello.rank = rank;
  hello.world_size = world_size;
  hello.secret = address.secret;
  hello.arena_bytes = arena->segment()->bytes();
  hello.shared_bytes = shared_bytes;
  put(hello.host, host_name());
  if (!send_message(*connection, &hello, sizeof hello, {arena->segment()->file()}))
    throw lost("was dropped by rank 0 before it could introduce itself");

  std::optional<Message> answer = receive_message(*connection, sizeof(Verdict), deadline);
  std::optional<Verdict> verdict = answer ? as<Verdict>(*answer) : std::nullopt;
  if (!verdict) throw lost("got no answer from rank 0, which waits for other ranks or has ended");
  if (!verdict->accepted) throw Error(ErrorKind::invalid_argument, get(verdict->reason));
  LocalGroup group;
  group.shared = Segment::map(std::move(answer->files.at(0)), shared_bytes);
  group.peers.resize(world_size);
  for (uint32_t i = 1; i < world_size; ++i) {
    std::optional<Message> message = receive_message(*connection, sizeof(PeerFacts), deadline);
    std::optional<PeerFacts> facts = message ? as<PeerFacts>(*message) : std::nullopt;
    if (!facts || facts->rank >= world_size) throw lost("lost rank 0 while it introduced the others");
    Peer& peer = group.peers[facts->rank];
    peer.rank = facts->rank;
    peer.pid = facts->pid;
    peer.host = get(facts->host);
    size_t next = 0;
    peer.arena = Segment::map(std::move(message->files.at(next++)), facts->arena_bytes);
    if (facts->has_process) peer.process = std::move(message->files.at(next++));
    if (facts->has_connection) peer.connection = std::move(message->files.at(next++));
  }
  group.peers[0].connection = std::move(*connection);
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
                            const std::string& name, size_t shared_bytes, const std::shared_ptr<Arena>& arena,
                            const Deadline& deadline) {
  if (rank != 0) return join_as_guest(rank, world_size, parse(address), name, shared_bytes, arena, deadline);
  if (world_size > 1) return Host(world_size, parse(address), name, shared_bytes, arena).gather(deadline);
  LocalGroup alone;
  alone.shared = Segment::create("photinus-group", shared_bytes);
  alone.peers.push_back(Peer{0, getpid(), host_name(), arena->segment(), {}, {}});
  return alone;
}

}  // namespace photinus
