// Runs all ranks' plans without memory, sockets or time: tensors, counters and links are plain data, and
// which rank does its next step, or which link carries some more bytes, is picked at random. Whatever the
// interleaving, no rank may get stuck, and the result must be the naive one. A step that reads what another
// rank has not written yet, or writes what another still needs, shows up as a wrong result in some
// interleaving.
//
// A link takes a frame's bytes from where they lie when it carries them, some at a time, and only when the
// receiver has said where they go; so bytes that change too early, or frames in another order on both sides,
// show up too.
//
// With an `odd_host` that calls something else, every rank must still hear of all hosts, and nobody's output
// be touched.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "check.h"
#include "collectives/levels.h"
#include "collectives/plan.h"
#include "data.h"
#include "kernels/reduce.h"

namespace photinus::test {

class Simulator {
 public:
  // Without levels, all ranks are on one host.
  Simulator(const Call& call, std::vector<Plan> plans, bool in_place, const std::vector<Bytes>& inputs,
            const SlotSizes& sizes, Levels levels = {}, const std::vector<double>& factors = {},
            uint64_t landing_bytes = 0, std::optional<uint32_t> odd_host = {})
      : call_(call), in_place_(in_place), levels_(std::move(levels)), factors_(factors), odd_host_(odd_host) {
    begin(std::move(plans), sizes);
    const auto expected = naive(call, inputs, factors, levels_);
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].send = inputs[r];
      ranks_[r].recv.resize(expected[r].size());
      ranks_[r].landing.resize(landing_bytes);
    }
  }

  // Of an exchange: parts[r][p] is what rank r sends to rank p.
  Simulator(std::vector<Plan> plans, const std::vector<std::vector<Bytes>>& parts, const SlotSizes& sizes,
            Levels levels = {})
      : levels_(std::move(levels)) {
    begin(std::move(plans), sizes);
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].send_parts = parts[r];
      for (const auto& row : parts) ranks_[r].recv_parts.emplace_back(row[r].size());
    }
  }

  void run(std::mt19937_64& random) {
    std::vector<uint32_t> busy;
    for (uint32_t r = 0; r < ranks_.size(); ++r) busy.push_back(r);
    // At times links and copies are slow: bytes move only when no rank can go on, or seldom.
    const uint64_t slowness = random() % 3;
    while (!busy.empty()) {
      // A rank runs on for a random while, so that ranks get far apart too.
      std::vector<uint32_t> ready;
      for (uint32_t r : busy)
        if (done(r) ? ranks_[r].copies[0].empty() : can_step(r) || can_meet(r)) ready.push_back(r);
      std::vector<Link*> links;
      for (auto& [pair, link] : links_)
        if (!link.sent.empty() && !link.places.empty() && !ranks_[link.from].gave_up &&
            !ranks_[link.to].gave_up)
          links.push_back(&link);
      // Copies of GPUs land when they like, those of one direction in their order.
      if (std::vector<std::pair<uint32_t, bool>> flights = copies_under_way();
          !flights.empty() && (ready.empty() || (slowness < 2 && random() % (slowness ? 10 : 2) == 0))) {
        const auto [rank, to_host] = flights[random() % flights.size()];
        land(ranks_[rank], to_host);
        continue;
      }
      if (!links.empty() && (ready.empty() || (slowness < 2 && random() % (slowness ? 10 : 2) == 0))) {
        carry(*links[random() % links.size()], random);
        continue;
      }
      if (ready.empty() && tell_what_was_let_go(busy)) continue;
      CHECK(!ready.empty());  // nobody can go on: a deadlock
      uint32_t r = ready[random() % ready.size()];
      if (!done(r)) ranks_[r].returned = ranks_[r].let_go;
      for (uint64_t burst = random() % 20 + 1; burst > 0 && !done(r); --burst) {
        if (can_meet(r) && (!can_step(r) || random() % 16 == 0))
          meet(r);
        else if (can_step(r))
          step(r);
      }
      if (!done(r) || !ranks_[r].copies[0].empty()) continue;  // a stream waits for copies
      busy.erase(std::find(busy.begin(), busy.end(), r));
      finish(ranks_[r]);
    }
    for (auto& [pair, link] : links_)
      CHECK(odd_host_ || (link.sent.empty() && link.places.empty()));  // nobody was left alone
  }

  // Of the rings for GPUs: many chunks with little data.
  static constexpr DeviceSizes kRings{512, 4};

  const Bytes& result(uint32_t r) const { return ranks_[r].result; }
  const std::vector<Bytes>& received_parts(uint32_t r) const { return ranks_[r].result_parts; }

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    uint64_t bytes, lets_go;  // lets_go: not 0: of so many results, and it is no copy
  };
  struct Rank {
    Bytes send, recv, flat, slot, landing, landing_ring, result;
    std::vector<Bytes> send_parts, recv_parts, result_parts;
    uint64_t counters[kCounterCount] = {};
    Plan plan;
    size_t next = 0;  // of before, then the meeting, then after
    uint32_t host = 0;
    std::set<uint32_t> known;    // hosts whose call it knows
    size_t told = 0, heard = 0;  // levels
    bool gave_up = false;
    std::vector<Copy> copies[2];  // under way to the GPU, and to the host
    uint64_t came = 0;            // to the host
    uint64_t let_go = 0,
             returned = 0;  // results with which it is done, as far as it knows and as it has told
  };
  struct Frame {
    Region from;
    uint64_t bytes;
  };
  struct Link {  // from one rank to another
    uint32_t from, to;
    std::vector<Frame> sent;  // the first one may be on its way
    std::vector<std::pair<Region, uint64_t>> places;
    uint64_t carried = 0;  // bytes of the first
    uint64_t frames = 0;   // have arrived
  };

  void begin(std::vector<Plan> plans, const SlotSizes& sizes) {
    result_ring_.resize(kRings.bytes());
    ranks_.resize(plans.size());
    if (levels_.hosts.empty()) {
      levels_.hosts.resize(1);
      for (uint32_t r = 0; r < ranks_.size(); ++r) levels_.hosts[0].push_back(r);
    }
    for (uint32_t r = 0; r < ranks_.size(); ++r) {
      ranks_[r].flat.resize(sizes.flat_bytes);
      ranks_[r].slot.resize(sizes.chunks * sizes.chunk_bytes);
      ranks_[r].landing_ring.resize(kRings.bytes() / 2);
      ranks_[r].host = levels_.host_of(r);
      ranks_[r].known = {ranks_[r].host};
      ranks_[r].plan = std::move(plans[r]);
    }
  }

  // The caller has its tensors back, and changes them; the landing is used for the next call.
  void finish(Rank& rank) {
    CHECK(rank.known.size() == levels_.hosts.size() && rank.gave_up == odd_host_.has_value());
    CHECK(rank.told == levels_.sizes.size() && rank.heard == levels_.sizes.size());
    rank.result = in_place_ ? rank.send : rank.recv;
    rank.result_parts = rank.recv_parts;
    auto spoil = [](Bytes& bytes) { std::fill(bytes.begin(), bytes.end(), std::byte{0xa5}); };
    for (Bytes* bytes : {&rank.send, &rank.recv, &rank.landing}) spoil(*bytes);
    for (Bytes& part : rank.send_parts) spoil(part);
    for (Bytes& part : rank.recv_parts) spoil(part);
  }

  std::vector<std::pair<uint32_t, bool>> copies_under_way() const {
    std::vector<std::pair<uint32_t, bool>> found;
    for (uint32_t r = 0; r < ranks_.size(); ++r)
      for (const bool to_host : {false, true})
        if (!ranks_[r].copies[to_host].empty()) found.emplace_back(r, to_host);
    return found;
  }

  // Ranks that wait look around. Who is done does not, and so tells nobody any more.
  bool tell_what_was_let_go(const std::vector<uint32_t>& busy) {
    bool news = false;
    for (const uint32_t r : busy) {
      if (done(r)) continue;
      news |= ranks_[r].returned != ranks_[r].let_go;
      ranks_[r].returned = ranks_[r].let_go;
    }
    return news;
  }

  static void land(Rank& rank, bool to_host) {
    const Copy copy = rank.copies[to_host].front();
    rank.copies[to_host].erase(rank.copies[to_host].begin());
    if (copy.lets_go) {
      rank.let_go = copy.lets_go;
      return;
    }
    std::memcpy(copy.to, copy.from, copy.bytes);
    rank.came += to_host;
  }

  size_t meeting(const Rank& rank) const { return rank.plan.before.size(); }
  bool done(uint32_t r) const {
    const Rank& rank = ranks_[r];
    return rank.gave_up ? rank.heard == levels_.sizes.size()
                        : rank.next == meeting(rank) + 1 + rank.plan.after.size();
  }

  Link& link(uint32_t from, uint32_t to) {
    CHECK(from < ranks_.size() && to < ranks_.size() && ranks_[from].host != ranks_[to].host);
    return links_.try_emplace({from, to}, Link{from, to, {}, {}}).first->second;
  }

  bool can_step(uint32_t r) {
    const Rank& rank = ranks_[r];
    if (rank.next < meeting(rank)) return true;
    if (rank.next == meeting(rank))  // all of its host have done their `before`
      return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& other) {
        return other.host != rank.host || other.next >= meeting(other);
      });
    const Step& s = rank.plan.after[rank.next - meeting(rank) - 1];
    if (rank.gave_up) return false;
    if (s.kind == Step::Kind::hear) return rank.heard > s.value;
    if (s.kind == Step::Kind::wait_copied) return rank.came >= s.value;
    if (s.kind == Step::Kind::wait_room)
      return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& other) {
        return (s.rank != kEveryone && &other != &rank) || other.returned + kRings.chunks > s.value;
      });
    if (s.kind == Step::Kind::wait_sent) return link(r, s.rank).frames >= s.value;
    if (s.kind == Step::Kind::wait_received) return link(s.rank, r).frames >= s.value;
    if (s.kind != Step::Kind::wait) return true;
    for (uint32_t other : levels_.hosts[rank.host])
      if ((s.rank == kEveryone || s.rank == other) &&
          ranks_[other].counters[static_cast<size_t>(s.counter)] < s.value)
        return false;
    return true;
  }

  // Where `r` finds `bytes` of a region, to write them or to read them.
  std::byte* at(uint32_t r, const Region& region, uint64_t bytes, bool writes) {
    if (bytes == 0) return nullptr;
    Rank& owner = ranks_[region.rank];
    CHECK(owner.host == ranks_[r].host && !ranks_[r].gave_up);
    CHECK((region.place != Place::landing && region.place != Place::recv_part) || region.rank == r);
    // An output must not be written before all hosts are known to agree.
    if (writes && (region.place == Place::recv || region.place == Place::recv_part))
      CHECK(ranks_[r].heard == levels_.sizes.size());
    Bytes* place = nullptr;
    switch (region.place) {
      case Place::send:
        place = &owner.send;
        break;
      case Place::recv:
        place = in_place_ ? &owner.send : &owner.recv;
        break;
      case Place::flat:
        place = &owner.flat;
        break;
      case Place::slot:
        place = &owner.slot;
        break;
      case Place::send_part:
        place = &owner.send_parts.at(region.part);
        break;
      case Place::recv_part:
        place = &owner.recv_parts.at(region.part);
        break;
      case Place::landing:
        place = &owner.landing;
        break;
      case Place::landing_ring:
        place = &owner.landing_ring;
        break;
      case Place::result_ring: {  // any number of results stand behind each other in it
        const uint64_t within = region.offset_bytes % kRings.chunk_bytes;
        CHECK(within + bytes <= kRings.chunk_bytes);
        return result_ring_.data() +
               region.offset_bytes / kRings.chunk_bytes % kRings.chunks * kRings.chunk_bytes + within;
      }
      default:
        CHECK(false);
    }
    CHECK(region.offset_bytes + bytes <= place->size());
    return place->data() + region.offset_bytes;
  }

  void step(uint32_t r) {
    Rank& rank = ranks_[r];
    size_t index = rank.next++;
    if (index == meeting(rank)) return;
    const Step& s =
        index < meeting(rank) ? rank.plan.before[index] : rank.plan.after[index - meeting(rank) - 1];
    switch (s.kind) {
      case Step::Kind::copy:
        std::memmove(at(r, s.to, s.bytes, true), at(r, s.from, s.bytes, false), s.bytes);
        break;
      case Step::Kind::advance:
        CHECK(rank.counters[static_cast<size_t>(s.counter)] < s.value);
        rank.counters[static_cast<size_t>(s.counter)] = s.value;
        break;
      case Step::Kind::reduce:
        reduce(r, s);
        break;
      case Step::Kind::start_copy: {
        const bool to_host = s.to.place != Place::recv;
        rank.copies[to_host].push_back(
            {at(r, s.to, s.bytes, true), at(r, s.from, s.bytes, false), s.bytes, 0});
        std::memset(rank.copies[to_host].back().to, 0xee, s.bytes);
        break;
      }
      case Step::Kind::let_go:
        rank.copies[0].push_back({nullptr, nullptr, 0, s.value + 1});
        break;
      case Step::Kind::send:
        CHECK(rank.told > level_between(r, s.rank));
        at(r, s.from, s.bytes, false);
        link(r, s.rank).sent.push_back({s.from, s.bytes});
        break;
      case Step::Kind::receive:
        CHECK(rank.heard > level_between(r, s.rank));
        link(s.rank, r).places.push_back({s.to, s.bytes});
        break;
      case Step::Kind::tell:
        CHECK(rank.heard >= s.value);
        if (rank.told == s.value) meet(r);
        break;
      default:  // waits are over
        break;
    }
  }

  // Whether a rank that has met its host's can tell or hear in the next level, whatever its plan waits for.
  bool can_meet(uint32_t r) const {
    const Rank& rank = ranks_[r];
    if (rank.next <= meeting(rank) || rank.heard == levels_.sizes.size()) return false;
    if (rank.told == rank.heard) return true;
    const auto peers = levels_.counterparts(r, rank.heard);
    return std::all_of(peers.begin(), peers.end(), [&](uint32_t peer) { return told_.count({peer, r}) > 0; });
  }

  void meet(uint32_t r) {
    Rank& rank = ranks_[r];
    if (rank.told == rank.heard) {
      for (uint32_t peer : levels_.counterparts(r, rank.told)) told_[{r, peer}] = rank.known;
      ++rank.told;
      return;
    }
    for (uint32_t peer : levels_.counterparts(r, rank.heard)) {
      const auto& told = told_[{peer, r}];
      rank.known.insert(told.begin(), told.end());
    }
    ++rank.heard;
    rank.gave_up = odd_host_ && rank.known.count(*odd_host_) > 0 && rank.known.size() > 1;
  }

  // In which of them two ranks are counterparts. Others may exchange frames once all levels have been heard.
  size_t level_between(uint32_t a, uint32_t b) const {
    for (size_t level = 0; level < levels_.sizes.size(); ++level) {
      const auto peers = levels_.counterparts(a, level);
      if (std::count(peers.begin(), peers.end(), b) > 0) return level;
    }
    return levels_.sizes.size() - 1;
  }

  void reduce(uint32_t r, const Step& s) {
    const Kernel kernel = s.kernel.value_or(Kernel{call_.reduction, call_.dtype, call_.dtype});
    const uint64_t elems = s.bytes / size_bytes(kernel.from);
    std::vector<const void*> sources;
    std::vector<double> factors;
    for (const Region& source : s.sources) {
      sources.push_back(at(r, source, s.bytes, false));
      if (!factors_.empty()) factors.push_back(factors_[source.rank]);
    }
    std::vector<void*> destinations;
    for (const Region& result : s.results)
      destinations.push_back(at(r, result, elems * size_bytes(kernel.to), true));
    reduce_between(kernel.from, kernel.to, kernel.reduction, InstructionSet::baseline,
                   {sources.data(), static_cast<uint32_t>(sources.size()), destinations.data(),
                    static_cast<uint32_t>(destinations.size()), elems, static_cast<uint32_t>(ranks_.size()),
                    factors.empty() ? nullptr : factors.data()});
  }

  // Some of the bytes of a link's first frame.
  void carry(Link& link, std::mt19937_64& random) {
    Frame& frame = link.sent.front();
    auto [to, bytes] = link.places.front();
    CHECK(frame.bytes == bytes);
    const uint64_t part = std::min<uint64_t>(random() % 2 ? bytes : random() % 100 + 1, bytes - link.carried);
    if (part > 0)
      std::memcpy(at(link.to, to, bytes, true) + link.carried,
                  at(link.from, frame.from, bytes, false) + link.carried, part);
    link.carried += part;
    if (link.carried < bytes) return;
    link.sent.erase(link.sent.begin());
    link.places.erase(link.places.begin());
    link.carried = 0;
    ++link.frames;
  }

  Call call_;
  Bytes result_ring_;
  bool in_place_ = false;
  Levels levels_;
  std::vector<double> factors_;
  std::optional<uint32_t> odd_host_;
  std::vector<Rank> ranks_;
  std::map<std::pair<uint32_t, uint32_t>, std::set<uint32_t>> told_;  // by who told whom
  std::map<std::pair<uint32_t, uint32_t>, Link> links_;
};

}  // namespace photinus::test
