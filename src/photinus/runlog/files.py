"""Open files of a run's folder, replace them as a whole, and read them while another process writes."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..errors import PhotinusError

_MOST_BYTES = 1 << 30  # what is read is read whole
_REMEMBERED_BYTES = 64  # before the place to which a growing file was read
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
        f"{os.fspath(path)} {what}, but a run's folder needs a plain file of at most {_MOST_BYTES >> 30} GiB there. "
        f"Move it away, or use another folder"
    )


def write_atomically(path: Path, text: str, *, mode: int = 0o666) -> None:
    """Writes a text file so that a reader, or a process killed in between, finds the old or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.is_dir():
            plain_file(path)  # raises
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def set_damaged_aside(path: Path) -> Path:
    """Rename a damaged file, so that another one can take its place; return the new path."""
    aside = path.with_name(f"{path.name}.damaged")
    os.replace(path, aside)
    return aside


class Tail:
    """Read a growing text file piece by piece, and notice when it was replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = (0, 0)
        self._offset = 0
        self._last = b""  # the bytes before the offset: a replaced file has others there

    def read(self) -> tuple[bool, list[str]]:
        """Return whether the file was started over (forget earlier lines), and the complete new lines.

        An absent or unreadable file has no lines. A last line without its end comes when its end has come.

        Raises:
            PhotinusError: it is not a plain file.
        """
        try:
            with open(self.path, "rb", opener=plain_file) as file:
                status = os.fstat(file.fileno())
                is_restarted = self._offset > 0 and not self._is_the_same(file, status)
                if is_restarted:
                    self._offset, self._last = 0, b""
                self._file = (status.st_dev, status.st_ino)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            is_restarted = self._offset > 0
            self._offset, self._last = 0, b""
            return is_restarted, []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._last = (self._last + complete[-_REMEMBERED_BYTES:])[-_REMEMBERED_BYTES:]
        return is_restarted, complete.decode("utf-8", "replace").splitlines()

    def _is_the_same(self, file: object, status: os.stat_result) -> bool:
        if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
            return False
        # A number of a file that was deleted may be given to its successor, and a file may be rewritten in place.
        before = os.pread(file.fileno(), len(self._last), self._offset - len(self._last))  # type: ignore[attr-defined]
        return before == self._last
