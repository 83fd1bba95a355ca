"""The `photinus` command: finds the subcommand, shows help, and turns errors into readable lines and exit codes.

Each subcommand is a module with `main(arguments) -> exit code`, imported when it is used. `main` raises
UsageError for words that cannot be carried out, and another PhotinusError for what failed. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from ..env import STARTED_AS
from ..errors import LaunchError, MissingLibraryError, PhotinusError, UsageError, name_limit
from ..version import __version__
from ..words import hint

COMMANDS = {
    "run": ("photinus.cli.run", "start a script on all devices of this host; restart on failure"),
    "new": ("photinus.cli.new", "create a small project to start from"),
    "doctor": ("photinus.tools.doctor.examine", "check what works on this machine"),
    "bench": ("photinus.tools.bench.measure", "measure collectives over each backend, and what limits them"),
    "top": ("photinus.tools.view.top", "show a run while it trains: progress, loss, where the time goes"),
    "report": ("photinus.tools.view.report", "write one HTML page about a run, or several to compare"),
    "export": ("photinus.compat.export", "write a run's weights as a safetensors file"),
}

_WRONG_USE = 2
_OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EROFS, errno.ESTALE)


_HELP = f"""\
photinus {__version__}: train one PyTorch model on many devices

usage: photinus COMMAND ...

commands:
{chr(10).join(f"  {name:<12}{meaning}" for name, (_, meaning) in COMMANDS.items())}

  --help, --version

examples:
  photinus run train.py                       one process per GPU (or core)
  photinus run --nproc-per-node 2 train.py --epochs 3
  photinus new digits                         a project to start from
  photinus doctor                             which backends work here?
  photinus bench                              which backend is fastest here?
  photinus top                                live progress; which rank is slow?
  photinus report runs/digits                 curves, times, options: one page
  photinus run --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `photinus` with these words and returns the exit code.

    Without words it is the command itself: it takes those of the command line, and leaves the process.
    """
    if arguments is not None:
        return _run(list(arguments))
    _open_closed_streams()
    # Who started this (a daemon) may ignore SIGCHLD, without which nobody learns how workers ended, or block signals,
    # and exec hands both on. What is ignored otherwise, as under nohup, stays so.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.stdout.errors == "strict":  # a name that its encoding lacks is no reason to fail, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = _run(sys.argv[1:])
    # All is ended and closed. Unloading torch, or half of it after Ctrl-C, would take the interpreter a second.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has gone, as after `| head`, or the disk is full
            stream.flush()
    os._exit(code)


def _open_closed_streams() -> None:
    """Puts /dev/null where a standard stream is closed (`>&-`, some daemons): the next file would get its number."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(descriptor, mode))  # noqa: SIM115 - for as long as the process lives


def _check_folder() -> None:
    """Refuses a working directory that is no more: removed, and maybe made anew, since the shell went there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        was = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        advice = f"cd {was}, which exists again" if os.path.isdir(was) else "cd to one that exists"
        raise UsageError(f"the working directory ({was}) was removed. Change to another: {advice}.") from None


def _run(words: list[str]) -> int:
    try:
        code = _dispatch(words)
        sys.stdout.flush()  # a full disk is told, not left to whoever uses half of the output
        return code
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except UsageError as error:
        return _tell(f"{_host()}{error}", _WRONG_USE)
    except LaunchError as error:
        return _tell(f"LaunchError: {error}", error.exit_code)
    except PhotinusError as error:
        return _tell(f"{_host()}{type(error).__name__}: {error}", _WRONG_USE)
    except ModuleNotFoundError as error:  # a library that comes with `pip install`, but not with --no-deps
        if error.name is None or error.name.startswith("photinus"):
            raise
        return _tell(str(MissingLibraryError(f"photinus {words[0]}", error.name)), _WRONG_USE)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as after `| head`
        return 128 + signal.SIGPIPE
    except OSError as error:  # of a path: another user's, with too long a name, on a file server that was lost
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _tell(f"{error.strerror}: the output was truncated.", 1)
        if limit := name_limit(error):
            return _tell(f"{_host()}{error.strerror}.{limit}", _WRONG_USE)
        if error.filename is None or error.errno not in _OF_A_PATH:
            raise
        return _tell(f"{_host()}{error.filename}: {error.strerror}. Use another path or fix permissions.", _WRONG_USE)


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help"]
    if not words or words[0] in ("--help", "-h", "help"):
        print(_HELP)
        return 0
    if words[0] in ("--version", "-V", "version"):
        print(f"photinus {__version__}")
        return 0
    if words[0] not in COMMANDS:
        _refuse(words[0])
    _check_folder()
    module, _ = COMMANDS[words[0]]
    code: int = importlib.import_module(module).main(words[1:])
    return code


def _refuse(word: str) -> NoReturn:
    if word.startswith("-"):
        text = f"unknown flag {word}. Put flags after the command: photinus run {word} ...; see `photinus --help`."
    elif word.endswith(".py"):
        text = f"{word} is not a command. To start it: photinus run {word}"
    else:
        text = f"unknown command {word}." + hint(word, COMMANDS, " See `photinus --help`.")
    raise UsageError(text)


def _host() -> str:
    """Return a prefix with the name of this host, where several hosts share a terminal."""
    name = STARTED_AS.get()
    return "" if name is None else f"host {name}: "


def _tell(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody can read it (`2>&1 | head`), but the exit code
        print(f"photinus: {message}", file=sys.stderr, flush=True)
    return code
