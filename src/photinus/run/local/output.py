"""The workers' lines on the launcher's terminal, and in log files.

Rank 0 has the launcher's terminal: untouched, in colour, with its progress bar. Where stdout or stderr is no terminal,
or one that may be closed while the job goes on, rank 0 writes into a pipe that is passed on as it comes: a reader that
leaves (`| head`) ends no worker. The other ranks write into pipes; one thread carries their lines out, whole and marked
with the rank: `[1] text`, and where there are several hosts with the host, `[node2:9] text`. What several of these
ranks print within a moment is shown once, `[1-7] text` (see `equal_lines`). A progress bar of such a rank (text that
returns to the line's start) is shown in its last state only.

What goes into a log file (see `logs`) takes the same way, that of rank 0 too: byte for byte, and whole even when the
worker is killed, as the thread empties its pipe to the end. Streams with files of their own have pipes of their own,
and their order between each other is that in which the thread saw them.

The last lines of each rank that has a pipe are kept, for the report of a failure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .equal_lines import EqualLines
from .logs import BOTH, LogFile, Logs

_LOOK_MS = 200
_LAST_WRITE_S = 1.0  # for a reader that goes on, also where nobody wants to wait for one that does not
_LINE_LIMIT_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_LEFT_LIMIT_BYTES = 1 << 20  # what a pipe can hold by default, for those that are still open at the end
_LAST_LINES = 10
_LAST_LINE_CHARACTERS = 200
_ESCAPES = re.compile(rb"\x1b(\[[0-9;:?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


@dataclass
class _Stream:
    """One pipe from a worker: where its bytes go, and the beginning of a line that is not complete yet."""

    rank: int
    target: int  # the launcher's stdout or stderr
    is_shown: bool
    as_it_comes: bool  # rank 0's, in which nothing is changed
    last: deque[str]  # its rank's last lines, of both streams
    file: LogFile | None = None
    pending: bytes = b""


@dataclass
class Output:
    """The launcher's stdout and stderr, shared between the launcher's own messages and the workers' lines."""

    logs: Logs | None = None  # where the workers' streams go
    gives_up: Callable[[], bool] = lambda: False  # whether to leave a reader that takes no more (`| less`) behind
    stdout: int = 1
    stderr: int = 2
    _attempt: tuple[str, int] = ("", 0)  # the job's id, and how often its workers were started before
    _host: str = ""
    _equal: dict[int, EqualLines] = field(default_factory=dict)  # by where they go, behind the lock of that
    _log_folder: Path | None = None
    _files: dict[int, dict[str, Path]] = field(default_factory=dict)
    _last: dict[int, deque[str]] = field(default_factory=dict)
    _warned: bool = False
    _locks: dict[int, threading.Lock] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _open: int = 0
    _quiet: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._locks = dict.fromkeys((self.stdout, self.stderr), threading.Lock())
        self._equal = {target: EqualLines() for target in self._locks}
        with contextlib.suppress(OSError):  # one of them is closed
            if not os.path.sameopenfile(self.stdout, self.stderr):
                self._locks[self.stderr] = threading.Lock()
        reading, self._wake = os.pipe()
        self._selector.register(reading, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._carry, name="photinus-output", daemon=True)
        self._thread.start()

    def say(self, text: str, alarm: bool = False) -> None:
        """Writes the launcher's own words to stderr, at once and in one piece.

        With `alarm`, the first line is bold and red where that can be seen (a terminal; NO_COLOR unset).
        """
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if alarm and os.isatty(self.stderr) and not plain:
            text = re.sub(r"^(\n*)([^\n]+)", "\\1\x1b[1;31m\\2\x1b[0m", text, count=1)
        for target in self._equal:
            if self._locks[target] is self._locks[self.stderr]:
                self._show_held(target, at_end=True)  # what workers said before comes before
        self._write(self.stderr, text.encode(sys.stderr.encoding or "utf-8", "backslashreplace"))

    def begin_attempt(self, attempt: int, job_id: str, host: str = "") -> None:
        """The workers started from now on belong to this attempt (0, 1, ...) of the job; says where its logs are.

        `host`: the name of this host, to stand before each line's rank; empty where it is the only one.
        """
        self._attempt, self._host = (job_id, attempt), host
        folder = None if self.logs is None else self.logs.folder(job_id)
        if self.logs is not None and folder != self._log_folder:
            self._log_folder = folder
            self.say(f"photinus: {self.logs.describe(folder)}\n")
        with self._quiet:
            self._files.clear()
            self._last.clear()
        for equal in self._equal.values():
            equal.ranks.clear()

    def ends_for(self, rank: int, local_rank: int) -> tuple[int | None, int | None]:
        """Return a worker's stdout and stderr; close them here once the worker has them.

        None stands for the launcher's own terminal, which rank 0 inherits. When stdout and stderr go to the same place
        and no other, both ends are the same pipe, so that the order of the two streams is kept.
        """
        logs = self.logs
        files = {} if logs is None else logs.files(*self._attempt, rank, local_rank)
        visible = BOTH if logs is None else logs.terminal_streams(local_rank)
        with self._quiet:
            self._files[rank] = files
            self._last[rank] = deque(maxlen=_LAST_LINES)
        targets = {"out": self.stdout, "err": self.stderr}
        inherited = [
            name
            for name, target in targets.items()
            if rank == 0 and name in visible and name not in files and _is_lasting_terminal(target)
        ]
        if not inherited and not files and (os.path.sameopenfile(self.stdout, self.stderr) or not visible):
            both = self._add(self._stream(rank, "out", visible, files))
            return both, os.dup(both)
        out, err = (
            None if name in inherited else self._add(self._stream(rank, name, visible, files)) for name in targets
        )
        return out, err

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The last lines that a rank wrote, as far as they came through here: not those of a terminal it inherited."""
        with self._quiet:
            return tuple(self._last.get(rank, ()))

    def log_of(self, rank: int) -> Path | None:
        """The file in which one looks for what a rank said last: its stderr, else its stdout; None without files."""
        files = self._files.get(rank, {})
        return files.get("err", files.get("out"))

    def add_to_log(self, rank: int, text: str) -> None:
        """Writes words of the launcher to the end of a rank's log file, if it has one."""
        path = self.log_of(rank)
        if path is not None:
            file = LogFile(path, self._warn)
            file.write(text.encode("utf-8", "backslashreplace"))
            file.close()

    def drain(self, timeout_s: float) -> None:
        """Waits until all that the workers have written is out and their pipes are closed, or the time is over."""
        deadline = time.monotonic() + timeout_s
        with self._quiet:
            while self._open > 0 and time.monotonic() < deadline:
                self._quiet.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends the thread; what is still in the pipes, and lines that were not complete, are written as they are."""
        os.close(self._wake)
        self._thread.join(_LAST_WRITE_S)
        while self._thread.is_alive():
            if self.gives_up():
                return
            self._thread.join(0.1)
        for key in list(self._selector.get_map().values()):
            self._finish(key.fd, key.data)
        for target in self._equal:
            self._show_held(target, at_end=True)
        self._selector.close()

    def _stream(self, rank: int, name: str, visible: frozenset[str], files: dict[str, Path]) -> _Stream:
        target = self.stdout if name == "out" else self.stderr
        if rank and name in visible:
            self._equal[target].ranks.add(rank)
        return _Stream(
            rank,
            target,
            is_shown=name in visible,
            as_it_comes=rank == 0,
            last=self._last[rank] if rank or name not in visible or name in files else deque(maxlen=0),  # seen above
            file=LogFile(files[name], self._warn) if name in files else None,
        )

    def _add(self, stream: _Stream) -> int:
        reading, writing = os.pipe()
        with self._quiet:
            self._open += 1
        self._selector.register(reading, selectors.EVENT_READ, stream)
        return writing

    def _carry(self) -> None:
        while True:
            due = {target: due_s for target, equal in self._equal.items() if (due_s := equal.due_s())}
            events = self._selector.select(max(0.0, min(due.values()) - time.monotonic()) if due else None)
            for target in due:
                self._show_held(target)
            for key, _ in events:
                stream: _Stream | None = key.data
                if stream is None:  # `close` closed the other end
                    self._selector.unregister(key.fd)
                    os.close(key.fd)
                    self._take_what_is_left()
                    return
                piece = _read(key.fd)
                if piece:
                    self._take(stream, piece)
                else:
                    self._finish(key.fd, stream)

    def _take_what_is_left(self) -> None:
        """Of pipes that somebody keeps open: what is in them now, but no more than a pipe holds."""
        for key in list(self._selector.get_map().values()):
            os.set_blocking(key.fd, False)
            byte_count = 0
            while byte_count < _LEFT_LIMIT_BYTES and (piece := _read(key.fd)):
                self._take(key.data, piece)
                byte_count += len(piece)

    def _take(self, stream: _Stream, piece: bytes) -> None:
        if stream.file is not None and not stream.file.write(piece):
            stream.file, stream.is_shown = None, True  # rather too much on the terminal than something lost
        if stream.is_shown and stream.as_it_comes:
            self._write(stream.target, piece, clear=False)
        *lines, rest = (stream.pending + piece).split(b"\n")
        # Of a progress bar keep the last state; of an endless line, give out what there is.
        if b"\r" in rest[:-1]:
            rest = _last_state(rest) + b"\r" * rest.endswith(b"\r")
        stream.pending = rest
        if len(stream.pending) > _LINE_LIMIT_BYTES:
            lines.append(stream.pending)
            stream.pending = b""
        if lines:
            self._give_out(stream, [_last_state(line) for line in lines])

    def _give_out(self, stream: _Stream, lines: list[bytes]) -> None:
        texts = [
            _ESCAPES.sub(b"", line[:_LINE_LIMIT_BYTES]).decode("utf-8", "replace").rstrip()
            for line in lines[-_LAST_LINES:]
        ]
        with self._quiet:
            stream.last.extend(text[:_LAST_LINE_CHARACTERS] for text in texts if text)
        if stream.is_shown and not stream.as_it_comes:
            with self._locks[stream.target]:
                self._equal[stream.target].add(stream.rank, lines, time.monotonic())
            self._show_held(stream.target)

    def _show_held(self, target: int, *, at_end: bool = False) -> None:
        """Shows the lines that have waited long enough for other ranks to say the same; `at_end`: all of them."""
        with self._locks[target]:
            lines = self._equal[target].take(float("inf") if at_end else time.monotonic(), self._host)
            if lines:
                self._write_here(target, lines, clear=True)

    def _finish(self, reading: int, stream: _Stream) -> None:
        self._selector.unregister(reading)
        os.close(reading)
        if _last_state(stream.pending):
            self._give_out(stream, [_last_state(stream.pending)])
        if stream.file is not None:
            stream.file.close()
        with self._quiet:
            self._open -= 1
            self._quiet.notify_all()

    def _warn(self, path: Path, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            self.say(
                f"photinus: warning: cannot write {path}: {error.strerror}. Training continues; output that does not "
                f"fit into log files is shown here only.\n"
            )

    def _write(self, target: int, data: bytes, *, clear: bool = True) -> None:
        with self._locks[target]:
            self._write_here(target, data, clear=clear)

    def _write_here(self, target: int, data: bytes, *, clear: bool) -> None:  # with the lock held
        if clear and os.isatty(target):
            # Rank 0's progress bar may stand on this line: take its place, it draws itself again below.
            data = b"\r\x1b[K" + data
        write_all(target, data, self.gives_up)


_full: set[int] = set()


def write_all(target: int, data: bytes, gives_up: Callable[[], bool] = lambda: False) -> None:
    """Writes to stdout or stderr. What cannot be written is dropped and the job goes on.

    The reader may have gone (`| head`), the terminal may be closed (EIO), or the disk may be full (one warning).
    Whoever carries the workers' lines must go on reading them, or each worker waits for ever in its next print. It
    waits for a reader that does not go on, until `gives_up`.
    """
    poll, rest = select.poll(), memoryview(data)
    try:
        poll.register(target, select.POLLOUT)
        while rest:
            if not poll.poll(_LOOK_MS):
                if gives_up():
                    return
                continue
            with contextlib.suppress(BlockingIOError):  # somebody made the terminal non-blocking
                rest = rest[os.write(target, rest[: select.PIPE_BUF]) :]  # for so much there is room
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and target not in _full:
            _full.add(target)
            text = f"cannot write the output of workers: {error.strerror}. Training continues; that output is lost."
            write_all(2, f"photinus: warning: {text}\n".encode(), gives_up)


def _read(reading: int) -> bytes:
    """Read what is there; nothing at the end, or when nothing is there and the pipe does not block."""
    try:
        return os.read(reading, _READ_BYTES)
    except BlockingIOError:
        return b""


def _is_lasting_terminal(target: int) -> bool:
    """Return whether a worker may write to this terminal itself. If it is closed, a print fails, and ends the job.

    A launcher that ignores SIGHUP (`trap "" HUP`), or runs in the background (`& disown`), goes on without it.
    """
    if not os.isatty(target) or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return False
    with contextlib.suppress(OSError):  # not the terminal that controls this process: no SIGHUP will come of it
        return os.tcgetpgrp(target) in (0, os.getpgrp())
    return True


def _last_state(line: bytes) -> bytes:
    """Return the text that a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
