// Collectives in which each pair of ranks has its own size: their plans in a simulator that runs the ranks'
// steps in random interleavings, and on real memory.
#include "collectives/exchange.h"

#include <algorithm>
#include <numeric>

#include "check.h"
#include "collectives/net_exchange.h"
#include "data.h"
#include "simulator.h"

using namespace photinus;
using namespace photinus::test;

namespace {

Bytes content(uint32_t from, uint32_t to, uint64_t bytes) {
  std::mt19937_64 random(from * 1000 + to);
  return random_elements(Dtype::uint8, bytes, random);
}

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

const std::vector<std::string> kHosts[] = {{"a", "b"},           {"a", "a", "b", "b"},
                                           {"a", "a", "a", "b"}, {"a", "b", "a", "b", "a", "b"},
                                           {"a", "b", "b", "c"}, {"a", "a", "b", "b", "c", "c", "d"}};

// What a rank of one of several hosts knows of the whole matrix.
HostParts seen_by(uint32_t rank, const Exchange& all, const Levels& levels) {
  HostParts exchange{levels, rank, all.item_bytes, {}};
  for (uint32_t local : exchange.locals()) exchange.rows.push_back(&all.parts[local * all.ranks]);
  return exchange;
}

void check_run(const Exchange& exchange, std::vector<Plan> plans, const SlotSizes& sizes, Levels levels,
               std::mt19937_64& random) {
  std::vector<std::vector<Bytes>> parts(exchange.ranks);
  for (uint32_t from = 0; from < exchange.ranks; ++from)
    for (uint32_t to = 0; to < exchange.ranks; ++to)
      parts[from].push_back(content(from, to, exchange.sent_bytes(from, to)));
  Simulator simulator(std::move(plans), parts, sizes, std::move(levels));
  simulator.run(random);
  for (uint32_t to = 0; to < exchange.ranks; ++to)
    for (uint32_t from = 0; from < exchange.ranks; ++from)
      CHECK(simulator.received_parts(to)[from] == parts[from][to]);
}

}  // namespace

TEST(every_rank_gets_its_parts_in_every_interleaving_tried) {
  std::mt19937_64 random(5);
  const SlotSizes tiny{128, 64, 3};
  for (int run = 0; run < 2000; ++run) {
    const Exchange exchange = random_exchange(random, 2 + random() % 5, 700);
    CHECK(!find_disagreement(exchange));
    std::vector<Plan> plans;
    for (uint32_t r = 0; r < exchange.ranks; ++r)
      plans.push_back({Algorithm::parts, exchange_before(exchange, {r, exchange.ranks}, tiny),
                       exchange_after(exchange, {r, exchange.ranks}, tiny)});
    check_run(exchange, std::move(plans), tiny, {}, random);
  }
}

TEST(every_rank_of_several_hosts_gets_its_parts_in_every_interleaving_tried) {
  std::mt19937_64 random(7);
  const SlotSizes tiny{128, 64, 3};
  for (const auto& hosts : kHosts)
    for (int run = 0; run < 200; ++run) {
      Levels levels = levels_of(hosts);
      if (levels.hosts.size() == 4) levels.sizes = {2, 2};
      const Exchange all = random_exchange(random, static_cast<uint32_t>(hosts.size()), 700);
      uint64_t sum = 0;
      std::vector<Plan> plans;
      for (uint32_t r = 0; r < all.ranks; ++r) {
        HostParts exchange = seen_by(r, all, levels);
        Plan plan{Algorithm::parts, {}, net_exchange_after(exchange, tiny)};
        for (uint32_t local : exchange.locals())  // it has not met the others yet
          if (local != r) exchange.rows[levels.local_index(local)] = nullptr;
        plan.before = net_exchange_before(exchange, tiny);
        plans.push_back(std::move(plan));
        sum += parts_sum(r, &all.parts[r * all.ranks], all.ranks);
      }
      CHECK(sum == 0);
      check_run(all, std::move(plans), tiny, levels, random);
    }
}

TEST(sizes_that_disagree_over_hosts_change_the_sum_and_are_told) {
  std::mt19937_64 random(8);
  const Levels levels = levels_of(kHosts[2]);
  for (int run = 0; run < 200; ++run) {
    Exchange all = random_exchange(random, 4, 50);
    const uint32_t from = static_cast<uint32_t>(random() % 4), to = static_cast<uint32_t>(random() % 4);
    all.parts[from * 4 + to].send_elems += 1 + random() % 3;
    if (run % 2) all.parts[from * 4 + (to + 1) % 4].send_elems += 1;  // and another
    uint64_t sum = 0;
    for (uint32_t r = 0; r < 4; ++r) sum += parts_sum(r, &all.parts[r * 4], 4);
    CHECK(sum != 0);
  }
  Exchange all{4, 4, std::vector<PostedPart>(16)};
  all.parts[0 * 4 + 3].send_elems = 5;
  all.parts[3 * 4 + 0].recv_elems = 6;
  CHECK_CONTAINS(disagreement_text("all_to_all", seen_by(0, all, levels)),
                 "here rank 3 gets 5 elements and is to send 0; no output");
  CHECK_CONTAINS(disagreement_text("all_to_all", seen_by(3, all, levels)),
                 "here rank 0 gets 0 elements and is to send 6; no output");
  all.parts[0 * 4 + 2].send_elems = 7;  // both on one host
  CHECK_CONTAINS(disagreement_text("all_to_all", seen_by(2, all, levels)),
                 "all_to_all: rank 0 sends 7 elements to rank 2, which expects 0; no output");
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
    CHECK_CONTAINS(message, layout() ? "Sizes must be equal on both sides"
                                     : "rank 2 sends 5 elements to rank 0, which expects 6");
    for (int32_t value : out) CHECK(value == -1);
    fill(0);
    communicator.submit(given)->wait();
    if (me == 0)
      CHECK(out[0] == 0 && out[10] == 1 && out[13] == 1 && out[20] == 2 && out[24] == 2 && out[25] == -1);
  });
}
