"""New lines of a file that another process writes: appends to, or replaces by another of the same name."""

from __future__ import annotations

import os
from pathlib import Path

from .plain_file import plain_file

_REMEMBERED_BYTES = 64


class Tail:
    """Reads a growing text file bit by bit, and notices when it is begun anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = (0, 0)
        self._offset = 0
        self._last = b""  # the bytes before the offset: a replaced file has others there

    def read(self) -> tuple[bool, list[str]]:
        """Whether the file was begun anew (forget what came before), and the complete lines that came since.

        An absent or unreadable file has no lines. A last line without its end comes when its end has come.

        Raises:
            PhotinusError: it is not a plain file.
        """
        try:
            with open(self.path, "rb", opener=plain_file) as file:
                status = os.fstat(file.fileno())
                anew = self._offset > 0 and not self._is_the_same(file, status)
                if anew:
                    self._offset, self._last = 0, b""
                self._file = (status.st_dev, status.st_ino)
                file.seek(self._offset)
                data = file.read()
        except OSError:
            anew = self._offset > 0
            self._offset, self._last = 0, b""
            return anew, []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        self._last = (self._last + complete[-_REMEMBERED_BYTES:])[-_REMEMBERED_BYTES:]
        return anew, complete.decode("utf-8", "replace").splitlines()

    def _is_the_same(self, file: object, status: os.stat_result) -> bool:
        if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
            return False
        # A number of a file that was deleted may be given to its successor, and a file may be rewritten in place.
        before = os.pread(file.fileno(), len(self._last), self._offset - len(self._last))  # type: ignore[attr-defined]
        return before == self._last
