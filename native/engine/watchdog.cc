#include "engine/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/log.h"

namespace photinus {
namespace {

// A gap between looks that are a tenth of a second apart: this process itself did not run, and what it missed
// meanwhile is nobody's fault.
constexpr double kOwnPause_s = 1.5;
// A cycle must stand for so long before it counts.
constexpr double kCycleStands_s = 0.02;
constexpr double kSuspicion_s = 0.5;  // for so long, if a thread may free it yet, until it is spoken of,
constexpr double kSpokenOf_s = 10;    // and not sooner in a wait: a process that is stopped has an old record
constexpr size_t kRanksTold = 4;

std::string brackets(const std::vector<uint32_t>& ranks) {
  std::string out = "[";
  for (size_t i = 0; i < ranks.size(); ++i) out += text(i ? ", %u" : "%u", ranks[i]);
  return out + "]";
}

std::string list_of(const std::vector<uint32_t>& ranks) {
  std::string out = brackets(ranks);
  return (ranks.size() == 1 ? "rank " : "ranks ") + out.substr(1, out.size() - 2);
}

}  // namespace

double Watchdog::look(WaitState& wait, const std::function<std::vector<uint32_t>()>& missing_now,
                      const Describe& description, uint64_t lane, Alone caller) {
  const double now = note_look(wait);
  if (group_.is_over()) group_.check(description());
  if (!look_for_ends(wait, missing_now, "", description)) return 0;
  const std::vector<uint32_t> missing = missing_now();
  if (missing.empty()) return 0;  // somebody has just come
  look_for_life(wait, missing, description, now);
  if (!wait.spoke && wait.deadline.elapsed_s() >= group_.options.limits.waiting_s) {
    wait.spoke = true;
    say(text("rank %u of %u has been waiting for %.0f s for ranks %s in %s; it gives up in %.0f s.%s",
             group_.rank(), group_.ranks(), wait.deadline.elapsed_s(), brackets(missing).c_str(),
             description().c_str(), wait.deadline.left_s(), what_they_do(missing).c_str()));
  }
  double nap_s = std::min(kSleepSlice_s, std::max(wait.deadline.left_s(), 0.001));
  if (wait.consequence_since_s > 0) nap_s = std::min(nap_s, 0.01);
  if (caller != Alone::no)
    nap_s = std::min(nap_s, look_for_deadlock(wait, missing, description, lane, caller, now));
  if (wait.deadline.passed()) {
    std::string message =
        text("%s: rank %u of %u waited %.1f s for %s, which ", description().c_str(), group_.rank(),
             group_.ranks(), wait.deadline.elapsed_s(), list_of(missing).c_str());
    message += missing.size() == 1 ? "is alive but has not come:" : "are alive but have not come:";
    for (uint32_t rank : missing)
      message += wait.is_message
                     ? text(" %s;", group_.peers->who(rank).c_str())
                     : text(" %s is at #%llu;", group_.peers->who(rank).c_str(),
                            static_cast<unsigned long long>(group_.peers->value(rank, Counter::posted)));
    throw Error(ErrorKind::timeout,
                message +
                    " a longer step there, a missing call, or a hang. Raise the timeout (timeout=, or "
                    "PHOTINUS_TIMEOUT_S) if the step may take longer." +
                    what_they_do(missing));
  }
  return nap_s;
}

double Watchdog::look_at_copy(WaitState& wait, double nap_s,
                              const std::function<std::vector<uint32_t>()>& needed,
                              const Describe& description) {
  note_look(wait);
  if (group_.is_over()) group_.check(description());
  if (needed) look_for_ends(wait, needed, "a copy of its own tensor", description);
  if (wait.deadline.passed())
    throw Error(
        ErrorKind::timeout,
        text("%s: rank %u of %u waited until the deadline of %.1f s for a copy of its own tensor, which "
             "has not ended: the device hangs or is very slow.",
             description().c_str(), group_.rank(), group_.ranks(), wait.deadline.limit_s()));
  return std::min({kSleepSlice_s, nap_s, std::max(wait.deadline.left_s(), 0.001)});
}

double Watchdog::note_look(WaitState& wait) {
  const double now = now_s();
  if (wait.last_look_s > 0 && now - wait.last_look_s > kOwnPause_s) {
    wait.deadline.extend(now - wait.last_look_s);
    std::lock_guard lock(mutex_);
    for (Sign& sign : signs_) sign.since_s = now;
  }
  if (wait.first_look_s == 0) wait.first_look_s = now;
  wait.last_look_s = now;
  return now;
}

// What ranks that have not come wait for themselves, as far as they show it.
std::string Watchdog::what_they_do(const std::vector<uint32_t>& missing) const {
  std::string out;
  for (size_t i = 0; i < missing.size() && i < kRanksTold; ++i) {
    const auto facts = (*group_.peers)[missing[i]].page->wait_record.read();
    if (facts && !group_.peers->is_lost(missing[i]))
      out += " " + group_.peers->who(missing[i]) + " waits in " + facts->text + ".";
  }
  return out;
}

// --- ranks that will not come

// What is known of a rank that will not come; empty while it may still come.
std::string Watchdog::what_became_of(uint32_t rank) const {
  if (rank == group_.rank()) return "";
  const bool lost =
      group_.peers->is_lost(rank);  // before what the rank wrote, or its last words could be missed
  const Presence presence = group_.peers->presence(rank);
  std::string reason = group_.peers->reason(rank);
  if (reason.empty()) reason = (*group_.peers)[rank].page->end_reason.read();
  if (!reason.empty() && reason.back() == '.') reason.pop_back();  // the sentence goes on
  if (presence == Presence::left)
    return group_.peers->who(rank) + " has left the group (it closed it, or its script ended)" +
           (reason.empty() ? "" : " after: " + reason);
  if (presence == Presence::failed) return group_.peers->who(rank) + " gave up: " + reason;
  if (!lost) return "";
  const std::string gpu = (*group_.peers)[rank].block->gpu.read();
  return group_.peers->who(rank) + (gpu.empty() ? " " : ", with tensors on " + gpu + ", ") +
         group_.peers->how_it_went(rank) + (reason.empty() ? "" : " after: " + reason);
}

// False when the operation can go on at once. `awaited`: instead of the missing ranks.
bool Watchdog::look_for_ends(WaitState& wait, const std::function<std::vector<uint32_t>()>& missing_now,
                             const std::string& awaited, const Describe& situation) {
  auto presence = [&](uint32_t rank) { return group_.peers->presence(rank); };
  // Whoever is missing may never come; and a rank that has failed ends the operation for all, missing or not.
  uint32_t gone = UINT32_MAX;
  const std::vector<uint32_t> missing = missing_now();
  std::vector<bool> lost(
      group_.ranks());  // read before presences: a rank that gives up and then ends gave up
  for (uint32_t rank = 0; rank < group_.ranks(); ++rank) lost[rank] = group_.peers->is_lost(rank);
  auto is_gone = [&](uint32_t rank) { return presence(rank) == Presence::left || lost[rank]; };
  if (!wait.any_will_do || std::all_of(missing.begin(), missing.end(), is_gone))
    for (uint32_t rank : missing)
      if (gone == UINT32_MAX && is_gone(rank)) gone = rank;
  for (uint32_t rank = 0; rank < group_.ranks() && gone == UINT32_MAX; ++rank)
    if (rank != group_.rank() && presence(rank) == Presence::failed) gone = rank;
  if (gone == UINT32_MAX) return !missing.empty();
  // A rank that simply died explains those that gave up because of it.
  for (uint32_t rank = 0; rank < group_.ranks(); ++rank)
    if (lost[rank] && presence(rank) == Presence::active) gone = rank;
  if (presence(gone) == Presence::failed) {
    const uint32_t culprit = (*group_.peers)[gone].block->culprit.load(std::memory_order_acquire);
    if (culprit != kOwnFault && culprit != group_.rank()) {
      if (group_.peers->is_lost(culprit)) {
        gone = culprit;
      } else {
        if (wait.consequence_since_s == 0) wait.consequence_since_s = now_s();
        if (now_s() - wait.consequence_since_s < kRootCausePatience_s + group_.peers->transit_s())
          return true;
      }
    }
  }
  // A rank that did its part and then went is not missed: what it wrote last came before its end.
  if (presence(gone) != Presence::failed && missing_now() != missing) return false;
  if ((*group_.peers)[gone].block->in_deadlock.load(std::memory_order_acquire))
    throw Deadlock(group_.peers->reason(gone) + " " + group_.peers->who(group_.rank()) +
                   " waited for them in " + situation() + ".");
  learn_of_deadlock(wait);
  const std::string whom = !awaited.empty() ? awaited : missing.empty() ? "nobody else" : list_of(missing);
  // Who left in order did not fail: a restart would end as this did.
  const char* advice = presence(gone) == Presence::left
                           ? "All ranks have to make the same calls: give each the same number of batches, "
                             "and let all leave a loop in the same one."
                           : "Its own output says more; restart the job to go on from the last checkpoint.";
  throw PeerLost(gone, text("%s. Rank %u of %u waited %.2f s for %s in %s. %s", what_became_of(gone).c_str(),
                            group_.rank(), group_.ranks(), wait.deadline.elapsed_s(), whom.c_str(),
                            situation().c_str(), advice));
}

// --- ranks that show no sign of life

void Watchdog::look_for_life(const WaitState& wait, const std::vector<uint32_t>& missing,
                             const Describe& description, double now) {
  const Limits& limits = group_.options.limits;
  std::lock_guard lock(mutex_);
  for (uint32_t rank : missing) {
    if (rank == group_.rank()) continue;
    Sign& sign = signs_[rank];
    const uint64_t heartbeat = (*group_.peers)[rank].page->heartbeat.load(std::memory_order_relaxed);
    if (heartbeat != sign.heartbeat || sign.since_s == 0) {
      if (sign.suspected)
        say(text("%s shows signs of life again after %.1f s; rank %u waits on in %s",
                 group_.peers->who(rank).c_str(), now - sign.since_s, group_.rank(), description().c_str()));
      sign = {heartbeat, now, false};
      continue;
    }
    // Between waits nobody looked: this process may have been stopped together with that rank.
    const double silent_s = now - std::max(sign.since_s, wait.first_look_s);
    if (silent_s < limits.suspect_s) continue;
    const std::string held = group_.peers->what_holds(rank);
    const std::string silence =
        text("%s has shown no sign of life for %.1f s%s", group_.peers->who(rank).c_str(), silent_s,
             held.empty() ? "" : (" (" + held + ")").c_str());
    if (silent_s >= limits.grace_s)
      throw PeerLost(
          rank, text("%s, longer than the grace of %.3g s. Rank %u of %u waited for it in %s. Continue the "
                     "process in time (kill -CONT), or raise PHOTINUS_GRACE_S.",
                     silence.c_str(), limits.grace_s, group_.rank(), group_.ranks(), description().c_str()));
    if (!sign.suspected)
      say(text("rank %u suspects that a rank hangs: %s; it is given up in %.0f s. Waiting in %s",
               group_.rank(), silence.c_str(), limits.grace_s - silent_s, description().c_str()));
    sign.suspected = true;
  }
}

// --- ranks that wait for each other

// Processes publish what their only calling thread is stuck in. A path of such waits that leads back here
// cannot end: somebody called another group, another order, or a receive that nobody answers. It may lead
// through any process that this one has met, whatever the group. A record may be stale, of a process that
// could go on but was not given a core yet; so a cycle counts only when each process in it has looked again
// since it was seen, and found itself still stuck: those that are stuck cannot free each other. A process
// with threads that may call something yet does not affirm that it is stuck, so its cycle is only spoken of.
double Watchdog::look_for_deadlock(WaitState& wait, const std::vector<uint32_t>& missing,
                                   const Describe& description, uint64_t lane, Alone caller, double now) {
  // Who waits for this rank may be about to go on by what it has sent: it does not affirm that it is stuck.
  if (group_.peers->has_data_under_way()) return kSleepSlice_s;
  ProcessPage& mine = *group_.peers->own().page;
  if (caller == Alone::yes) mine.wait_record.affirm();
  std::vector<uint64_t> waits_for;
  for (uint32_t rank : missing) waits_for.push_back((*group_.peers)[rank].page->id.load());
  if (wait.published != missing || wait.published_for != waits_for ||
      wait.published_version != mine.wait_record.version()) {
    wait.published_version = mine.wait_record.write({lane, waits_for, description()});
    wait.published_for = waits_for;
    wait.published = missing;
    for (uint32_t rank : missing) group_.peers->wake(rank);  // so that both sides see the cycle
  }
  struct Stop {
    Processes::Process process;
    WaitRecord::Facts facts;
    size_t came_from;
  };
  const Processes& processes = group_.options.progress->processes();
  const uint64_t own_id = mine.id.load();
  learn_of_deadlock(wait);
  std::vector<Stop> stops;
  std::set<uint64_t> seen;
  auto visit = [&](uint64_t id, size_t came_from) {
    if (!seen.insert(id).second) return;
    auto process = processes.find(id);
    if (!process) return;
    if (auto facts = process->page->wait_record.read()) stops.push_back({*process, *facts, came_from});
  };
  for (uint64_t id : waits_for) visit(id, SIZE_MAX);
  size_t last = SIZE_MAX;
  for (size_t i = 0; i < stops.size() && last == SIZE_MAX; ++i) {
    for (uint64_t id : std::vector<uint64_t>(stops[i].facts.waits_for)) {
      if (id == own_id)
        last = i;
      else
        visit(id, i);
    }
  }
  if (last == SIZE_MAX) {
    wait.cycle = 0;
    return kSleepSlice_s;
  }
  uint64_t fingerprint = 1;
  bool one_lane = true;
  std::vector<Stop> cycle;
  std::vector<uint64_t> affirmed;
  for (size_t i = last; i != SIZE_MAX; i = stops[i].came_from) {
    const WaitRecord::Facts& facts = stops[i].facts;
    cycle.push_back(stops[i]);
    affirmed.push_back(facts.affirmed);
    fingerprint = (fingerprint * 31 + facts.version) * 1000003 + stops[i].process.page->id.load();
    one_lane &= facts.lane == lane;
  }
  if (one_lane) return kSleepSlice_s;  // ranks at different points of the same sequence: somebody will move
  auto wake_all = [&] {
    for (const Stop& stop : cycle) wake(stop.process.page->futex);
  };
  if (wait.cycle != fingerprint) {
    wait.cycle = fingerprint;
    wait.cycle_since_s = now;
    wait.affirmed = affirmed;
    wake_all();
  }
  bool all_looked_again = caller == Alone::yes;
  for (size_t i = 0; i < cycle.size(); ++i) all_looked_again &= affirmed[i] > wait.affirmed[i] + 1;
  const double stood_s = now - wait.cycle_since_s - group_.peers->transit_s();
  const bool stands_long = !all_looked_again && stood_s > kSuspicion_s;
  const bool is_suspected = stands_long && wait.deadline.elapsed_s() > kSpokenOf_s;
  if (stands_long && (!is_suspected || wait.has_spoken_of_cycle)) return kSleepSlice_s;
  if (!is_suspected && (!all_looked_again || stood_s < kCycleStands_s)) {
    wake_all();
    return 0.005;
  }
  auto named = [&](uint64_t id) {
    auto process = processes.find(id);
    return process ? process->name : group_.peers->who(group_.rank());
  };
  std::string message = (is_suspected ? "ranks wait for each other, perhaps for ever: "
                                      : "deadlock: ranks wait for each other and can never go on: ") +
                        named(own_id) + " in " + description();
  for (auto stop = cycle.rbegin(); stop != cycle.rend(); ++stop)
    message += "; " + stop->process.name + " in " + stop->facts.text;
  message += ". Every rank must make its groups, and call their operations, in the same order.";
  if (is_suspected) {
    wait.has_spoken_of_cycle = true;
    say(message + text(" Unless a thread that has called nothing yet frees them, this wait ends in %.0f s.",
                       wait.deadline.left_s()));
    return kSleepSlice_s;
  }
  std::vector<WaitRecord::Wait> waits;  // first of the one that waits for this rank, and will look here
  for (const Stop& stop : cycle) waits.push_back({stop.process.page->id.load(), stop.facts.version});
  waits.push_back({own_id, wait.published_version});
  end_deadlock(waits, message);
}

// Whoever this rank waits for may have found the deadlock before, and gone on or away.
void Watchdog::learn_of_deadlock(const WaitState& wait) {
  const WaitRecord::Wait own{group_.peers->own().page->id.load(), wait.published_version};
  for (uint32_t rank : wait.published) {
    const std::vector<WaitRecord::Wait> deadlocked = (*group_.peers)[rank].page->wait_record.deadlocked();
    if (std::count(deadlocked.begin(), deadlocked.end(), own))
      end_deadlock(deadlocked, (*group_.peers)[rank].page->end_reason.read());
  }
}

void Watchdog::end_deadlock(const std::vector<WaitRecord::Wait>& waits, const std::string& message) {
  ProcessPage& mine = *group_.peers->own().page;
  // Ranks outside of the cycle, which wait in other groups for ranks in it, read this too.
  mine.end_reason.write(message);
  mine.wait_record.set_deadlocked(waits);
  for (const WaitRecord::Wait& wait : waits)
    if (auto process = group_.options.progress->processes().find(wait.process)) wake(process->page->futex);
  throw Deadlock(message);
}

}  // namespace photinus
