"""The checksums of files that torch.save makes: zip archives with a CRC-32 for each record. torch checks none of them.

Why CRC-32 is enough: the enemy is a disk, a copy or a cut-off write, and not a forger, who could write the checksum,
too. It finds every error of up to 32 neighbouring bits, and misses one in 4 billion of all others. The directory at the
archive's end lists names, places and checksums of all records, so the CRC-32 of the directory stands for the content.
"""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ...errors import CheckpointError

MOST_THREADS = 4  # memory bandwidth feeds no more
_READ_BYTES = 1 << 20
_HEADER, _HEADER_BYTES = "<4s22x2H", 30  # of a record, without name and extra field
_DESCRIPTOR = b"PK\x07\x08"  # zip's, behind the bytes of a record: CRC-32 and sizes
_CENTRAL = b"PK\x01\x02"
_CENTRAL_BYTES = 46  # of a directory's entry, without name, extra field and comment, whose lengths are at 28


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
