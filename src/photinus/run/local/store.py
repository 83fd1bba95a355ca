"""The store of an attempt: torch's TCPStore on the loopback interface, in a child process of the launcher.

    python -m photinus.run.local.store LAUNCHER_PID

Importing torch takes seconds and hundreds of MiB, so a launcher does without, and its store lies in a process of its
own (not in rank 0, which may so die like any other), forked where workers are (see `start_method`). The launcher binds
the port; workers that come before the store is there wait in the queue of the listening socket.

Torch's own rendezvous keeps one store for all attempts. After a restart, workers find the addresses of dead workers in
it and connect to them (6 of 8 measured restarts failed so). Here each attempt has a new store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from ...errors import LaunchError
from ...job.attempt import tell_ended
from ...job.cgroup import text_of
from ...job.deaths import describe_end
from ...job.own_address import listen, reaches_from
from .interrupts import block_signals
from .job import LOOPBACK
from .start_method import Forked, StartMethod
from .worker import die_with_launcher

_STORE_TIMEOUT = timedelta(seconds=300)
_ANSWERS_WITHIN_S = 60.0
_REQUEST_BYTES = 1 << 16
_MODULE = "photinus.run.local.store"


class StoreProcess:
    """The launcher's end of the process, which starts with the first store and holds one store after the other."""

    def __init__(self, start_method: StartMethod | None = None, say: Callable[[str], object] | None = None) -> None:
        self._start_method, self._say, self._was_stopped = start_method, say, False
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._control: socket.socket | None = None

    def open(self, port: int = 0) -> int:
        """Opens a fresh store in place of the one before, if there was one, and returns its port.

        Raises:
            PortTakenError: another process has the port.
            LaunchError: the loopback interface is down.
        """
        try:
            reaches_from(LOOPBACK)
        except OSError as error:  # workers would listen and dial all the same, for minutes
            raise LaunchError(
                f"the loopback interface is down ({error.strerror}), and the workers of this host need {LOOPBACK}: "
                f"`ip link set lo up`, or start the container with a network."
            ) from None
        if self._process is not None and not self._close_store():
            self.close()
        with listen(LOOPBACK, port) as listener:
            if self._process is None:
                self._start()
            assert self._control is not None
            with contextlib.suppress(OSError):  # it ended: `loss` says so
                socket.send_fds(self._control, [b"open"], [listener.fileno()])
            bound: int = listener.getsockname()[1]
            return bound

    def tell_ended(self, ranks: Iterable[int]) -> None:
        """Writes into the store which ranks have exited with code 0: workers may wait for these to join a group."""
        if self._control is not None:
            with contextlib.suppress(OSError):  # it ended: `loss` says so
                self._control.send(" ".join(map(str, ("ended", *ranks))).encode())

    def loss(self) -> str:
        """Return once that the process was killed; empty while it runs. Prints a line when the process is stopped.

        Raises:
            LaunchError: it ended by itself, as it would again.
        """
        process = self._process
        if process is None:
            return ""
        name = f"the process that holds the workers' store (pid {process.pid})"
        if (code := process.poll()) is None:
            was_stopped, self._was_stopped = self._was_stopped, _is_stopped(process.pid)
            if self._was_stopped and not was_stopped and self._say is not None:
                advice = f"let it go on: kill -CONT {process.pid}"
                self._say(f"photinus: {name} is stopped (SIGSTOP or a debugger), and workers wait for it; {advice}\n")
            return ""
        self.close()
        if code >= 0:
            raise LaunchError(f"{name} {describe_end(code)}: does `import torch` fail in {sys.executable}?")
        return f"{name} {describe_end(code)}"

    def close(self) -> None:
        """Ends the process."""
        if self._process is None or self._control is None:
            return
        self._process.kill()
        self._process.wait()
        self._control.close()
        self._process = self._control = None

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWERS_WITHIN_S)
        with theirs, block_signals():
            if self._start_method is not None:
                streams = theirs.fileno(), subprocess.DEVNULL, None
                self._process = self._start_method.fork((), os.environ, streams, _MODULE)
            self._process = self._process or subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
                start_new_session=True,
            )

    def _close_store(self) -> bool:
        """Ask the process to close its store, and with it the port; return whether it did."""
        assert self._control is not None
        with contextlib.suppress(OSError):  # it ended, or does not answer
            self._control.send(b"close")
            return self._control.recv(16) == b"closed"
        return False


def _is_stopped(pid: int) -> bool:
    return text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] in (["T"], ["t"])


def serve() -> None:
    """Hold stores for the launcher, which is at the other end of standard input, until it closes that."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    control, store = socket.socket(fileno=0), None
    while True:
        request, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 1)
        if not request:
            return
        word, *ranks = request.decode().split()
        if word == "close":
            store = None  # with its port and all that was written to it
            control.send(b"closed")
        elif word == "open":
            with socket.socket(fileno=os.dup(fds[0])) as listener:
                port = listener.getsockname()[1]
            store = TCPStore(
                LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, master_listen_fd=fds[0]
            )
        elif store is not None:
            tell_ended(store, map(int, ranks))


def main(launcher_pid: int) -> NoReturn:
    """Be the process that holds the stores."""
    die_with_launcher(launcher_pid)  # the import of torch would go on for seconds
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:  # /proc may be read-only
        name.write("photinus-store")
    with contextlib.suppress(ConnectionError):  # the launcher is gone
        serve()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
