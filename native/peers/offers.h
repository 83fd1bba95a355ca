// Messages between two ranks: for each ordered pair of ranks a page of offers. The sender fills a free offer
// and says where the data lie: in memory that peers see, or flowing through a ring of bytes there. The
// receiver takes the oldest offer with its tag, copies, and says how it went; the sender then frees the
// offer.
//
//   state      who sets it   meaning
//   free       sender        may be filled
//   offered    sender        filled; data may flow already
//   taken      receiver      the receiver copies
//   done       receiver      all is copied, the sender may go on
//   refused    receiver      its call does not match; `recv_*` say what it wanted
#pragma once

#include <atomic>
#include <cstdint>

#include "base/dtype.h"
#include "peers/posts.h"

namespace photinus {

inline constexpr uint32_t kOffers = 64;  // that one rank can have pending at another, whatever their tags

enum class OfferState : uint32_t { free, offered, taken, done, refused };

// An offer's state together with its number among the sender's offers to this rank: a receiver that looked at
// one offer cannot take another one that has come into its place meanwhile.
struct OfferWord {
  uint64_t order = 0;
  OfferState state = OfferState::free;
  uint64_t packed() const { return order << 3 | static_cast<uint64_t>(state); }
  static OfferWord of(uint64_t word) { return {word >> 3, static_cast<OfferState>(word & 7)}; }
};

inline constexpr size_t kKindBytes = 24;

struct alignas(64) Offer {
  std::atomic<uint64_t> word{0};
  std::atomic<int64_t> tag{0};
  Dtype dtype = Dtype::float32, recv_dtype = Dtype::float32;
  DeviceType device = DeviceType::cpu, recv_device = DeviceType::cpu;
  uint64_t elems = 0, recv_elems = 0;
  uint64_t offset = 0;      // in the sender's memory that peers see
  uint64_t ring_bytes = 0;  // 0: all data lie at `offset`; otherwise they flow through so many bytes there
  alignas(64) std::atomic<uint64_t> filled{0};        // bytes, by the sender
  alignas(64) std::atomic<uint64_t> drained{0};       // bytes, by the receiver
  char send_kind[kKindBytes], recv_kind[kKindBytes];  // of elements that travel as another type: "uint16"
  char send_site[RankBlock::kTextBytes];
  char recv_site[RankBlock::kTextBytes];

  OfferWord look() const { return OfferWord::of(word.load(std::memory_order_seq_cst)); }
  void set(OfferWord to) { word.store(to.packed(), std::memory_order_seq_cst); }
};

}  // namespace photinus
