// No wake-up is lost between ranks: ShmPeers::advance (native/shm/shm_peers.cc) and wait_on (native/progress/wait_loop.h).
//
// Each rank advances its counter and then waits for all others, ROUNDS times. A lost wake-up leaves a rank asleep
// for ever, which spin reports as an invalid end state: the sleeper's regular look around is left out on purpose.
//
// Sequential consistency is spin's memory model and the right one here: counters, futex, asleep and sleepers are
// seq_cst atomics. The two orders that matter (store the counter, then load `asleep`; store `asleep`, then load the
// counters) are the ones that anything weaker gives up; BUG_WAKE_BEFORE_STORE and BUG_ANNOUNCED_LATE are what a
// store buffer would make of them.

#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif

byte counter[RANKS];
bool asleep[RANKS];
byte sleepers;
byte ended;

// The futex is a number that grows; all that counts is whether it has changed since its owner read it.
bool woken[RANKS];
bool in_futex[RANKS];

inline read_futex() { woken[me] = false }

inline wake(r) {
  woken[r] = true;
  in_futex[r] = false  // FUTEX_WAKE
}

inline futex_wait() {
  atomic { if :: !woken[me] -> in_futex[me] = true :: else fi };
  !in_futex[me]
}

inline wake_sleepers() {
  if
  :: sleepers == 0 -> skip
  :: else ->
    peer = 0;
    do
    :: peer == RANKS -> break
    :: peer < RANKS && (peer == me || !asleep[peer]) -> peer++
    :: peer < RANKS && peer != me && asleep[peer] -> wake(peer); peer++
    od
  fi
}

inline advance(to) {
#ifdef BUG_WAKE_BEFORE_STORE
  wake_sleepers();
  counter[me] = to
#else
  counter[me] = to;
#ifndef BUG_NO_WAKE
  wake_sleepers()
#endif
#endif
}

// Every look at a counter is a step of its own. `missing` ends at the first rank that has not come.
inline look_at_counters(wanted) {
  do
  :: missing == RANKS -> break
  :: missing < RANKS && counter[missing] >= wanted -> missing++
  :: missing < RANKS && counter[missing] < wanted -> break
  od
}

inline announce() { sleepers++; asleep[me] = true }

inline wait(wanted) {
  missing = 0;
  look_at_counters(wanted);  // pausing and yielding: more looks before sleeping, which change nothing
  if
  :: missing == RANKS
  :: else ->
#ifndef BUG_ANNOUNCED_LATE
    announce();
#endif
    do
    :: true ->
#ifdef BUG_FUTEX_READ_LATE
      look_at_counters(wanted);
      read_futex();
#else
      read_futex();
#ifndef BUG_NO_RECHECK
      look_at_counters(wanted);
#endif
#endif
      if :: missing == RANKS -> break :: else fi;
#ifdef BUG_ANNOUNCED_LATE
      announce();
#endif
      futex_wait();
#ifdef BUG_ANNOUNCED_LATE
      asleep[me] = false;
      sleepers--;
#endif
#ifdef BUG_NO_RECHECK
      look_at_counters(wanted)
#endif
    od;
#ifndef BUG_ANNOUNCED_LATE
    asleep[me] = false;
    sleepers--
#endif
  fi
}

active [RANKS] proctype Rank() {
  byte me = _pid, round = 1, missing, peer;
  do
  :: round > ROUNDS -> break
  :: else ->
    advance(round);
    wait(round);
    round++
  od;
  ended++
}

ltl every_collective_ends { <> (ended == RANKS) }
