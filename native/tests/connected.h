// Processes of a job in one: their connections, and what a stranger does to them.
#pragma once

#include <sys/socket.h>

#include <initializer_list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "check.h"
#include "net/connections.h"

namespace photinus::test {

inline Membership member(uint32_t rank, const std::string& secret = "secret", uint32_t attempt = 1) {
  Membership made;
  made.job = "job";
  made.group = "world";
  made.attempt = attempt;
  made.rank = rank;
  made.ranks = 4;
  made.host = text("host-%u", rank);
  made.key = key_of(secret, "job");
  return made;
}

inline Connections::Options options(const std::string& address = "127.0.0.1") {
  Connections::Options made;
  made.listen = {numeric_address(address, 0)};
  return made;
}

// Lines that were said, instead of standard error.
struct Lines {
  std::mutex mutex;
  std::string all;
  Lines() {
    set_listener([this](const std::string& line) {
      std::lock_guard lock(mutex);
      all += line + "\n";
    });
  }
  ~Lines() { set_listener({}); }
  std::string text() {
    std::lock_guard lock(mutex);
    return all;
  }
};

inline void poll_all(std::initializer_list<Connections*> all) {
  for (Connections* one : all) one->poll();
}

template <class Done>
void run(std::initializer_list<Connections*> all, Done&& done, double limit_s = 10) {
  for (Deadline deadline = Deadline::in(limit_s); !done();) {
    CHECK(!deadline.passed());
    poll_all(all);
  }
}

// The error of an opening; with how long it took.
inline std::pair<ErrorKind, std::string> failure(const std::shared_ptr<Opening>& opening,
                                                 std::initializer_list<Connections*> all,
                                                 double within_s = 3) {
  std::pair<ErrorKind, std::string> error;
  const double start = now_s();
  run(all, [&] {
    try {
      CHECK(!opening->link());
      return false;
    } catch (const Error& met) {
      error = {met.kind(), met.what()};
      return true;
    }
  });
  CHECK(now_s() - start < within_s);
  return error;
}

struct Socket {
  FileDescriptor file;
  explicit Socket(const SocketAddress& to) : file(socket(to.family(), SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const linger gone{1, 0};  // leaves no TIME_WAIT behind
    setsockopt(file.get(), SOL_SOCKET, SO_LINGER, &gone, sizeof gone);
    CHECK(connect(file.get(), to.get(), to.bytes()) == 0);
  }
  bool say(const void* data, size_t bytes) {
    return send(file.get(), data, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }
  template <class Message>
  bool hear(Message& message) {
    return recv(file.get(), message.data(), message.size(), MSG_WAITALL) ==
           static_cast<ssize_t>(message.size());
  }
};

// A port on which nobody listens, or somebody who is no peer.
struct Squatter {
  FileDescriptor file{socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  SocketAddress address;
  explicit Squatter(bool listens) {
    const SocketAddress any = numeric_address("127.0.0.1", 0);
    CHECK(bind(file.get(), any.get(), any.bytes()) == 0);
    if (listens) CHECK(listen(file.get(), 100) == 0);
    sockaddr_storage bound;
    socklen_t bytes = sizeof bound;
    CHECK(getsockname(file.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) == 0);
    address = SocketAddress(reinterpret_cast<sockaddr*>(&bound), bytes);
  }
};

inline const Link::Handler kDeaf = [](auto...) {};
inline Deadline soon(double seconds = 10) {
  return Deadline::in(seconds);
}

// Two processes in one, with a link.
struct Pair {
  Connections a, b;
  std::shared_ptr<Opening> at_a, at_b;
  std::shared_ptr<Link> link_a, link_b;
  std::string heard;

  explicit Pair(const Connections::Options& given = options()) : a(given), b(given) {
    a.join(member(0));
    b.join(member(1));
    at_a =
        a.await("job", "world", 1, soon(), [this](uint32_t, uint64_t, const std::byte* data, size_t bytes) {
          heard.append(reinterpret_cast<const char*>(data), bytes);
        });
    at_b = b.dial("job", "world", 0, a.addresses(), soon(), kDeaf);
    run({&a, &b}, [&] { return at_a->link() && at_b->link(); });
    link_a = at_a->link();
    link_b = at_b->link();
  }
};

inline void exchange(Link& from, Link& to, uint64_t sequence, size_t bytes,
                     const std::function<void()>& poll) {
  std::vector<std::byte> out(bytes), in(bytes);
  for (size_t i = 0; i < bytes; ++i) out[i] = static_cast<std::byte>(i * 31 + sequence);
  Transfer sent, received;
  const iovec piece{out.data(), out.size()};
  to.expect(1, sequence, in.data(), in.size(), received);
  from.send(1, sequence, {&piece, 1}, sent);
  for (Deadline deadline = soon(); !received.is_done() || !sent.is_done(); poll()) {
    CHECK(!deadline.passed());
    from.check();
    to.check();
  }
  CHECK(in == out);
}

}  // namespace photinus::test
