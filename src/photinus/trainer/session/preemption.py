"""Preemption: asked to suspend (SIGTERM, SIGUSR1), all ranks finish the same step, save, and leave to go on later.

A `Loop` does it by itself. In a loop of one's own:

    for step, batch in enumerate(batches):
        train(batch)
        if photinus.suspend_requested():  # the same answer on all ranks
            photinus.save(path, model=model, optimizer=optimizer)
            photinus.suspend(f"step {step + 1}, saved in {path}")

One signal at one rank is enough, on whichever host. How all agree on a step, without an exchange in each:

    1. Each rank counts its calls of `suspend_requested`. A thread looks into the job's store a few times a second.
    2. A rank that was asked writes so into the store.
    3. A thread that sees it holds its rank at the next call, and writes how many calls the rank has made.
    4. When all have, rank 0's thread writes the highest number plus one: the call that answers True. Ranks that are
       held go on up to it.

No rank has passed that call, because each was held before it said where it is; and none waits in vain for a rank that
is held, because the threads go on whatever their ranks are doing. A call that nobody asked anything of costs a lock.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

from ... import env
from ...errors import CollectiveTimeoutError, PhotinusError
from ...job import status
from ...job.world import name_ranks
from ...parallel.exchange.agreement import place_in_group
from ..checkpoint.statefile import finish_writing

EXIT_CODE = 75
"""What a process that has suspended itself leaves with: EX_TEMPFAIL of sysexits.h, "try again later"."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LOOK_EVERY_S = 0.25
_LOOK_CLOSELY_S = 0.01
_JOIN_S = 2.0
_NEVER = 1 << 62  # in place of a number of calls: this rank makes none any more

_asked: signal.Signals | None = None  # the last signal, from when on this process wants to suspend
_watches: list[Watch] = []  # those that take signals now, the newest last
_before: dict[signal.Signals, Any] = {}  # handlers that ours stand in front of
_owner_pid = 0
_made = 0  # watches made by this process; equal on all ranks at equal places of the program
_own: Watch | None = None  # of `suspend_requested`


class Suspended(SystemExit):
    """SystemExit with code 75, raised after the work was saved. `photinus run` then starts the job again, and so does
    torchrun with --max-restarts.

    Args:
        words: text for people: what was saved and where, "step 120, saved in runs/x/checkpoints/step-00000120".
    """

    def __init__(self, words: str) -> None:
        super().__init__(EXIT_CODE)
        self.words = words

    def __str__(self) -> str:
        return self.words


def suspend_requested() -> bool:
    """Return whether the job was asked to suspend. Call it once after each step, on all ranks: all get the same answer.

    The first call starts to handle SIGTERM and SIGUSR1, until the session closes. A script's own handlers are still
    called, and an ignored signal stays ignored. After True it stays True: save, then call `suspend`.

    Raises:
        CollectiveTimeoutError: the job was asked to suspend, and a rank did not answer within PHOTINUS_TIMEOUT_S.
        PhotinusError: the job was asked to suspend, and its store cannot be reached.
    """
    global _own
    if _own is None:
        _own = Watch()
    status.tell(steps=_own.calls + 1)
    return _own.requested()


def suspend(words: str = "") -> NoReturn:
    """End this process so that a launcher that still runs starts it again, without counting a failure.

    Args:
        words: text for people: what was saved and where. The launcher logs it.

    Raises:
        Suspended: always. It is a SystemExit with code 75, so `with` blocks close in order.
    """
    finish_writing()
    raise Suspended(words)


def close() -> None:
    """Ends what `suspend_requested` began. Called when the session closes."""
    global _own, _asked
    if _own is not None:
        _own.close()
        _own = None
    if not _watches:
        _asked = None


class Watch:
    """Takes the signals and agrees with the other ranks, from its making to `close`. All ranks make it alike.

    Args:
        active: False makes one that takes no signal and always answers False.
    """

    def __init__(self, active: bool = True) -> None:
        global _made
        self._rank, self._world_size = place_in_group()
        self._store: Any = None
        self._simulated_at = env.PREEMPT_AT_STEP.get() if env.ATTEMPT.get() == 0 else None
        self._condition = threading.Condition()
        self.calls = 0
        self._holding = False
        self._target: int | None = None
        self._trouble: Exception | None = None
        self._closing = False
        self._thread: threading.Thread | None = None
        if active and self._world_size > 1:
            self._store = dist.distributed_c10d._get_default_store()
        # Without a store (MPI makes groups without one) ranks cannot agree: the signals keep their meaning.
        self._active = active and (self._world_size == 1 or self._store is not None)
        if not self._active:
            return
        _made += 1
        self._key = f"photinus/suspend/{_made}"
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if self._store is not None:
            self._thread = threading.Thread(target=self._look, name="photinus-preemption", daemon=True)
            self._thread.start()
        _watches.append(self)
        status.tell(letter="c" if _take_signals() else "r")

    def requested(self, step: int | None = None) -> bool:
        """See the function of this name; `step` is the number of the step that is done, default the calls so far."""
        if not self._active:
            return False
        number = self.calls + 1
        if self._rank == 0 and self._simulated_at is not None and (step or number) == self._simulated_at:
            _ask(signal.SIGUSR1)
        if self._store is None:
            self.calls = number
            answer = _asked is not None
        else:
            with self._condition:
                self._holding = self._holding or _asked is not None
                if self._holding:
                    self._wait_for_target()
                    assert self._target is not None
                answer = self._holding and self._target is not None and number >= self._target
                self.calls = number
        if answer:
            status.tell(letter="s")
        return answer

    def close(self) -> None:
        """Gives the signals back, and tells the other ranks that this one stops at no step any more."""
        if not self._active:
            return
        self._active = False
        _watches.remove(self)
        status.tell(letter="r" if _watches else "-")
        if not _watches:
            _give_signals_back()
        self._closing = True
        if self._thread is not None:
            self.ring()
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():  # the store hangs; the pipe stays open, as the thread may look at it again
                return
        os.close(self._bell)

    def ring(self) -> None:
        """Wakes the thread; safe in a signal handler."""
        with contextlib.suppress(OSError):
            os.eventfd_write(self._bell, 1)

    def _wait_for_target(self) -> None:
        """Waits, holding the lock, until all ranks have said where they are."""
        limit_s = env.TIMEOUT_S.get()
        deadline = time.monotonic() + limit_s
        self.ring()
        while self._target is None:
            if self._trouble is not None:
                raise PhotinusError(
                    f"rank {self._rank} was asked to suspend, but the ranks cannot agree on a step, because the job's "
                    f"store cannot be reached: {self._trouble}"
                ) from self._trouble
            if not self._condition.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"rank {self._rank} was asked to suspend and waited {limit_s:g} s for {self._missing()} to say "
                    f"at which step it is. All ranks have to call photinus.suspend_requested() (or run the same "
                    f"Loop)."
                )

    def _missing(self) -> str:
        try:
            missing = [rank for rank in range(self._world_size) if not self._store.check([f"{self._key}/at/{rank}"])]
        except Exception:  # noqa: BLE001 - the words of an error that is raised anyway
            return "other ranks"
        return name_ranks(missing or [0])

    # -- the thread --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        try:
            while not self._closing:
                self._pause(_LOOK_EVERY_S)
                if _asked is not None:
                    self._store.set(f"{self._key}/wish", str(self._rank))
                if _asked is not None or self._store.check([f"{self._key}/wish"]):
                    self._agree()
                    return
            self._say_where(_NEVER)
        except Exception as error:  # noqa: BLE001 - matters only if the rank is asked to suspend, and is told then
            with self._condition:
                self._trouble = error
                self._condition.notify_all()

    def _agree(self) -> None:
        with self._condition:
            self._holding = True  # from here on the rank passes no further call
            calls = _NEVER if self._closing else self.calls
        self._say_where(calls)
        while not self._store.check([f"{self._key}/target"]):
            if self._rank == 0 and self._store.check([f"{self._key}/at/{rank}" for rank in range(self._world_size)]):
                at = [int(self._store.get(f"{self._key}/at/{rank}")) for rank in range(self._world_size)]
                self._store.set(f"{self._key}/target", str(max(at) + 1))
            elif self._closing:  # the rank is past its last call, and the others need not stop
                self._say_where(_NEVER)
                return
            else:
                self._pause(_LOOK_CLOSELY_S)
        target = int(self._store.get(f"{self._key}/target"))
        with self._condition:
            self._target = target
            self._condition.notify_all()

    def _say_where(self, calls: int) -> None:
        self._store.set(f"{self._key}/at/{self._rank}", str(calls))
        if calls == _NEVER and self._rank == 0:  # nobody is left to reckon: no call answers True
            self._store.set(f"{self._key}/target", str(_NEVER))

    def _pause(self, timeout_s: float) -> None:
        select.select([self._bell], [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)


def _take_signals() -> bool:
    """Puts our handlers in front; whether SIGTERM had one of the script's."""
    global _owner_pid
    if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
        _owner_pid = os.getpid()
        for number in _SIGNALS:
            before = signal.getsignal(number)
            # None is a handler that is not Python's, such as faulthandler's.
            if number not in _before and before not in (signal.SIG_IGN, None):
                _before[number] = before
                signal.signal(number, _note)
    return callable(_before.get(signal.SIGTERM))


def _give_signals_back() -> None:
    for number, before in _before.items():
        if signal.getsignal(number) is _note and threading.current_thread() is threading.main_thread():
            signal.signal(number, before)
    _before.clear()


def _note(number: int, frame: FrameType | None) -> None:
    before = _before.get(signal.Signals(number))
    if os.getpid() == _owner_pid:
        _ask(signal.Signals(number))
    elif not callable(before):  # a forked child of the rank: not its affair, and it must die of SIGTERM as ever
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if callable(before):
        before(number, frame)


def _ask(number: signal.Signals) -> None:
    global _asked
    _asked = number
    for watch in _watches:
        watch.ring()
