"""The process that has imported torch, once for all attempts of a host, and from which their workers are forked.

    python photinus/run/local/worker.py LAUNCHER_PID warm:FD FOLDER script|module TARGET ARGUMENTS...

It runs in a Python with a worker's options and environment. An order holds a worker's words, environment and streams.
The process forks a child that forks the worker and exits, so the launcher, a subreaper, adopts the worker and waits
for it as for one that it started itself. The worker returns from `serve` into worker.py, as if it had just started.

What was imported is hidden from the worker until the script imports it (see _Hidden); but not what torch brought of
the standard library, as long as no file beside the script has such a name. A process with threads, or with a GPU open,
cannot be forked, and a debugger's or coverage tool's hooks are for one process: then this one says why and ends, and
the launcher starts workers the other way.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.machinery
import io
import json
import os
import select
import signal
import socket
import sys
import time
import warnings

TYPE_CHECKING = False  # importing `typing` is left to the script
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any

_IDLE_S = 5.0
_MODULES_LIMIT_BYTES = 4096
# torch, its libraries and numpy's read these when they are loaded.
_READ_AT_LOAD = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "NPY_"),
    *("ATEN_", "PYTORCH_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_"),
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WITH_TORCH = ("torch.", "torchgen.", "functorch.", "photinus.backend.", "photinus.parallel.", "photinus.trainer.")
_NEXT = ["photinus.trainer", "torch._dynamo"]  # for later attempts; the first optimizer step imports the latter
_GPUS = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def at_load(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that torch reads when it is loaded."""
    return {name: value for name, value in environ.items() if name.startswith(_READ_AT_LOAD)}


def serve(mark: str, modules: set[str]) -> None:
    """Import, and fork a worker for each order; returns in each worker. Ends the process when nobody asks any more.

    `modules` are those that a worker has when it starts.
    """
    control = socket.socket(fileno=int(mark.partition(":")[2]))
    names = control.recv(_MODULES_LIMIT_BYTES).decode().split()
    fresh = _Fresh(modules)
    try:
        reason = _why_not("Python") or _import(names) or _why_not("`import torch`") or _hides(fresh.new())
    except Exception as error:  # noqa: BLE001 - as odd as a Python can be
        reason = f"{type(error).__name__}: {error}"
    try:
        control.send(b"=" + reason.encode()[:_MODULES_LIMIT_BYTES])
    except OSError:
        reason = "the launcher is gone"
    later, began = [name for name in _NEXT if name not in names], False
    while not reason:
        if began and later and not select.select([control], [], [], _IDLE_S)[0]:
            before = set(sys.modules)
            _import([later.pop(0)])
            fresh.hide(sys.modules.keys() - before)
            reason = _why_not("torch")
            continue
        try:
            request, fds, _, _ = socket.recv_fds(control, 16, 5)
        except OSError:
            break
        if not request:
            break
        began = True
        if middle := _fork_twice(fds[0]):
            control.close()
            return fresh.become_worker(fds, middle)
        for fd in fds:
            os.close(fd)
    os._exit(0)


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
        os.write(answer, f"!{error}".encode())
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


def _hides(names: Iterable[str]) -> str:
    """Return why a worker needs other modules: Python looks first at the files beside the script."""
    kind, target = sys.argv[4:6]
    path = os.path.realpath(target)
    places = [os.getcwd()] if kind == "module" else [path, os.path.dirname(path)]
    for name in sorted({name.partition(".")[0] for name in names}):
        found, loaded = importlib.machinery.PathFinder.find_spec(name, places), _spec(sys.modules[name])
        if found is not None and found.loader is not None and (loaded is None or found.origin != loaded.origin):
            return f"{found.origin} takes the place of a module that torch uses"
    return ""


def _is_standard(name: str) -> bool:
    return name.partition(".")[0] in sys.stdlib_module_names


def _spec(module: ModuleType) -> importlib.machinery.ModuleSpec | None:
    return getattr(module, "__spec__", None)


class _Fresh:
    """This process before the imports, and what a forked worker needs to look like that again."""

    def __init__(self, modules: set[str]) -> None:
        with open("/proc/self/comm") as comm, open("/proc/self/stat") as stat:
            self._comm = comm.read().strip()
            self._shown_at = [int(number) for number in stat.read().rpartition(")")[2].split()[45:49]]
        self._show(["photinus-warm"], "photinus-warm")
        self._modules, self._path, self._filters = modules, list(sys.path), len(warnings.filters)
        self._later = set[str]()

    def hide(self, names: Iterable[str]) -> None:
        """Hide modules, also of the standard library, that workers of earlier attempts did not have."""
        self._later.update(names)

    def new(self) -> list[str]:
        """Return the modules that the imports have brought, in their order, which is that of their end, too."""
        return [name for name in sys.modules if name not in self._modules]

    def become_worker(self, fds: Sequence[int], middle: int) -> None:
        """Make this process, just forked, the worker of an order."""
        answer, paper, *streams = fds
        launcher = int(sys.argv[1])
        while (parent := os.getppid()) != launcher:
            if parent != middle:
                os._exit(128 + signal.SIGKILL)  # the launcher was killed
            time.sleep(0.0005)
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
        try:
            os.write(answer, str(os.getpid()).encode())
        except OSError:
            os._exit(128 + signal.SIGKILL)  # the launcher has given up
        for fd in fds:
            os.close(fd)
        os.environ.clear()
        os.environ.update(order["environ"])
        if "threading" in sys.modules:  # which took it from the process that was forked
            sys.modules["threading"].main_thread()._set_native_id()
        _draw_again(sys.modules)
        if not order["words"]:
            sys.path[:] = order["path"]
            self._show([sys.executable, "-m", "photinus.run.local.store", str(launcher)], self._comm)
            try:
                importlib.import_module("photinus.run.local.store").main(launcher)
            finally:
                os._exit(1)
        sys.argv[1:], sys.path[:] = order["words"], self._path
        sys.orig_argv[:] = [*order["python"], *sys.argv]
        self._show(sys.orig_argv, self._comm)
        importlib.invalidate_caches()
        hidden = [name for name in self.new() if name in self._later or not _is_standard(name)]
        filters: Any = warnings.filters
        added = filters[: len(filters) - self._filters]
        _set_filters(filters[len(added) :])
        sys.meta_path.insert(0, _Hidden({name: sys.modules.pop(name) for name in hidden}, added))
        signal.pthread_sigmask(signal.SIG_SETMASK, order["mask"])

    def _show(self, command: Sequence[str], name: str) -> None:
        """Let `ps` and /proc show this command, name and environment. Spaces, which int() skips, fill up a command."""
        with open("/proc/self/comm", "w") as file:
            file.write(name)
        arguments_at, end, environ_at, environ_end = self._shown_at
        text = [os.fsencode(word) + b"\0" for word in command]
        if sys.argv[0] in command:
            text.insert(command.index(sys.argv[0]) + 1, b" " * (end - arguments_at - sum(map(len, text))))
        variables = [os.fsencode(f"{key}={value}") + b"\0" for key, value in os.environ.items()]
        for place, size, words in (
            (arguments_at, end - arguments_at, text),
            (environ_at, environ_end - environ_at, variables),
        ):
            if place:  # where /proc hides it, it stays as it is
                ctypes.memmove(place, b"".join(words).ljust(size, b"\0")[: size - 1], size - 1)


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


def _set_filters(filters: list[Any]) -> None:
    warnings.filters[:] = filters  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # leaving the block, Python makes them known to C


def _draw_again(modules: Mapping[str, Any]) -> None:
    """Draw what modules draw at random when they are imported; what they took from the environment, they forget."""
    modules["torch"].default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()  # Python's `random` does so by itself
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None


class _Hidden:
    """Finds what is in memory: torch and what needs it, once any of that is imported, and the rest once any is.

    Until then the worker is one without torch: a folder put into sys.path may hold another numpy, variables that torch
    reads may be set, and a hook may wait for its import. Modules of the standard library are found one by one.
    """

    def __init__(self, modules: dict[str, ModuleType], filters: list[Any]) -> None:
        self._modules, self._filters = modules, filters
        self._environ = at_load(os.environ)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return how to put the module in memory into sys.modules, if it is the one that Python would find."""
        if name not in self._modules or not (found := self._found_again(name, path)):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=found.origin)  # type: ignore[arg-type]
        spec.submodule_search_locations = found.submodule_search_locations
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave that to Python; `exec_module` puts the one in memory in its place."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the modules into sys.modules."""
        if _is_standard(module.__name__):
            sys.modules[module.__name__] = self._modules[module.__name__]
            return
        all_of_it = f"{module.__name__}.".startswith(_WITH_TORCH)
        names = [name for name in self._modules if not _is_standard(name)]
        names = [name for name in names if all_of_it or not f"{name}.".startswith(_WITH_TORCH)]
        tops = {module.__name__.partition(".")[0]}
        for top in {name.partition(".")[0] for name in names} - tops:
            ours = self._modules.get(top)
            if ours is None or sys.modules.get(top) is ours or (top not in sys.modules and self._found_again(top)):
                tops.add(top)
        sys.modules.update({name: self._modules[name] for name in names if name.partition(".")[0] in tops})
        if all_of_it:
            self._catch_up()

    def _found_again(self, name: str, path: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Return where Python finds a module now, if that is where the one in memory came from."""
        for finder in sys.meta_path:
            if (
                hasattr(finder, "find_spec")
                and finder is not self
                and (found := finder.find_spec(name, path)) is not None
            ):
                loaded = _spec(self._modules[name])
                return found if loaded is not None and found.origin == loaded.origin else None
        return None

    def _catch_up(self) -> None:
        """Do what torch would have done at its import in the present environment, or say that it was not done."""
        _set_filters([*self._filters, *warnings.filters])
        now, before = at_load(os.environ), self._environ
        self._filters, self._environ = [], now
        changed = [name for name in sorted(now.keys() | before.keys()) if now.get(name) != before.get(name)]
        for name in changed:
            if name in _THREADS and now.get(name, "").isdecimal() and int(now[name]):
                sys.modules["torch"].set_num_threads(int(now[name]))
        if others := ", ".join(name for name in changed if name not in _THREADS):
            text = f"photinus: {others} changed after torch was loaded for all workers, so it has no effect. Set it "
            print(f"{text}before the command, or add --start-method spawn.", file=sys.stderr)
