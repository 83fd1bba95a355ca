"""Stdin of a launcher that another host started over ssh: carries signals; its end means that the caller is gone.

Each line is the number of a signal, or empty: the caller is still there. When stdin ends, or is silent for long, the
caller is gone (a kill, a cut cable), and the launcher ends as after SIGTERM.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from ..local.interrupts import FROM_A_KEYBOARD

# A machine that loses its power says no good-bye. (Ctrl-Z at the other end stops the lines too, so not too short.)
_SILENCE_S = 300.0
# After it was asked to end: the launcher gives its workers 1.5 s, and some moments are its own.
_LEAVE_S = 4.0


def hold_lifeline(grace_s: float) -> None:
    """Takes standard input away from this process and its children, and obeys it in a thread.

    A launcher that takes longer to end than the grace of its workers is killed (its guard ends the workers).
    """
    line = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_obey, args=(line, grace_s), name="photinus-lifeline", daemon=True).start()


def _obey(line: int, grace_s: float) -> None:
    kill_at_s, heard_at_s, pending, is_open = float("inf"), time.monotonic(), b"", True
    while True:
        until_s = min(kill_at_s, heard_at_s + _SILENCE_S if is_open else float("inf"))
        ready, _, _ = select.select([line] if is_open else [], [], [], max(0.0, until_s - time.monotonic()))
        if time.monotonic() >= kill_at_s:
            os.kill(os.getpid(), signal.SIGKILL)
        data = os.read(line, 4096) if ready else b""
        heard_at_s = time.monotonic()
        *lines, pending = (pending + data).split(b"\n")
        numbers = [int(text) for text in lines if text]
        if not data:
            is_open, numbers = False, [signal.SIGTERM]
        for number in numbers:
            if number == signal.SIGUSR1:  # a request to suspend ends nothing
                os.kill(os.getpid(), number)
                continue
            at_once = number in FROM_A_KEYBOARD or kill_at_s != float("inf")
            kill_at_s = time.monotonic() + _LEAVE_S + (0.0 if at_once else grace_s)
            os.kill(os.getpid(), number)
