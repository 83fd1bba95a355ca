// The staged all_reduce (native/collectives/shm_all_reduce.cc, staged): in round k a rank copies chunk k in, adds its
// slice of chunk k-1 and copies the others' sums of chunk k-2 out, through a ring of SLOTS chunk slots.
//
// CALLS collectives of CHUNKS chunks run one after the other, so that slots and counters meet those of the collective
// before. Slots are divided into cache lines, LINES in a full chunk and TAIL in the last one, and slices as by slice_of
// (native/collectives/slices.h). Geometry matters: the slices of the short last chunk lie elsewhere, so it overwrites lines
// of sums that a peer may still be copying out. (Were all chunks alike, the wait on `finished` would be superfluous:
// -DBUG_NO_FINISH_WAIT -DTAIL=LINES survives.) A rank without a slice of the last chunk skips waits (`mine.elems > 0`,
// `theirs.elems == 0`). A line's tag says collective, chunk, and whether it holds an input or the sum.
//
// Each copy is one step; see meeting.pml for why this is enough, and for the memory model.
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
#ifndef LINES
#define LINES (2 * RANKS)
#endif
#ifndef TAIL
#define TAIL RANKS
#endif

#ifdef BUG_NO_EPOCH
#define STAMP(step) (step)
#else
#define STAMP(step) ((s) * 16 + (step))
#endif
#define LINE(r, k, at) slot[((r) * SLOTS + (k) % SLOTS) * LINES + (at)]
#define INPUT(k) ((s) * 32 + (k) * 2)
#define SUM(k) ((s) * 32 + (k) * 2 + 1)
#define LINES_OF(k) (LINES - (LINES - TAIL) * ((k) == CHUNKS - 1))
#define EXTRA(k, r) ((r) * ((r) < LINES_OF(k) % RANKS) + LINES_OF(k) % RANKS * ((r) >= LINES_OF(k) % RANKS))
#define BORDER(k, r) ((r) * (LINES_OF(k) / RANKS) + EXTRA(k, r))
#define HAS_SLICE(r, k) (BORDER(k, (r) + 1) > BORDER(k, r))

// The counters of all ranks.
#define POSTED 0
#define STAGED 1
#define REDUCED 2
#define FINISHED 3
#define VALUE(counter, r) counters[(counter) * RANKS + (r)]
byte counters[4 * RANKS];
byte slot[RANKS * SLOTS * LINES];
byte ended;

inline wait_all(counter, value) {
  peer = 0;
  do
  :: peer < RANKS && VALUE(counter, peer) >= (value) -> peer++
  :: peer == RANKS -> break
  od;
  peer = 0
}

inline write_lines(k, first, end, tag) {
  d_step {
    line = first;
    do :: line < (end) -> LINE(me, k, line) = tag; line++ :: else -> break od;
    line = 0
  }
}

// Reads what rank `whose` owns of chunk k, in the slot of rank r.
inline check_lines(r, k, whose, tag) {
  d_step {
    line = BORDER(k, whose);
    do :: line < BORDER(k, (whose) + 1) -> assert(LINE(r, k, line) == tag); line++ :: else -> break od;
    line = 0
  }
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
  skip;
  write_lines(k, 0, BORDER(k, me), INPUT(k));
  write_lines(k, BORDER(k, me + 1), LINES_OF(k), INPUT(k));
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
    :: peer < RANKS && peer != me -> check_lines(peer, k, me, INPUT(k)); peer++
    :: peer == RANKS -> break
    od;
    peer = 0;
    write_lines(k, BORDER(k, me), BORDER(k, me + 1), SUM(k))
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
      check_lines(from, k, from, SUM(k))
    :: !HAS_SLICE(from, k)
    fi;
    peer++
  :: peer == RANKS -> break
  od;
  peer = 0;
  d_step { from = 0; VALUE(FINISHED, me) = STAMP(k + 1) }
}

active [RANKS] proctype Rank() {
  byte me = _pid, s = 1, round, peer, from, line;
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
