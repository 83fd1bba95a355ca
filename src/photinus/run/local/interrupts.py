"""Ctrl-C, SIGTERM and their like, noted when they come and acted upon at safe points; SIGUSR1 asks to suspend.

Workers are in sessions of their own, where Ctrl-Z and a new size of the terminal do not reach them: both are passed on.

An exception thrown from a signal handler could strike between the start of a process and the note of its pid. So the
handlers only write the signal down; a byte in a pipe wakes whoever waits. Only as long as nothing has been started
(a child process may count GPUs for seconds) does a signal strike at once, as `Interrupted`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import types
from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGTSTP, signal.SIGWINCH)
FROM_A_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
_ONE_REQUEST_S = 0.1


class Interrupted(BaseException):
    """A signal came before anything was started. Not an Exception, so that no library's handler swallows it."""


class Interrupts:
    """The signals received so far. `fd` becomes readable with each, until `drain`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.received: list[signal.Signals] = []
        self.suspension_wanted = False  # SIGUSR1 has come, and the workers have not been asked to suspend
        self.groups: set[int] = set()  # process groups of workers, to which _PASSED_ON is passed on
        self._first_at_s = 0.0
        self._raise_at_once = False

    @property
    def first(self) -> signal.Signals | None:
        """The signal that ends the job, if one has come."""
        return self.received[0] if self.received else None

    @property
    def forced(self) -> bool:
        """Return whether the user has sent a second signal: no more grace."""
        return len(self.received) > 1

    def note(self, number: int, frame: types.FrameType | None) -> None:
        """The signal handler."""
        if number == signal.SIGUSR1:
            self.suspension_wanted = True
            return
        if number in _PASSED_ON:
            self._pass_on(signal.SIGSTOP if number == signal.SIGTSTP else signal.SIGWINCH)
            if number == signal.SIGTSTP:
                signal.signal(number, signal.SIG_DFL)  # stops this process, unless no shell could continue it
                signal.raise_signal(number)  # returns after SIGCONT
                signal.signal(number, self.note)
                self._pass_on(signal.SIGCONT)
            return
        # `timeout` and schedulers signal a process and its group: what then comes twice at once is one request. When a
        # terminal is closed, the shell and the kernel may both send SIGHUP, and nobody is impatient.
        now_s = time.monotonic()
        is_again = number == signal.SIGHUP or now_s - self._first_at_s < _ONE_REQUEST_S
        if self.received and number not in FROM_A_KEYBOARD and is_again:
            return
        self._first_at_s = self._first_at_s if self.received else now_s
        self.received.append(signal.Signals(number))
        if self._raise_at_once:
            self._raise_at_once = False
            raise Interrupted

    def _pass_on(self, number: signal.Signals) -> None:
        for group in self.groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # not yet a group, or another user's
                os.killpg(group, number)

    @contextlib.contextmanager
    def raise_at_once(self) -> Iterator[None]:
        """During the block nothing is running that would have to be ended, so a signal raises Interrupted."""
        if self.received:
            raise Interrupted
        self._raise_at_once = True
        try:
            yield
        finally:
            self._raise_at_once = False

    def comes_within(self, timeout_s: float) -> bool:
        """Wait for a signal that ends the job; return whether one has been received."""
        deadline = time.monotonic() + timeout_s
        self.drain()
        while not self.received and (left_s := deadline - time.monotonic()) > 0:
            select.select([self.fd], [], [], left_s)
            self.drain()
        return bool(self.received)

    def drain(self) -> None:
        """Empties the pipe behind `fd`."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 512):
                pass


@contextlib.contextmanager
def block_signals() -> Iterator[None]:
    """Processes started in the block never get the signals that end a job, from their first instruction on.

    Slurm, systemd and `kill -- -PGID` signal every process of a job. A process that the launcher needs until workers
    have saved must survive that; the launcher ends it (a closed pipe, SIGKILL). Keep the block short: signals of this
    thread wait for its end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGUSR1))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def handle_signals() -> Iterator[Interrupts]:
    """Takes these signals during the block, but not those that are ignored (nohup)."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    interrupts = Interrupts(reading)

    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGUSR1, *_PASSED_ON)}
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, interrupts.note)
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(reading)
        os.close(writing)
