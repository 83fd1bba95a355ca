// A word that threads of a process sleep on. It lies in memory that peers see: a peer that advances a counter
// wakes them.
//
// Rule against lost wake-ups: a sleeper announces itself, then looks a last time, then sleeps; a peer changes
// its counter, then looks for announced sleepers, then wakes them. All four are sequentially consistent.
#pragma once

#include <atomic>
#include <cstdint>

namespace photinus {

struct Futex {
  alignas(64) std::atomic<uint32_t> word{0};
  alignas(64) std::atomic<uint32_t> asleep{0};  // threads of the owner that sleep or are about to
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "words in shared memory must not hide a lock");

// Wakes all threads that sleep on it.
void wake(Futex& futex);

// Sleeps until the futex is woken, unless it was since `word` was read, for at most `limit_s`. A signal ends
// the sleep too.
void sleep_on(Futex& futex, uint32_t word, double limit_s);

}  // namespace photinus
