"""The end of a command: its exit code, and one readable line for an error instead of a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from ..errors import LaunchError, MissingLibraryError, PhotinusError, UsageError, name_limit

_WRONG_USE = 2
_OF_A_PATH = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EROFS, errno.ESTALE)


def run_as_process(command: Callable[[], int], **names: str) -> NoReturn:
    """Run a command as all that this process does, and leave with its exit code; see `exit_code_of`."""
    # Who started this (a daemon) may ignore SIGCHLD, without which nobody learns how workers ended, or block signals,
    # and exec hands both on. What is ignored otherwise, as under nohup, stays so.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.stdout.errors == "strict":  # a name that its encoding lacks is no reason to fail, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    code = exit_code_of(command, **names)
    # All is ended and closed. Unloading torch, or half of it after Ctrl-C, would take the interpreter a second.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has gone, as after `| head`, or the disk is full
            stream.flush()
    os._exit(code)


def exit_code_of(command: Callable[[], int], *, name: str = "run", host: str = "") -> int:
    """Run a command and return its exit code; print a line for an error.

    Args:
        command: raises UsageError for words that cannot be carried out, and another PhotinusError for what failed.
        name: the subcommand.
        host: name of this host, where several hosts share a terminal.
    """
    who = f"host {host}: " if host else ""
    try:
        code = command()
        sys.stdout.flush()  # reports a full disk
        return code
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except UsageError as error:
        return _print(f"{who}{error}", _WRONG_USE)
    except LaunchError as error:
        return _print(f"LaunchError: {error}", error.exit_code)
    except PhotinusError as error:
        return _print(f"{who}{type(error).__name__}: {error}", _WRONG_USE)
    except ModuleNotFoundError as error:  # a library that comes with `pip install`, but not with --no-deps
        if error.name is None or error.name.startswith("photinus"):
            raise
        return _print(str(MissingLibraryError(f"photinus {name}", error.name)), _WRONG_USE)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as after `| head`
        return 128 + signal.SIGPIPE
    except OSError as error:  # of a path: another user's, with too long a name, on a file server that was lost
        if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _print(f"{error.strerror}: the output was truncated.", 1)
        if limit := name_limit(error):
            return _print(f"{who}{error.strerror}.{limit}", _WRONG_USE)
        if error.filename is None or error.errno not in _OF_A_PATH:
            raise
        return _print(f"{who}{error.filename}: {error.strerror}. Use another path or fix permissions.", _WRONG_USE)


def _print(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody can read it (`2>&1 | head`), but the exit code
        print(f"photinus: {message}", file=sys.stderr, flush=True)
    return code
