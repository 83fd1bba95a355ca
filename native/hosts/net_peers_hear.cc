// What ranks of other hosts say: on whichever thread polls their links.
#include <algorithm>
#include <cstring>

#include "hosts/net_peers.h"

namespace photinus {

void NetPeers::hear(uint32_t from, uint32_t channel, uint64_t sequence, const std::byte* payload,
                    size_t bytes) {
  Reader reader(payload, bytes);
  Known& known = known_[from];
  heard_of_[from].store(true, std::memory_order_relaxed);
  switch (channel) {
    case kTold: {
      Told& told = known.told[sequence % 2];
      std::memcpy(told.what, payload, bytes);
      told.bytes = bytes;
      told.sequence.store(sequence, std::memory_order_release);
      note_posted(from, sequence);
      break;
    }
    case kBeat:
      return hear_beat(from, reader);
    case kEnded:
      return hear_end(reader);
    case kReason:
      known.block.reason.write(reader.take_text(kControlBytes));
      break;
    case kWaits:
      return hear_waits(reader);
    case kOffer:
      return hear_offer(from, reader);
    default:
      break;  // of a later version's making; the handshake has seen to it that there is none
  }
}

// Words of one rank come over several links, so an older one may come last.
void NetPeers::note_posted(uint32_t rank, uint64_t sequence) {
  std::atomic<uint64_t>& posted = known_[rank].block.counter(Counter::posted);
  uint64_t seen = posted.load(std::memory_order_relaxed);
  while (seen < sequence && !posted.compare_exchange_weak(seen, sequence, std::memory_order_seq_cst)) {
  }
}

void NetPeers::hear_beat(uint32_t from, Reader& reader) {
  const auto beat = reader.take<Beat>();
  if (!beat) return;
  const std::vector<uint32_t> there = on_host_of(from);
  for (uint32_t i = 0; i < beat->count && beat->first + i < there.size(); ++i) {
    const auto sign = reader.take<Sign>();
    const uint32_t rank = there[beat->first + i];
    if (!sign || is_local(rank)) return;
    known_[rank].page.heartbeat.store(sign->heartbeat, std::memory_order_relaxed);
    note_posted(rank, sign->posted);
    heard_of_[rank].store(true, std::memory_order_relaxed);
  }
}

void NetPeers::hear_end(Reader& reader) {
  const auto ended = reader.take<Ended>();
  if (!ended || ended->rank >= ranks() || is_local(ended->rank)) return;
  if (ended->culprit >= ranks() && ended->culprit != kOwnFault) return;
  const std::string words = reader.take_text(kControlBytes);
  note_posted(ended->rank, ended->posted);
  if (ended->how == Presence::active) return note_loss(ended->rank, words);
  RankBlock& block = known_[ended->rank].block;
  {
    std::lock_guard lock(mutex_);
    if (block.presence.load() != Presence::active) return;
    block.culprit.store(ended->culprit, std::memory_order_release);
    block.in_deadlock.store(ended->in_deadlock, std::memory_order_release);
    block.reason.write(words);
    if (ended->how == Presence::left) {
      ends_[ended->rank].said_left = true;
      return;
    }
    block.presence.store(ended->how, std::memory_order_seq_cst);
  }
  say_end(ended->rank);
}

void NetPeers::note_loss(uint32_t rank, const std::string& how) {
  {
    std::lock_guard lock(mutex_);
    if (ends_[rank].lost.load()) return;
    ends_[rank].how = how;
    ends_[rank].lost.store(true, std::memory_order_release);
    // Whoever leaves, or gives up and says so, may end then.
    if (views_[rank].block->presence.load() != Presence::active) return;
  }
  Loss& loss = shm_->loss(rank);
  uint32_t none = Loss::none;
  if (loss.state.compare_exchange_strong(none, Loss::being_written)) {
    how.copy(loss.how, sizeof loss.how - 1);
    loss.state.store(Loss::known, std::memory_order_release);
  }
  say_end(rank);
  for (const uint32_t local : locals_) wake(local);
}

void NetPeers::hear_waits(Reader& reader) {
  const auto waits = reader.take<Waits>();
  if (!waits || waits->rank >= ranks() || is_local(waits->rank)) return;
  ProcessPage& page = known_[waits->rank].page;
  page.id.store(waits->process);
  if (processes_) processes_->add(views_[waits->rank].page, who(waits->rank));
  WaitRecord::Facts facts{
      waits->lane, {}, reader.take_text(waits->text_bytes), waits->version, waits->affirmed};
  for (const uint64_t process : waits->waits_for)
    if (process) facts.waits_for.push_back(process);
  page.wait_record.mirror(facts);
  std::vector<WaitRecord::Wait> deadlocked;
  for (const auto& wait : waits->deadlocked)
    if (wait[1]) deadlocked.push_back({wait[0], wait[1]});
  if (deadlocked.empty()) return;
  page.end_reason.write(reader.take_text(kControlBytes));
  page.wait_record.set_deadlocked(deadlocked);
}

void NetPeers::hear_offer(uint32_t from, Reader& reader) {
  const auto shown = reader.take<OfferShown>();
  if (!shown || shown->index >= kOffers || static_cast<size_t>(shown->dtype) >= kDtypeCount) return;
  const OfferWord word = OfferWord::of(shown->word);
  if (shown->by_receiver) {
    Offer& offer = views_[from].sent[shown->index];
    if (offer.look().order != word.order) return;
    offer.recv_dtype = shown->dtype;
    offer.recv_device = shown->device;
    offer.recv_elems = shown->elems;
    std::memcpy(offer.recv_kind, shown->kind, sizeof offer.recv_kind - 1);
    std::memcpy(offer.recv_site, shown->site, sizeof offer.recv_site - 1);
    offer.set(word);
  } else if (word.state == OfferState::offered) {
    Offer& offer = views_[from].received[shown->index];
    offer.tag.store(shown->tag, std::memory_order_relaxed);
    offer.dtype = shown->dtype;
    offer.device = shown->device;
    offer.elems = shown->elems;
    std::memcpy(offer.send_kind, shown->kind, sizeof offer.send_kind - 1);
    std::memcpy(offer.send_site, shown->site, sizeof offer.send_site - 1);
    offer.set(word);
  }
}

}  // namespace photinus
