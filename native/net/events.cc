#include "net/events.h"

#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>

#include "base/clock.h"
#include "base/error.h"

namespace photinus {
namespace {

constexpr uint64_t kTimer = UINT64_MAX, kBell = UINT64_MAX - 1;

}  // namespace

Events::Events()
    : epoll_(PrivateDescriptor::make([] { return epoll_create1(EPOLL_CLOEXEC); })),
      timer_(PrivateDescriptor::make(
          [] { return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK); })),
      bell_(PrivateDescriptor::make([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })) {
  if (!epoll_.valid() || !timer_.valid() || !bell_.valid())
    throw_errno("making an epoll set for links (are there enough file descriptors, ulimit -n?)");
  for (auto [number, id] : {std::pair{timer_.get(), kTimer}, {bell_.get(), kBell}}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = id;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, number, &event) != 0) throw_errno("watching a timer");
  }
}

void Events::control(int how, int socket, uint64_t id) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.u64 = id;
  if (epoll_ctl(epoll_.get(), how, socket, &event) != 0) throw_errno("watching a connection");
}

void Events::watch(int socket, uint64_t id) {
  control(EPOLL_CTL_ADD, socket, id);
}

void Events::watch_as(int socket, uint64_t id) {
  control(EPOLL_CTL_MOD, socket, id);
}

void Events::wake_at(double time_s) {
  if (time_s == wake_at_s_) return;
  wake_at_s_ = time_s;
  itimerspec when{};  // zero: none
  if (time_s > 0) {
    const double left_s = std::max(time_s - now_s(), 1e-6);
    when.it_value.tv_sec = static_cast<time_t>(left_s);
    when.it_value.tv_nsec = static_cast<long>((left_s - std::floor(left_s)) * 1e9);
  }
  timerfd_settime(timer_.get(), 0, &when, nullptr);
}

void Events::ring() {
  const uint64_t one = 1;
  while (write(bell_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

std::span<epoll_event> Events::collect(std::span<epoll_event> room, double limit_s) {
  const int limit_ms = static_cast<int>(std::ceil(std::min(limit_s, 3600.0) * 1000));
  const int count = epoll_wait(epoll_.get(), room.data(), static_cast<int>(room.size()), limit_ms);
  if (count <= 0) return {};
  auto* end = room.data();
  for (const epoll_event& event : room.first(static_cast<size_t>(count))) {
    uint64_t ignored;
    if (event.data.u64 == kTimer) {
      wake_at_s_ = 0;
      [[maybe_unused]] const ssize_t got = ::read(timer_.get(), &ignored, sizeof ignored);
    } else if (event.data.u64 == kBell) {
      [[maybe_unused]] const ssize_t got = ::read(bell_.get(), &ignored, sizeof ignored);
    } else {
      *end++ = event;
    }
  }
  return {room.data(), end};
}

}  // namespace photinus
