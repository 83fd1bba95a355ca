// What a group on several hosts does now and then, on the network's thread: it notices ends, and tells the
// other hosts that its ranks live, what they wait for and how they ended.
#include <algorithm>
#include <set>
#include <string_view>

#include "base/error.h"
#include "hosts/net_peers.h"

namespace photinus {
namespace {

constexpr double kBeatEvery_s = 0.25, kTellWaitsEvery_s = 0.05;
// What a rank's host has to say of its end, before it is given up without.
constexpr double kWordFromHost_s = 0.12;

}  // namespace

bool NetPeers::tend(double now) {
  say_ends_here();
  const bool soon = look_for_ends(now);
  if (now - beaten_s_ >= kBeatEvery_s) {
    beaten_s_ = now;
    beat();
  }
  if (now - told_waits_s_ >= kTellWaitsEvery_s) {
    told_waits_s_ = now;
    tell_waits();
  }
  return soon;
}

void NetPeers::say_ends_here() {
  for (const uint32_t rank : locals_) {
    const bool has_ended = rank != rank_ && (is_lost(rank) || presence(rank) != Presence::active);
    if (!has_ended || presence(rank) == Presence::absent) continue;
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(ends_[rank].passed_on, true)) continue;
    }
    say_end(rank);
  }
}

// Whether something is suspected that must be looked at soon.
bool NetPeers::look_for_ends(double now) {
  bool soon = false;
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (is_local(rank)) continue;
    bool all_came = true;
    for (const Direction direction : {up, down}) {
      Way& here = way(rank, direction);
      Link* link = here.link.load(std::memory_order_acquire);
      try {
        if (!link) link = adopt(here);
      } catch (const Error& error) {  // a link that could not be made
        if (!here.has_ended) note_loss(rank, text("could not be reached: %s", error.what()));
        here.has_ended = true;
      }
      if (!link || here.has_ended) continue;
      if (link->has_peer_left()) {
        link->leave();
        here.has_ended = true;
      } else if (link->has_failed()) {
        here.has_ended = true;
        const std::string fault = link->fault();
        std::lock_guard lock(mutex_);
        if (ends_[rank].suspected_s == 0) ends_[rank].suspected_s = now;
        if (!fault.empty()) ends_[rank].how = "cannot be reached any more: " + fault;
      } else {
        all_came = false;
      }
    }
    if (all_came) note_left(rank);
    soon |= suspect(rank, now);
  }
  return soon;
}

// A rank that has said that it leaves has left when all that it sent before has come, too: data have streams
// of their own.
void NetPeers::note_left(uint32_t rank) {
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(ends_[rank].said_left, false)) return;
    known_[rank].block.presence.store(Presence::left, std::memory_order_seq_cst);
  }
  say_end(rank);
  wake(rank_);
}

// A link of a rank has ended without a word. Another rank of its host may be about to tell how it went.
bool NetPeers::suspect(uint32_t rank, double now) {
  std::string how;
  {
    std::lock_guard lock(mutex_);
    const double since_s = ends_[rank].suspected_s;
    if (since_s == 0 || ends_[rank].lost.load()) return false;
    const auto there = on_host_of(rank);
    const bool others = std::any_of(there.begin(), there.end(), [&](uint32_t other) {
      return ends_[other].suspected_s == 0 && !is_lost(other) && presence(other) != Presence::left;
    });
    if (others && now - since_s < kWordFromHost_s) return true;
    how = others ? "closed its connections, and its host says no more"
                 : "closed its connections without a goodbye: its process was killed, or its host is gone";
    if (!ends_[rank].how.empty()) how = ends_[rank].how;
  }
  note_loss(rank, how);
  return false;
}

void NetPeers::beat() {
  if (locals_.size() == 1) own().page->heartbeat.fetch_add(1, std::memory_order_relaxed);
  constexpr uint32_t kSignsOfFrame = (kControlBytes - sizeof(Beat)) / sizeof(Sign);
  for (uint32_t first = 0; first < locals_.size(); first += kSignsOfFrame) {
    std::vector<std::byte> payload;
    const uint32_t count = std::min<uint32_t>(kSignsOfFrame, static_cast<uint32_t>(locals_.size()) - first);
    put(payload, Beat{first, count});
    for (uint32_t i = first; i < first + count; ++i)
      put(payload, Sign{views_[locals_[i]].page->heartbeat.load(std::memory_order_relaxed),
                        value(locals_[i], Counter::posted)});
    say_newest(kBeat, payload);
  }
  // Of whom no rank of its host tells, or none any more, nobody can say that it is silent.
  std::set<std::string_view> linked;
  for (uint32_t rank = 0; rank < ranks(); ++rank)
    for (const Direction direction : {up, down})
      if (const Way& here = way(rank, direction);
          here.link.load(std::memory_order_acquire) && !here.has_ended)
        linked.insert(places_[rank].host_key);
  for (uint32_t rank = 0; rank < ranks(); ++rank)
    if (!is_local(rank) &&
        !(heard_of_[rank].load(std::memory_order_relaxed) && linked.contains(places_[rank].host_key)))
      known_[rank].page.heartbeat.fetch_add(1, std::memory_order_relaxed);
}

// Of a thread that has been stuck since the last time; who is in a cycle of waits reads this.
void NetPeers::tell_waits() {
  const WaitRecord& record = own().page->wait_record;
  const uint64_t version = record.version();
  const bool stands = version == seen_wait_;
  seen_wait_ = version;
  const auto facts = record.read();
  if (!stands || (version == said_wait_ && (!facts || facts->affirmed == said_affirmed_))) return;
  if (!say_newest(kWaits, wait_of(rank_))) return;  // once more the next time
  said_wait_ = version;
  said_affirmed_ = facts ? facts->affirmed : 0;
}

std::vector<std::byte> NetPeers::wait_of(uint32_t rank) const {
  const ProcessPage& page = *views_[rank].page;
  const WaitRecord& record = page.wait_record;
  const auto facts = record.read();
  const auto deadlocked = record.deadlocked();
  Waits waits;
  waits.rank = rank;
  waits.process = page.id.load();
  waits.version = facts ? facts->version : record.version();
  std::string call;
  if (facts) {
    waits.affirmed = facts->affirmed;
    waits.lane = facts->lane;
    std::copy_n(facts->waits_for.begin(), std::min(facts->waits_for.size(), std::size(waits.waits_for)),
                waits.waits_for);
    call = facts->text;
  }
  for (size_t i = 0; i < deadlocked.size() && i < std::size(waits.deadlocked); ++i) {
    waits.deadlocked[i][0] = deadlocked[i].process;
    waits.deadlocked[i][1] = deadlocked[i].version;
  }
  waits.text_bytes = static_cast<uint32_t>(call.size());
  std::vector<std::byte> payload;
  put(payload, waits);
  put_text(payload, call, call.size());
  put_text(payload, page.end_reason.read(), kControlBytes - payload.size());
  return payload;
}

}  // namespace photinus
