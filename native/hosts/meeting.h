// How the ranks of a group that know nothing but its address and where rank 0 listens find one another: each
// brings a text to rank 0, over a connection that proves itself by the address (net/handshake.h), and gets
// those of all.
#pragma once

#include <string>
#include <vector>

#include "hosts/network.h"

namespace photinus {

struct Meeting {
  uint32_t rank = 0, ranks = 1;
  std::string address;            // of the group: the secret
  std::vector<SocketAddress> at;  // where rank 0 listens; unused on rank 0, whose network listens there
  std::string host, job;          // this rank's host, for messages; whose connections are let in
  uint32_t attempt = 0;
  double timeout_s = 300;
};

// By rank. Throws Error(timeout) naming ranks that have not come, Error(peer_lost) when one ends meanwhile,
// and Error(invalid_argument) for a text of more than 6 KiB or a rank that was refused (it is taken; another
// number of ranks).
std::vector<std::string> exchange_texts(Network& network, const Meeting& meeting, const std::string& own);

}  // namespace photinus
