// What a process sleeps on, and how it waits before it sleeps. The bell lies in memory that peers see: a peer
// that advances a counter rings it.
//
// Rule against lost wake-ups: a sleeper announces itself, then looks a last time, then sleeps; a peer changes
// its counter, then looks for announced sleepers, then rings. All four are sequentially consistent.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/clock.h"

namespace photinus {

struct Bell {
  alignas(64) std::atomic<uint32_t> word{0};
  alignas(64) std::atomic<uint32_t> asleep{0};  // threads of the owner that sleep or are about to
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free,
              "words in shared memory must not hide a lock");

// Wakes all threads that sleep on the bell.
void ring(Bell& bell);

// Sleeps until the bell is rung, unless it was since `word` was read, for at most `limit_s`. A signal ends
// the sleep too.
void sleep_on(Bell& bell, uint32_t word, double limit_s);
inline constexpr double kSleepSlice_s = 0.1;  // a waiter looks around at least this often, whatever happens

// One turn of spinning, and giving the core to whoever wants it.
void pause_cpu();
void yield_cpu();

// How long to wait in which way before sleeping. Long pauses are poison when ranks exceed cores: a spinning
// rank burns the time slice of the rank it waits for (measured: ten times slower), so the pause is then kept
// to a microsecond.
struct Patience {
  double pause_s = 20e-6;
  double yield_s = 200e-6;
  static Patience for_ranks(uint32_t ranks_on_host);
};

enum class Poll : uint8_t { blocked, moved, done };

// Waits until `poll()` says done: pauses, yields, then sleeps; starts anew whenever something moved.
// `announce()` gives an object that lives from before the last poll ahead of a sleep to the end of the
// sleeping. `look()` runs before each
// sleep, and now and then while things move; it says how long a sleep may last, and ends the wait by
// throwing.
template <class Poller, class Announce, class Look>
void wait_on(Bell& bell, const Patience& patience, Poller&& poll, Announce&& announce, Look&& look) {
  Poll last = poll();
  double looked_s = now_s();
  while (last != Poll::done) {
    const double start = now_s();
    if (start - looked_s > kSleepSlice_s) {  // something moves all the time, but perhaps not everything
      looked_s = start;
      look();
    }
    last = Poll::blocked;
    for (double now = start; last == Poll::blocked && now - start < patience.pause_s; now = now_s()) {
      for (int i = 0; i < 16 && last == Poll::blocked; ++i) {
        pause_cpu();
        last = poll();
      }
    }
    while (last == Poll::blocked && now_s() - start < patience.yield_s) {
      yield_cpu();
      last = poll();
    }
    if (last != Poll::blocked) continue;
    [[maybe_unused]] auto announced = announce();
    while (last == Poll::blocked) {
      const uint32_t word = bell.word.load(std::memory_order_seq_cst);
      last = poll();
      if (last != Poll::blocked) break;
      looked_s = now_s();
      sleep_on(bell, word, look());
    }
  }
}

}  // namespace photinus
