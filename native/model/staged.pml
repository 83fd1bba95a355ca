// The staged all_reduce (native/collectives/shm_all_reduce.cc, staged): in round k a rank copies chunk k in, adds its
// slice of chunk k-1 and copies the others' sums of chunk k-2 out, through a ring of SLOTS chunk slots.
//
// CALLS collectives of CHUNKS chunks run one after the other, so that slots and counters meet those of the collective
// before. A slot of a rank has a slice for each rank; a slice's tag says collective, chunk, and whether it holds an
// input or the sum. The last chunk is so short that only the first TAIL ranks have a slice of it, as at the end of
// most tensors; who has none skips waits (`mine.elems > 0`, `theirs.elems == 0`).
//
// Each write and each read of a slice is one step; see meeting.pml for why this is enough, and for the memory model.
// Counters hold (collective, step) as in Executor::run, so that they only grow.

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CHUNKS
#define CHUNKS 5
#endif
#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef CALLS
#define CALLS 1
#endif
#ifndef TAIL
#define TAIL RANKS
#endif

#ifdef BUG_NO_EPOCH
#define STAMP(step) (step)
#else
#define STAMP(step) ((s) * 16 + (step))
#endif
#define SLICE(r, k, of) slot[((r) * SLOTS + (k) % SLOTS) * RANKS + (of)]
#define INPUT(k) ((s) * 32 + (k) * 2)
#define SUM(k) ((s) * 32 + (k) * 2 + 1)
#define HAS_SLICE(r, k) ((k) < CHUNKS - 1 || (r) < TAIL)

// The counters of all ranks.
#define POSTED 0
#define STAGED 1
#define REDUCED 2
#define FINISHED 3
#define VALUE(counter, r) counters[(counter) * RANKS + (r)]
byte counters[4 * RANKS];
byte slot[RANKS * SLOTS * RANKS];
byte ended;

inline wait_all(counter, value) {
  peer = 0;
  do
  :: peer < RANKS && VALUE(counter, peer) >= (value) -> peer++
  :: peer == RANKS -> break
  od;
  peer = 0
}

// All but the own slice, which is added from the tensor itself.
inline copy_in(k) {
#ifndef BUG_NO_FINISH_WAIT
  if
#ifdef BUG_FINISH_WAIT_ONE_EARLY
  :: k >= SLOTS -> wait_all(FINISHED, STAMP(k - SLOTS))
#else
  :: k >= SLOTS -> wait_all(FINISHED, STAMP(k - SLOTS + 1))
#endif
  :: k < SLOTS
  fi;
#endif
  do
  :: peer < RANKS && (peer == me || !HAS_SLICE(peer, k)) -> peer++
  :: peer < RANKS && peer != me && HAS_SLICE(peer, k) -> SLICE(me, k, peer) = INPUT(k); peer++
  :: peer == RANKS -> break
  od;
  peer = 0;
  VALUE(STAGED, me) = STAMP(k + 1)
}

inline add(k) {
  if
  :: HAS_SLICE(me, k) ->
#ifndef BUG_NO_STAGED_WAIT
    wait_all(STAGED, STAMP(k + 1));
#endif
    do
    :: peer < RANKS && peer == me -> peer++
    :: peer < RANKS && peer != me -> assert(SLICE(peer, k, me) == INPUT(k)); peer++
    :: peer == RANKS -> break
    od;
    peer = 0;
    SLICE(me, k, me) = SUM(k)
  :: !HAS_SLICE(me, k)
  fi;
  VALUE(REDUCED, me) = STAMP(k + 1)
}

inline copy_out(k) {
  peer = 1;
  do
  :: peer < RANKS ->
    from = (me + peer) % RANKS;
    if
    :: HAS_SLICE(from, k) ->
#ifndef BUG_NO_REDUCED_WAIT
      VALUE(REDUCED, from) >= STAMP(k + 1);
#endif
      assert(SLICE(from, k, from) == SUM(k))
    :: !HAS_SLICE(from, k)
    fi;
    peer++
  :: peer == RANKS -> break
  od;
  peer = 0;
  d_step { from = 0; VALUE(FINISHED, me) = STAMP(k + 1) }
}

active [RANKS] proctype Rank() {
  byte me = _pid, s = 1, round, peer, from;
  do
  :: s > CALLS -> break
  :: s <= CALLS ->
    VALUE(POSTED, me) = s;
#ifndef BUG_NO_MEETING
    wait_all(POSTED, s);
#endif
    round = 0;
    do
    :: round == CHUNKS + 2 -> break
    :: round < CHUNKS + 2 ->
      if :: round < CHUNKS -> copy_in(round) :: round >= CHUNKS fi;
      if :: round >= 1 && round - 1 < CHUNKS -> add(round - 1) :: round == 0 || round > CHUNKS fi;
      if :: round >= 2 -> copy_out(round - 2) :: round < 2 fi;
      round++
    od;
    s++
  od;
  ended++
}

ltl every_collective_ends { <> (ended == RANKS) }
