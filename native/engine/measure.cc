#include "engine/measure.h"

#include <sched.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "hosts/words.h"
#include "net/link.h"

namespace photinus {
namespace {

constexpr size_t kFrames = 16;
constexpr uint64_t kFrameBytes = 32 << 10;

// The lower of two: in steady flow, for of the first half buffers on the way take a part at any rate; and
// over all of the time, for who is late to look finds much that has come long ago.
double rate_of(double begun_s, const std::vector<double>& came_s) {
  if (came_s.size() < 2) return 0;
  const size_t from = (came_s.size() - 1) / 2;
  const auto bytes = [](size_t frames) { return static_cast<double>(frames * kFrameBytes); };
  const double whole = bytes(came_s.size()) / (came_s.back() - begun_s);
  const double seconds = came_s.back() - came_s[from];
  return seconds > 0 ? std::min(whole, bytes(came_s.size() - 1 - from) / seconds) : whole;
}

}  // namespace

Speeds measure(Peers& peers, const Levels& levels, double limit_s) {
  if (peers.rank() != peers.locals().front()) return {};
  const uint32_t host = levels.host_of(peers.rank()), hosts = levels.sizes[0];
  const uint32_t own = levels.member_of(host, 0);
  auto link_to = [&](uint32_t member) {
    return peers.link(levels.carrier(levels.peer(host, 0, member % hosts), 0), LinkUse::collective);
  };
  Link *const to = link_to(own + 1), *const from = link_to(own + hosts - 1);
  if (!to || !from) return {};
  const double begun_s = now_s();
  const Deadline deadline = Deadline::from(begun_s, limit_s);
  const auto sent = std::make_unique<std::byte[]>(kFrameBytes);
  const auto place = std::make_unique<std::byte[]>(kFrames * kFrameBytes);
  Transfer sends[kFrames], receipts[kFrames];
  const iovec piece{sent.get(), kFrameBytes};
  std::vector<double> came_s;
  size_t left = 0;
  try {
    for (size_t i = 0; i < kFrames; ++i)
      from->expect(kMeasured, i, &place[i * kFrameBytes], kFrameBytes, receipts[i]);
    const size_t cards = to->data_streams() - kCollectiveStreams;
    for (size_t i = 0; i < kFrames; ++i)
      to->send(kMeasured, i, {&piece, 1}, sends[i], static_cast<uint32_t>(kCollectiveStreams + i % cards));
    while ((came_s.size() < kFrames || left < kFrames) && !deadline.passed()) {
      if (!peers.poll()) sched_yield();
      while (came_s.size() < kFrames && receipts[came_s.size()].is_done()) came_s.push_back(now_s());
      while (left < kFrames && sends[left].is_done()) ++left;
    }
  } catch (const Error&) {  // NOLINT: a link that has failed; what becomes of it the next call finds
  }
  to->forget(kMeasured);
  from->forget(kMeasured);
  return {to->counts().least_round_trip_s / 2, rate_of(begun_s, came_s)};
}

}  // namespace photinus
