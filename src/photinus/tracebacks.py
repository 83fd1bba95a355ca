"""Show an uncaught error with the user's lines and the message, without Photinus's own frames between them.

Left out are the frames of Photinus, and those of libraries that it calls, on the way to code of the user's (a data set,
a metric), and all frames below the user's last line where Photinus raised on purpose: then the message says it. An
error that Photinus did not raise on purpose keeps every frame below that line, because it may be a bug in Photinus.
Left out, too, is the cause of such an error of Photinus, if its message quotes it and no line of the user's is in it.
PHOTINUS_FULL_TRACEBACK=1 keeps all frames. Only what is printed at the end of a process is shortened: debuggers,
loggers and tests see the error as it is.
"""

from __future__ import annotations

import opcode
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import TracebackType

from . import env
from .errors import PhotinusError

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")} | {"<"})
_installed = False


def install() -> None:
    """Shortens what `sys.excepthook` is given from now on. May be called again."""
    global _installed
    if _installed:
        return
    _installed = True
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        shorten(error)
        previous(kind, error, error.__traceback__)

    sys.excepthook = excepthook


def shorten(error: BaseException) -> None:
    """Drops frames from the error's traceback, and from those of the errors that led to it."""
    ids: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in ids and not env.FULL_TRACEBACK.get():
        ids.add(id(link))
        link.__traceback__ = _shorten(link)
        if isinstance(link, PhotinusError) and link.__cause__ is not None and _is_quoted(link.__cause__, str(link)):
            link.__cause__ = None
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_quoted(cause: BaseException, text: str) -> bool:
    """Return whether a text says all that a user can learn from the cause."""
    return str(cause) in text and not isinstance(cause, PhotinusError) and not any(map(_is_users, _steps(cause)))


def _steps(error: BaseException) -> Iterator[TracebackType]:
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def _shorten(error: BaseException) -> TracebackType | None:
    steps = [*_steps(error)]
    frames: list[TracebackType] = []
    between: list[TracebackType] = []  # of libraries, since the user's last frame
    for each in steps:
        between.append(each)
        if _is_users(each):
            frames += between[-1:] if any(_is_own(frame) for frame in between) else between
            between = []
    if not frames:
        return error.__traceback__
    if not _is_on_purpose(error, steps[-1]):
        frames += between
    shortened: TracebackType | None = None
    for each in reversed(frames):
        shortened = TracebackType(shortened, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shortened


def _file(step: TracebackType) -> str:
    return step.tb_frame.f_code.co_filename


def _is_own(step: TracebackType) -> bool:
    return _file(step).startswith(_OWN)


def _is_users(step: TracebackType) -> bool:
    return not _file(step).startswith((_OWN, *_LIBRARIES))


def _is_on_purpose(error: BaseException, raised_at: TracebackType) -> bool:
    """Return whether Photinus raised it with a message for users: by `raise`, not by an operation that failed."""
    if isinstance(error, PhotinusError):
        return True
    if isinstance(error, AssertionError) or not _is_own(raised_at):
        return False
    return opcode.opname[raised_at.tb_frame.f_code.co_code[raised_at.tb_lasti]] == "RAISE_VARARGS"
