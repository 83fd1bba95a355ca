// What a communicator over several hosts does before its users get it: it measures what is between them, and
// takes the list of levels that follows from it, the same on all ranks.
#include <unistd.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "collectives/choose.h"
#include "engine/communicator.h"
#include "engine/measure.h"

namespace photinus {
namespace {

constexpr double kMeasuring_s = 0.04;
// A card by so much slower than most is worth a word.
constexpr double kSlow = 0.5;

double hash_of(const std::optional<std::vector<uint32_t>>& list) {
  uint32_t hash = list ? 0x811c9dc5 : 1;
  if (list)
    for (const uint32_t size : *list) hash = (hash ^ size) * 0x01000193;
  return hash;
}

// Of those that are known; the lower one of an even number.
double median(std::vector<double> values) {
  std::erase(values, 0.0);
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[(values.size() - 1) / 2];
}

std::string text_of_rate(double bytes_per_s) {
  return bytes_per_s < 1e9 ? text("%.3g MB/s", bytes_per_s * 1e-6) : text("%.3g GB/s", bytes_per_s * 1e-9);
}

}  // namespace

NetSizes Communicator::net_sizes() const {
  NetSizes sizes = group_->options.net;
  sizes.latency_s = speeds_.latency_s;
  sizes.bytes_per_s = speeds_.bytes_per_s;
  return sizes;
}

// With `for_all`, those calls whose bits depend on the list take it too.
void Communicator::use(const std::vector<uint32_t>& sizes, bool for_all) {
  state_ = std::make_shared<CollectiveState>(group_, watchdog_);
  state_->memory.sizes = group_->options.sizes;
  state_->own_calls = sequence_;
  if (!group_->levels) return;
  const Levels levels{group_->levels->hosts, sizes};
  photinus::check(levels);
  // Of a list that was asked for, all links may not stand yet. Who has ended meanwhile, the next call finds.
  const Deadline deadline = Deadline::in(group_->options.limits.timeout_s);
  for (size_t level = 0; level < sizes.size(); ++level)
    for (const uint32_t other : levels.counterparts(rank(), level))
      while (!group_->peers->link(other, LinkUse::collective) && !group_->peers->is_lost(other) &&
             group_->peers->presence(other) == Presence::active) {
        if (deadline.passed())
          throw Error(
              ErrorKind::timeout,
              text("%s has no link with %s for levels %s after %.1f s", group_->peers->who(rank()).c_str(),
                   group_->peers->who(other).c_str(), print(sizes).c_str(), deadline.elapsed_s()));
        check_interrupt("links of group " + group_->options.name);
        if (!group_->peers->poll()) usleep(100);
      }
  state_->hosts =
      std::make_unique<HostTraffic>(*group_->peers, levels, for_all ? levels : *group_->levels, net_sizes());
}

std::vector<std::pair<uint32_t, double>> Communicator::under_way_s() const {
  std::vector<std::pair<uint32_t, double>> all;
  if (!state_->hosts) return all;
  const Levels& levels = state_->hosts->levels();
  for (size_t level = 0; level < levels.sizes.size(); ++level)
    for (const uint32_t other : levels.counterparts(rank(), level))
      if (Link* const link = group_->peers->link(other, LinkUse::collective))
        all.emplace_back(other, link->counts().under_way_s);
  return all;
}

void Communicator::look_at_hosts() {
  const Levels& usual = *group_->levels;
  const auto& wish = group_->options.levels;
  // What all ranks have, by rank.
  auto gather = [this](double own) {
    std::vector<double> all(world_size());
    submit({Operation::all_gather, Dtype::float64, Reduction::sum, 0, 1}, &own, all.data(), 0, false)->wait();
    return all;
  };
  const std::vector<double> wishes = gather(hash_of(wish));
  for (uint32_t other = 0; other < world_size(); ++other)
    if (wishes[other] != wishes[0])
      throw Error(ErrorKind::invalid_argument,
                  group_->peers->who(0) + " and " + group_->peers->who(other) +
                      " were given different levels: PHOTINUS_LEVELS must be the same on all ranks");
  speeds_ = group_->options.speeds;
  const bool measures = !speeds_.known() && (!wish || !wish->empty());
  std::vector<double> rates;
  if (measures) {  // all at once, for they have just met
    const Speeds own = measure(*group_->peers, usual, kMeasuring_s);
    const std::vector<double> latency_of = gather(own.latency_s), rate_of = gather(own.bytes_per_s);
    std::vector<double> latencies;
    for (const auto& host : usual.hosts) {
      latencies.push_back(latency_of[host.front()]);
      rates.push_back(rate_of[host.front()]);
    }
    speeds_ = {median(latencies), median(rates)};
  }
  const ListChoice choice = list_for(usual, wish, speeds_, group_->options.sizes, net_sizes());
  std::string about = "not measured";
  if (speeds_.known()) {
    about = text("%.3g µs and %s between them", speeds_.latency_s * 1e6,
                 text_of_rate(speeds_.bytes_per_s).c_str());
    const auto lowest = std::min_element(rates.begin(), rates.end());
    if (lowest != rates.end() && *lowest > 0 && *lowest < kSlow * speeds_.bytes_per_s) {
      const uint32_t there = usual.hosts[static_cast<size_t>(lowest - rates.begin())].front();
      about += text(", only %s to %s", text_of_rate(*lowest).c_str(), group_->peers->who(there).c_str());
    }
  } else if (measures) {
    about = "not measured: too little data arrived in 40 ms";
  }
  about_hosts_ =
      text("%s; levels %s (%s)", about.c_str(), print(choice.sizes).c_str(), choice.reason.c_str());
  use(choice.sizes, is_for(wish, usual));
}

}  // namespace photinus
