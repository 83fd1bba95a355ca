// Tensors that lie in the arena: peers read and write them where they are. The all_reduce of
// native/collectives/shm_all_reduce.cc (arena): meet, add the own slice of all tensors, write the sum into all of them,
// then wait until all have done so. With -DBROADCAST the broadcast of shm_broadcast.cc (arena), where only the root
// waits. In both the owner uses its tensor for something else as soon as the collective has returned.
//
// CALLS collectives in place. A slice's tag says what it holds: the input of a collective, its sum, or (0) whatever the
// owner does with its tensor between two collectives.
//
// Each access to a slice is one step; see meeting.pml for why this is enough, and for the memory model.

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 2
#endif
#define SLICE(r, of) tensor[(r) * RANKS + (of)]
#define INPUT(s) (2 * (s))
#define SUM(s) (2 * (s) + 1)

// The counters of all ranks.
#define POSTED 0
#define FINISHED 1
#define VALUE(counter, r) counters[(counter) * RANKS + (r)]
byte counters[2 * RANKS];
byte tensor[RANKS * RANKS];
bool in_call[RANKS];  // for the assertions only: the owner has lent its tensor
byte ended;

inline wait_all(counter, value) {
  peer = 0;
  do
  :: peer < RANKS && VALUE(counter, peer) >= (value) -> peer++
  :: peer == RANKS -> break
  od;
  peer = 0
}

inline fill(tag) {
  do
  :: peer < RANKS -> SLICE(me, peer) = tag; peer++
  :: peer == RANKS -> break
  od;
  peer = 0
}

inline all_reduce() {
  do
  :: peer < RANKS -> assert(SLICE(peer, me) == INPUT(s)); peer++
  :: peer == RANKS -> break
  od;
  peer = 0;
  do
  :: peer < RANKS -> assert(in_call[peer]); SLICE(peer, me) = SUM(s); peer++
  :: peer == RANKS -> break
  od;
  peer = 0;
  VALUE(FINISHED, me) = s;
#ifndef BUG_NO_FINISH_WAIT
  wait_all(FINISHED, s);
#endif
  do  // the result is complete
  :: peer < RANKS -> assert(SLICE(me, peer) == SUM(s)); peer++
  :: peer == RANKS -> break
  od;
  peer = 0
}

inline broadcast() {
  if
  :: me != 0 ->
    do
    :: peer < RANKS -> assert(SLICE(0, peer) == INPUT(s)); peer++
    :: peer == RANKS -> break
    od;
    peer = 0;
    VALUE(FINISHED, me) = s
  :: me == 0 ->
    VALUE(FINISHED, me) = s;
#ifndef BUG_NO_FINISH_WAIT
    wait_all(FINISHED, s)
#endif
  fi
}

active [RANKS] proctype Rank() {
  byte me = _pid, s = 1, peer;
  do
  :: s > CALLS -> break
  :: s <= CALLS ->
    fill(INPUT(s));
    in_call[me] = true;
    VALUE(POSTED, me) = s;
#ifndef BUG_NO_MEETING
    wait_all(POSTED, s);
#endif
#ifdef BROADCAST
    broadcast();
#else
    all_reduce();
#endif
    in_call[me] = false;
    fill(0);
    s++
  od;
  ended++
}

ltl every_collective_ends { <> (ended == RANKS) }
