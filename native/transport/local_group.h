// How the ranks of one host find each other: rank 0 listens on an abstract Unix socket, the others connect
// and prove that they know the group's secret. Rank 0 then hands everyone the group's mailbox segment and,
// for each peer, the peer's arena, a handle of its process, and one end of a connection that closes when the
// peer goes away.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "memory/arena.h"
#include "memory/segment.h"

namespace photinus {

// One peer as this rank holds it. The own entry has neither process handle nor connection.
struct Peer {
  uint32_t rank = 0;
  int pid = 0;
  std::string host;
  std::shared_ptr<Segment> arena;
  FileDescriptor process;
  FileDescriptor connection;
};

struct LocalGroup {
  std::shared_ptr<Segment> shared;  // zeroed by the kernel, `shared_bytes` long
  std::vector<Peer> peers;          // by rank
};

// A new printable address: the socket's name and a secret of 128 bits. Made by one rank, brought to the
// others by any means (a store, an argument); whoever has it and is of the same user may join.
std::string new_address();

// Meets the other ranks. All give the same world_size, address and shared_bytes. Throws Error(timeout) that
// names the missing ranks, Error(invalid_argument) when this rank was refused (a duplicate, another world
// size), with the reason.
LocalGroup join_local_group(uint32_t rank, uint32_t world_size, const std::string& address,
                            const std::string& name, size_t shared_bytes, const std::shared_ptr<Arena>& arena,
                            const Deadline& deadline);

}  // namespace photinus
