"""Preemption: asked to suspend (SIGTERM, SIGUSR1), all ranks finish the same step, save, and leave to go on later.

A `Loop` does it by itself. In a loop of one's own:

    for step, batch in enumerate(batches):
        train(batch)
        if photinus.suspend_requested():  # the same answer on all ranks
            photinus.save(path, model=model, optimizer=optimizer)
            photinus.suspend(f"step {step + 1}, saved in {path}")

One signal at one rank is enough, on whichever host. The wish of a rank travels to the others in an exchange that all
make: a Loop's exchange of losses, at least every 16 steps or second, or one of `suspend_requested` in each call.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ... import env
from ...job import status
from ...parallel.exchange.agreement import place_in_group
from ...parallel.exchange.collectives import control_device, resolve_group
from ..checkpoint.statefile import finish_writing

EXIT_CODE = status.SUSPENDED_CODE
"""Exit code of a process that has suspended itself."""

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_is_asked = False  # a signal has come, so this process wants to suspend
_watches = 0  # those that take signals now
_before: dict[signal.Signals, Any] = {}  # handlers that ours stand in front of
_owner_pid = 0
_own: Watch | None = None  # of `suspend_requested`
_calls = 0  # of `suspend_requested`
_is_agreed = False  # between the ranks, in such a call


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

    The ranks exchange one number in each call. The first call starts to handle SIGTERM and SIGUSR1, until the session
    closes. A script's own handlers are still called, and an ignored signal stays ignored. After True it stays True:
    save, then call `suspend`.
    """
    global _own, _calls, _is_agreed
    if _own is None:
        _own = Watch()
    _calls += 1
    status.update(steps=_calls)
    if not _is_agreed:
        wish = _own.wants(_calls)
        if place_in_group()[1] > 1:
            wishes = torch.tensor([float(wish)], device=control_device(resolve_group(None)))
            dist.all_reduce(wishes, dist.ReduceOp.MAX)
            wish = bool(wishes.item())
        _is_agreed = wish
    if _is_agreed:
        status.update(letter="s")
    return _is_agreed


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
    global _own, _calls, _is_agreed, _is_asked
    if _own is not None:
        _own.close()
    _own, _calls, _is_agreed = None, 0, False
    if not _watches:
        _is_asked = False


class Watch:
    """Takes the signals, from its making to `close`.

    Args:
        active: False makes one that takes no signal and wants nothing.
    """

    def __init__(self, active: bool = True) -> None:
        global _watches
        self._is_active = active
        is_simulated = place_in_group()[0] == 0 and env.ATTEMPT.get() == 0
        self._simulated_at = env.PREEMPT_AT_STEP.get() if is_simulated else None
        if active:
            _watches += 1
            status.update(letter="c" if _take_signals() else "r")

    def wants(self, step: int) -> bool:
        """Return whether this rank was asked to suspend, when so many steps are done."""
        global _is_asked
        _is_asked |= self._is_active and step == self._simulated_at
        return self._is_active and _is_asked

    def close(self) -> None:
        """Gives the signals back. May be called again."""
        global _watches
        if self._is_active:
            self._is_active = False
            _watches -= 1
            status.update(letter="r" if _watches else "-")
            if not _watches:
                _give_signals_back()


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
    global _is_asked
    before = _before.get(signal.Signals(number))
    if os.getpid() == _owner_pid:
        _is_asked = True
    elif not callable(before):  # a forked child of the rank: not its affair, and it must die of SIGTERM as ever
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if callable(before):
        before(number, frame)
