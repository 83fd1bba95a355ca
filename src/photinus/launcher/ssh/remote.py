"""The far side: what `photinus run --hostfile` and `photinus doctor --hosts` start on each host, over ssh.

    ssh HOST python -m photinus.launcher.ssh.remote

It says who it is and does what it is told by lines of JSON on stdin: neither a secret nor an environment stands on a
command line. Stdin is also its lifeline. When it ends, the place where the user typed is gone (Ctrl-C, a kill, a cut
cable), and the far side ends what it has started: SIGTERM to its launcher, which then ends as always.

    {"do": "prepare", "cwd": ..., "program": ..., "listen": ...}   look whether the job can start; bind the port
    {"do": "run", "words": ..., "environ": ..., "secret": ...}     start `photinus run`
    {"do": "signal", "number": 2}                                  pass it on
    {"do": "beat"}                                                 still there? (answered)
    {"do": "facts" | "serve" | "probe", ...}                       questions of `photinus doctor`, see far_probe

Stdout carries its answers and the job's output, as frames (see far_frames).
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import signal
import socket
import sys
import time
from typing import Any

from ...env import CONDUCTED_AS, JOB_SECRET
from ...errors import PhotinusError
from ...version import __version__
from ..command_line.program import Program, check_program
from ..command_line.usage import UsageError
from ..workers.interrupts import Interrupts, taking_interrupts
from .remote_frames import MARK, frame, message
from .remote_job import FarJob, Outputs
from .remote_listen import listen

__all__ = ["main"]

_FROM_USER, _TO_USER = 0, 1
# A machine that loses its power says no good-bye. (Ctrl-Z at the other end stops the beats too, so not too short.)
_SILENCE_S = 300.0
_FULL_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 1 << 24
_LAST_WORDS_S = 5.0


def main() -> int:
    """Serves the place where the user typed until the job is over or nobody is there any more."""
    os.set_blocking(_TO_USER, False)
    with taking_interrupts() as interrupts:
        side = _FarSide(interrupts)
        side.serve()
    return 0


class _FarSide:
    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._signals_seen = 0
        self._unread = b""  # the beginning of a line from the user's side
        self._unsent = bytearray(MARK)
        self._heard_at_s = time.monotonic()
        self._deserted = False  # nobody listens any more
        self._over = False
        self._job: FarJob | None = None
        self._listener: socket.socket | None = None
        self._say({"hello": _who_is_here()})

    def serve(self) -> None:
        """Until the job has ended and all is said, or there is nobody to say it to."""
        said_at_s: float | None = None
        while True:
            if self._job is not None and self._job.ended():
                self._say({"ended": self._job.code()})
                self._job, self._over = None, True
            if self._deserted and self._job is None:
                return
            if self._over:
                said_at_s = said_at_s or time.monotonic()
                if not self._unsent or time.monotonic() > said_at_s + _LAST_WORDS_S:
                    return
            self._turn()

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._interrupts.fd, select.POLLIN)
        if not self._deserted:
            poll.register(_FROM_USER, select.POLLIN)
            if self._unsent:
                poll.register(_TO_USER, select.POLLOUT)
        if self._job is not None:
            poll.register(self._job.pidfd, select.POLLIN)
            if len(self._unsent) < _FULL_BYTES:
                for descriptor in self._job.outputs:
                    poll.register(descriptor, select.POLLIN)
        job_ended = False
        for descriptor, _ in poll.poll(50 if self._job_is_leaving() else 500):
            if descriptor == self._interrupts.fd:
                self._interrupts.drain()
            elif descriptor == _FROM_USER:
                self._listen_to_user()
            elif descriptor == _TO_USER:
                self._send()
            elif self._job is not None and descriptor == self._job.pidfd:
                job_ended = True
            elif self._job is not None and descriptor in self._job.outputs:
                kind = self._job.outputs[descriptor]
                data = self._job.read(descriptor)
                if data and not self._deserted:
                    self._unsent += frame(kind, data)
        if job_ended and self._job is not None and self._job.outputs:
            time.sleep(0.002)  # its last output is on the way; its end stays readable, and must not keep a core busy
        self._look_after_job()

    def _job_is_leaving(self) -> bool:
        return self._job is not None and (self._deserted or self._signals_seen > 0)

    def _look_after_job(self) -> None:
        if time.monotonic() - self._heard_at_s > _SILENCE_S:
            self._desert()
        for number in self._interrupts.received[self._signals_seen :]:
            self._signals_seen += 1
            self._over = self._job is None
            if self._job is not None:
                self._job.ask(number)
        if self._job is not None:
            self._job.kill_overdue()

    def _desert(self) -> None:
        """The other end is gone: the job ends, and nothing more is said."""
        if self._deserted:
            return
        self._deserted = True
        self._unsent.clear()
        if self._job is not None:
            self._job.ask(signal.SIGTERM)

    def _listen_to_user(self) -> None:
        try:
            data = os.read(_FROM_USER, 1 << 16)
        except OSError:
            data = b""
        if not data or len(self._unread) > _LONGEST_LINE_BYTES:
            self._desert()
            return
        self._heard_at_s = time.monotonic()
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            try:
                self._obey(json.loads(line))
            except (PhotinusError, UsageError, OSError) as error:
                self._say({"trouble": str(error)})
                self._over = True

    def _send(self) -> None:
        try:
            sent = os.write(_TO_USER, self._unsent[:_FULL_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self._desert()
            return
        del self._unsent[:sent]

    def _say(self, content: dict[str, Any]) -> None:
        if not self._deserted:
            self._unsent += message(content)

    def _obey(self, order: dict[str, Any]) -> None:
        what = order["do"]
        if what == "prepare":
            self._prepare(order)
        elif what == "run":
            self._run(order)
        elif what == "signal":
            if self._job is not None:
                self._job.ask(int(order["number"]))
        elif what == "beat":
            self._say({"beat": True})
        else:
            from .remote_probe import answer

            self._say(answer(order))

    def _prepare(self, order: dict[str, Any]) -> None:
        cwd = order["cwd"]
        try:
            os.chdir(cwd)
        except OSError as error:
            raise UsageError(
                f"its folder {cwd} cannot be entered ({error.strerror}), and the job runs in the folder where it was "
                f"typed. Share or copy the folder to the same path, or start from one that all hosts have."
            ) from None
        program = order["program"]
        check_program(Program(program["kind"], program["target"], tuple(program["arguments"])))
        wanted = order["listen"]
        if wanted is None:
            self._say({"prepared": {}})
            return
        self._listener = listen(**wanted)
        address, port = self._listener.getsockname()[:2]
        self._say({"prepared": {"address": address, "port": port}})

    def _run(self, order: dict[str, Any]) -> None:
        environ = {**os.environ, **order["environ"], CONDUCTED_AS.name: order["name"]}
        if order["secret"] is not None:
            environ[JOB_SECRET.name] = order["secret"]
        folder = os.path.dirname(sys.executable)
        path = environ.get("PATH", os.defpath)
        if folder not in path.split(os.pathsep):
            environ["PATH"] = folder + os.pathsep + path
        outputs = Outputs(**order["outputs"])
        self._job = FarJob(order["words"], environ, outputs=outputs, listener=self._listener, grace_s=order["grace_s"])
        if self._listener is not None:
            self._listener.close()
            self._listener = None


def _who_is_here() -> dict[str, Any]:
    # sshd says: client address, client port, own address, own port.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "photinus": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "address": connection[2] if len(connection) == 4 else None,
        "seen": connection[0] if len(connection) == 4 else None,
    }


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
    # Nothing is left to be done, and nobody reads what an interpreter says that cannot flush a closed pipe.
    os._exit(0)
