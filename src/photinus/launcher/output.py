"""The workers' lines on the launcher's terminal.

Rank 0 writes to the launcher's own stdout and stderr: untouched, in colour, with its progress bar. The other ranks
write into pipes; one thread carries their lines out, whole and marked with the rank: `[1] text`. A progress bar of
such a rank (text that returns to the line's start) is shown in its last state only.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import sys
import threading
import time
from dataclasses import dataclass, field

__all__ = ["Output"]

_LINE_LIMIT_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024


@dataclass
class _Stream:
    """One pipe from a worker: where its lines go, and the beginning of a line that is not complete yet."""

    prefix: bytes
    target: int
    pending: bytes = b""


@dataclass
class Output:
    """The launcher's stdout and stderr, shared between the launcher's own messages and the workers' lines."""

    stdout: int = 1
    stderr: int = 2
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _selector: selectors.BaseSelector | None = None
    _thread: threading.Thread | None = None
    _wake: int | None = None
    _open: int = 0
    _quiet: threading.Condition = field(default_factory=threading.Condition)

    def say(self, text: str, *, alarm: bool = False) -> None:
        """Writes the launcher's own words to stderr, at once and in one piece.

        With `alarm`, the first line is bold and red where that can be seen (a terminal; NO_COLOR unset).
        """
        if alarm and os.isatty(self.stderr) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
            text = re.sub(r"^(\n*)([^\n]+)", "\\1\x1b[1;31m\\2\x1b[0m", text, count=1)
        self._write(self.stderr, text.encode(sys.stderr.encoding or "utf-8", "backslashreplace"))

    def pipes_for(self, rank: int) -> tuple[int, int]:
        """Two writing ends, for stdout and stderr of a worker; to be closed here once the worker has them.

        When stdout and stderr go to the same place, both ends are the same pipe, so that the order of the two
        streams is kept.
        """
        self._start()
        prefix = f"[{rank}] ".encode()
        if os.path.sameopenfile(self.stdout, self.stderr):
            writing = self._add(_Stream(prefix, self.stdout))
            return writing, os.dup(writing)
        return self._add(_Stream(prefix, self.stdout)), self._add(_Stream(prefix, self.stderr))

    def drain(self, timeout_s: float) -> None:
        """Waits until all that the workers have written is out and their pipes are closed, or the time is over."""
        deadline = time.monotonic() + timeout_s
        with self._quiet:
            while self._open > 0 and time.monotonic() < deadline:
                self._quiet.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends the thread; lines that were not complete are written as they are."""
        if self._thread is None or self._wake is None or self._selector is None:
            return
        os.close(self._wake)
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            self._finish(key.fd, key.data)
        self._selector.close()
        self._thread = self._wake = self._selector = None

    def _start(self) -> None:
        if self._thread is not None:
            return
        reading, self._wake = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(reading, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._carry, args=(self._selector,), name="photinus-output", daemon=True)
        self._thread.start()

    def _add(self, stream: _Stream) -> int:
        assert self._selector is not None
        reading, writing = os.pipe()
        with self._quiet:
            self._open += 1
        self._selector.register(reading, selectors.EVENT_READ, stream)
        return writing

    def _carry(self, selector: selectors.BaseSelector) -> None:
        while True:
            for key, _ in selector.select():
                stream: _Stream | None = key.data
                if stream is None:  # `close` closed the other end
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    return
                piece = os.read(key.fd, _READ_BYTES)
                if piece:
                    self._take(stream, piece)
                else:
                    self._finish(key.fd, stream)

    def _take(self, stream: _Stream, piece: bytes) -> None:
        *lines, rest = (stream.pending + piece).split(b"\n")
        # Of a progress bar keep the last state; of an endless line, give out what there is.
        stream.pending = rest.rpartition(b"\r")[2] if b"\r" in rest[:-1] else rest
        if len(stream.pending) > _LINE_LIMIT_BYTES:
            lines.append(stream.pending)
            stream.pending = b""
        if lines:
            self._write(stream.target, b"".join(stream.prefix + _last_state(line) + b"\n" for line in lines))

    def _finish(self, reading: int, stream: _Stream | None) -> None:
        assert self._selector is not None
        self._selector.unregister(reading)
        os.close(reading)
        if stream is None:
            return
        if _last_state(stream.pending):
            self._write(stream.target, stream.prefix + _last_state(stream.pending) + b"\n")
        with self._quiet:
            self._open -= 1
            self._quiet.notify_all()

    def _write(self, target: int, data: bytes) -> None:
        with self._lock:
            if os.isatty(target):
                # Rank 0's progress bar may stand on this line: take its place, it draws itself again below.
                data = b"\r\x1b[K" + data
            # A reader that has gone (`| head`) is no reason to fail: the workers' pipes must still be emptied.
            with contextlib.suppress(BrokenPipeError):
                while data:
                    try:
                        data = data[os.write(target, data) :]
                    except BlockingIOError:  # somebody made the terminal non-blocking and it is full
                        select.select([], [target], [], 1.0)


def _last_state(line: bytes) -> bytes:
    """What a terminal would show of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
