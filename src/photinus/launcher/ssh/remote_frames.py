"""What travels between the place where the user typed and a host: frames, so that output and messages share one pipe.

From the host: a mark (a shell's start-up files may have printed something before), then frames. A frame is a kind (one
byte), a length (4 bytes, big-endian) and so many bytes. Kinds: "j" a message as JSON; "o", "e" output of the job,
stdout and stderr. To the host: messages as lines of JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["MARK", "FrameError", "Frames", "frame", "line", "message"]

MARK = b"\x00photinus far side\x00"
_HEAD = struct.Struct(">cI")
_LARGEST_BYTES = 1 << 24
_NOISE_LIMIT_BYTES = 1 << 16


class FrameError(ValueError):
    """The bytes are not what the far side writes."""


def frame(kind: bytes, data: bytes) -> bytes:
    """One frame."""
    return _HEAD.pack(kind, len(data)) + data


def message(content: dict[str, Any]) -> bytes:
    """A frame that holds a message."""
    return frame(b"j", json.dumps(content).encode())


def line(content: dict[str, Any]) -> bytes:
    """A message as a line, for the way to the host."""
    return json.dumps(content).encode() + b"\n"


class Frames:
    """Takes bytes as they come and gives out whole frames.

    Attributes:
        marked: whether the mark has come, so that the far side runs.
    """

    def __init__(self) -> None:
        self.marked = False
        self._noise = b""
        self._pending = b""

    @property
    def noise(self) -> bytes:
        """What came before the mark (its last 64 KiB)."""
        return self._noise if self.marked else self._noise + self._pending

    def take(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The frames (kind, content) that are complete with these bytes.

        Raises:
            FrameError: a frame that the far side does not write.
        """
        self._pending += data
        if not self.marked:
            before, mark, after = self._pending.partition(MARK)
            if not mark:
                # No more than the beginning of a mark can still become one.
                keep = len(MARK) - 1
                self._noise = (self._noise + self._pending[:-keep])[-_NOISE_LIMIT_BYTES:]
                self._pending = self._pending[-keep:]
                return
            self._noise, self.marked, self._pending = self._noise + before, True, after
        while len(self._pending) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._pending)
            if kind not in (b"j", b"o", b"e") or length > _LARGEST_BYTES:
                raise FrameError(f"a frame of kind {kind!r} with {length} bytes")
            if len(self._pending) < _HEAD.size + length:
                return
            content = self._pending[_HEAD.size : _HEAD.size + length]
            self._pending = self._pending[_HEAD.size + length :]
            yield kind, content
