"""Python processes that need not import torch: a server that has imported it forks them.

    process = fork_python("tests.ranks:main", [...], environ={...}, stdout=log, stderr=log)
    process.wait(timeout=60)

A fresh interpreter spends two seconds of a core on importing torch, and the tests start hundreds of ranks. A forked one
runs `module:function` with the words as arguments and then ends as any interpreter does, exit handlers and destructors
included. It differs from a fresh one only in what is decided when Python starts or torch is imported: tests of these
start interpreters of their own. The server has one thread, begins at the first use, and ends with the process that
started it, as do the children then.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

REPOSITORY = Path(__file__).resolve().parent.parent
_REQUEST_BYTES = 1 << 20


class ForkedProcess:
    """A child of the server, with the part of subprocess.Popen's face that tests use; streams are the caller's."""

    def __init__(self, pid: int, call: str) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._call = call
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """The exit code, -N for signal N, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as soon as there is one."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self._call, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


def fork_python(
    call: str,
    words: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any],
    stderr: int | IO[Any],
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Starts `module:function(*words)` in the repository's folder, in this environment and with these streams.

    With FRESH_PYTHON=1, as beside a GPU, by an interpreter of its own: CUDA survives no fork.
    """
    if os.environ.get("FRESH_PYTHON") == "1":
        script = "import importlib, sys; m, f = sys.argv[1].split(':'); "
        script += "getattr(importlib.import_module(m), f)(*sys.argv[2:])"
        return subprocess.Popen(
            [sys.executable, "-c", script, call, *words],
            cwd=REPOSITORY,
            env={**environ, "PYTHONPATH": _python_path(environ)},
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=stdout,
            stderr=stderr,
        )
    with _lock:
        server = _servers.get(os.getpid())
        if server is None:
            server = _servers[os.getpid()] = _Server()
        if stdin is None:
            with open(os.devnull) as nothing:
                return server.start(call, words, environ, (nothing, stdout, stderr))
        return server.start(call, words, environ, (stdin, stdout, stderr))


def end_servers() -> None:
    """Ends the server of this process, if there is one, and what it has forked."""
    with _lock:
        server = _servers.pop(os.getpid(), None)
    if server is not None:
        server.end()


class _Server:
    """The side of the process that asks: requests go one way, pids and exit codes come the other."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": _python_path(os.environ), "OMP_NUM_THREADS": "1"},
            )
        self._running: dict[int, ForkedProcess] = {}
        self._started: list[ForkedProcess] = []
        self._has_started = threading.Semaphore(0)
        self._call = ""
        threading.Thread(target=self._read, name="fork-server", daemon=True).start()

    def start(
        self, call: str, words: Sequence[str], environ: Mapping[str, str], streams: Sequence[int | IO[Any]]
    ) -> ForkedProcess:
        self._call = call
        environ = {**environ, "PYTHONPATH": _python_path(environ)}
        request = json.dumps({"call": call, "words": list(words), "environ": environ}).encode()
        assert len(request) < _REQUEST_BYTES
        fds = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        socket.send_fds(self._socket, [request], fds)
        assert self._has_started.acquire(timeout=60), "the server that forks ranks does not answer"
        assert self._started, f"the server that forks ranks ended with exit code {self._process.wait()}"
        return self._started.pop()

    def end(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)
        self._process.wait()

    def _read(self) -> None:
        while answer := self._socket.recv(_REQUEST_BYTES):
            said = json.loads(answer)
            if "code" in said:
                self._running.pop(said["pid"])._end(said["code"])
            else:
                process = self._running[said["pid"]] = ForkedProcess(said["pid"], self._call)
                self._started.append(process)
                self._has_started.release()
        self._has_started.release()


_lock = threading.Lock()
_servers: dict[int, _Server] = {}


def _python_path(environ: Mapping[str, str]) -> str:
    return os.pathsep.join(dict.fromkeys(filter(None, [str(REPOSITORY), *environ.get("PYTHONPATH", "").split(":")])))


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Forks children as asked; returns in each of them, with what it is to do, and None when nobody asks any more."""
    running: dict[int, int] = {}  # process handle -> pid
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd in running:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    pid = running.pop(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    control.send(json.dumps({"pid": pid, "code": code}).encode())
                    continue
                request, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 3)
                if not request:
                    for handle in running:
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                    return None
                pid = os.fork()
                if pid == 0:
                    for number, fd in enumerate(fds):
                        os.dup2(fd, number)
                    for fd in (*fds, *running, control.detach()):
                        os.close(fd)
                    asked: dict[str, Any] = json.loads(request)
                    return asked
                for fd in fds:
                    os.close(fd)
                handle = os.pidfd_open(pid)
                running[handle] = pid
                selector.register(handle, selectors.EVENT_READ)
                control.send(json.dumps({"pid": pid}).encode())


def _main(control_fd: int) -> None:
    # torch._dynamo: the first optimizer and torch's DDP import it, which takes as long as torch itself.
    ours = ("photinus.backend", "photinus.parallel", "photinus.trainer")
    for module in ("numpy", "pytest", "torch.distributed", "torch._dynamo", *ours):
        importlib.import_module(module)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked"
    gc.freeze()
    asked = _serve(socket.socket(fileno=control_fd))
    if asked is None:
        return
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.path[:] = [*asked["environ"]["PYTHONPATH"].split(os.pathsep), *(p for p in sys.path if p != str(REPOSITORY))]
    module, name = asked["call"].split(":")
    getattr(importlib.import_module(module), name)(*asked["words"])


if __name__ == "__main__":
    _main(int(sys.argv[1]))
