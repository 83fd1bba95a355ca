"""The digest of a file: CRC-32 of each 16 MiB block, then CRC-32 of those.

Why CRC-32: the enemy is a disk, a copy or a cut-off write, not a forger (whoever can write the file can write its
digest, too), and it runs at memory speed: 1.8 to 5 GB/s on one core where SHA-256 makes 0.7 to 1.8. It finds every
error of up to 32 neighbouring bits and any two flipped bits in a block of this size, and misses one in 4 billion of
all others. Why blocks: threads can work on them side by side (zlib releases the interpreter lock).
"""

from __future__ import annotations

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BLOCK_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_MOST_THREADS = 4  # more than memory bandwidth asks for


class BlockDigest:
    """The digest of bytes that come piece by piece."""

    def __init__(self) -> None:
        self.bytes = 0
        self._blocks: list[int] = []
        self._block = 0  # CRC of the block that is not yet full

    def update(self, data: bytes | memoryview) -> None:
        """Takes the next piece, of any length."""
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: BLOCK_BYTES - self.bytes % BLOCK_BYTES]
            self._block = zlib.crc32(piece, self._block)
            self.bytes += len(piece)
            if self.bytes % BLOCK_BYTES == 0:
                self._blocks.append(self._block)
                self._block = 0
            view = view[len(piece) :]

    def hexdigest(self) -> str:
        """Eight hexadecimal digits."""
        open_block = [self._block] if self.bytes % BLOCK_BYTES else []
        return _combine([*self._blocks, *open_block])


def file_digest(path: Path, end: int | None = None) -> tuple[int, str]:
    """(bytes, digest) of a file, or of its first `end` bytes. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        size = size if end is None else min(size, end)
        starts = range(0, size, BLOCK_BYTES)
        if len(starts) < 2:
            blocks = [_block_digest(descriptor, start, size) for start in starts]
        else:
            threads = min(_MOST_THREADS, len(starts), len(os.sched_getaffinity(0)))
            with ThreadPoolExecutor(threads, thread_name_prefix="photinus-digest") as pool:
                blocks = list(pool.map(lambda start: _block_digest(descriptor, start, size), starts))
    finally:
        os.close(descriptor)
    return size, _combine(blocks)


def _block_digest(descriptor: int, start: int, size: int) -> int:
    crc, buffer = 0, bytearray(min(_READ_BYTES, size - start))
    position, end = start, min(start + BLOCK_BYTES, size)
    while position < end:
        view = memoryview(buffer)[: min(len(buffer), end - position)]
        count = os.preadv(descriptor, [view], position)
        if count == 0:  # cut off meanwhile; the digest will not fit
            break
        crc = zlib.crc32(view[:count], crc)
        position += count
    return crc


def _combine(blocks: list[int]) -> str:
    return f"{zlib.crc32(struct.pack(f'<{len(blocks)}I', *blocks)):08x}"
