// How a thread waits: it spins, yields, then sleeps on the futex of its process (base/futex.h).
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/clock.h"
#include "base/futex.h"
#include "base/thread.h"

namespace photinus {

inline constexpr double kSleepSlice_s = 0.1;  // a waiter looks around at least this often, whatever happens

// How long to wait in which way before sleeping. Long pauses are poison when ranks exceed cores: a spinning
// rank burns the time slice of the rank it waits for (measured: ten times slower), so the pause is then kept
// to a microsecond.
struct SpinTimes {
  double pause_s = 20e-6;
  double yield_s = 200e-6;
  // After two waits that were longer spinning is in vain, until one was shorter again: frames that a rate
  // limits come a millisecond apart.
  double in_vain_s = 1e9;
  static SpinTimes for_ranks(uint32_t ranks_on_host);
  // Words from other hosts take microseconds, in which the core may be somebody else's. Measured with four
  // hosts of one rank on two cores: who yields for 60 us only takes a quarter longer for 4 KiB, and half more
  // processor time; 200 us take half more of that while large tensors cross.
  static SpinTimes for_hosts() { return {1e-6, 100e-6, 400e-6}; }
};

enum class Poll : uint8_t { blocked, moved, done };

// Waits until `poll()` says done: pauses, yields, then sleeps; starts anew whenever something moved.
// `announce()` gives an object that lives from before the last poll ahead of a sleep to the end of the
// sleeping. `look()` runs before each sleep, and now and then while things move; it says how long a sleep may
// last, and ends the wait by throwing.
template <class Poller, class Announce, class Look>
void wait_on(Futex& futex, const SpinTimes& times, Poller&& poll, Announce&& announce, Look&& look) {
  // What is short ends within a few turns; for that no clock is read.
  Poll last = poll();
  for (int turn = 0; turn < 4 && last != Poll::done; ++turn) {
    pause_cpu();
    last = poll();
  }
  if (last == Poll::done) return;
  double looked_s = now_s();
  int longer = 0;
  while (last != Poll::done) {
    const double start = now_s();
    if (start - looked_s > kSleepSlice_s) {  // something moves all the time, but perhaps not everything
      looked_s = start;
      look();
    }
    last = Poll::blocked;
    for (double now = start; longer < 2 && last == Poll::blocked && now - start < times.pause_s;
         now = now_s()) {
      for (int i = 0; i < 16 && last == Poll::blocked; ++i) {
        pause_cpu();
        last = poll();
      }
    }
    while (longer < 2 && last == Poll::blocked && now_s() - start < times.yield_s) {
      yield_cpu();
      last = poll();
    }
    if (last != Poll::blocked) continue;
    [[maybe_unused]] auto announced = announce();
    while (last == Poll::blocked) {
      const uint32_t word = futex.word.load(std::memory_order_seq_cst);
      last = poll();
      if (last != Poll::blocked) break;
      looked_s = now_s();
      sleep_on(futex, word, look());
    }
    longer = now_s() - start < times.in_vain_s ? 0 : std::min(longer + 1, 2);
  }
}

}  // namespace photinus
