// The meeting: Collective::post, all_posted and agree_and_plan (native/engine/collective.cc), the flat plan of all_reduce
// (native/collectives/shm_all_reduce.cc), and the rule at the top of native/peers/posts.h: whoever posts s has
// finished s-1, so s % 2 is free.
//
// RANKS ranks run CALLS collectives. Rank 0 may call something else than the others (a mismatch), at any of them.
// Descriptors and flat slots carry the sequence number they were written for.
//
// Each write and each read of data is one step. That is enough to find every race: where a read and a write are not
// ordered by counters, spin also tries the order in which the reader finds the wrong sequence number.
//
// Sequential consistency: `posted` is a seq_cst atomic; the data are written before it is advanced and read after it
// was seen, so they are ordered by it (release and acquire would do).

#ifndef RANKS
#define RANKS 2
#endif
#ifndef CALLS
#define CALLS 4
#endif

#ifdef BUG_ONE_FLAT_SLOT
#define FLAT(r, s) flat[(r) * 2]
#else
#define FLAT(r, s) flat[(r) * 2 + (s) % 2]
#endif
#ifdef BUG_ONE_DESCRIPTOR
#define AT(r, s) ((r) * 2)
#else
#define AT(r, s) ((r) * 2 + (s) % 2)
#endif

byte posted[RANKS];
byte flat[2 * RANKS];        // the sequence number of the tensor that lies there
byte call_sequence[2 * RANKS];
bool call_other[2 * RANKS];  // what is called: all the rest of a descriptor
byte finished[RANKS];        // for the assertions only: what each rank has finished
byte verdict[CALLS + 1];     // for the assertions only: 0 unknown, 1 the same everywhere, 2 refused
byte ended;

inline write_flat() {
  // The rule itself, besides what follows from it.
  d_step {
    peer = 0;
    do :: peer < RANKS -> assert(s < 2 || finished[peer] >= s - 2); peer++ :: else -> break od;
    peer = 0
  };
  FLAT(me, s) = s
}

inline write_descriptor() {
  d_step { call_sequence[AT(me, s)] = s; call_other[AT(me, s)] = other }
}

inline read_descriptors() {
  peer = 0;
  refused = false;
  do
#ifdef BUG_NEIGHBOURS_COMPARED
  :: peer < RANKS && peer != me && peer != (me + 1) % RANKS -> peer++
  :: peer < RANKS && (peer == me || peer == (me + 1) % RANKS) ->
#else
  :: peer < RANKS ->
#endif
    d_step {
      assert(call_sequence[AT(peer, s)] == s);
      refused = (refused || call_other[AT(peer, s)] != other)
    };
    peer++
  :: peer == RANKS -> break
  od
}

inline wait_for_all() {
  peer = 0;
  do
#ifdef BUG_EXACT_COUNTER
  :: peer < RANKS && posted[peer] == s -> peer++
#else
  :: peer < RANKS && posted[peer] >= s -> peer++
#endif
  :: peer == RANKS -> break
  od
}

active [RANKS] proctype Rank() {
  byte me = _pid, s = 1, peer;
  bool other, refused;
  do
  :: s > CALLS -> break
  :: s <= CALLS ->
    other = false;
    if :: true :: me == 0 -> other = true fi;
#ifndef BUG_FLAT_AFTER_POSTING
    write_flat();  // the part of the plan before the meeting; also by a rank that will be refused
#endif
#ifdef BUG_POSTED_BEFORE_WRITTEN
    posted[me] = s;
    write_descriptor();
#else
    write_descriptor();
    posted[me] = s;
#endif
#ifdef BUG_FLAT_AFTER_POSTING
    write_flat();
#endif
#ifndef BUG_NO_MEETING
    wait_for_all();
#endif
    read_descriptors();
    atomic {
      assert(verdict[s] == 0 || verdict[s] == 1 + refused);
      verdict[s] = 1 + refused
    };
    if
    :: refused
    :: !refused ->
      peer = 0;
      do
      :: peer < RANKS -> assert(FLAT(peer, s) == s); peer++
      :: peer == RANKS -> break
      od
    fi;
    atomic { finished[me] = s; refused = false; other = false };
    s++
  od;
  ended++
}

ltl every_collective_ends { <> (ended == RANKS) }
