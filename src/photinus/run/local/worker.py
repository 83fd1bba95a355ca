"""Runs in each worker before the user's script: ties the worker to its launcher, then runs the script as Python would.

    python photinus/run/local/worker.py LAUNCHER_PID FOLDER script|module|program TARGET ARGUMENTS...

Started by its path and importing nothing of Photinus (nor torch), so that neither the working directory nor Photinus
can hide a module that the script imports, and the script finds sys.path, sys.argv and __main__ just as under
`python script.py` or `python -m module`.

What it adds:
  1. The worker dies with its launcher (PR_SET_PDEATHSIG; a launcher that is gone already is noticed by getppid).
  2. An uncaught exception is written to the error file (see `job.worker_files`), in torch elastic's format with a few
     fields more, without the frames of this file. The launcher shows it, once, so it is not printed here too.
  3. A fatal signal (SIGSEGV, SIGABRT, ...) leaves the Python stack in the fault file, for the launcher as well.
  4. The sockets of multiprocessing lie in FOLDER, which the launcher removes.
A program that is not Python takes this process's place, and gets the first of these only.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    del sys.path[0]  # this file's folder; first of all, lest a name in it hide one of the standard library

import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import os
import signal
import time
import types

WORKER_FILE = __file__
TYPE_CHECKING = False  # importing `typing` costs as much as the rest of this file
if TYPE_CHECKING:
    from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_CHAIN_LIMIT = 16
_TEXT_LIMIT = 100_000


def python_command() -> list[str]:
    """Returns this Python and its options (-O, -W error, -X dev) but -P, which the launcher gives to itself."""
    import subprocess

    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [sys.executable, *(option for option in options if option != "-P")]


def die_with_launcher(launcher_pid: int) -> None:
    """Asks the kernel to kill this process when its launcher dies, and leaves at once if that has happened already.

    SIGKILL, because nothing that a script does (handlers, a collective that waits inside C++) may keep a worker
    going whose launcher is gone. The request survives execve and ends with fork: children of the worker are the
    launcher's and its guard's concern, who know its process group.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != launcher_pid:  # it died before the request was in force
        os._exit(128 + signal.SIGKILL)


def use_folder(folder: str) -> None:
    """Lets multiprocessing make its sockets in `folder`, and not in one of its own that it leaves there when killed.

    (A data loader's workers hand tensors over through them.) TMPDIR itself stays as it is: what a script keeps there
    shall be found after the job (torch's tutorials save to it) and before (batch jobs put their data there), and
    torch.compile's cache in it serves the next job.
    """
    from multiprocessing import process

    process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def describe(
    error: BaseException, traceback_text: str, exit_code: int, raised_at_s: float, by: list[str]
) -> dict[str, Any]:
    """The content of the error file: torch elastic's fields, and under "photinus" what the launcher reads.

    `chain` holds [type, text] of the error and of what it was raised from or during, so that an error which a script
    raised because a peer was lost is known for that, and `by` who raised each. `place` is the line that raised it, of
    whatever file.
    """
    chain = [[type(link).__name__, _text(link)[:2000]] for link in _links(error)]
    own = {"chain": chain, "by": by, "place": _place(error), "exit_code": exit_code, "raised_at_s": raised_at_s}
    facts = {"py_callstack": _clip(traceback_text), "timestamp": str(int(time.time()))}
    message = {"message": _clip(f"{type(error).__name__}: {_text(error)}"), "extraInfo": facts}
    return {"message": message, "photinus": own}


def _clip(text: str) -> str:
    """Leave out the middle of a text that is too long for the launcher."""
    half = _TEXT_LIMIT // 2
    return text if len(text) <= _TEXT_LIMIT else f"{text[:half]} ... {text[-half:]}"


def _links(error: BaseException) -> list[BaseException]:
    """The error, and those that it was raised from or during."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and len(links) < _CHAIN_LIMIT:
        links.append(link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return links


def raised_by(error: BaseException) -> list[str]:
    """Names who raised the error and each that it was raised from or during: torch, photinus, or other.

    A socket that a script opened itself fails in the same words as one between ranks. It is torch's or Photinus's error
    by its class, or by the frame that raised it. Torch's C++ leaves no frame, only a RuntimeError that no `raise` made;
    and torch._utils raises again what a data loader's worker met.
    """
    return [_raised_by(link) for link in _links(error)]


def _raised_by(link: BaseException) -> str:
    import opcode

    kind, step = type(link), _last_frame(link)
    module = "" if step is None else step.tb_frame.f_globals.get("__name__", "")
    by_raise = step is None or opcode.opname[step.tb_frame.f_code.co_code[step.tb_lasti]] == "RAISE_VARARGS"
    owners = {name.partition(".")[0] for name in (kind.__module__, module)}
    if "photinus" in owners:
        return "photinus"
    by_torch = kind is RuntimeError and (not by_raise or ("torch" in owners and module != "torch._utils"))
    return "torch" if by_torch or kind.__module__.partition(".")[0] == "torch" else "other"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the error's own code, which must not take its place
        return "<exception str() failed>"  # Python's words


def _place(error: BaseException) -> str:
    """FILE:LINE of the innermost frame; empty where no line of the script has run."""
    frame = _last_frame(error)
    return "" if frame is None else f"{frame.tb_frame.f_code.co_filename}:{frame.tb_lineno}"


def _last_frame(error: BaseException) -> types.TracebackType | None:
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame


_worker_pid = os.getpid()  # imported in the worker itself
_recorded: BaseException | None = None


def _file(number: int) -> str:
    """Return the path of one of this worker's files, by its place in the text of `job.worker_files`."""
    return os.environ.get("PHOTINUS_WORKER_FILES", ",").split(",")[number]


def _write(text: str, mode: str) -> bool:
    """Writes or appends to the error file; False when there is none, it cannot be written, or it is the parent's: a
    child that the script forked may fail or leave as it likes."""
    path = _file(0)
    if not path or os.getpid() != _worker_pid:
        return False
    try:
        with open(path, mode, encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:  # the launcher is going away, or /proc is not there: Python's own message must do
        return False
    return True


def _record(error: BaseException, exit_code: int, *, traced: bool) -> bool:
    """Write the error, and how it came about if it is `traced`, for the launcher; return whether it is written."""
    raised_at_s = time.monotonic()
    _write(" ", "a")  # the launcher waits for what follows
    try:
        import json

        by, text = raised_by(error), ""  # before frames are left out
        if traced:
            import traceback

            if "photinus.tracebacks" in sys.modules:  # the script uses Photinus
                sys.modules["photinus.tracebacks"].shorten(error)
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        content = json.dumps(describe(error, text, exit_code, raised_at_s, by))
    except Exception:  # noqa: BLE001 - a file beside the script takes the place of such a module
        return False
    return _write(content, "w")


def _without_own_frames(error: BaseException) -> types.TracebackType | None:
    """The error's traceback from the script's first frame on; all of it gone when the script never ran."""
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith((__file__, "<frozen ")):
        frame = frame.tb_next
    return frame


def _hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Stands at the bottom of sys.excepthook (torch and loggers put theirs around it).

    It prints all but the error that the launcher shows: a script may call the hook itself, in a thread for example.
    """
    if error is not _recorded:
        sys.__excepthook__(kind, error, trace)


def _fail(error: BaseException) -> NoReturn:
    """An uncaught exception: recorded for the launcher, shown to the script's own hooks, then Python's exit code."""
    global _recorded
    sys.last_value = error  # Python sets it too, and code that runs at the exit reads it
    error.__traceback__ = _without_own_frames(error)
    if _record(error, 1, traced=True):
        _recorded = error
    # A hook of the script may take its time (a debugger). Only a newline in the record says that we leave now.
    sys.excepthook(type(error), error, error.__traceback__)
    _write("\n", "a")
    raise SystemExit(1)


def _leave(leaving: SystemExit) -> None:
    """sys.exit in the script: a code other than 0 is recorded, and the interpreter does the rest."""
    code = leaving.code
    if code is None or code == 0:
        return
    _record(leaving, code & 0xFF if isinstance(code, int) else 1, traced=False)
    _write("\n", "a")


def _is_archive(path: str) -> bool:
    if path.endswith(".py"):
        return False
    import zipimport

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _load(kind: str, target: str) -> tuple[types.CodeType, types.ModuleType]:
    """The program's code and its empty __main__, with sys.path and sys.argv[0] as Python sets them for it."""
    module = types.ModuleType("__main__")
    safe_path = getattr(sys.flags, "safe_path", False)
    path = os.path.join(os.getcwd(), target)
    if kind == "script" and not os.path.isdir(target) and not _is_archive(path):
        if not safe_path:
            sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        source = importlib.machinery.SourceFileLoader("__main__", path)
        compiled = importlib.machinery.SourcelessFileLoader("__main__", path) if path.endswith(".pyc") else None
        vars(module).update(__file__=path, __loader__=compiled or source, __package__=None, __cached__=None)
        sys.modules["__main__"] = module
        code = source.source_to_code(source.get_data(path), path) if compiled is None else compiled.get_code("__main__")
        assert code is not None, "a file has code"
        return code, module
    if kind == "script":  # a folder, or an archive of one, with __main__.py
        sys.path.insert(0, path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", sys.path[:1])
    else:
        if not (safe_path or target.startswith("photinus.")):  # our modules need nothing of it
            sys.path.insert(0, os.getcwd())
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"no module named {target}" + (".__main__" if kind == "script" else ""), name=target)
    vars(module).update(
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=spec.parent,
        __cached__=spec.cached,
        __spec__=spec,
    )
    if kind == "module":
        sys.argv[0] = spec.origin or target
    sys.modules["__main__"] = module
    return code, module


def run(kind: str, target: str, arguments: list[str]) -> None:
    """Runs the program to its end; leaves by SystemExit when it does not end well."""
    sys.argv[:] = [target, *arguments]
    try:
        code, module = _load(kind, target)
        exec(code, vars(module))
    except SystemExit as leaving:
        _leave(leaving)
        raise
    except KeyboardInterrupt as interrupt:
        sys.last_value = interrupt
        raise SystemExit(128 + signal.SIGINT) from None
    except BaseException as error:  # noqa: BLE001 - recorded, and turned into the exit code that Python gives it
        _fail(error)


def main() -> None:
    """Reads the launcher's words and runs the program."""
    launcher_pid, folder, kind, target, *arguments = sys.argv[1:]
    die_with_launcher(int(launcher_pid))
    for stream in (sys.stdout, sys.stderr):
        # Whole lines, and as soon as they are printed: several ranks share a terminal, and a SIGKILL may follow. Also
        # under PYTHONUNBUFFERED, which would send out each argument of a print by itself.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)
    if folder and kind != "program":
        use_folder(folder)  # which imports: before SIGINT is the script's
    try:
        faults = os.open(_file(1), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.write(faults, b"\n")  # tells the launcher that the script begins: from here on SIGINT is the script's
        if not faulthandler.is_enabled():
            faulthandler.enable(faults, all_threads=False)
    except OSError as problem:
        print(f"photinus: a fatal signal will show no stack: {problem}", file=sys.stderr)
    if kind == "program":
        # Python's place is taken. The kernel's promise to end it with the launcher stays.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, which the program would inherit
        try:
            os.execvp(target, [target, *arguments])
        except OSError as error:
            _fail(error)
    sys.excepthook = _hook
    run(kind, target, arguments)


def _fork_workers() -> None:
    """Runs the process of fork_server.py; returns in each worker."""
    global _worker_pid
    die_with_launcher(int(sys.argv[1]))
    modules = set(sys.modules)
    path = f"{os.path.dirname(__file__)}/fork_server.py"
    spec = importlib.util.spec_from_file_location("photinus.run.local.fork_server", path)
    assert spec is not None
    assert spec.loader is not None, "a path has a loader"
    fork_server = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fork_server)
    fork_server.serve(sys.argv[2], modules)
    _worker_pid = os.getpid()


if __name__ == "__main__":
    if sys.argv[2].startswith("fork:"):
        _fork_workers()
    main()
