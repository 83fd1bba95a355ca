// Plain sockets that move between hosts what an all_reduce must move, and add nothing: what
// benchmarks/hosts.py compares with.
//   bare RANK FOLDER ADDRESS:PORT...   one of the ranks; those with one address are one host's
// A tensor of S bytes has as many slices as the largest host has ranks, and each host's rank i carries slices
// i, i + its number of ranks, ... Whoever carry a slice on two of the H hosts send each other 2 S / slices /
// H bytes in a call, the slice's part of a reduce-scatter and of an all-gather, all at once. Commands are
// those of driven.h; there is one path, all_reduce.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "driven.h"
#include "net/socket_address.h"

using namespace photinus;

namespace {

constexpr int kLimit_ms = 60'000;

[[noreturn]] void fail(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

struct Peer {
  FileDescriptor socket;
  size_t slices = 0;  // carried by both
  std::vector<std::byte> out, in;
  size_t sent = 0, received = 0;  // of what is being moved
};

class Rank {
 public:
  Rank(size_t rank, const std::vector<SocketAddress>& ranks) : peers_(ranks.size()), pieces_(ranks.size()) {
    meet(rank, ranks);
    share_slices(rank, ranks);
    prepare(0);
  }

  void prepare(size_t bytes) {
    for (size_t i = 0; i < peers_.size(); ++i) {
      pieces_[i] = 2 * bytes * peers_[i].slices / slices_ / hosts_;
      peers_[i].out = std::vector<std::byte>(std::max<size_t>(pieces_[i], 1));
      peers_[i].in = std::vector<std::byte>(std::max<size_t>(pieces_[i], 1));
    }
    barrier();
  }

  double run(uint64_t calls) {
    for (uint64_t i = 0; i <= calls / 10; ++i) move(pieces_);
    barrier();
    const double start = now_s();
    for (uint64_t i = 0; i < calls; ++i) move(pieces_);
    return (now_s() - start) / static_cast<double>(calls);
  }

 private:
  // A connection to each other rank: the higher one dials, and says who it is.
  void meet(size_t rank, const std::vector<SocketAddress>& ranks) {
    const FileDescriptor listener(socket(ranks[rank].family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener.get(), ranks[rank].get(), ranks[rank].bytes()) != 0 ||
        listen(listener.get(), static_cast<int>(ranks.size())) != 0)
      fail("cannot listen on " + ranks[rank].text());
    for (size_t other = 0; other < rank; ++other) {
      peers_[other].socket = dial(ranks[other]);
      const auto own = static_cast<uint32_t>(rank);
      if (send(peers_[other].socket.get(), &own, sizeof own, MSG_NOSIGNAL) != sizeof own)
        fail("cannot say who I am");
    }
    for (size_t count = rank + 1; count < ranks.size(); ++count) {
      pollfd come{listener.get(), POLLIN, 0};
      if (poll(&come, 1, kLimit_ms) <= 0) throw std::runtime_error("not all ranks came within a minute");
      FileDescriptor accepted(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
      uint32_t who = 0;
      if (recv(accepted.get(), &who, sizeof who, MSG_WAITALL) != sizeof who || who >= ranks.size())
        fail("a rank did not say who it is");
      peers_[who].socket = std::move(accepted);
    }
    for (Peer& peer : peers_)
      if (peer.socket.valid()) setsockopt(peer.socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }

  static FileDescriptor dial(const SocketAddress& address) {
    for (const double end = now_s() + kLimit_ms * 1e-3; now_s() < end;) {
      FileDescriptor made(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (connect(made.get(), address.get(), address.bytes()) == 0) return made;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // it does not listen yet
    }
    fail("cannot connect to " + address.text());
  }

  void share_slices(size_t rank, const std::vector<SocketAddress>& ranks) {
    std::map<std::string, std::vector<size_t>> hosts;
    for (size_t i = 0; i < ranks.size(); ++i) hosts[ranks[i].host()].push_back(i);
    hosts_ = hosts.size();
    for (const auto& [address, on_host] : hosts) slices_ = std::max(slices_, on_host.size());
    const auto& own = hosts[ranks[rank].host()];
    for (size_t slice = 0; slice < slices_; ++slice) {
      if (own[slice % own.size()] != rank) continue;
      for (const auto& [address, on_host] : hosts)
        if (address != ranks[rank].host()) ++peers_[on_host[slice % on_host.size()]].slices;
    }
  }

  // A byte to and from everybody.
  void barrier() {
    std::vector<size_t> one;
    for (const Peer& peer : peers_) one.push_back(peer.socket.valid() ? 1 : 0);
    move(one);
  }

  // Sends each peer so many bytes, and receives as many.
  void move(const std::vector<size_t>& bytes) {
    for (Peer& peer : peers_) peer.sent = peer.received = 0;
    while (true) {
      bool moved = false;
      std::vector<pollfd> waiting;
      for (size_t i = 0; i < peers_.size(); ++i) {
        Peer& peer = peers_[i];
        const int file = peer.socket.get();
        if (peer.sent < bytes[i])
          moved |= advance(
              peer.sent, send(file, &peer.out[peer.sent], bytes[i] - peer.sent, MSG_DONTWAIT | MSG_NOSIGNAL));
        if (peer.received < bytes[i])
          moved |= advance(peer.received,
                           recv(file, &peer.in[peer.received], bytes[i] - peer.received, MSG_DONTWAIT));
        const int events = (peer.sent < bytes[i] ? POLLOUT : 0) | (peer.received < bytes[i] ? POLLIN : 0);
        if (events != 0) waiting.push_back({file, static_cast<short>(events), 0});
      }
      if (waiting.empty()) return;
      if (!moved && poll(waiting.data(), waiting.size(), kLimit_ms) == 0)
        throw std::runtime_error("not a byte moved for a minute");
    }
  }

  static bool advance(size_t& done, ssize_t moved) {
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    if (moved == 0) throw std::runtime_error("a rank has ended");
    if (moved < 0) fail("a connection broke");
    done += static_cast<size_t>(moved);
    return true;
  }

  std::vector<Peer> peers_;     // by rank; this rank's own has no socket
  std::vector<size_t> pieces_;  // bytes to each in a call
  size_t hosts_ = 0, slices_ = 0;
};

void serve(Rank& rank, const std::string& pipe) {
  std::ofstream answers(pipe + ".out");
  std::ifstream commands(pipe + ".in");
  answers.precision(9);
  answers << "{\"ready\": \"plain sockets\"}" << std::endl;
  for (std::string line; std::getline(commands, line);) {
    std::istringstream words(line);
    std::string verb, name;
    uint64_t number = 0;
    words >> verb >> name >> number;
    if (verb == "prepare") {
      rank.prepare(number);
      answers << "{}" << std::endl;
    } else if (verb == "run") {
      answers << "{\"s\": " << rank.run(number) << "}" << std::endl;
    } else {
      return;
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const size_t own = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 0;
  std::vector<SocketAddress> ranks;
  try {
    for (int i = 3; i < argc; ++i) {
      const std::string text = argv[i];
      const size_t colon = text.rfind(':');
      if (colon == std::string::npos) throw std::invalid_argument(text + " is no ADDRESS:PORT");
      ranks.push_back(
          numeric_address(text.substr(0, colon), static_cast<uint16_t>(std::stoul(text.substr(colon + 1)))));
    }
    if (own >= ranks.size()) {
      std::fprintf(stderr, "usage: bare RANK FOLDER ADDRESS:PORT...   (of all ranks, in order)\n");
      return 2;
    }
    bench::pin(static_cast<uint32_t>(own));
    Rank rank(own, ranks);
    serve(rank, std::string(argv[2]) + "/" + argv[1]);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bare, rank %zu: %s\n", own, error.what());
    return 1;
  }
}
