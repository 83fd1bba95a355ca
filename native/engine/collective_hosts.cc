// Collectives of a group on several hosts: the ranks of this one have met in memory; those of the others are
// told, and heard, as the plan goes on.
#include "base/error.h"
#include "base/log.h"
#include "collectives/choose.h"
#include "collectives/net.h"
#include "engine/collective.h"

namespace photinus {

void Collective::agree_on_host() {
  const Peers& peers = *group_->peers;
  Memory& memory = state_->memory;
  const size_t side = sequence_ % 2;
  memory.descriptors.resize(peers.ranks());
  memory.factors.resize(peers.ranks());
  HostPost post;
  post.sequence = sequence_;
  for (const uint32_t rank : peers.locals()) {
    const RankBlock& block = *peers[rank].block;
    memory.descriptors[rank] = block.calls[side];
    memory.factors[rank] = block.calls[side].factor;
    add(post, block.calls[side], block.sites[side], block.labels[side], rank, block.shapes[side]);
    if (block.calls[side].has_parts)
      post.parts_sum += parts_sum(rank, peers[rank].parts[side], peers.ranks());
  }
  HostTraffic& hosts = *state_->hosts;
  hosts.begin(sequence_, given_.call, std::move(post), [this](const HostPost& all) { return fault_of(all); });
  phase_ = hosts.is_refused() ? Phase::disagreeing : Phase::working;
  if (!hosts.is_refused()) plan_over_hosts();
}

void Collective::plan_over_hosts() {
  const HostTraffic& hosts = *state_->hosts;
  const Memory& memory = state_->memory;
  const Levels& levels = hosts.levels_of(given_.call);
  if (has_parts()) {
    const HostParts exchange = exchange_of_hosts();
    const Exchange here = among_locals(exchange);
    if (find_disagreement(here)) {  // the others hear of it by the sum
      own_steps_ = net_barrier(levels, group_->rank()).after;
    } else {
      for (uint32_t i = 0; i < here.ranks; ++i)
        reads_peers_ |= here.way_of(i, memory.sizes) == Algorithm::arena;
      own_steps_ = net_exchange_after(exchange, memory.sizes);
    }
    steps_ = &own_steps_;
  } else {
    const Algorithm algorithm =
        choose(given_.call, levels, group_->rank(), memory.descriptors, memory.sizes, hosts.sizes())
            .algorithm;
    reads_peers_ = algorithm == Algorithm::arena;
    steps_ = &state_->plan(given_.call, {group_->rank(), group_->ranks()}, algorithm).after;
  }
  if (reads_peers_) check_peers();
}

// Before ranks have met only the own row is whole.
HostParts Collective::exchange_of_hosts() const {
  const Peers& peers = *group_->peers;
  HostParts exchange{state_->hosts->levels(), group_->rank(), size_bytes(given_.call.dtype), {}};
  for (const uint32_t rank : peers.locals())
    exchange.rows.push_back(
        phase_ >= Phase::working || rank == group_->rank() ? peers[rank].parts[sequence_ % 2] : nullptr);
  return exchange;
}

// All ranks have the same of this to look at, and so find the same.
std::string Collective::fault_of(const HostPost& post) {
  const std::string& group = group_->options.name;
  const auto updates = state_->updates.unequal_updates(post.updates);
  if (!agrees(post)) return mismatch_text(group, number_, post.calls, post.left_out);
  if (post.parts_sum != 0) return disagreement_text(description(), exchange_of_hosts());
  if (updates) return updates_text(group, number_, post.calls[0], *updates);
  const std::vector<CallDescriptor> calls = calls_by_rank(post);
  if (calls.empty() || !state_->sites.look_out_of_step(calls, group_->options.strict_sites)) return "";
  if (group_->options.strict_sites) return out_of_step_text(group, number_, post.calls);
  if (group_->rank() == 0) say(suspicion_text(group, number_, post.calls));
  return "";
}

// The plan waits; what has come meanwhile may let it go on, or show that calls do not agree.
bool Collective::run_on_with_hosts() {
  HostTraffic& hosts = *state_->hosts;
  const bool moved = group_->peers->poll();
  hosts.meet();
  const bool done =
      moved && !hosts.is_refused() && executor_.run(*steps_, next_, given_.call, state_->memory);
  if (!done && hosts.is_refused()) phase_ = Phase::disagreeing;
  return done;
}

}  // namespace photinus
