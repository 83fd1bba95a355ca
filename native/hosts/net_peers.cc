#include "hosts/net_peers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/interrupt.h"

namespace photinus {
namespace {

constexpr double kGoodbye_s = 1;  // for what was said last to leave this host
constexpr double kNever_s = std::numeric_limits<double>::infinity();
constexpr size_t kGroupNameBytes = 40;
constexpr const char* kAnyJob = "photinus";

// Names that no other group of the job has: the address tells groups of one name apart.
std::string name_of(const ShmPeers::Options& ranks) {
  uint32_t hash = 0x811c9dc5;  // FNV-1a: the same on every host
  for (const char c : ranks.address) hash = (hash ^ static_cast<unsigned char>(c)) * 0x01000193;
  return text("%s-%08x", ranks.name.substr(0, kGroupNameBytes).c_str(), hash);
}

// Memory that takes no place before it is used.
std::shared_ptr<void> zeroed(size_t bytes) {
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw_errno("taking memory for what ranks of other hosts say");
  return {memory, [bytes](void* at) { munmap(at, bytes); }};
}

}  // namespace

NetPeers::NetPeers(const Options& options)
    : Peers(options.ranks.rank, options.ranks.world_size),
      places_(options.places),
      job_(options.job.empty() ? kAnyJob : options.job.substr(0, kNameBytes - 1)),
      name_(name_of(options.ranks)),
      network_(options.network ? options.network : Network::of_this_process()),
      local_index_(ranks(), UINT32_MAX),
      processes_(options.processes),
      timeout_s_(options.ranks.timeout_s),
      grace_s_(options.grace_s),
      ways_(std::make_unique<Way[]>(2 * ranks())),
      ends_(std::make_unique<End[]>(ranks())),
      heard_of_(ranks()) {
  locals_ = on_host_of(rank_);
  for (uint32_t i = 0; i < locals_.size(); ++i) local_index_[locals_[i]] = i;
  ShmPeers::Options here = options.ranks;
  here.rank = local_index_[rank_];
  here.world_size = static_cast<uint32_t>(locals_.size());
  here.all_ranks = ranks();
  here.on_loss = [network = network_] { network->attend(); };
  // Hosts that are one machine in truth must not meet.
  here.address.insert(here.address.rfind(':'), text("-%u", locals_[0]));
  shm_ = std::make_shared<ShmPeers>(here);
  for (uint32_t i = 0; i < locals_.size(); ++i) views_[locals_[i]] = (*shm_)[i];
  known_memory_ = std::static_pointer_cast<Known>(zeroed(ranks() * sizeof(Known)));
  known_ = known_memory_.get();
  for (uint32_t rank = 0; rank < ranks(); ++rank) {
    if (local_index_[rank] != UINT32_MAX) continue;
    Known& known = known_[rank];
    PeerView& view = views_[rank];
    view.block = &known.block;
    view.page = {known_memory_, &known.page};
    view.sent = known.sent;
    view.received = known.received;
    known.block.presence.store(Presence::active, std::memory_order_relaxed);
  }
  Connections& connections = network_->connections();
  connections.reserve(options.counterparts.size());
  Membership member;
  member.job = job_;
  member.attempt = options.attempt;
  member.rank = rank_;
  member.ranks = ranks();
  member.host = places_[rank_].host_name.substr(0, kNameBytes - 1);
  member.key = key_of(options.ranks.address, job_);
  for (const Direction direction : {up, down}) {
    member.group = group(direction);
    connections.join(member);
  }
  try {
    for (uint32_t rank = 0; rank < ranks(); ++rank)
      if (!is_local(rank)) open(rank, rank < rank_ ? up : down);
    for (const uint32_t rank : options.counterparts)
      if (rank > rank_) open(rank, up);
    await_links(options.counterparts, timeout_s_);
  } catch (const std::exception& error) {  // others may have all their links, and wait in a call already
    end_openings();
    set_reason(error.what());
    end(Presence::failed, kOwnFault, false);
    close();
    throw;
  }
  network_->add(this, &own().page->futex);
}

// Dials where this rank is the one to, else awaits for ever.
void NetPeers::open(uint32_t rank, Direction direction) {
  Connections& connections = network_->connections();
  auto handler = [this, rank](uint32_t channel, uint64_t sequence, const std::byte* payload, size_t bytes) {
    hear(rank, channel, sequence, payload, bytes);
  };
  const bool dials = (rank > rank_) == (direction == up);
  std::lock_guard lock(mutex_);
  Way& here = way(rank, direction);
  if (here.opening) return;
  if (dials)
    here.opening = connections.dial(job_, group(direction), rank, places_[rank].addresses,
                                    Deadline::in(timeout_s_), handler);
  else
    here.opening = connections.await(job_, group(direction), rank, Deadline::in(kNever_s), handler);
}

// The link of an opening, once it stands. Throws why it could not be made.
Link* NetPeers::adopt(Way& way) {
  if (Link* const link = way.link.load(std::memory_order_acquire)) return link;
  std::lock_guard lock(mutex_);
  if (!way.opening || way.link.load()) return way.link.load();
  way.kept = way.opening->link();
  if (!way.kept) return nullptr;
  way.kept->endure(grace_s_);
  way.link.store(way.kept.get(), std::memory_order_release);
  return way.kept.get();
}

void NetPeers::await_links(const std::vector<uint32_t>& wanted, double timeout_s) {
  const Deadline deadline = Deadline::in(timeout_s);
  std::vector<uint32_t> missing = wanted;
  while (true) {
    std::erase_if(missing, [&](uint32_t rank) { return adopt(way(rank, up)) != nullptr; });
    if (missing.empty()) return;
    for (uint32_t rank = 0; rank < ranks(); ++rank) {
      const bool gave_up = presence(rank) == Presence::failed;
      if (rank == rank_ || !(gave_up || is_lost(rank))) continue;
      throw Error(ErrorKind::peer_lost, who(rank) + " " + (gave_up ? "gave up" : how_it_went(rank)) +
                                            " while group " + name_ + " was being made" +
                                            (gave_up ? ": " + reason(rank) : ""));
    }
    // Who is dialled has a deadline of its own, whose error says what was met at its address.
    const auto late =
        std::find_if(missing.begin(), missing.end(), [&](uint32_t rank) { return rank < rank_; });
    if (late != missing.end() && deadline.passed())
      throw Error(
          ErrorKind::timeout,
          text("%s has no link with %s after %.1f s: it has not come to %s. Is that address reached from "
               "its host (a firewall)? PHOTINUS_INTERFACE names the network cards to use.",
               who(rank_).c_str(), who(*late).c_str(), deadline.elapsed_s(),
               network_->connections().addresses()[0].text().c_str()));
    check_interrupt("links of group " + name_);
    if (!network_->poll()) usleep(100);
  }
}

std::vector<uint32_t> NetPeers::on_host_of(uint32_t rank) const {
  std::vector<uint32_t> found;
  for (uint32_t other = 0; other < places_.size(); ++other)
    if (places_[other].host_key == places_[rank].host_key) found.push_back(other);
  return found;
}

std::string NetPeers::who(uint32_t rank) const {
  return text("rank %u (pid %d on %s)", rank, places_[rank].pid, places_[rank].host_name.c_str());
}

bool NetPeers::is_lost(uint32_t rank) const {
  if (is_local(rank)) return shm_->is_lost(local_index_[rank]);
  return ends_[rank].lost.load(std::memory_order_acquire) ||
         shm_->loss(rank).state.load(std::memory_order_acquire) == Loss::known;
}

std::string NetPeers::how_it_went(uint32_t rank) const {
  if (is_local(rank)) return shm_->how_it_went(local_index_[rank]);
  const Loss& loss = shm_->loss(rank);
  if (loss.state.load(std::memory_order_acquire) == Loss::known) return loss.how;
  std::lock_guard lock(mutex_);
  return ends_[rank].how;
}

std::string NetPeers::what_holds(uint32_t rank) const {
  return is_local(rank) ? shm_->what_holds(local_index_[rank]) : "";
}

void NetPeers::announce_sleep() {
  shm_->announce_sleep();
  network_->resume();
}

// --- links

// What has come may be for another thread of this process, in whichever group.
bool NetPeers::poll() {
  const bool moved = network_->poll();
  Futex& futex = own().page->futex;
  if (moved && futex.asleep.load(std::memory_order_seq_cst)) photinus::wake(futex);
  return moved;
}

Link* NetPeers::link(uint32_t rank, LinkUse use) {
  const bool lower_sends = use == LinkUse::collective || (use == LinkUse::send) == (rank_ < rank);
  Way& here = way(rank, lower_sends ? up : down);
  Link* link = here.link.load(std::memory_order_acquire);
  if (!link) {
    open(rank, lower_sends ? up : down);
    link = adopt(here);
  }
  return link && !link->has_failed() && !link->has_peer_left() ? link : nullptr;
}

void NetPeers::forget(uint32_t channel) {
  for (uint32_t i = 0; i < 2 * ranks(); ++i)
    if (Link* const link = ways_[i].link.load(std::memory_order_acquire)) link->forget(channel);
}

// A link that has failed says nothing; what became of its peer is found by look_for_ends().
void NetPeers::say(Link* link, uint32_t channel, uint64_t sequence, std::span<const std::byte> payload,
                   uint32_t stream) {
  const bool at_once = stream == kAtOnce;
  try {
    if (link)
      link->send_control(channel, sequence, payload.data(), payload.size(),
                         at_once ? Link::kControlStream : stream, !at_once);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::invalid_argument) throw;
  }
}

void NetPeers::say_to_all(uint32_t channel, std::span<const std::byte> payload) {
  for (uint32_t i = 0; i < 2 * ranks(); ++i)
    if (Link* const link = ways_[i].link.load(std::memory_order_acquire)) say(link, channel, 0, payload);
}

bool NetPeers::say_newest(uint32_t channel, std::span<const std::byte> payload) {
  bool all = true;
  for (uint32_t i = 0; i < 2 * ranks(); ++i) {
    Link* const link = ways_[i].link.load(std::memory_order_acquire);
    if (!link) continue;
    if (link->is_behind())
      all = false;
    else
      say(link, channel, 0, payload);
  }
  return all;
}

// --- what is told

void NetPeers::tell(uint32_t rank, uint64_t sequence, std::span<const std::byte> what, uint32_t stream) {
  say(way(rank, up).link.load(std::memory_order_acquire), kTold, sequence, what, stream);
}

std::span<const std::byte> NetPeers::told(uint32_t rank, uint64_t sequence) const {
  const Told& told = known_[rank].told[sequence % 2];
  if (told.sequence.load(std::memory_order_acquire) != sequence) return {};
  return {told.what, told.bytes};
}

void NetPeers::show(uint32_t peer, Offer& offer) {
  if (is_local(peer)) return shm_->show(local_index_[peer], offer);
  const PeerView& view = views_[peer];
  const bool mine = &offer >= view.sent && &offer < view.sent + kOffers;
  OfferShown shown;
  shown.index = static_cast<uint32_t>(&offer - (mine ? view.sent : view.received));
  shown.by_receiver = !mine;
  shown.word = offer.word.load(std::memory_order_seq_cst);
  shown.tag = offer.tag.load(std::memory_order_relaxed);
  shown.elems = mine ? offer.elems : offer.recv_elems;
  shown.dtype = mine ? offer.dtype : offer.recv_dtype;
  shown.device = mine ? offer.device : offer.recv_device;
  std::memcpy(shown.kind, mine ? offer.send_kind : offer.recv_kind, sizeof shown.kind);
  std::memcpy(shown.site, mine ? offer.send_site : offer.recv_site, sizeof shown.site);
  Link* const to = link(peer, mine ? LinkUse::send : LinkUse::receive);
  say(to, kOffer, 0, std::as_bytes(std::span(&shown, 1)));
}

void NetPeers::set_reason(const std::string& reason) {
  shm_->set_reason(reason);
  std::vector<std::byte> payload;
  put_text(payload, reason, kControlBytes);
  say_to_all(kReason, payload);
}

// The news goes out before whoever waits here gets its error, and so before this process may end.
void NetPeers::end(Presence how, uint32_t culprit, bool in_deadlock) {
  const bool first = own().block->presence.load() == Presence::active;
  if (first) {  // the cause before its consequence
    say_ends_here();
    for (const uint32_t local : locals_)
      if (!views_[local].page->wait_record.deadlocked().empty()) say_to_all(kWaits, wait_of(local));
  }
  shm_->end(how, culprit, in_deadlock);
  if (first) say_end(rank_);
}

void NetPeers::wake(uint32_t rank) {
  if (is_local(rank)) shm_->wake(local_index_[rank]);
}

// Tells all what is known of the end of a rank.
void NetPeers::say_end(uint32_t rank) {
  const RankBlock& block = *views_[rank].block;
  Ended ended{rank, block.culprit.load(),        block.presence.load(), block.in_deadlock.load(),
              0,    value(rank, Counter::posted)};
  std::string words = block.reason.read();
  if (ended.how == Presence::active) words = how_it_went(rank);
  std::vector<std::byte> payload;
  put(payload, ended);
  put_text(payload, words, kControlBytes - sizeof ended);
  say_to_all(kEnded, payload);
}

// All links that stand are known from then on, and no other one is made.
void NetPeers::end_openings() {
  for (const Direction direction : {up, down}) network_->connections().leave(job_, group(direction));
  for (uint32_t i = 0; i < 2 * ranks(); ++i) {
    try {
      adopt(ways_[i]);
    } catch (const Error&) {  // NOLINT: there is none, and none is needed any more
    }
  }
}

void NetPeers::close() {
  if (closed_.exchange(true)) return;
  network_->remove(this);
  end_openings();
  // Whose group was no use to it has said nothing yet; a goodbye alone would look like a rank that is late.
  if (own().block->presence.load() == Presence::active) end(Presence::left, kOwnFault, false);
  std::vector<std::shared_ptr<Link>> links;
  for (uint32_t i = 0; i < 2 * ranks(); ++i)
    if (ways_[i].kept) links.push_back(ways_[i].kept);
  for (const auto& link : links) link->leave();
  const Deadline deadline = Deadline::in(kGoodbye_s);
  auto is_over = [](const auto& link) { return link->is_finished() || link->has_failed(); };
  while (!std::all_of(links.begin(), links.end(), is_over) && !deadline.passed())
    if (!network_->poll()) usleep(100);
  for (const auto& link : links) link->close();
  shm_->close();
}

}  // namespace photinus
