// How the ranks of one host find each other: rank 0 listens on an abstract Unix socket, the others connect
// and prove that they know the group's secret. Rank 0 then hands everyone the group's mailbox segment and,
// for each peer, the peer's arena, a handle of its process, and the end of its lifeline: a pipe that closes
// when the peer goes away. So each rank holds three descriptors for each peer, and rank 0 no more.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "shm/arena.h"
#include "shm/segment.h"

namespace photinus {

// One peer as this rank holds it. The own entry has neither process handle nor lifeline.
struct Peer {
  uint32_t rank = 0;
  int pid = 0;
  std::string host;
  std::shared_ptr<Segment> arena;
  FileDescriptor process;
  FileDescriptor lifeline;
};

struct LocalGroup {
  std::shared_ptr<Segment> shared;  // zeroed by the kernel, as long as the layout says
  std::vector<Peer> peers;          // by rank
  FileDescriptor own_lifeline;      // the end that tells the peers by closing
};

// A new printable address: the socket's name and a secret of 128 bits. Made by one rank, brought to the
// others by any means (a store, an argument); whoever has it and is of the same user may join.
std::string new_address();

// The group's segment: how large, and a fingerprint of what decides where things lie in it.
struct Layout {
  size_t bytes = 0;
  uint64_t settings = 0;
};

// Meets the other ranks. All give the same world_size, address and layout. Says after `waiting_s` who has not
// come. Throws Error(timeout) that names the missing ranks, Error(peer_lost) when one that had come has gone,
// Error(invalid_argument) when this rank was refused (a duplicate, another world size), with the reason,
// Error(interrupted) when this thread was interrupted.
LocalGroup join_local_group(uint32_t rank, uint32_t world_size, const std::string& address,
                            const std::string& name, const Layout& layout,
                            const std::shared_ptr<Arena>& arena, const Deadline& deadline, double waiting_s);

}  // namespace photinus
