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
// All do the same, so what has come tells how far what was sent is: no more than this is under way, for a
// slow card would be busy with it for long, and who looks late would find much that came long ago.
constexpr size_t kAhead = 4;

// In steady flow: of the first half, buffers on the way take a part at any rate. Where not all has come, the
// rest was waited for: a limit of the rate may let a burst through.
double rate_of(const std::vector<double>& came_s, double ended_s) {
  if (came_s.size() < 2) return 0;
  const size_t from = (came_s.size() - 1) / 2;
  const double seconds = (came_s.size() < kFrames ? ended_s : came_s.back()) - came_s[from];
  return seconds > 0 ? static_cast<double>((came_s.size() - 1 - from) * kFrameBytes) / seconds : 0;
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
  const Deadline deadline = Deadline::in(limit_s);
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
    size_t begun = 0;
    while ((came_s.size() < kFrames || left < kFrames) && !deadline.passed()) {
      for (; begun < std::min(kFrames, came_s.size() + kAhead); ++begun)
        to->send(kMeasured, begun, {&piece, 1}, sends[begun],
                 static_cast<uint32_t>(kCollectiveStreams + begun % cards));
      if (!peers.poll()) sched_yield();
      while (came_s.size() < kFrames && receipts[came_s.size()].is_done()) came_s.push_back(now_s());
      while (left < begun && sends[left].is_done()) ++left;
    }
  } catch (const Error&) {  // NOLINT: a link that has failed; what becomes of it the next call finds
  }
  to->forget(kMeasured);
  from->forget(kMeasured);
  return {to->counts().least_round_trip_s / 2, rate_of(came_s, now_s())};
}

}  // namespace photinus
