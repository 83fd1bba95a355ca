// Who fails and who leaves where ranks meet over links (native/hosts, net/link.h): RANKS ranks, each on a host of its own,
// run CALLS collectives by levels as in levels.pml (all call the same) and then leave, at once and without waiting for each
// other. With -DDEATH one of them, the last, may die at any moment: what it sent last may be lost on any of its links.
//
// Links join counterparts only, so with two levels (RANKS=4) one rank has no link with the one that dies. A link is a queue
// of control frames and one of data in each direction; data wait at the head of theirs until their place is posted. Both
// end with a goodbye, and a rank has left for another that has taken both. Who learns of the death tells it once to all with
// whom it has links, whatever it is doing.
//
// Checked: every rank that lives comes to an end, its collectives done, or an error; nobody fails unless a rank died.

#ifndef RANKS
#define RANKS 4
#endif
#ifndef CALLS
#define CALLS 1
#endif
#define VICTIM (RANKS - 1)

#ifdef DIRECT
#define DEPTH 1
#define FIRST(r) (r == 0 -> 1 : 0)
#define AFTER(r, p) ((p) + 1 == r -> (p) + 2 : (p) + 1)
#define IS_LINKED(r, p) (r != p)
#else
#define DEPTH 2
#define FIRST(r) (r ^ (1 << level))
#define AFTER(r, p) RANKS
#define IS_LINKED(r, p) ((r ^ p) == 1 || (r ^ p) == 2)
#endif

mtype = { told_, frame_, news_, goodbye_ };

#define LINK(from, to) ((from) * RANKS + (to))
chan control[RANKS * RANKS] = [CALLS + 2] of { mtype };
chan data[RANKS * RANKS] = [CALLS + 1] of { mtype };
byte told[RANKS * RANKS];    // how many tells have come,
byte posted[RANKS * RANKS];  // how many places stand or stood open,
byte landed[RANKS * RANKS];  // and how many frames of data have come, of each link at its receiver
byte goodbyes[RANKS * RANKS];
bool broken[RANKS];          // the link with the rank that died has ended
bool knows[RANKS];           // of the death
bool dead, over[RANKS];
byte ended;

// Of a rank: it knows, and tells all with whom it has links. (Not modelled: news for who has ended, or knows already.)
inline learn(r) {
  assert(dead);
  if
  :: !knows[r] ->
    knows[r] = true;
#ifndef BUG_NEWS_NOT_PASSED_ON
    to = 0;
    do
    :: to < RANKS -> if :: IS_LINKED(r, to) && !over[to] && !knows[to] && to != VICTIM -> control[LINK(r, to)]!news_ :: else fi; to++
    :: else -> break
    od;
    to = 0
#endif
  :: else
  fi
}

#if defined(DATA) && !defined(BUG_ONE_GOODBYE)
#define STREAMS 2
#else
#define STREAMS 1
#endif
#define IS_GONE(p) (knows[me] || goodbyes[LINK(p, me)] >= STREAMS)

// Until `count` of what comes from `peer` is at least s; gives up if none is to come any more.
inline wait_for(count) {
#ifndef STAY
  seen = (count >= s);
#endif
  do
  :: seen -> break
  :: else ->
    atomic {
      (count >= s || IS_GONE(peer));
      if
      :: IS_GONE(peer) ->
#ifndef BUG_NO_SECOND_LOOK
        // What has come before the end is there now.
        if :: count >= s -> break :: else fi;
#endif
        assert(knows[me]);
        goto out
      :: else -> break
      fi
    }
  od;
  seen = false
}

// What comes later is taken by nobody.
inline end_it() {
  atomic {
    over[me] = true;
    ended++;
    peer = 0;
    do
    :: peer < RANKS ->
      do :: control[LINK(peer, me)]?_ :: empty(control[LINK(peer, me)]) -> break od;
      peer++
    :: else -> break
    od
  }
}

active [RANKS] proctype Rank() {
  byte me = _pid, s = 1, level, peer;
  bool seen;
  {
    do
    :: s <= CALLS ->
      level = 0;
      do
      :: level < DEPTH ->
        atomic {
          peer = FIRST(me);
          do
          :: peer < RANKS -> if :: !over[peer] -> control[LINK(me, peer)]!told_ :: else fi; peer = AFTER(me, peer)
          :: else -> break
          od
        };
#ifdef DATA
        atomic {
          peer = FIRST(me);
          do :: peer < RANKS -> data[LINK(me, peer)]!frame_; peer = AFTER(me, peer) :: else -> break od
        };
#endif
        peer = FIRST(me);
        do :: peer < RANKS -> wait_for(told[LINK(peer, me)]); peer = AFTER(me, peer) :: else -> break od;
#ifdef DATA
        atomic {
          peer = FIRST(me);
          do :: peer < RANKS -> posted[LINK(peer, me)] = s; peer = AFTER(me, peer) :: else -> break od
        };
        peer = FIRST(me);
        do :: peer < RANKS -> wait_for(landed[LINK(peer, me)]); peer = AFTER(me, peer) :: else -> break od;
#endif
        level++
      :: else -> break
      od;
      s++
    :: else -> break
    od;
#ifndef STAY
    atomic {
      peer = 0;
      do
      :: peer < RANKS ->
        if
        :: IS_LINKED(me, peer) ->
          if :: !over[peer] -> control[LINK(me, peer)]!goodbye_ :: else fi;
#ifdef DATA
          data[LINK(me, peer)]!goodbye_
#endif
        :: else
        fi;
        peer++
      :: else -> break
      od
    };
#endif
out:
    end_it()
  } unless { me == VICTIM && dead && !over[me] };
  if
  :: over[me]
  :: else -> end_it()
  fi
}

// Takes what comes over the links of a rank.
#define POLLS (!over[me] && !(dead && me == VICTIM))
#define TAKES(queue, what, r) r < RANKS && POLLS && queue[LINK(r % RANKS, me)]?[what] -> queue[LINK(r % RANKS, me)]?what
#define TAKES_FROM(r) \
  :: atomic { TAKES(control, told_, r); told[LINK(r % RANKS, me)]++ } \
  :: atomic { TAKES(control, news_, r); learn(me) } \
  :: atomic { TAKES(control, goodbye_, r); goodbyes[LINK(r % RANKS, me)]++ } \
  :: atomic { landed[LINK(r % RANKS, me)] < posted[LINK(r % RANKS, me)] && TAKES(data, frame_, r); landed[LINK(r % RANKS, me)]++ } \
  :: atomic { TAKES(data, goodbye_, r); goodbyes[LINK(r % RANKS, me)]++ }

#ifdef BUG_CLOSED_AT_ONCE
#define HAS_ENDED over[VICTIM]
#else
#define HAS_ENDED dead
#endif

active [RANKS] proctype Poll() {
  byte me = _pid % RANKS, to;
end:
  do
  TAKES_FROM(0)
  TAKES_FROM(1)
  TAKES_FROM(2)
  TAKES_FROM(3)
  :: atomic {
      HAS_ENDED && POLLS && !broken[me] && IS_LINKED(me, VICTIM) ->
      broken[me] = true;
      // What is still on its way may come first, or never.
      do :: control[LINK(VICTIM, me)]?_ :: empty(control[LINK(VICTIM, me)]) -> break od;
      do :: data[LINK(VICTIM, me)]?_ :: empty(data[LINK(VICTIM, me)]) -> break od;
      learn(me)
    }
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
