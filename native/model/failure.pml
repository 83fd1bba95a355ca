// Who fails, and whom the others name: Watchdog::look, look_for_ends and what_became_of (native/engine/watchdog.cc),
// Group::fail and leave (native/engine/group.cc) and PeerWatch::run (native/shm/peer_watch.cc), with collectives that only meet (barriers).
//
// RANKS ranks run CALLS barriers and then leave in order, at once and without waiting for each other. With -DDEATH
// one of them, the last, may die at any moment. Checked:
//  * every rank that lives comes to an end: its barriers done, or an error;
//  * nobody fails unless a rank died; above all, a rank that leaves after its last barrier takes nobody down that has
//    not yet seen it arrive (BUG_NO_SECOND_LOOK);
//  * every error names the rank that died: itself, or in the reason left by a rank that gave up before and is quoted.
// With -DBUG_... the rules are broken; -DDEAD_RANK_FIRST asks for more than the code promises: that the error begins
// with the dead rank, too. It does not where another rank saw the death first and gave up.
//
// Futexes are modelled in sleep.pml; here a futex is a flag, raised together with what it announces. The reason's text is the rank that it names.

#ifndef RANKS
#define RANKS 3
#endif
#ifndef CALLS
#define CALLS 2
#endif
#define NOBODY RANKS
#define VICTIM (RANKS - 1)

mtype = { active_, left_, failed_ };

byte posted[RANKS];
mtype presence[RANKS] = active_;
byte reason[RANKS] = NOBODY;
bool woken[RANKS];
bool over[RANKS];           // the process has ended, in whatever way
bool dead;                  // the victim was killed
bool lost[RANKS * RANKS];   // what the watch of a rank (first) knows of another
byte ended;

#define LOST(by, r) lost[(by) * RANKS + (r)]

inline wake_all() {
  d_step { i = 0; do :: i < RANKS -> woken[i] = true; i++ :: else -> break od; i = 0 }
}

inline count_missing() {
  missing = 0;
  i = 0;
  do
  :: atomic { i < RANKS && posted[i] >= s -> i++ }
  :: atomic { i < RANKS && posted[i] < s -> missing = missing | (1 << i); i++ }
  :: i == RANKS -> break
  od;
  i = 0
}

// `first` is the rank that the error begins with, `cause` the one that it names in the end.
inline what_became_of(r) {
  if
  :: r == me
  :: r != me ->
#ifdef BUG_PRESENCE_BEFORE_LOSS
    seen = presence[r];
    seen_lost = LOST(me, r);
#else
    // A rank that is lost writes nothing any more: what it left is read after.
    seen_lost = LOST(me, r);
    seen = presence[r];
#endif
    if
    :: seen == left_ -> first = r; cause = r
    :: seen == failed_ -> first = r; cause = reason[r]
    :: seen == active_ && seen_lost -> first = r; cause = r
    :: seen == active_ && !seen_lost
    fi;
    seen_lost = false;
    seen = active_
  fi
}

inline look() {
  first = NOBODY;
  cause = NOBODY;
  do
  :: i < RANKS && first == NOBODY && (missing & (1 << i)) -> what_became_of(i); i++
  :: atomic { i < RANKS && (first != NOBODY || !(missing & (1 << i))) -> i++ }
  :: i == RANKS -> break
  od;
  i = 0;
  do
  :: i < RANKS && first == NOBODY && presence[i] == failed_ -> what_became_of(i); i++
  :: atomic { i < RANKS && (first != NOBODY || presence[i] != failed_) -> i++ }
  :: i == RANKS -> break
  od;
  i = 0;
  if
  :: first != NOBODY ->
    do
    :: i < RANKS && i != me && LOST(me, i) ->
      if :: presence[i] == active_ -> d_step { first = i; cause = i } :: presence[i] != active_ fi;
      i++
    :: i < RANKS && (i == me || !LOST(me, i)) -> i++
    :: i == RANKS -> break
    od;
    i = 0
  :: first == NOBODY
  fi
}

inline fail() {
#ifdef BUG_PRESENCE_BEFORE_REASON
  atomic { presence[me] = failed_; wake_all() };
  reason[me] = cause
#else
  reason[me] = cause;
  atomic { presence[me] = failed_; wake_all() }
#endif
}

active [RANKS] proctype Rank() {
  byte me = _pid, s = 1, i, missing, first = NOBODY, cause = NOBODY;
  mtype seen = active_;
  bool seen_lost;
  {
    do
    :: s > CALLS -> break
    :: s <= CALLS ->
      atomic { posted[me] = s; wake_all() };
      do
      :: true ->
        woken[me] = false;
        count_missing();
        if :: missing == 0 -> break :: missing != 0 fi;
        look();
        if
        :: first != NOBODY ->
#ifndef BUG_NO_SECOND_LOOK
          // Whoever has ended advances nothing any more: what is missing now will never come.
          count_missing();
          if :: missing == 0 -> break :: missing != 0 fi;
#endif
          atomic {
            assert(dead);
#ifdef DEAD_RANK_FIRST
            assert(first == VICTIM);
#endif
            assert(cause == VICTIM)
          };
          fail();
          goto out
        :: first == NOBODY
        fi;
        woken[me]
      od;
      atomic { first = NOBODY; cause = NOBODY; missing = 0; s++ }
    od;
    atomic { presence[me] = left_; wake_all() };
out:
    atomic { over[me] = true; ended++ }
  } unless { me == VICTIM && dead && !over[me] };
  if
  :: over[me]
  :: !over[me] -> atomic { over[me] = true; ended++ }
  fi
}

// The watching thread of each rank: the connection tells when a peer's process ends, and its process is woken.
#define SEES_THE_END_OF(r) \
  atomic { \
    r < RANKS && r != me && over[r % RANKS] && !over[me] && !LOST(me, r % RANKS) -> \
    LOST(me, r % RANKS) = true; \
    WAKE \
  }

#ifdef BUG_WATCH_DOES_NOT_WAKE
#define WAKE skip
#else
#define WAKE woken[me] = true
#endif

active [RANKS] proctype Watch() {
  byte me = _pid % RANKS;
end:
  do
  :: SEES_THE_END_OF(0)
  :: SEES_THE_END_OF(1)
  :: SEES_THE_END_OF(2)
  od
}

#ifdef DEATH
active proctype Killer() {
  if
  :: true
  :: d_step { !over[VICTIM] -> dead = true }
  fi
}
#endif

ltl every_rank_ends { <> (ended == RANKS) }
