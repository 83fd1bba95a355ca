#include "collectives/net_exchange.h"

#include "base/error.h"
#include "collectives/net_steps.h"

namespace photinus {
namespace {

// Steps of ranks called by their places on their host.
std::vector<Step> by_rank(std::vector<Step> steps, const std::vector<uint32_t>& locals) {
  for (Step& step : steps) {
    if (step.rank != kEveryone) step.rank = locals[step.rank];
    for (Region* region : {&step.to, &step.from}) {
      region->rank = locals[region->rank];
      region->part = locals[region->part];
    }
  }
  return steps;
}

Seat seat_of(const HostParts& exchange) {
  return {exchange.levels.local_index(exchange.rank), static_cast<uint32_t>(exchange.locals().size())};
}

// splitmix64's (Steele, Lea and Flood, 2014).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

uint64_t mix(uint32_t from, uint32_t to, uint64_t elems) {
  return elems == 0 ? 0 : mix(mix(uint64_t{from} << 32 | to) + elems);
}

}  // namespace

Exchange among_locals(const HostParts& exchange) {
  const auto& locals = exchange.locals();
  const auto count = static_cast<uint32_t>(locals.size());
  Exchange among{count, exchange.item_bytes, std::vector<PostedPart>(size_t{count} * count)};
  for (uint32_t i = 0; i < count; ++i)
    for (uint32_t j = 0; j < count && exchange.rows[i]; ++j)
      among.parts[i * count + j] = exchange.rows[i][locals[j]];
  return among;
}

std::vector<Step> net_exchange_before(const HostParts& exchange, const SlotSizes& sizes) {
  return by_rank(exchange_before(among_locals(exchange), seat_of(exchange), sizes), exchange.locals());
}

std::vector<Step> net_exchange_after(const HostParts& exchange, const SlotSizes& sizes) {
  const Levels& levels = exchange.levels;
  const uint32_t ranks = levels.ranks(), me = exchange.rank;
  NetSteps s(levels, me);
  s.agree();
  // In round t to the rank t places behind and from the one t places before, so nobody is everybody's first
  // target. Frames are on their way while ranks of this host exchange.
  std::vector<Frame> frames;
  for (uint32_t round = 1; round < ranks; ++round) {
    const uint32_t to = (me + round) % ranks, from = (me + ranks - round) % ranks;
    const uint64_t out = exchange.part(to).send_elems, in = exchange.part(from).recv_elems;
    if (in > 0 && levels.host_of(from) != s.host)
      frames.push_back(s.receive(from, {Place::recv_part, me, 0, from}, in * exchange.item_bytes));
    if (out > 0 && levels.host_of(to) != s.host)
      s.send(to, {Place::send_part, me, 0, to}, out * exchange.item_bytes);
  }
  for (Step& step : by_rank(exchange_after(among_locals(exchange), seat_of(exchange), sizes), s.locals))
    s.add(std::move(step));
  s.wait_received(frames);
  s.wait_sent();
  return std::move(s.steps);
}

uint64_t parts_sum(uint32_t rank, const PostedPart* row, uint32_t ranks) {
  uint64_t sum = 0;
  for (uint32_t peer = 0; peer < ranks; ++peer)
    sum += mix(rank, peer, row[peer].send_elems) - mix(peer, rank, row[peer].recv_elems);
  return sum;
}

std::string disagreement_text(const std::string& call, const HostParts& exchange) {
  constexpr size_t kMostNamed = 16;
  std::string what;
  if (const auto wrong = find_disagreement(among_locals(exchange))) {
    what = text("rank %u sends %llu elements to rank %u, which expects %llu", exchange.locals()[wrong->from],
                static_cast<unsigned long long>(wrong->sent), exchange.locals()[wrong->to],
                static_cast<unsigned long long>(wrong->expected));
  } else {
    what =
        "some rank does not send what another one expects, and both are not on this host. Of other hosts' "
        "ranks, here";
    size_t named = 0;
    for (uint32_t peer = 0; peer < exchange.levels.ranks(); ++peer) {
      const PostedPart& part = exchange.part(peer);
      if (exchange.levels.host_of(peer) == exchange.levels.host_of(exchange.rank)) continue;
      if (part.send_elems == 0 && part.recv_elems == 0) continue;
      if (++named > kMostNamed) break;
      what += text("%s rank %u gets %llu elements and is to send %llu", named > 1 ? "," : "", peer,
                   static_cast<unsigned long long>(part.send_elems),
                   static_cast<unsigned long long>(part.recv_elems));
    }
    if (named == 0) what += " none is sent anything, or is to send";
    if (named > kMostNamed) what += ", ...";
  }
  return call + ": " + what + "; no output was written. Sizes must be equal on both sides.";
}

}  // namespace photinus
