// The simulator of the engine's plans on a model (bench/simulate).
#include <sys/resource.h>

#include "check.h"
#include "simulate/parameters.h"
#include "simulate/simulation.h"

using namespace photinus;
using namespace photinus::simulate;
using namespace photinus::test;

namespace {

// Whose network alone costs anything, and little is: so that times can be said in a line.
Model plain() {
  Model model;
  model.rate_gbit = 8;  // a nanosecond for each byte
  model.latency_us = 10;
  model.header_bytes = 0;
  for (const Parameter& each : parameters()) {
    const std::string name = each.name;
    const bool is_cost = name.ends_with("-us") || name.ends_with("-ns");
    if (is_cost && name != "latency-us") model.*each.value = 0;
  }
  return model;
}

Setup setup(uint32_t hosts, uint32_t ranks, std::vector<uint32_t> sizes, uint64_t bytes) {
  Setup s;
  uint32_t rank = 0;
  for (uint32_t host = 0; host < hosts; ++host) {
    s.levels.hosts.emplace_back();
    for (uint32_t i = 0; i < ranks; ++i) s.levels.hosts.back().push_back(rank++);
  }
  s.levels.sizes = std::move(sizes);
  s.call = {Operation::all_reduce, Dtype::float32, Reduction::sum, 0, bytes / 4};
  s.model = plain();
  return s;
}

bool is_near(double value, double expected, double share = 1e-9) {
  return std::abs(value - expected) <= share * expected;
}

constexpr double kUs = 1e-6, kNs = 1e-9;
// What a rank tells with or before the first frame of a level, to each counterpart.
constexpr double kPost = kToldBytes * kNs;

}  // namespace

TEST(one_message_takes_its_latency_its_bytes_and_what_its_ends_do) {
  for (const uint64_t bytes : {4096, 8192}) {
    Setup s = setup(2, 1, {2}, bytes);
    const double size = static_cast<double>(bytes);
    CHECK(is_near(run(s).seconds, kPost + 10 * kUs + size * kNs));
    s.model.send_us = 2;
    s.model.receive_us = 3;
    s.model.socket_ns = 0.5;
    s.model.add_ns = 0.25;
    s.model.call_us = 7;
    // What is told goes in one call with a frame; ahead of a larger one it is heard while that is under way.
    const double given = (7 + 2) * kUs + 0.5 * size * kNs, heard = given + 10 * kUs + kPost + 3 * kUs;
    const double came = given + 10 * kUs + kPost + size * kNs;
    CHECK(bytes == 4096 || heard < came);
    CHECK(is_near(run(s).seconds, came + 3 * kUs + (0.5 + 0.25) * size * kNs));
  }
}

TEST(direct_exchange_takes_two_latencies_and_what_cards_must_carry) {
  for (const uint32_t hosts : {2u, 4u, 8u}) {
    const double bytes = 512 * 1024 * hosts;  // smaller ones go flat
    Setup s = setup(hosts, 1, {hosts}, static_cast<uint64_t>(bytes));
    s.slots.chunk_bytes = 64 << 20;  // one chunk
    s.net = {512 << 20, 16 << 20, 16 << 20, 4 << 10};
    const double pieces = (hosts - 1.0) * bytes / hosts;
    const double formula = (hosts - 1) * kPost + 2 * (10 * kUs + pieces * kNs);
    // What is told goes to all in one order, so some of it waits at a card.
    CHECK(is_near(run(s).seconds, formula, hosts == 2 ? 1e-9 : 0.001));
  }
}

TEST(halving_and_doubling_takes_two_latencies_a_level_and_the_same_bytes) {
  const double bytes = 1 << 20;
  Setup s = setup(8, 1, {2, 2, 2}, 1 << 20);
  s.slots.chunk_bytes = 64 << 20;
  s.net = {512 << 20, 16 << 20, 16 << 20, 4 << 10};
  CHECK(is_near(run(s).seconds, 3 * kPost + 6 * 10 * kUs + 2 * 7 / 8.0 * bytes * kNs));
  s.levels.sizes = {4, 2};
  CHECK(is_near(run(s).seconds, 4 * kPost + 4 * 10 * kUs + 2 * 7 / 8.0 * bytes * kNs, 0.001));
}

TEST(the_formula_is_within_a_third_of_what_plans_take) {
  for (const auto& [hosts, ranks, list] :
       std::vector<std::tuple<uint32_t, uint32_t, std::vector<uint32_t>>>{{1, 4, {}},
                                                                          {2, 1, {2}},
                                                                          {4, 2, {4}},
                                                                          {4, 2, {2, 2}},
                                                                          {8, 4, {8}},
                                                                          {8, 4, {2, 2, 2}},
                                                                          {16, 8, {4, 4}}})
    for (const uint64_t bytes : {4 << 10, 64 << 10, 1 << 20, 16 << 20})
      for (const double rate_gbit : {1.0, 200.0}) {
        Setup s = setup(hosts, ranks, list, bytes);
        s.model = Model{};
        s.model.rate_gbit = rate_gbit;
        const Outcome o = run(s);
        const double formula = predicted_s(s.model, s.call, s.levels, o.algorithm, s.slots, s.net);
        if (!is_near(formula, o.seconds, 0.33))
          std::fprintf(stderr, "%u hosts x %u, levels %s, %llu bytes: %g s by formula, %g s simulated\n",
                       hosts, ranks, print(list).c_str(), static_cast<unsigned long long>(bytes), formula,
                       o.seconds);
        CHECK(is_near(formula, o.seconds, 0.33));
      }
}

TEST(the_ranks_of_a_host_share_its_card_and_chunks_hide_latency) {
  Setup s = setup(2, 4, {2}, 16 << 20);
  const Outcome o = run(s);
  CHECK(o.sent_bytes == o.least_bytes && o.received_bytes == o.least_bytes);
  CHECK(o.seconds > o.least_bytes * kNs && o.seconds < 1.02 * o.least_bytes * kNs);
  CHECK(o.card_out > 0.98 && o.binds().starts_with("cards"));
}

TEST(switches_that_have_less_than_their_cards_bind) {
  Setup s = setup(8, 1, {2, 4}, 16 << 20);
  const double before = run(s).seconds;
  s.model.leaf_hosts = 2;
  s.model.oversubscription = 4;
  const Outcome o = run(s);
  CHECK(o.binds().starts_with("switches") && o.seconds > 1.5 * before);
  // Each pair of hosts sends 3/4 of the tensor, in two directions' halves, through half a card.
  CHECK(is_near(o.seconds, 2 * 0.75 * (16 << 20) * 2 * kNs, 0.1));
}

TEST(cores_that_ranks_share_are_used_by_one_at_a_time) {
  Setup s = setup(2, 2, {2}, 1 << 20);
  s.in_arenas = false;
  s.model.copy_ns = s.model.add_ns = 10;
  const double apart = run(s).seconds;
  s.model.cores = 1;
  const double host = run(s).seconds;
  s.model.machines = 1;
  CHECK(host > 1.5 * apart && run(s).seconds > 1.5 * host);
}

TEST(jitter_costs_time_that_follows_from_the_seed_alone) {
  Setup s = setup(8, 2, {4, 2}, 1 << 20);
  const double calm = run(s).seconds;
  s.model.jitter_us = 50;
  const double once = run(s).seconds, again = run(s).seconds;
  s.model.seed = 2;
  CHECK(once == again && once > calm && run(s).seconds != once);
}

TEST(a_host_that_stands_for_all_takes_the_time_of_all_where_they_are_alike) {
  for (const auto& sizes : {std::vector<uint32_t>{8}, {2, 2, 2}, {4, 2}}) {
    Setup s = setup(8, 4, sizes, 8 << 20);
    s.model = Model{};
    const double all = run(s).seconds;
    s.folded = true;
    CHECK(is_near(run(s).seconds, all, 0.01));
  }
}

TEST(every_rank_is_in_every_sum_once_in_the_order_of_the_tree) {
  for (const bool in_arenas : {true, false})
    for (const auto& sizes : {std::vector<uint32_t>{8}, {2, 2, 2}, {4, 2}})
      for (const uint64_t bytes : {4 << 10, 300 << 10}) {
        Setup s = setup(8, 3, sizes, bytes);
        s.in_arenas = in_arenas;
        for (uint64_t element = 0; element < s.call.elems; element += 401) s.followed.push_back(element);
        CHECK(run(s).sums == s.followed.size());
      }
}

TEST(a_sum_with_a_rank_too_few_or_in_another_order_is_found) {
  const Levels levels{{{0}, {1}, {2}}, {3}};
  const Call call{Operation::all_reduce, Dtype::float32, Reduction::sum, 0, 1};
  auto end = [&](const std::vector<uint32_t>& order) {
    Sums sums(levels, call, {0});
    for (uint32_t rank = 0; rank < 3; ++rank) {
      std::vector<Region> sources;
      for (const uint32_t other : order) sources.push_back({Place::send, other, 0});
      Step step = reduce_step({{Place::landing, rank, 0}}, sources, 4);
      sums.reduce(step);
    }
    for (uint32_t rank = 0; rank < 3; ++rank) sums.copy({Place::recv, rank, 0}, {Place::landing, rank, 0}, 4);
    sums.finish();
  };
  auto refused = [&](const std::vector<uint32_t>& order) { return error_of([&] { end(order); }).second; };
  end({0, 1, 2});
  CHECK_CONTAINS(refused({0, 2, 1}), "rank 0 has of element 0 ((0+2)+1); ((0+1)+2) expected");
  CHECK_CONTAINS(refused({0, 1}), "(0+1)");
  CHECK_CONTAINS(refused({0, 1, 1}), "((0+1)+1)");
}

TEST(plans_of_many_ranks_are_made_no_further_than_they_are_run) {
  Setup s = setup(64, 4, {8, 8}, 32 << 20);
  s.slots.chunk_bytes = 1 << 20;
  s.model = Model{};
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const Outcome o = run(s);
  getrusage(RUSAGE_SELF, &after);
  const uint64_t more = static_cast<uint64_t>(after.ru_maxrss - before.ru_maxrss) << 10;
  CHECK(o.steps * sizeof(Step) > 100 << 20 && more < o.steps * sizeof(Step) / 4);
}

TEST(what_cannot_be_simulated_is_refused) {
  auto refused = [](const Setup& s) { return error_of([&] { run(s); }).second; };
  Setup s = setup(4, 1, {4}, 1 << 20);
  s.levels.sizes = {3};
  CHECK_CONTAINS(refused(s), "the levels are for 3 hosts, and there are 4");
  s = setup(4, 1, {4}, 1 << 20);
  s.folded = true;
  s.model.jitter_us = 1;
  CHECK_CONTAINS(refused(s), "with jitter");
  Model model;
  CHECK(!set(model, "no-such", "1"));
  CHECK_CONTAINS(error_of([&] { set(model, "rate-gbit", "0"); }).second,
                 "rate-gbit must be a number above 0");
  CHECK_CONTAINS(error_of([&] { read(model, "/nowhere/model"); }).second, "/nowhere/model cannot be read");
}
