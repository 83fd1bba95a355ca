"""The files through which a worker and its launcher know of each other, and what is written into them.

All are memory files of the launcher, which its workers open as /proc/LAUNCHER/fd/N: they have no name in any folder, so
nothing is left behind. PHOTINUS_WORKER_FILES holds their paths: "ERROR,FAULT,STATUS:A,B:A,B".

    ERROR   the exception that ended the worker, see `deaths.Raised`; torch's `@record` finds it by a name of its own
    FAULT   the Python stack at a fatal signal; begins with a newline when the script begins
    STATUS  one line, see status.py
    A,B     two images of the training's state (`trainer.checkpoint.image`) for each worker of this host, by local rank

A worker's first three live as long as the launcher wants to know of it, the images as long as the launcher: the next
attempt continues from them. `run.local.worker`, which imports nothing of Photinus, reads the variable by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass
from typing import NamedTuple

from .. import env

HEAD_BYTES = 4096
USE_AT, PROGRESS_AT = HEAD_BYTES - 24, HEAD_BYTES - 16  # the number of the file's use; the last finished step, twice
_MAGIC = b"PHOTIMG1"
_FOR_TORCH = "TORCHELASTIC_ERROR_FILE"


class WorkerFiles(NamedTuple):
    """The paths of one worker's files, and of all images on its host."""

    error: str = ""
    fault: str = ""
    status: str = ""
    images: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def of_this_process() -> WorkerFiles:
        """Read the environment; paths are empty where no launcher wants to know."""
        own, *images = (env.WORKER_FILES.get() or ",,").split(":")
        error, fault, status = own.split(",")
        return WorkerFiles(error, fault, status, tuple(tuple(pair.split(",")) for pair in images))

    def environ(self) -> dict[str, str]:
        """Return the variables from which the worker reads them."""
        own = ",".join((self.error, self.fault, self.status))
        return {env.WORKER_FILES.name: ":".join((own, *map(",".join, self.images))), _FOR_TORCH: self.error}


def path_of(descriptor: int) -> str:
    """Return the path by which other processes open a file of this one."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def make_image_files(workers: int) -> tuple[tuple[str, ...], ...]:
    """Make two memory files for each worker, which live as long as this process; return their paths."""
    try:
        files = [[os.memfd_create(f"photinus-snapshot-{n}-{side}") for side in "ab"] for n in range(workers)]
    except OSError:  # forbidden here, or too many open files: there are no snapshots
        return ()
    return tuple(tuple(map(path_of, each)) for each in files)


@dataclass(frozen=True)
class Head:
    """The first bytes of an image, which one rank wrote. Zeros while the image is being written.

    The cut bytes are those of all files of the host, the digest is that of all behind the head. A state that a strategy
    splits goes back only to the same ranks.
    """

    run: str
    step: int
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    split: bool = False
    cut_bytes: int = 0
    skeleton_bytes: int = 0
    bytes: int = 0
    digest: str = ""


def pack_head(head: Head) -> bytes:
    """Return what `read_head` reads, as long as the place for it."""
    text = json.dumps(asdict(head)).encode()
    body = (struct.pack("<I", len(text)) + text).ljust(USE_AT - len(_MAGIC) - 4, b"\0")
    return _MAGIC + struct.pack("<I", zlib.crc32(body)) + body


def read_head(path: str) -> Head | None:
    """Return the head of an image; None where the file has none, or a damaged one."""
    raw = _first_bytes(path)
    body = raw[len(_MAGIC) + 4 : USE_AT]
    if len(raw) < HEAD_BYTES or raw[: len(_MAGIC) + 4] != _MAGIC + struct.pack("<I", zlib.crc32(body)):
        return None
    (length,) = struct.unpack_from("<I", body)
    return Head(**json.loads(body[4 : 4 + length]))


def progress_bytes(step: int) -> bytes:
    """Return the bytes at PROGRESS_AT once this step is finished."""
    return struct.pack("<QQ", step, ~step & (2**64 - 1))


def read_progress(path: str) -> int:
    """Return the last finished step that is noted beside an image; -1 for none."""
    step, complement = struct.unpack("<QQ", _first_bytes(path)[PROGRESS_AT:].ljust(16, b"\0"))
    return step if step ^ complement == 2**64 - 1 else -1


def key_of(run: str) -> str:
    """Return the name of a run in heads; see status.py for what a run is called."""
    return hashlib.sha256(os.fsencode(run)).hexdigest()


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
