"""The process that imports torch once per host, and from which the workers of all attempts are forked.

    python photinus/run/local/worker.py LAUNCHER_PID fork:FD:MODULES FOLDER script|module TARGET ARGUMENTS...

Its Python has a worker's options, command line and environment, which `ps` and /proc show for the workers, too. An
order holds a worker's words, environment and streams. The process forks a child that forks the worker and exits, so
the launcher, a subreaper, adopts the worker and waits for it as for one that it started itself. The worker returns
from `serve` into worker.py.

What was imported is in a worker's sys.modules from its start. Nothing else is imported later, so workers of all
attempts find the same. A process with threads, or with a GPU open, cannot be forked; a debugger's or coverage tool's
hooks are for one process; and a file beside the script that has the name of an imported module would not be found. Then
this process says why and ends, and the launcher starts workers the other way.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.machinery
import io
import json
import os
import signal
import socket
import sys
import time
import warnings

TYPE_CHECKING = False  # as in worker.py
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

_REASON_LIMIT_BYTES = 4096
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def serve(mark: str, modules: set[str]) -> None:
    """Import, and fork a worker for each order; returns in each worker. Ends the process when the launcher closes FD.

    `modules` are those that a worker has when it starts.
    """
    _, descriptor, names = mark.split(":")
    control = socket.socket(fileno=int(descriptor))
    comm = _rename("photinus-fork")
    try:
        reason = _why_not("Python") or _import(names.split(",")) or _why_not("`import torch`")
        reason = reason or _find_hidden_file(sys.modules.keys() - modules)
    except Exception as error:  # noqa: BLE001 - as odd as a Python can be
        reason = f"{type(error).__name__}: {error}"
    try:
        control.send(b"=" + reason.encode()[:_REASON_LIMIT_BYTES])
    except OSError:
        reason = "the launcher is gone"
    while not reason:
        try:
            request, fds, _, _ = socket.recv_fds(control, 16, 5)
        except OSError:
            break
        if not request:
            break
        if middle := _fork_twice(fds[0]):
            control.close()
            _rename(comm)
            return _become_worker(fds, middle)
        for fd in fds:
            os.close(fd)
    os._exit(0)


def _rename(name: str) -> str:
    """Set what `ps -o comm` and `top` show; return what it was."""
    old = ""
    with contextlib.suppress(OSError), open("/proc/self/comm", "r+") as file:  # /proc may be read-only
        old = file.read().strip()
        file.write(name)
    return old


def _fork_twice(answer: int) -> int:
    """Return 0 in this process, and in the grandchild the pid of the child between, which exits."""
    parent = os.getpid()
    try:
        if child := _fork():
            os.waitpid(child, 0)
        else:
            between = os.getpid()
            if _fork() == 0:
                return between
            os._exit(0)
    except OSError as error:
        os.write(answer, f"!{error.errno}".encode())
        if os.getpid() != parent:
            os._exit(1)
    return 0


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which have been looked for
        return os.fork()


def _import(names: Iterable[str]) -> str:
    """Import modules; return why torch cannot be. Others are the script's own affair."""
    gc.disable()  # a quarter of the time
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - the worker shows it, if it imports the same
            if name == "torch":
                return f"`import torch` fails: {type(error).__name__}: {error}"
    gc.freeze()  # a collection in a worker would copy what it shares
    gc.enable()
    return ""


def _why_not(what: str) -> str:
    """Return why this process cannot be forked; `what` was started or imported before."""
    tools = [sys.monitoring.get_tool(number) for number in range(6)] if hasattr(sys, "monitoring") else []
    if sys.gettrace() or sys.getprofile() or any(tools):
        return "a debugger, profiler or coverage tool follows each worker"
    # OpenBLAS has threads of its own, which it ends before a fork and starts again when it needs them.
    if (child := _fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    if (count := len(os.listdir("/proc/self/task")) - 1) > 0:
        return f"{what} starts {count} thread{'s' * (count > 1)}, which no fork has"
    for fd in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{fd}").startswith(_GPUS):
            return f"{what} opens {os.path.realpath(f'/proc/self/fd/{fd}')}, which no fork can use"
    return ""


def _find_hidden_file(imported: Iterable[str]) -> str:
    """Return why a worker needs other modules: Python looks first at the files beside the script."""
    kind, target = sys.argv[4:6]
    path = os.path.realpath(target)
    places = [os.getcwd()] if kind == "module" else [path, os.path.dirname(path)]
    for name in sorted({name.partition(".")[0] for name in imported}):
        found = importlib.machinery.PathFinder.find_spec(name, places)
        loaded = getattr(sys.modules[name], "__spec__", None)
        if found is not None and found.loader is not None and (loaded is None or found.origin != loaded.origin):
            return f"{found.origin} takes the place of a module that torch uses"
    return ""


def _become_worker(fds: Sequence[int], middle: int) -> None:
    """Make this process, just forked, the one that the order describes."""
    answer, paper, *streams = fds
    os.setsid()
    order = json.loads(os.pread(paper, os.fstat(paper).st_size, 0))
    for number, (stream, own) in enumerate(zip(streams, (None, sys.stdout, sys.stderr), strict=True)):
        printed = b""  # what importing prints, each worker would have printed
        if own is not None and order["words"]:
            own.flush()
            printed = os.pread(number, os.fstat(number).st_size, 0)
        os.dup2(stream, number)
        while printed:
            printed = printed[os.write(number, printed) :]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        _open_again(number, name)
    launcher = int(sys.argv[1])
    while (parent := os.getppid()) != launcher:  # last, because the process between takes some milliseconds to end
        if parent != middle:
            os._exit(128 + signal.SIGKILL)  # the launcher was killed
        time.sleep(0.0005)
    try:
        os.write(answer, str(os.getpid()).encode())
    except OSError:
        os._exit(128 + signal.SIGKILL)  # the launcher has given up
    for fd in fds:
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["environ"])
    _draw_again(sys.modules)
    importlib.invalidate_caches()  # files may be newer than the folders' lists
    if order["module"]:
        sys.path[:] = order["path"]
        try:
            importlib.import_module(order["module"]).main(launcher)
        finally:
            os._exit(1)
    sys.orig_argv[-len(sys.argv) + 1 :] = order["words"]
    sys.argv[1:] = order["words"]
    signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])


def _open_again(number: int, name: str) -> None:
    """Make a standard stream for what the descriptor is now: Python remembers whether it could seek before."""
    old = getattr(sys, name)
    if type(old) is not io.TextIOWrapper or old is not getattr(sys, f"__{name}__"):
        return
    is_buffered = not isinstance(old.buffer, io.RawIOBase)
    file: Any = open(number, "wb" if number else "rb", -1 if is_buffered else 0, closefd=False)  # noqa: SIM115
    (file.raw if is_buffered else file).name = old.name
    by_line = old.line_buffering or os.isatty(number)
    new: Any = io.TextIOWrapper(file, old.encoding, old.errors, "\n", by_line, old.write_through)
    new.mode = old.mode
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _draw_again(modules: Mapping[str, Any]) -> None:
    """Draw again what modules draw at random, or read of the process or its environment, when they are imported."""
    modules["torch"].default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()  # Python's `random` does so by itself
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None
    if "threading" in modules:
        modules["threading"].main_thread()._set_native_id()
