"""What a process with open groups leaves behind: a reason for its peers, and no thread in native code.

- An uncaught exception aborts the groups at once, with a reason that the peers read ("rank 1 ... raised ValueError:
  ..."), even where the process then takes long to end.
- At interpreter exit the groups that nobody destroyed are shut down: a thread left in native code would end the process
  with SIGABRT ("terminate called without an active exception"). Daemon threads that wait in a collective stay there.
- A forked child (a data loader's worker) lets its parent's groups alone: it shares their sockets, and gloo's destructor
  would wait for threads that the child does not have.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from types import TracebackType
from typing import Protocol

from .. import _native
from ..errors import CollectiveError
from ..group import printed


class _Group(Protocol):
    def fail(self, reason: str) -> None: ...

    def shutdown(self) -> None: ...


_open: weakref.WeakSet[_Group] = weakref.WeakSet()
_installed = False


def watch(group: _Group) -> None:
    """Looks after a group until `forget`."""
    global _installed
    if not _installed:
        _installed = True
        atexit.register(_shut_down_all)
        os.register_at_fork(after_in_child=_leave_to_parent)
        _chain_excepthook()
    _open.add(group)


def forget(group: _Group) -> None:
    """The group has been shut down."""
    _open.discard(group)


def _chain_excepthook() -> None:
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        # At a prompt the process goes on. A collective's error is known to the peers, with its cause.
        if not hasattr(sys, "ps1") and not isinstance(error, CollectiveError):
            lines = str(error).splitlines()
            for group in list(_open):
                group.fail(f"raised {kind.__name__}: {lines[0]}" if lines else f"raised {kind.__name__}")
        previous(kind, error, traceback)

    sys.excepthook = excepthook


def _shut_down_all() -> None:
    _native.begin_exit()
    for group in list(_open):
        with printed():
            group.shutdown()


def _leave_to_parent() -> None:
    for group in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # never destroyed, not even at the interpreter's end
    _open.clear()
