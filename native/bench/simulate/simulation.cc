#include "simulate/simulation.h"

#include "base/error.h"
#include "collectives/choose.h"
#include "collectives/shm.h"
#include "net/frame.h"
#include "peers/posts.h"
#include "simulate/network.h"
#include "simulate/ranks.h"

namespace photinus::simulate {
namespace {

class Simulation {
 public:
  explicit Simulation(const Setup& setup) : setup_(setup), levels_(setup.levels), model_(setup.model) {
    check_setup();
    if (!setup.followed.empty()) sums_.emplace(levels_, setup.call, setup.followed);
    choose_algorithm();
    make_ranks();
  }

  Outcome run() {
    for (Rank& r : ranks_) {
      begin(r);
      run_at(r, r.now);
    }
    while (!events_.empty()) {
      const Event event = events_.take();
      if (event.kind == Event::Kind::run)
        run_rank(event);
      else if (event.kind == Event::Kind::enter)
        enter(event);
      else
        events_.add(network_->pass(event));
    }
    return outcome();
  }

 private:
  struct Core {
    Time free = 0, busy = 0;
    uint32_t last = UINT32_MAX;
  };

  uint32_t hosts() const { return static_cast<uint32_t>(levels_.hosts.size()); }
  void check_setup() const {
    check(levels_);
    auto wrong = [](const char* why) { throw Error(ErrorKind::invalid_argument, why); };
    if (setup_.calls == 0) wrong("there must be at least one call");
    if (!setup_.followed.empty() &&
        (setup_.folded || setup_.calls > 1 || setup_.call.operation != Operation::all_reduce))
      wrong(
          "sums are followed through one all_reduce of all ranks, not through other operations, several "
          "calls, "
          "or where all hosts but one are left out");
    if (!setup_.folded) return;
    for (const auto& ranks : levels_.hosts)
      if (ranks.size() != levels_.hosts[0].size()) wrong("hosts of different sizes are not alike");
    if (model_.jitter_us > 0 || model_.leaf_hosts > 0 || model_.machines > 0 ||
        has_root(setup_.call.operation))
      wrong("with jitter, several switches, shared cores or a root, hosts do not all do the same");
  }

  void choose_algorithm() {
    std::vector<CallDescriptor> descriptors(levels_.ranks());
    for (CallDescriptor& each : descriptors)
      each.send_offset = each.recv_offset = setup_.in_arenas ? 0 : kNowhere;
    algorithm_ = hosts() == 1
                     ? choose(setup_.call, descriptors, setup_.slots).algorithm
                     : choose(setup_.call, levels_, 0, descriptors, setup_.slots, setup_.net).algorithm;
  }

  void make_ranks() {
    std::vector<uint32_t> host(levels_.ranks()), index(levels_.ranks());
    for (uint32_t h = 0; h < hosts(); ++h)
      for (uint32_t i = 0; i < levels_.hosts[h].size(); ++i) {
        host[levels_.hosts[h][i]] = h;
        index[levels_.hosts[h][i]] = i;
      }
    network_.emplace(model_, std::move(host), hosts());
    const std::vector<uint32_t>& first = levels_.hosts[0];
    if (setup_.folded)
      for (uint32_t i = 0; i < first.size(); ++i)
        if (first[i] != i)
          throw Error(ErrorKind::invalid_argument, "the first host must have the first ranks");
    ranks_.resize(setup_.folded ? first.size() : levels_.ranks());
    const auto cores = static_cast<uint32_t>(model_.cores);
    uint32_t count = 0;
    for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
      Rank& r = ranks_[rank];
      r.rank = rank;
      r.host = network_->host_of(rank);
      if (cores == 0)
        r.core = rank;
      else
        r.core = model_.machines > 0 ? rank % cores : r.host * cores + index[rank] % cores;
      count = std::max(count, r.core + 1);
      link(r, index[rank]);
    }
    cores_.resize(count);
    for (Rank& r : ranks_)
      for (Link& each : r.links) {
        // Where all hosts do alike, what this one sends to the next comes to it from the one before.
        each.to_rank = setup_.folded ? r.rank : each.peer;
        each.to_link = static_cast<uint32_t>(setup_.folded ? r.link_with(mirrored(r, each))
                                                           : ranks_[each.peer].link_with(r.rank));
      }
  }

  // The counterparts, as Levels::counterparts finds them.
  void link(Rank& r, uint32_t index) {
    const auto own = static_cast<uint32_t>(levels_.hosts[r.host].size()), slices = levels_.slices();
    for (size_t level = 0; level < levels_.sizes.size(); ++level)
      for (uint32_t slice = index; slice < slices; slice += own)
        for (uint32_t member = 0; member < levels_.sizes[level]; ++member) {
          if (member == levels_.member_of(r.host, level)) continue;
          Link made;
          made.peer = levels_.carrier(levels_.peer(r.host, level, member), slice);
          made.level = static_cast<uint32_t>(level);
          r.links.push_back(std::move(made));
        }
    auto by_peer = [](const Link& a, const Link& b) { return a.peer < b.peer; };
    std::sort(r.links.begin(), r.links.end(), by_peer);
    const auto same = [](const Link& a, const Link& b) { return a.peer == b.peer; };
    r.links.erase(std::unique(r.links.begin(), r.links.end(), same), r.links.end());
    r.links.shrink_to_fit();
  }

  uint32_t mirrored(const Rank& r, const Link& link) const {
    const uint32_t size = levels_.sizes[link.level], own = levels_.member_of(r.host, link.level);
    const uint32_t member = levels_.member_of(network_->host_of(link.peer), link.level);
    const uint32_t host = levels_.peer(r.host, link.level, (2 * own + size - member) % size);
    return levels_.hosts[host][r.rank];
  }

  // ---- a rank's plan

  void begin(Rank& r) {
    ++r.sequence;
    r.has_met = false;
    for (Link& each : r.links) each.before = each.asked;
    r.now += time_of(model_.call_us * 1e-6);
    r.steps.made.clear();
    r.steps.next = 0;
    r.steps.source.reset();
    if (algorithm_ == Algorithm::flat || !is_lazy()) {
      Plan plan = plan_of(r.rank);
      r.steps.made = std::move(plan.before);
    }
  }

  bool is_lazy() const {
    return hosts() > 1 && setup_.call.operation == Operation::all_reduce && setup_.call.elems > 0 &&
           algorithm_ != Algorithm::flat;
  }
  Plan plan_of(uint32_t rank) const {
    return hosts() > 1 ? net_plan(setup_.call, levels_, rank, algorithm_, setup_.slots, setup_.net)
                       : shm_plan(setup_.call, {rank, levels_.ranks()}, algorithm_, setup_.slots);
  }

  void meet(Rank& r) {
    r.has_met = true;
    if (is_lazy()) {
      r.steps.source =
          net_all_reduce_steps(setup_.call, levels_, r.rank, algorithm_, setup_.slots, setup_.net);
    } else {
      r.steps.made = plan_of(r.rank).after;
      r.steps.next = 0;
    }
  }

  // Does the rank's steps until it must wait, for what nobody knows when it will be, or with a core that
  // others wait for.
  void run_rank(const Event& event) {
    Rank& r = ranks_[event.to];
    Core& core = cores_[r.core];
    if (r.waits != Rank::Waits::no || event.at < r.now) return;  // it was woken for something else since
    if (core.free > event.at) return run_at(r, core.free);
    r.now = event.at;
    if (core.last != r.rank && core.last != UINT32_MAX) r.now += time_of(model_.switch_us * 1e-6);
    core.last = r.rank;
    const Time began = event.at;
    waited_ = 0;
    std::optional<Time> later;
    while (!later && !r.is_done) later = step(r);
    core.free = r.now;
    core.busy += r.now - began - waited_;
    if (!later || r.is_done) return;
    if (*later < kNever) run_at(r, waits_in_host_ ? *later : awake(r, *later));
  }

  // What it waits for has come from another host. Who has waited for longer than it spins is asleep by then,
  // and it takes the thread that watches the sockets to wake it.
  void wake(Rank& r, Time at) {
    r.waits = Rank::Waits::no;
    run_at(r, awake(r, at));
  }
  void run_at(Rank& r, Time at) {
    r.now = at;
    events_.add({r.now, Event::Kind::run, false, r.rank, r.rank});
  }
  Time awake(const Rank& r, Time at) const {
    if (at <= r.now) return r.now;
    return at - r.now > time_of(model_.spin_us * 1e-6) ? at + time_of(model_.wake_us * 1e-6) : at;
  }

  // Until then the rank has its core, unless others want it too.
  std::optional<Time> wait_until(Rank& r, Time at, bool for_others = true) {
    if (at <= r.now) return {};
    waits_in_host_ = !for_others;
    if (at == kNever || model_.cores > 0) return at;
    const Time until = for_others ? awake(r, at) : at;
    waited_ += until - r.now;
    r.now = until;
    return {};
  }

  void spend(Rank& r, double microseconds, double nanoseconds_per_byte, uint64_t bytes) {
    r.now += time_of(microseconds * 1e-6 + nanoseconds_per_byte * 1e-9 * static_cast<double>(bytes));
  }

  // Done, or when to try again.
  std::optional<Time> step(Rank& r) {
    const Step* const s = r.steps.now();
    if (!s) return next_phase(r);
    ++steps_;
    switch (s->kind) {
      case Step::Kind::copy:
        spend(r, 0, model_.copy_ns, s->bytes);
        if (sums_) sums_->copy(s->to, s->from, s->bytes);
        break;
      case Step::Kind::reduce: {
        const auto added = static_cast<double>(s->sources.size() - 1);
        const auto copied = static_cast<double>(s->results.size() - (added > 0 ? 1 : 0));
        spend(r, 0, model_.add_ns * added + model_.copy_ns * copied, s->bytes);
        if (sums_) sums_->reduce(*s);
        break;
      }
      case Step::Kind::advance:
        advance(r, s->counter, mark(r.sequence, s->value));
        break;
      case Step::Kind::wait:
        if (const auto at = wait_until(r, reached(r, s->counter, s->rank, mark(r.sequence, s->value)), false))
          return at;
        break;
      case Step::Kind::send:
        send(r, *s);
        break;
      case Step::Kind::receive: {
        Link& link = r.links[r.link_with(s->rank)];
        ++link.asked;
        if (sums_) link.places.push_back({s->to, s->bytes});
        break;
      }
      case Step::Kind::wait_received:
        if (const auto at = take_frames(r, *s)) return at;
        break;
      case Step::Kind::wait_sent:  // what was sent lies in the kernel
        break;
      case Step::Kind::tell:
        for (Link& link : r.links)
          if (link.level == s->value) link.is_untold = true;
        break;
      case Step::Kind::hear:
        if (const auto at = hear(r, s->value)) return at;
        break;
      case Step::Kind::start_copy:  // of GPUs, whose plans are not modelled
      case Step::Kind::wait_copied:
      case Step::Kind::wait_room:
      case Step::Kind::let_go:
        break;
    }
    ++r.steps.next;
    return {};
  }

  // Before the meeting, the meeting, the end.
  std::optional<Time> next_phase(Rank& r) {
    if (r.has_met) {
      if (r.sequence == setup_.calls) {
        r.is_done = true;
        ended_ = std::max(ended_, r.now);
        ++done_;
      } else {
        begin(r);
      }
      return {};
    }
    if (r.marks[0].reached(r.sequence) == kNever) advance(r, Counter::posted, r.sequence);
    const auto at = wait_until(r, reached(r, Counter::posted, kEveryone, r.sequence), false);
    if (!at) meet(r);
    return at;
  }

  void advance(Rank& r, Counter counter, uint64_t value) {
    r.marks[static_cast<size_t>(counter)].add(value, r.now);
    for (const uint32_t waiter : r.waiters) {
      Rank& other = ranks_[waiter];
      if (other.waits != Rank::Waits::counter) continue;
      other.waits = Rank::Waits::no;
      run_at(other, std::max(other.now, r.now + time_of(model_.counter_us * 1e-6)));
    }
    r.waiters.clear();
  }

  Time reached(Rank& r, Counter counter, uint32_t rank, uint64_t value) {
    Time at = 0;
    for (const uint32_t other : levels_.hosts[r.host]) {
      if (other == r.rank || (rank != kEveryone && rank != other)) continue;
      const Time then = ranks_[other].marks[static_cast<size_t>(counter)].reached(value);
      if (then == kNever) {
        ranks_[other].waiters.push_back(r.rank);
        r.waits = Rank::Waits::counter;
        return kNever;
      }
      at = std::max(at, then + time_of(model_.counter_us * 1e-6));
    }
    return at;
  }

  // In one call with a frame of so many bytes, of which `within` are in what is told.
  void tell(Rank& r, Link& link, uint64_t frame_bytes, uint64_t within) {
    link.is_untold = false;
    spend(r, model_.send_us, model_.socket_ns, frame_bytes);
    events_.add({r.now, Event::Kind::leave, true, r.rank, link.to_rank, link.to_link, kToldBytes + within});
  }

  void send(Rank& r, const Step& s) {
    Link& link = r.links[r.link_with(s.rank)];
    ++frames_;
    const bool goes_along = link.is_untold && kToldBytes + s.bytes <= sizeof(FrameHeader) + kControlBytes;
    const bool is_given = link.is_untold;
    if (is_given) tell(r, link, s.bytes, goes_along ? s.bytes : 0);
    if (sums_) sums_->send(uint64_t{link.to_rank} << 32 | link.to_link, link.sent, s.from, s.bytes);
    ++link.sent;
    if (goes_along) return;
    if (!is_given) spend(r, model_.send_us, model_.socket_ns, s.bytes);
    events_.add({r.now, Event::Kind::leave, false, r.rank, link.to_rank, link.to_link, s.bytes});
  }

  std::optional<Time> take_frames(Rank& r, const Step& s) {
    const size_t index = r.link_with(s.rank);
    Link& link = r.links[index];
    while (link.taken < link.before + s.value) {
      if (link.taken == link.arrived) {
        r.waits = Rank::Waits::frame;
        r.waits_for = index;
        return kNever;
      }
      const auto [at, bytes, is_with_told] = link.waiting[link.first];
      if (const auto later = wait_until(r, at)) return later;
      if (++link.first == link.waiting.size()) {
        link.waiting.clear();
        link.first = 0;
      }
      if (sums_) {
        const auto& [to, expected] = link.places[0];
        if (expected != bytes)
          throw Error(ErrorKind::system, text("rank %u gets %llu bytes from rank %u in place of %llu", r.rank,
                                              static_cast<unsigned long long>(bytes), link.peer,
                                              static_cast<unsigned long long>(expected)));
        sums_->receive(uint64_t{r.rank} << 32 | index, link.taken, to, bytes);
        link.places.erase(link.places.begin());
      }
      ++link.taken;
      spend(r, is_with_told ? 0 : model_.receive_us, model_.socket_ns, bytes);
    }
    return {};
  }

  std::optional<Time> hear(Rank& r, uint64_t level) {
    for (Link& link : r.links)
      if (link.is_untold) tell(r, link, 0, 0);
    Time last = r.now;
    size_t heard = 0;
    for (const Link& link : r.links) {
      if (link.level != level) continue;
      if (link.told < r.sequence) {
        r.waits = Rank::Waits::told;
        r.waits_for = level;
        return kNever;
      }
      last = std::max(last, link.told_at[r.sequence % 2]);
      ++heard;
    }
    if (const auto at = wait_until(r, last)) return at;
    spend(r, model_.receive_us * static_cast<double>(heard), 0, 0);
    return {};
  }

  void enter(const Event& event) {
    Rank& r = ranks_[event.to];
    Link& link = r.links[event.link];
    const Time at = std::max(network_->enter(event), link.last);
    link.last = at;
    if (event.is_told) {
      ++link.told;
      link.told_at[link.told % 2] = at;
    }
    const bool is_frame = !event.is_told || event.frame_bytes() > 0;
    if (is_frame) {
      ++link.arrived;
      link.waiting.push_back({at, event.frame_bytes(), event.is_told});
    }
    if ((event.is_told && r.waits == Rank::Waits::told && r.waits_for == link.level) ||
        (is_frame && r.waits == Rank::Waits::frame && r.waits_for == event.link))
      wake(r, at);
  }

  Outcome outcome() {
    if (done_ != ranks_.size())
      for (const Rank& r : ranks_)
        if (!r.is_done)
          throw Error(
              ErrorKind::system,
              text("rank %u is stuck in call %llu%s", r.rank, static_cast<unsigned long long>(r.sequence),
                   setup_.folded ? ": some pieces are empty, so hosts are not alike; simulate all of them, "
                                   "or give chunks more memory"
                                 : ""));
    Outcome o;
    o.algorithm = algorithm_;
    const double calls = setup_.calls, all = static_cast<double>(ended_);
    o.seconds = all / kPerSecond / calls;
    o.sent_bytes = static_cast<double>(network_->sent_bytes()) / calls;
    o.received_bytes = static_cast<double>(network_->received_bytes()) / calls;
    o.least_bytes = 2 * (hosts() - 1.0) / hosts() *
                    static_cast<double>(setup_.call.elems * size_bytes(setup_.call.dtype));
    o.card_out = static_cast<double>(network_->card_out()) / all;
    o.card_in = static_cast<double>(network_->card_in()) / all;
    o.switches = static_cast<double>(network_->switches()) / all;
    for (const Core& core : cores_) o.core = std::max(o.core, static_cast<double>(core.busy) / all);
    o.frames = frames_;
    o.steps = steps_;
    if (sums_) {
      sums_->finish();
      o.sums = sums_->elements();
    }
    return o;
  }

  const Setup& setup_;
  const Levels& levels_;
  const Model& model_;
  Algorithm algorithm_ = Algorithm::flat;
  std::optional<Network> network_;
  std::vector<Rank> ranks_;
  std::vector<Core> cores_;
  std::optional<Sums> sums_;
  Events<Event> events_;
  Time ended_ = 0, waited_ = 0;
  size_t done_ = 0;
  uint64_t frames_ = 0, steps_ = 0;
  bool waits_in_host_ = false;
};

}  // namespace

std::string Outcome::binds() const {
  const std::pair<double, const char*> all[] = {
      {std::max(card_out, card_in), "cards"}, {core, "cores"}, {switches, "switches"}};
  const auto [share, what] = *std::max_element(std::begin(all), std::end(all));
  if (share >= 0.8) return text("%s (busy %.0f %%)", what, 100 * share);
  return text("waiting (%s busy %.0f %%)", what, 100 * share);
}

Outcome run(const Setup& setup) {
  return Simulation(setup).run();
}

}  // namespace photinus::simulate
