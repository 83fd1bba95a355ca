// Two links with each other in one process, over TCP or over made-up streams.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "fake_streams.h"
#include "net/link.h"
#include "net/tcp_stream.h"

namespace photinus::test {

using Streams = std::vector<std::unique_ptr<Stream>>;
enum class Carrier { tcp, fake };

inline PrivateDescriptor made(int number) {
  CHECK(number >= 0);
  CHECK(fcntl(number, F_SETFL, O_NONBLOCK) == 0);
  return PrivateDescriptor::make([&] { return number; });
}

// Two connected TCP sockets of this host.
inline std::pair<PrivateDescriptor, PrivateDescriptor> tcp_pair(const TcpOptions& options = {}) {
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  set_options(listener.get(), options);
  CHECK(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) == 0);
  CHECK(listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0);
  const int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  set_options(one, options);
  CHECK(connect(one, reinterpret_cast<sockaddr*>(&address), length) == 0);
  const int other = accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
  return {made(one), made(other)};
}

struct Control {
  uint32_t channel;
  uint64_t sequence;
  std::string text;
  bool operator==(const Control&) const = default;
};

// Two links with each other, in one process.
struct Ends {
  std::unique_ptr<Link> links[2];
  std::vector<Control> heard[2];
  std::vector<FakeStream*> fakes[2];
  std::vector<TcpStream*> tcps;

  explicit Ends(Carrier carrier, uint64_t seed = 0, size_t data_streams = 1, const TcpOptions& tcp = {}) {
    Streams streams[2];
    for (size_t i = 0; i <= data_streams; ++i) {
      if (carrier == Carrier::fake) {
        auto pair = FakeStream::pair(seed * 100 + i);
        fakes[0].push_back(pair.first.get());
        fakes[1].push_back(pair.second.get());
        streams[0].push_back(std::move(pair.first));
        streams[1].push_back(std::move(pair.second));
      } else {
        auto pair = tcp_pair(tcp);
        for (auto* socket : {&pair.first, &pair.second}) {
          auto stream = std::make_unique<TcpStream>(std::move(*socket));
          tcps.push_back(stream.get());
          streams[socket == &pair.second].push_back(std::move(stream));
        }
      }
    }
    for (int side : {0, 1})
      links[side] = std::make_unique<Link>(
          std::move(streams[side]), side ? "rank 1" : "rank 0", side ? "rank 0" : "rank 1",
          [this, side](uint32_t channel, uint64_t sequence, const std::byte* payload, size_t bytes) {
            heard[side].push_back({channel, sequence, {reinterpret_cast<const char*>(payload), bytes}});
          });
  }
  ~Ends() {
    for (auto& link : links)
      if (link) link->close();
  }

  bool poll(int side) {
    if (links[side] && !links[side]->has_failed())
      for (size_t i = static_cast<size_t>(side); i < tcps.size(); i += 2)
        tcps[i]->readiness()->set(true, true, false);
    return links[side] && links[side]->poll();
  }
  bool poll() {
    const bool first = poll(0);
    return poll(1) || first;
  }
  // Until something holds; not for ever.
  void run(const std::function<bool()>& done, double limit_s = 20) {
    for (Deadline deadline = Deadline::in(limit_s); !done();) {
      CHECK(!deadline.passed());
      poll();
    }
  }
  std::string error(int side) {
    run([&] { return links[side]->has_failed(); });
    return error_of([&] { links[side]->check(); }).second;
  }
};

// Every test holds over both.
inline void for_both(const std::function<void(Carrier)>& body) {
  for (Carrier carrier : {Carrier::tcp, Carrier::fake}) body(carrier);
}

inline std::vector<std::byte> content(uint64_t seed, size_t bytes) {
  std::vector<std::byte> made(bytes);
  uint64_t value = seed * 0x9e3779b97f4a7c15;
  for (size_t i = 0; i < bytes; ++i) {
    if (i % 8 == 0) value = value * 6364136223846793005 + 1442695040888963407;
    made[i] = static_cast<std::byte>(value >> (i % 8 * 8));
  }
  return made;
}

inline iovec all_of(std::vector<std::byte>& bytes) {
  return {bytes.data(), bytes.size()};
}

}  // namespace photinus::test
