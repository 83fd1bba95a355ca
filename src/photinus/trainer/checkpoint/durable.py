"""Writing files so that after a kill, a full disk or a power cut there is the old or the new, and never a mixture.

The steps, in the order that matters: write under a temporary name, fsync the file, fsync its folder, rename, fsync the
parent. Only then may anything older be deleted, and that by renaming it away first.

And checking them: torch.save makes zip archives with a CRC-32 for each record, and torch.load checks none of them.
Why CRC-32 is enough: the enemy is a disk, a copy or a cut-off write, and not a forger, who could write the checksum,
too. It finds every error of up to 32 neighbouring bits, and misses one in 4 billion of all others. The directory at the
archive's end lists names, places and checksums of all records, so the CRC-32 of the directory stands for the content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import os
import secrets
import shutil
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...errors import CheckpointError
from ...runlog.files import plain_file

MOST_THREADS = 4  # memory bandwidth feeds no more
_READ_BYTES = 1 << 20
_HEADER, _HEADER_BYTES = "<4s22x2H", 30  # of a record, without name and extra field
_DESCRIPTOR = b"PK\x07\x08"  # zip's, behind the bytes of a record: CRC-32 and sizes
_CENTRAL = b"PK\x01\x02"
_CENTRAL_BYTES = 46  # of a directory's entry, without name, extra field and comment, whose lengths are at 28
_TEMPORARY = ".tmp-"
_LOCK = ".writer.lock"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.EBADF)  # what file systems without locks answer

_File = TypeVar("_File", bound="DurableFile")


class DurableFile:
    """A new file to write from start to end, as torch.save wants it.

    An error of the operating system while writing is kept and raised by `close`: torch's writer is C++ that would turn
    it into "unexpected pos 67109824 vs 67109776" on the way.
    """

    def __init__(self, path: Path) -> None:
        self._error: OSError | None = None
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # see remove_dead_files
        except OSError as error:
            if error.errno not in NO_LOCKS and not isinstance(error, BlockingIOError):
                os.close(self._descriptor)
                raise

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data`; returns its length, even after an error."""
        view = memoryview(data).cast("B")
        if self._error is None:
            written = 0
            try:
                while written < len(view):
                    written += os.write(self._descriptor, view[written:])
            except OSError as error:
                self._error = error
        return len(view)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Makes what was written durable. Raises the first OSError of all the writing."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if self._error is None:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if self._error is not None:
            raise self._error

    def __enter__(self: _File) -> _File:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self.close()
        elif self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sync_folder(folder: Path) -> None:
    """Makes the names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary(path: Path, token: str = "") -> Path:
    """A fresh name beside `path` for what will be renamed to it; `remove_debris` knows such names."""
    return path.with_name(f"{_TEMPORARY}{path.name}-{token or secrets.token_hex(4)}")


def failure_of_first(token: str) -> str:
    """Return the name of a file by which the first host lets all others know that it could not write."""
    return f"{_TEMPORARY}failed-{token}"


@contextmanager
def replacing(path: Path, token: str = "") -> Iterator[Path]:
    """A block that writes a file or folder durably, under another name: it then takes the place of `path`, or goes."""
    unfinished = temporary(path, token)
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException:
        if unfinished.is_dir():
            shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def discard(path: Path) -> None:
    """Deletes a file or folder, whole or not at all as seen from outside. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        doomed = temporary(path)
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    else:
        path.unlink()


def remove_debris(folder: Path) -> None:
    """Removes what writers that died have left in `folder`; call it holding the folder's lock."""
    for path in folder.glob(f"{_TEMPORARY}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)  # what cannot be deleted now is tried again at the next save
        else:
            path.unlink(missing_ok=True)


@contextmanager
def temporary_folder(path: Path, token: str) -> Iterator[Path]:
    """A block with a folder beside `path`, to make what will take its place; `remove_dead_files` knows such folders."""
    folder = temporary(path, token)
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def remove_dead_files(path: Path) -> None:
    """Removes unfinished files and folders for `path` whose writer is gone: they are locked while it has them open."""
    for unfinished in path.parent.glob(f"{_TEMPORARY}{glob.escape(path.name)}-*"):
        kind = os.O_RDONLY | os.O_DIRECTORY if unfinished.is_dir() else os.O_RDWR
        try:
            descriptor = os.open(unfinished, kind | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
        except OSError:  # its writer lives, or there are no locks to tell by
            continue
        finally:
            os.close(descriptor)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raises CheckpointError unless `folder`'s file system has `needed_bytes` free."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise _no_space(folder, needed_bytes, free_bytes)


@contextmanager
def explain_no_space(folder: Path, needed_bytes: int) -> Iterator[None]:
    """A block that writes into `folder`, or makes it: a full disk or quota in it is told as `require_space` does."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        raise _no_space(folder, needed_bytes, shutil.disk_usage(there).free) from error


def _no_space(folder: Path, needed_bytes: int, free_bytes: int) -> CheckpointError:
    return CheckpointError(
        f"no space left for a checkpoint in {folder}: it needs {needed_bytes} bytes ({needed_bytes / 2**20:.1f} MiB) "
        f"and {free_bytes} ({free_bytes / 2**20:.1f} MiB) are free. Checkpoints written before are untouched. Free "
        f"some space (or raise the quota), or keep fewer checkpoints."
    )


def lock_file(
    descriptor: int,
    lock: Callable[[int, int], object],
    owner: str,
    timeout_s: float,
    refusal: Callable[[str], Exception],
) -> str:
    """Lock an open file by flock or lockf, and write its owner into it; the kernel lets go when this process dies.

    Returns:
        Why the file system has no locks; "" when this process holds the file.

    Raises:
        Exception: another process has held it for `timeout_s` seconds: what `refusal` makes of that process's name.
    """
    deadline, lacking = time.monotonic() + timeout_s, ""
    while True:
        try:
            lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno in NO_LOCKS:
                lacking = error.strerror or str(error)
                break
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            if time.monotonic() >= deadline:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
                raise refusal(holder or "another process") from None
            time.sleep(0.02)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, owner.encode(), 0)
    return lacking


@contextmanager
def lock_folder(folder: Path, timeout_s: float = 60.0) -> Iterator[bool]:
    """Holds the folder against other writers.

    Yields whether the file system has locks at all. Where it has none, debris cannot be told from work in progress.

    Raises:
        CheckpointError: another process has held it for `timeout_s` seconds.
    """

    def refusal(holder: str) -> CheckpointError:
        return CheckpointError(
            f"{holder} has been writing into {folder} for more than {timeout_s:.0f} s: two jobs must not save into the "
            f"same folder. Give one of them another, or wait."
        )

    descriptor = plain_file(folder / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        owner = f"process {os.getpid()} on host {socket.gethostname()}\n"
        yield not lock_file(descriptor, fcntl.flock, owner, timeout_s, refusal)
    finally:
        os.close(descriptor)


def verify_archive(path: Path, directory: str = "") -> str:
    """Read a whole archive and return the checksum of its directory.

    Args:
        directory: the checksum that the directory must have; "" for any.

    Raises:
        CheckpointError: a checksum differs, or this is not an archive.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            found = _directory_checksum(file.fileno(), archive)
            if directory not in ("", found):
                raise _damaged(path, "its directory", directory, found)
            for record, _, crc in _records(file.fileno(), archive):
                if crc != record.CRC:
                    raise _damaged(path, f"its record {record.filename!r}", f"{record.CRC:08x}", f"{crc:08x}")
            return found
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def directory_checksum(path: Path) -> str:
    """Return the checksum of the directory of an archive that is good. Raises OSError."""
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        return _directory_checksum(file.fileno(), archive)


def checksum(path: Path) -> str:
    """Return the checksum of any file. Raises OSError."""
    with open(path, "rb") as file:
        return f"{_crc32(file.fileno(), 0, path.stat().st_size):08x}"


def write_checksums(path: Path) -> None:
    """Bring the checksums of an archive up to date, durably, after its records were filled in. Raises OSError."""
    with open(path, "r+b") as file:
        descriptor = file.fileno()
        with zipfile.ZipFile(file) as archive:
            records, at = [*_records(descriptor, archive)], archive.start_dir
        for record, end, crc in records:
            head = os.pread(descriptor, _CENTRAL_BYTES, at)
            assert head[:4] == _CENTRAL, "the archive's directory lists them in this order"
            os.pwrite(descriptor, struct.pack("<I", crc), at + 16)
            at += _CENTRAL_BYTES + sum(struct.unpack_from("<3H", head, 28))
            if record.flag_bits & 8 and os.pread(descriptor, 4, end) == _DESCRIPTOR:
                os.pwrite(descriptor, struct.pack("<I", crc), end + 4)
        os.fsync(descriptor)


def _records(descriptor: int, archive: zipfile.ZipFile) -> Iterator[tuple[zipfile.ZipInfo, int, int]]:
    """Each record of an archive with the end of its bytes and their CRC-32, one thread to a record."""
    records = archive.infolist()
    starts = [_start_of(descriptor, record.header_offset) for record in records]
    ends = [start + record.file_size for start, record in zip(starts, records, strict=True)]
    with ThreadPoolExecutor(min(MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        yield from zip(records, ends, pool.map(partial(_crc32, descriptor), starts, ends), strict=True)


def _start_of(descriptor: int, header: int) -> int:
    magic, name_bytes, extra_bytes = struct.unpack(_HEADER, os.pread(descriptor, _HEADER_BYTES, header))
    if magic != b"PK\x03\x04":  # torch refuses it, too
        raise zipfile.BadZipFile(f"at byte {header} a record should begin")
    return header + _HEADER_BYTES + int(name_bytes) + int(extra_bytes)


def _directory_checksum(descriptor: int, archive: zipfile.ZipFile) -> str:
    return f"{_crc32(descriptor, archive.start_dir, os.fstat(descriptor).st_size):08x}"


def _crc32(descriptor: int, start: int, end: int) -> int:
    crc = 0
    while start < end:
        data = os.pread(descriptor, min(_READ_BYTES, end - start), start)
        if not data:  # cut off: the checksum will differ
            break
        crc = zlib.crc32(data, crc)
        start += len(data)
    return crc


def _damaged(path: Path, part: str, wanted: str, found: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: checksum of {part} expected {wanted}, actual {found}")
