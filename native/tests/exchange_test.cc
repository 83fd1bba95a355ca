// Collectives in which each pair of ranks has its own size: their plans in a simulator that runs the ranks'
// steps in random interleavings, and on real memory.
#include "collectives/exchange.h"

#include <algorithm>
#include <numeric>

#include "check.h"
#include "data.h"

using namespace photinus;
using namespace photinus::test;

namespace {

Bytes content(uint32_t from, uint32_t to, uint64_t bytes) {
  std::mt19937_64 random(from * 1000 + to);
  return random_elements(Dtype::uint8, bytes, random);
}

struct Rank {
  std::vector<Bytes> sends, recvs;
  Bytes flat, slot;
  uint64_t counters[kCounterCount] = {};
  std::vector<Step> before, after;
  size_t next = 0;
  bool returned = false;
};

// Every rank's memory and counters as plain data; a rank that has returned overwrites what it sent.
class Simulator {
 public:
  Simulator(const Exchange& exchange, const SlotSizes& sizes) : exchange_(exchange), ranks_(exchange.ranks) {
    for (uint32_t r = 0; r < exchange.ranks; ++r) {
      Rank& rank = ranks_[r];
      for (uint32_t p = 0; p < exchange.ranks; ++p) {
        rank.sends.push_back(content(r, p, exchange.sent_bytes(r, p)));
        rank.recvs.push_back(Bytes(exchange.sent_bytes(p, r)));
      }
      rank.flat.resize(sizes.flat_bytes);
      rank.slot.resize(sizes.chunks * sizes.chunk_bytes);
      rank.before = exchange_before(exchange, {r, exchange.ranks}, sizes);
      rank.after = exchange_after(exchange, {r, exchange.ranks}, sizes);
    }
  }

  void run(std::mt19937_64& random) {
    while (true) {
      std::vector<uint32_t> ready;
      bool all_done = true;
      for (uint32_t r = 0; r < ranks_.size(); ++r) {
        all_done &= ranks_[r].returned;
        if (!ranks_[r].returned && can_step(r)) ready.push_back(r);
      }
      if (all_done) break;
      CHECK(!ready.empty());  // nobody can go on: a deadlock
      const uint32_t r = ready[random() % ready.size()];
      for (uint64_t burst = random() % 20 + 1; burst > 0 && !ranks_[r].returned && can_step(r); --burst)
        step(r);
    }
    for (uint32_t to = 0; to < ranks_.size(); ++to)
      for (uint32_t from = 0; from < ranks_.size(); ++from)
        CHECK(ranks_[to].recvs[from] == content(from, to, exchange_.sent_bytes(from, to)));
  }

 private:
  bool can_step(uint32_t r) const {
    const Rank& rank = ranks_[r];
    const size_t meeting = rank.before.size();
    if (rank.next < meeting) return true;
    if (rank.next == meeting)
      return std::all_of(ranks_.begin(), ranks_.end(),
                         [](const Rank& other) { return other.next >= other.before.size(); });
    if (rank.next == meeting + 1 + rank.after.size()) return true;
    const Step& s = rank.after[rank.next - meeting - 1];
    if (s.kind != Step::Kind::wait) return true;
    for (uint32_t other = 0; other < ranks_.size(); ++other)
      if ((s.rank == kEveryone || s.rank == other) &&
          ranks_[other].counters[static_cast<size_t>(s.counter)] < s.value)
        return false;
    return true;
  }

  std::byte* at(const Region& region, uint64_t bytes) {
    Rank& rank = ranks_[region.rank];
    auto inside = [&](Bytes& memory) {
      CHECK(region.offset_bytes + bytes <= memory.size());
      return memory.data() + region.offset_bytes;
    };
    switch (region.place) {
      case Place::send_part:
        return inside(rank.sends[region.part]);
      case Place::recv_part:
        return inside(rank.recvs[region.part]);
      case Place::flat:
        return inside(rank.flat);
      default:
        return inside(rank.slot);
    }
  }

  void step(uint32_t r) {
    Rank& rank = ranks_[r];
    const size_t index = rank.next++, meeting = rank.before.size();
    if (index == meeting) return;
    if (index == meeting + 1 + rank.after.size()) {
      rank.returned = true;
      for (Bytes& sent : rank.sends) std::fill(sent.begin(), sent.end(), std::byte{0xee});
      return;
    }
    const Step& s = index < meeting ? rank.before[index] : rank.after[index - meeting - 1];
    if (s.kind == Step::Kind::copy) std::memcpy(at(s.to, s.bytes), at(s.from, s.bytes), s.bytes);
    if (s.kind == Step::Kind::advance) {
      CHECK(rank.counters[static_cast<size_t>(s.counter)] < s.value);
      rank.counters[static_cast<size_t>(s.counter)] = s.value;
    }
  }

  const Exchange& exchange_;
  std::vector<Rank> ranks_;
};

Exchange random_exchange(std::mt19937_64& random, uint32_t ranks, uint64_t most) {
  Exchange exchange{ranks, 1, std::vector<PostedPart>(ranks * ranks)};
  for (uint32_t from = 0; from < ranks; ++from) {
    const uint64_t limit = random() % 4 == 0 ? 0 : random() % 3 == 0 ? 40 : most;
    const bool in_arena = random() % 3 == 0;
    for (uint32_t to = 0; to < ranks; ++to) {
      const uint64_t bytes = limit ? random() % limit : 0;
      exchange.parts[from * ranks + to].send_elems = bytes;
      exchange.parts[from * ranks + to].send_offset = in_arena ? 0 : kNowhere;
      exchange.parts[to * ranks + from].recv_elems = bytes;
    }
  }
  return exchange;
}

}  // namespace

TEST(every_rank_gets_its_parts_in_every_interleaving_tried) {
  std::mt19937_64 random(5);
  const SlotSizes tiny{128, 64, 3};
  for (int run = 0; run < 2000; ++run) {
    const Exchange exchange = random_exchange(random, 2 + random() % 5, 700);
    CHECK(!find_disagreement(exchange));
    Simulator(exchange, tiny).run(random);
  }
}

TEST(a_disagreement_about_sizes_names_both_ranks) {
  std::mt19937_64 random(6);
  Exchange exchange = random_exchange(random, 3, 50);
  exchange.parts[1 * 3 + 2].send_elems = 7;
  exchange.parts[2 * 3 + 1].recv_elems = 8;
  const Disagreement wrong = *find_disagreement(exchange);
  CHECK(wrong.from == 1 && wrong.to == 2 && wrong.sent == 7 && wrong.expected == 8);
}

TEST_ANY_PEERS(real_memory_agrees_with_the_matrix) {
  for (uint32_t ranks : {1u, 2u, 3u, 4u}) {
    run_ranks(
        ranks,
        [&](Communicator& communicator) {
          const uint32_t me = communicator.rank();
          std::mt19937_64 shared(ranks);  // the same on all ranks
          for (int round = 0; round < 60; ++round) {
            const Exchange exchange = random_exchange(shared, ranks, round % 3 ? 300 : 20000);
            Submission given;
            given.call = {Operation::all_to_all, Dtype::uint8, Reduction::sum, 0, 0};
            given.asynchronous = round % 2;
            std::vector<Bytes> sends, recvs;
            std::vector<std::byte*> blocks;
            for (uint32_t peer = 0; peer < ranks; ++peer) {
              sends.push_back(content(me, peer, exchange.sent_bytes(me, peer)));
              recvs.push_back(Bytes(exchange.sent_bytes(peer, me)));
            }
            for (uint32_t peer = 0; peer < ranks; ++peer) {
              void* buffer = sends[peer].data();
              if (exchange.part(me, peer).send_offset == 0) {
                blocks.push_back(communicator.arena()->allocate(sends[peer].size()));
                std::copy(sends[peer].begin(), sends[peer].end(), blocks.back());
                buffer = blocks.back();
              }
              given.send_parts.push_back({buffer, sends[peer].size()});
              given.recv_parts.push_back({recvs[peer].data(), recvs[peer].size()});
            }
            communicator.submit(given)->wait();
            for (uint32_t peer = 0; peer < ranks; ++peer)
              CHECK(recvs[peer] == content(peer, me, exchange.sent_bytes(peer, me)));
            for (std::byte* block : blocks) communicator.arena()->free(block);
          }
        },
        60, SlotSizes{1024, 512, 4});
  }
}

TEST_ANY_PEERS(unequal_sizes_are_refused_on_every_rank_and_the_group_stays_usable) {
  run_ranks(3, [](Communicator& communicator) {
    const uint32_t me = communicator.rank();
    std::vector<int32_t> out(30, -1), in(30, static_cast<int32_t>(me));
    Submission given;
    given.call = {Operation::gather, Dtype::int32, Reduction::sum, 0, 0};
    given.send_parts.resize(3);
    given.recv_parts.resize(3);
    auto size_of = [](uint32_t rank) { return uint64_t{rank} + 3; };
    auto fill = [&](uint64_t wrong) {
      given.send_parts[0] = {in.data(), size_of(me)};
      for (uint32_t r = 0; r < 3 && me == 0; ++r)
        given.recv_parts[r] = {out.data() + 10 * r, size_of(r) + (r == 2) * wrong};
    };
    fill(1);
    auto [kind, message] = error_of([&] { communicator.submit(given)->wait(); });
    CHECK(kind == ErrorKind::mismatch);
    CHECK_CONTAINS(message, "rank 2 sends 5 elements to rank 0, which expects 6");
    for (int32_t value : out) CHECK(value == -1);
    fill(0);
    communicator.submit(given)->wait();
    if (me == 0)
      CHECK(out[0] == 0 && out[10] == 1 && out[13] == 1 && out[20] == 2 && out[24] == 2 && out[25] == -1);
  });
}
