"""Opens a file of a run's folder: a plain one, never a link to write through, and none that would fill the memory."""

from __future__ import annotations

import errno
import os
import stat

from ..errors import PhotinusError

_MOST_BYTES = 1 << 30  # what is read is read whole
_KINDS = {stat.S_IFDIR: "folder", stat.S_IFIFO: "FIFO", stat.S_IFLNK: "link", stat.S_IFSOCK: "socket"}


def plain_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens as os.open does, at once whatever it is; the `opener` of Python's `open`.

    Raises:
        PhotinusError: it is not a plain file, a link and to be written, or larger than any of a run and to be read.
    """
    writes = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if writes else 0), 0o666)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO, errno.ELOOP):
            raise _refusal(path, os.lstat(path)) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (not writes and status.st_size > _MOST_BYTES):
        os.close(descriptor)
        raise _refusal(path, status)
    return descriptor


def _refusal(path: str | os.PathLike[str], status: os.stat_result) -> PhotinusError:
    kind = stat.S_IFMT(status.st_mode)
    what = f"has {status.st_size} bytes" if stat.S_ISREG(kind) else f"is a {_KINDS.get(kind, 'device')}"
    return PhotinusError(
        f"{os.fspath(path)} {what}, but a run's folder has a plain file of at most {_MOST_BYTES >> 30} GiB there: move "
        f"it away, or use another folder"
    )
