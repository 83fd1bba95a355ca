// One descriptor to sleep on, whatever is awaited: sockets, a point in time, another thread.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <span>

#include "net/private_descriptor.h"

namespace photinus {

class Events {
 public:
  Events();

  // Reports each change of a socket (edge-triggered) under `id`, from now on or instead of another id. It
  // ends with the socket. Throws Error(system).
  void watch(int socket, uint64_t id);
  void watch_as(int socket, uint64_t id);
  // Becomes readable at that point of now_s() too; 0: at none.
  void wake_at(double time_s);
  // Ends a sleep in collect(), or the next one.
  void ring();
  // What has changed, at most `room` many; sleeps for at most `limit_s` if nothing has.
  std::span<epoll_event> collect(std::span<epoll_event> room, double limit_s);

 private:
  void control(int how, int socket, uint64_t id);

  PrivateDescriptor epoll_, timer_, bell_;
  double wake_at_s_ = 0;
};

}  // namespace photinus
