// The meeting over hosts, by levels (collectives/net_steps.h), with data beside it over links whose frames wait for their
// places (net/link.h), and what becomes of the data of a call that was refused.
//
// RANKS ranks, each on a host of its own, run CALLS collectives; in each, each calls A or B. In a level a rank tells its
// counterparts all calls that it has heard of, sends them data unless it knows that the calls differ, hears what they
// tell, and then, if all are the same, posts places and takes their data. After the last hearing it writes its output, or
// raises. Once it knows that the calls differ, its frames that have not left are dropped, and it only tells and hears in
// the levels that are left. So who waits for a frame to come or leave tells and hears meanwhile ahead of its plan. With
// -DDIRECT there is one level, in which all meet; without, there are two, of two members each (RANKS=4).
//
// What is told goes into a place at the receiver at once, and is read there later; a tell under way is one not read yet.
// Data are a queue for each link and direction, and its head blocks what is behind it; a rank may meet ahead, too, though
// the frame that it waits for is there, for it may be under way. A place is posted when the rank waits for its frame:
// nobody can see that it stood open earlier. With -DUNBUFFERED a frame has left only when it is taken (a long one);
// otherwise nobody waits for that (a short one lies in the kernel). With -DTOGETHER data travel in the tell, unless that
// was told ahead of the plan, and lie in a place beside it until the receiver's plan takes them. With -DAHEAD the tell
// goes ahead of data in their queue instead, and is heard once it is the head.
//
// Checked: all ranks raise or all return, as the calls were; who raises knows all calls; output is written only when all
// have called the same; a place gets the frame of its own call; a tell is read before the next takes its place; all end.

#ifndef RANKS
#define RANKS 4
#endif
#ifndef CALLS
#define CALLS 2
#endif
#ifndef MIXED
#define MIXED CALLS
#endif

#ifdef DIRECT
#define DEPTH 1
#define FIRST(level) (me == 0 -> 1 : 0)
#define AFTER(p) ((p) + 1 == me -> (p) + 2 : (p) + 1)
#else
#define DEPTH 2
#define FIRST(level) (me ^ (1 << (level)))
#define AFTER(p) RANKS
#endif

#define A 1
#define B 2
#define LINK(from, to) ((from) * RANKS + (to))
#ifdef BUG_ONE_PLACE_FOR_TELLS
#define TOLD(from, to) told[LINK(from, to) * 2]
#else
#define TOLD(from, to) told[LINK(from, to) * 2 + s % 2]
#endif

#ifdef BUG_ONE_PLACE_FOR_CARRIED
#define CARRIED(from, to) carried[LINK(from, to) * 2]
#else
#define CARRIED(from, to) carried[LINK(from, to) * 2 + s % 2]
#endif
#ifdef TOGETHER
#define IS_CARRIED(from) (CARRIED(from, me) / 4 == s)
#define TELLS_WITH_DATA (tells == level && !refused)
#else
#define IS_CARRIED(from) false
#define TELLS_WITH_DATA false
#endif
#ifdef AHEAD
#define QUEUE (2 * CALLS)
#define TELLS_AHEAD (tells == level && !refused)
#else
#define QUEUE CALLS
#define TELLS_AHEAD false
#endif
#define TELL 100  // for a channel
#define IS_TOLD_AHEAD(l) data[l]?[TELL, eval(s), _, _]

#ifdef BUG_NO_NUMBER
#define NUMBER 0
#else
#define NUMBER s
#endif
#define IS_NEXT(l) data[l]?[eval(channel), eval(NUMBER), _, _]
#define FITS(l) data[l]?[eval(channel), eval(NUMBER), eval(own), _]
#define IS_QUEUED(l) data[l]??[eval(channel), eval(NUMBER), _, _]
#define HAS_LEFT(l) !IS_QUEUED(l)
#define IS_OF(c, l) data[l]?[eval(c), _, _, _]
#ifdef BUG_NO_FORGET
#define IS_FORGOTTEN(l) false
#else
#define IS_FORGOTTEN(l) (channel > 0 && IS_OF(0, l) || channel > 1 && IS_OF(1, l))
#endif

byte told[2 * RANKS * RANKS];  // 4 s + the calls; 0 once it is read
#ifdef TOGETHER
byte carried[2 * RANKS * RANKS];  // 4 s + the call; 0 once it is taken
#else
byte carried[1];
#endif
chan data[RANKS * RANKS] = [QUEUE] of { byte, byte, byte, byte };  // channel, number, size: the call; for assertions: s
byte called[CALLS + 1];        // for the assertions only: all calls,
byte begun[CALLS + 1];         // by how many,
byte finished[CALLS + 1];      // and who is through with it
byte ended;

// In the next level, which may lie ahead of the plan's.
#define MAY_TELL (tells == heard && heard < DEPTH)
inline tell() {
  other = FIRST(tells);
  do
  :: other < RANKS ->
    assert(TOLD(me, other) == 0);
#ifdef BUG_OWN_CALL_TOLD_ONLY
    TOLD(me, other) = 4 * s + own;
#else
    TOLD(me, other) = 4 * s + known;
#endif
    other = AFTER(other)
  :: else -> break
  od;
  tells++;
  other = FIRST(heard)
}

inline carry() {
  peer = FIRST(level);
  do
  :: peer < RANKS -> CARRIED(me, peer) = 4 * s + own; peer = AFTER(peer)
  :: else -> break
  od
}

inline send() {
  peer = FIRST(level);
  do
  :: peer < RANKS -> data[LINK(me, peer)]!channel, NUMBER, own, s; peer = AFTER(peer)
  :: else -> break
  od
}

inline send_with_tell() {
  peer = FIRST(level);
  do
  :: peer < RANKS ->
    data[LINK(me, peer)]!TELL, s, known, s;
    data[LINK(me, peer)]!channel, NUMBER, own, s;
    peer = AFTER(peer)
  :: else -> break
  od;
  tells++;
  other = FIRST(heard)
}

// Which frames of the call have left is open. The code drops the others when the rank raises: what leaves until then is
// here what had left before.
inline give_up() {
  refused = true;
#ifndef BUG_NO_FORGET
  other = 0;
  do
  :: other < RANKS ->
    if
    :: IS_QUEUED(LINK(me, other)) -> data[LINK(me, other)]??eval(channel), eval(NUMBER), _, _
    :: true
    fi;
    other++
  :: else -> break
  od
#endif
}

// The next of those who tell in the next level that is not heard.
#define MAY_HEAR (heard < tells && (TOLD(other, me) / 4 == s || IS_TOLD_AHEAD(LINK(other, me))))
inline hear_one() {
  if
  :: IS_TOLD_AHEAD(LINK(other, me)) ->
    data[LINK(other, me)]?_, _, size, _;
    known = known | size;
    size = 0
  :: else ->
    known = known | TOLD(other, me) % 4;
    TOLD(other, me) = 0
  fi;
  other = AFTER(other);
  if
  :: other >= RANKS ->
    heard++;
    if :: known == (A | B) && !refused -> give_up() :: else fi;
    other = 0
  :: else
  fi
}

inline hear() {
  do
  :: heard <= level ->
    if
    :: MAY_HEAR -> hear_one()
    :: IS_FORGOTTEN(LINK(other, me)) -> data[LINK(other, me)]?_, _, _, _
#ifdef BUG_POSTED_BEFORE_HEARD
    :: IS_NEXT(LINK(other, me)) && !FITS(LINK(other, me)) -> assert(false)
#endif
    fi
  :: else -> break
  od
}

inline take() {
  data[LINK(peer, me)]?_, _, size, whose;
  assert(whose == s);
  assert(size == own);
  size = 0;
  whose = 0
}

inline receive() {
  peer = FIRST(level);
  do
  :: peer < RANKS && !refused ->
    if
    :: IS_CARRIED(peer) ->
      assert(CARRIED(peer, me) % 4 == own);
      CARRIED(peer, me) = 0;
      peer = AFTER(peer)
    :: IS_NEXT(LINK(peer, me)) -> take(); peer = AFTER(peer)
    :: IS_FORGOTTEN(LINK(peer, me)) -> data[LINK(peer, me)]?_, _, _, _
#ifndef BUG_NO_MEETING_AHEAD
    :: MAY_TELL -> tell()
    :: MAY_HEAR -> hear_one()
    :: heard < tells && IS_FORGOTTEN(LINK(other, me)) -> data[LINK(other, me)]?_, _, _, _
#endif
    fi
  :: else -> break
  od
}

inline wait_sent() {
  peer = FIRST(level);
  do
  :: peer < RANKS && !refused ->
    if
    :: HAS_LEFT(LINK(me, peer)) -> peer = AFTER(peer)
#ifndef BUG_NO_MEETING_AHEAD
    :: MAY_TELL -> tell()
    :: MAY_HEAR -> hear_one()
    :: heard < tells && IS_FORGOTTEN(LINK(other, me)) -> data[LINK(other, me)]?_, _, _, _
#endif
    fi
  :: else -> break
  od
}

// What has come is dropped, and what comes later will be.
inline forget() {
#ifndef BUG_NO_FORGET
  peer = 0;
  do
  :: peer < RANKS ->
    do :: IS_OF(channel, LINK(peer, me)) -> data[LINK(peer, me)]?_, _, _, _ :: else -> break od;
    peer++
  :: else -> break
  od;
#endif
#ifndef BUG_CHANNEL_KEPT
  channel++
#endif
}

inline write_output() { assert(begun[s] == RANKS && called[s] != (A | B)) }

active [RANKS] proctype Rank() {
  byte me = _pid, s = 1, channel, level, tells, heard, peer, other, own, known, size, whose;
  bool refused;
  do
  :: s <= CALLS ->
    atomic {
      if :: own = A :: me > 0 && s <= MIXED -> own = B fi;
      known = own;
      called[s] = called[s] | own;
      begun[s]++
    };
    do
    :: atomic {
        if
        :: TELLS_WITH_DATA ->
          tell();
          carry()
        :: TELLS_AHEAD -> send_with_tell()
        :: else ->
          if :: tells == level -> tell() :: else fi;
          if :: !refused -> send() :: else fi
        fi
      };
#ifdef BUG_SENT_BEFORE_HEARD
      atomic { wait_sent() };
#endif
      atomic {
#ifdef BUG_OUTPUT_BEFORE_HEARD
        if :: level == DEPTH - 1 && !refused -> write_output() :: else fi;
#endif
        hear();
        if :: level == DEPTH - 1 && !refused -> write_output() :: else fi;
        receive();
#ifdef UNBUFFERED
        wait_sent();
#endif
        level++;
        if :: level == DEPTH -> break :: else fi;
#ifdef BUG_RAISED_AT_ONCE
        if :: refused -> break :: else fi
#endif
      }
    od;
    atomic {
      assert(refused == (called[s] == (A | B)) && (!refused || known == (A | B)));
      if :: refused -> forget() :: else fi;
      finished[s]++;
      if :: finished[s] == RANKS -> called[s] = 0; begun[s] = 0 :: else fi;
      refused = false;
      level = 0;
      tells = 0;
      heard = 0;
      peer = 0;
      other = 0;
      own = 0;
      known = 0;
      s++
    }
  :: else -> break
  od;
  ended++
}

ltl every_rank_ends { <> (ended == RANKS) }
