#include "shm/mailbox.h"

namespace photinus {
namespace {

constexpr size_t kHeaderBytes = 64;

}  // namespace

size_t Mailbox::bytes(uint32_t ranks) {
  return kHeaderBytes + ranks * sizeof(RankBlock) + sizeof(PostedPart) * 2 * ranks * ranks;
}

Mailbox::Mailbox(std::shared_ptr<Segment> segment, uint32_t rank, std::vector<Futex*> futexes)
    : segment_(std::move(segment)),
      rank_(rank),
      ranks_(static_cast<uint32_t>(futexes.size())),
      futexes_(std::move(futexes)),
      blocks_(reinterpret_cast<RankBlock*>(segment_->base() + kHeaderBytes)),
      parts_(reinterpret_cast<PostedPart*>(blocks_ + ranks_)) {}

PostedPart* Mailbox::parts(uint32_t rank, uint64_t sequence) const {
  return parts_ + (sequence % 2 * ranks_ + rank) * ranks_;
}

void Mailbox::advance(Counter counter, uint64_t to) const {
  own().counters[static_cast<size_t>(counter)].value.store(to, std::memory_order_seq_cst);
  if (header().sleepers.load(std::memory_order_seq_cst) == 0) return;
  for (uint32_t rank = 0; rank < ranks_; ++rank)
    if (rank != rank_) wake(rank);
}

void Mailbox::wake(uint32_t rank) const {
  if (blocks_[rank].asleep.load(std::memory_order_seq_cst)) photinus::wake(*futexes_[rank]);
}

void Mailbox::wake_all() const {
  for (Futex* futex : futexes_) photinus::wake(*futex);
}

void Mailbox::announce_sleep() const {
  header().sleepers.fetch_add(1, std::memory_order_seq_cst);
  own().asleep.fetch_add(1, std::memory_order_seq_cst);
}

void Mailbox::end_sleep() const {
  own().asleep.fetch_sub(1, std::memory_order_seq_cst);
  header().sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void Mailbox::set_reason(const std::string& reason) const {
  std::lock_guard lock(writing_reason_);
  own().reason.write(reason);
}

}  // namespace photinus
