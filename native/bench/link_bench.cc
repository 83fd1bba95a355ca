// A link between two processes of this host, over loopback TCP, beside plain sockets that move the same
// bytes.
//   link_bench [ROUNDS [STREAMS [CONGESTION_CONTROL]]]   medians of so many interleaved rounds (7)
// "spin": both processes poll without a pause; "sleep": they sleep until something comes. "cpu": the first
// process's processor time over that with plain sockets, both asleep while they wait.
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "driven.h"
#include "net/connections.h"

using namespace photinus;

namespace {

constexpr int kWindow = 4;  // frames on their way at a time
constexpr double kLimit_s = 60;

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "link_bench: %s\n", why.c_str());
  std::_Exit(1);
}

// One of the two ways to move bytes.
class Mover {
 public:
  virtual ~Mover() = default;
  virtual void send(const std::byte* from, size_t bytes) = 0;  // may return before all is sent
  virtual void receive(std::byte* to, size_t bytes) = 0;       // the next ones, which were announced
  virtual void announce(std::byte*, size_t) {}                 // what will be received, in order
  virtual void finish() = 0;                                   // all that was sent is with the kernel
};

class LinkMover final : public Mover {
 public:
  LinkMover(Connections& connections, Link& link, bool spins)
      : connections_(connections), link_(link), sleep_s_(spins ? 0 : 0.1) {}

  void announce(std::byte* to, size_t bytes) override {
    link_.expect(channel_, announced_, to, bytes, places_[announced_ % kWindow]);
    ++announced_;
  }
  void receive(std::byte*, size_t) override {
    wait(places_[received_ % kWindow]);
    ++received_;
  }
  void send(const std::byte* from, size_t bytes) override {
    Transfer& transfer = sends_[sent_ % kWindow];
    if (sent_ >= kWindow) wait(transfer);
    const iovec piece{const_cast<std::byte*>(from), bytes};
    link_.send(channel_, sent_++, {&piece, 1}, transfer);
  }
  void finish() override {
    for (uint64_t i = sent_ > kWindow ? sent_ - kWindow : 0; i < sent_; ++i) wait(sends_[i % kWindow]);
    sent_ = announced_ = received_ = 0;
    ++channel_;
  }

 private:
  void wait(const Transfer& transfer) {
    while (!transfer.is_done()) {
      connections_.poll(sleep_s_);
      link_.check();
    }
  }

  Connections& connections_;
  Link& link_;
  const double sleep_s_;
  static inline uint32_t channel_ = 0;
  uint64_t sent_ = 0, announced_ = 0, received_ = 0;
  Transfer sends_[kWindow], places_[kWindow];
};

class SocketMover final : public Mover {
 public:
  SocketMover(int socket, bool spins) : socket_(socket), flags_(spins ? MSG_DONTWAIT : 0) {}

  void send(const std::byte* from, size_t bytes) override {
    each(bytes, [&](size_t at) { return ::send(socket_, from + at, bytes - at, MSG_NOSIGNAL | flags_); });
  }
  void receive(std::byte* to, size_t bytes) override {
    each(bytes, [&](size_t at) { return ::recv(socket_, to + at, bytes - at, flags_); });
  }
  void finish() override {}

 private:
  void each(size_t bytes, const std::function<ssize_t(size_t)>& move) {
    for (size_t at = 0; at < bytes;) {
      const ssize_t moved = move(at);
      if (moved > 0)
        at += static_cast<size_t>(moved);
      else if (moved == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        die("a plain socket broke");
    }
  }
  const int socket_, flags_;
};

struct Memory {
  std::vector<std::byte> out, in;
  explicit Memory(size_t bytes) : out(bytes * kWindow, std::byte{7}), in(bytes * kWindow) {}
};

double processor_s() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

struct Cost {
  double wall_s = 0, processor_s = 0;
};
struct Clock {
  double wall_s = now_s(), cpu_s = processor_s();
  Cost stop(double units) const { return {(now_s() - wall_s) / units, (processor_s() - cpu_s) / units}; }
};

// Half of a round trip.
Cost ping_pong(Mover& mover, bool is_first, size_t bytes, int count) {
  Memory memory(bytes);
  Clock clock;
  for (int i = 0; i < count + count / 10; ++i) {
    if (i == count / 10) clock = Clock();
    mover.announce(memory.in.data(), bytes);
    if (is_first) mover.send(memory.out.data(), bytes);
    mover.receive(memory.in.data(), bytes);
    if (!is_first) mover.send(memory.out.data(), bytes);
  }
  const Cost cost = clock.stop(2.0 * count);
  mover.finish();
  return cost;
}

// For each byte that the first sends and the second has.
Cost stream(Mover& mover, bool is_first, size_t bytes, int count) {
  Memory memory(bytes);
  std::byte end{};
  if (is_first) mover.announce(&end, 1);
  const Clock clock;
  if (is_first) {
    for (int i = 0; i < count; ++i) mover.send(memory.out.data() + bytes * (i % kWindow), bytes);
    mover.receive(&end, 1);
  } else {
    auto place = [&](int i) { return memory.in.data() + bytes * (i % kWindow); };
    for (int i = 0; i < std::min(kWindow, count); ++i) mover.announce(place(i), bytes);
    for (int i = 0; i < count; ++i) {
      mover.receive(place(i), bytes);
      if (i + kWindow < count) mover.announce(place(i + kWindow), bytes);
    }
    mover.send(&end, 1);
    if (memory.in != memory.out) die("other bytes came than were sent");
  }
  const Cost cost = clock.stop(count * static_cast<double>(bytes));
  mover.finish();
  return cost;
}

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

void run(bool is_first, Connections& connections, Link& link, int plain, int rounds) {
  LinkMover link_spins(connections, link, true), link_sleeps(connections, link, false);
  SocketMover plain_spins(plain, true), plain_sleeps(plain, false);
  Mover* const movers[] = {&link_spins, &plain_spins, &link_sleeps, &plain_sleeps};
  // Walls of the four, and the processor times of the last two.
  auto measure = [&](const std::function<Cost(Mover&)>& body) {
    std::vector<double> walls[4], processors[4];
    for (int round = 0; round < rounds; ++round)
      for (int way = 0; way < 4; ++way) {
        const Cost cost = body(*movers[way]);
        walls[way].push_back(cost.wall_s);
        processors[way].push_back(cost.processor_s);
      }
    std::vector<double> medians;
    for (const auto& times : walls) medians.push_back(median(times));
    medians.push_back(median(processors[2]) / median(processors[3]));
    return medians;
  };
  auto title = [&](const char* what) {
    if (is_first)
      std::printf("%s\n%10s %10s %10s %6s %10s %10s %6s %6s\n", what, "bytes", "link spin", "plain", "ratio",
                  "link sleep", "plain", "ratio", "cpu");
  };
  title("half a round trip, us");
  for (size_t bytes : {4, 64, 512, 1024, 4096}) {
    const auto s = measure([&](Mover& mover) { return ping_pong(mover, is_first, bytes, 1000); });
    if (is_first)
      std::printf("%10zu %10.2f %10.2f %6.2f %10.2f %10.2f %6.2f %6.2f\n", bytes, s[0] * 1e6, s[1] * 1e6,
                  s[0] / s[1], s[2] * 1e6, s[3] * 1e6, s[2] / s[3], s[4]);
    std::fflush(stdout);
  }
  title("one direction, GB/s; ratio of times");
  for (size_t bytes = 64 << 10; bytes <= 16 << 20; bytes *= 4) {
    const int count = static_cast<int>(std::max<size_t>(8, (64 << 20) / bytes));
    const auto s = measure([&](Mover& mover) { return stream(mover, is_first, bytes, count); });
    if (is_first)
      std::printf("%10zu %10.2f %10.2f %6.2f %10.2f %10.2f %6.2f %6.2f\n", bytes, 1e-9 / s[0], 1e-9 / s[1],
                  s[0] / s[1], 1e-9 / s[2], 1e-9 / s[3], s[2] / s[3], s[4]);
    std::fflush(stdout);
  }
}

Membership member(uint32_t rank) {
  Membership made;
  made.job = "bench";
  made.group = "pair";
  made.rank = rank;
  made.ranks = 2;
  made.key = key_of("no secret", "bench");
  return made;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 7, streams = argc > 2 ? std::atoi(argv[2]) : 1;
  if (rounds < 1 || streams < 1 || streams > 16) {
    std::fprintf(stderr, "usage: link_bench [ROUNDS [STREAMS [CONGESTION_CONTROL]]]\n");
    return 2;
  }
  Connections::Options options;
  options.streams = static_cast<uint8_t>(streams);
  if (argc > 3) options.tcp.congestion_control = argv[3];
  // A plain listener, whose port the child knows; the link's is told through a pipe.
  FileDescriptor listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  SocketAddress plain_at = numeric_address("127.0.0.1", 0);
  set_options(listener.get(), options.tcp);
  sockaddr_storage bound;
  socklen_t bytes = sizeof bound;
  if (bind(listener.get(), plain_at.get(), plain_at.bytes()) != 0 || listen(listener.get(), 1) != 0 ||
      getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) != 0)
    die("cannot listen");
  plain_at = SocketAddress(reinterpret_cast<sockaddr*>(&bound), bytes);
  int ends[2];
  if (pipe(ends) != 0) die("cannot make a pipe");
  const pid_t child = fork();
  const bool is_first = child != 0;
  bench::pin(is_first ? 0 : 1);
  try {
    if (is_first) options.listen = {numeric_address("127.0.0.1", 0)};
    Connections connections(options);
    connections.join(member(is_first ? 0 : 1));
    std::shared_ptr<Opening> opening;
    uint16_t port = 0;
    FileDescriptor plain;
    if (is_first) {
      port = connections.addresses().front().port();
      if (write(ends[1], &port, sizeof port) != sizeof port) die("cannot tell the port");
      opening = connections.await("bench", "pair", 1, Deadline::in(kLimit_s), [](auto...) {});
      plain = FileDescriptor(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    } else {
      if (read(ends[0], &port, sizeof port) != sizeof port) die("was not told the port");
      opening = connections.dial("bench", "pair", 0, {numeric_address("127.0.0.1", port)},
                                 Deadline::in(kLimit_s), [](auto...) {});
      plain = FileDescriptor(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (connect(plain.get(), plain_at.get(), plain_at.bytes()) != 0) die("cannot connect");
    }
    set_options(plain.get(), options.tcp);
    while (!opening->link()) connections.poll(0.1);
    run(is_first, connections, *opening->link(), plain.get(), rounds);
    opening->link()->leave();
    for (Deadline deadline = Deadline::in(5); !opening->link()->is_finished() && !deadline.passed();)
      connections.poll(0.1);
  } catch (const std::exception& error) {
    die(error.what());
  }
  if (!is_first) _exit(0);
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}
