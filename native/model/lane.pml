// No wake-up is lost inside a process: one futex for each process, and several threads that drive a collective.
//
// Process A has a progress thread and USERS threads that wait for one collective of a lane; process B advances the
// counter that the collective needs, STEPS times. All threads of A sleep on A's one futex. Whoever drives takes the
// lane's lock by trying; the progress thread leaves lanes with waiters alone. A waiting thread may lose patience.
//
// Rules (each has a mutation that breaks it):
//  1. A waiter counts itself in `waiters`, announces itself in `asleep`, reads the futex, tries the lock and polls,
//     and only then sleeps. `asleep` is a count, and a wake-up reaches all.
//  2. A driver that will not poll again by itself (the progress thread: it now sees waiters) wakes its own futex after
//     it has unlocked a lane with waiters: one of them may have found the lock taken.
//  3. A driver that is a waiter itself wakes nobody for that: it polls again before it sleeps if anything has
//     happened since it read the futex. If it did, it would wake itself for ever (BUG_WAITER_WAKES_ITSELF), and two
//     waiters would wake each other for ever.
//  4. Whoever completes the collective wakes; so does who submits it, and a waiter that leaves before the end (the
//     progress thread has skipped the lane until then).
//
// `every_thread_ends` is checked WITHOUT fairness: as long as B does nothing, A must come to rest by itself. So it
// also says that nobody spins.
//
// Sequential consistency is right here: waiters, asleep, futex, lock and counters are seq_cst atomics.

#ifndef USERS
#define USERS 1
#endif
#ifndef STEPS
#define STEPS 2
#endif
#define THREADS (USERS + 1)
#define PROGRESS USERS

byte counter;      // of process B
byte step;         // of the state machine; guarded by the lock
bool locked, submitted, done;
byte waiters, asleep, ended;
bool woken[THREADS], in_futex[THREADS];

inline read_futex() { woken[me] = false }

inline wake_a() {
  d_step { i = 0; do :: i < THREADS -> woken[i] = true; i++ :: else -> break od; i = 0 };
#ifdef BUG_WAKE_ONE
  // The kernel wakes the one that came first; which that was is left open.
  if
  :: in_futex[0] -> in_futex[0] = false
  :: in_futex[PROGRESS] -> in_futex[PROGRESS] = false
#if USERS > 1
  :: in_futex[1] -> in_futex[1] = false
#endif
  :: else
  fi
#else
  d_step { i = 0; do :: i < THREADS -> in_futex[i] = false; i++ :: else -> break od; i = 0 }
#endif
}

inline wake_a_if_asleep() { if :: asleep > 0 -> wake_a() :: asleep == 0 fi }

inline futex_wait() {
  atomic { if :: !woken[me] -> in_futex[me] = true :: else fi };
  !in_futex[me]
}

#ifdef BUG_ASLEEP_IS_A_FLAG
#define ANNOUNCE asleep = 1
#define AWAKE asleep = 0
#else
#define ANNOUNCE asleep++
#define AWAKE asleep--
#endif

// Tries the lock, does all steps that can be done, unlocks, and tells those who may have found the lock taken.
inline drive() {
  completed = false;
  atomic { if :: !locked -> locked = true; got = true :: else -> got = false fi };
  if
  :: !got
  :: got ->
    do
    :: done || !submitted -> break
    :: !done && submitted && step < STEPS && counter > step -> step++
    :: !done && submitted && step < STEPS && counter <= step -> break
    :: !done && submitted && step == STEPS -> done = true; completed = true
    od;
    locked = false;
    if
    :: completed ->
#ifndef BUG_NO_WAKE_AT_END
      wake_a_if_asleep()
#else
      skip
#endif
    :: !completed ->
#ifdef BUG_NO_WAKE_AFTER_UNLOCK
      skip
#else
#ifdef BUG_WAITER_WAKES_ITSELF
      if :: waiters > 0 -> wake_a_if_asleep() :: waiters == 0 fi
#else
      if
      :: me == PROGRESS && waiters > 0 -> wake_a_if_asleep()
      :: me != PROGRESS || waiters == 0
      fi
#endif
#endif
    fi
  fi
}

active [USERS] proctype User() {
  byte me = _pid, i;
  bool got, completed;
  if
  :: me == 0 ->
    submitted = true;
#ifndef BUG_NO_WAKE_ON_SUBMIT
    wake_a_if_asleep()
#endif
  :: me != 0 -> submitted
  fi;
  if :: true :: true -> goto left fi;  // the collective is waited for, some time later, or never
#ifndef BUG_COUNTED_LATE
  waiters++;
#endif
  if :: true :: drive() fi;  // looks before sleeping; any number of them is like one
  do
  :: true ->
    ANNOUNCE;
    read_futex();
    if :: done -> AWAKE; break :: !done fi;
    drive();
    if :: done -> AWAKE; break :: !done fi;
#ifdef BUG_COUNTED_LATE
    waiters++;
#endif
    futex_wait();
#ifdef BUG_COUNTED_LATE
    waiters--;
#endif
    AWAKE;
    if :: true :: !done -> break fi  // woken, or out of patience
  od;
#ifndef BUG_COUNTED_LATE
  waiters--;
#endif
#ifndef BUG_NO_WAKE_ON_LEAVING
  if :: done :: !done -> wake_a_if_asleep() fi;
#endif
left:
  ended++
}

active proctype Progress() {
  byte me = PROGRESS, i;
  bool got, completed;
  do
  :: done -> break
  :: !done ->
    if :: true :: waiters == 0 -> drive() fi;
    ANNOUNCE;
    read_futex();
    if :: waiters == 0 -> drive() :: waiters > 0 fi;
    if :: done -> AWAKE; break :: !done fi;
    futex_wait();
    AWAKE
  od;
  ended++
}

active proctype B() {
  byte i;
  do
  :: counter == STEPS -> break
  :: counter < STEPS -> counter++; wake_a_if_asleep()
  od;
  ended++
}

ltl every_thread_ends { <> (ended == THREADS + 1 && done) }
