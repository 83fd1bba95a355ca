"""`digests.bin`: digests of parameters and optimizer states at some steps of a run, by which two runs are compared.

The first line is JSON: the names of the parameters. A record follows for each step: the step, then of each parameter
the digest of its values, then of each parameter that of what the optimizers remember of it; all in 64 bits.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .files import plain_file

DIGESTS = "digests.bin"
_FORMAT = 1


@dataclass(frozen=True)
class Digests:
    """The content of a file.

    Attributes:
        names: of the parameters.
        records: the digests of each step, as they lie in the file: equal bytes for equal digests.
    """

    names: tuple[str, ...]
    records: dict[int, bytes]

    def differing(self, step: int, other: Digests) -> tuple[list[str], list[str]]:
        """The parameters whose values, and those whose optimizer states, differ from another run's at a step."""
        count = len(self.names)
        pairs = zip(_numbers(self.records[step]), _numbers(other.records[step]), strict=True)
        places = [place for place, (a, b) in enumerate(pairs) if a != b]
        return [self.names[p] for p in places if p < count], [self.names[p - count] for p in places if p >= count]


def _numbers(record: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(record) // 8}Q", record)


def read_digests(folder: Path) -> Digests | None:
    """The digests of a run; None where it has none, or the file is damaged. A last record without its end is left out.

    Raises:
        PhotinusError: it is not a plain file.
    """
    try:
        with open(folder / DIGESTS, "rb", opener=plain_file) as file:
            data = file.read()
        head, _, body = data.partition(b"\n")
        found = json.loads(head)
        names = tuple(map(str, found["names"]))
        if found["format"] != _FORMAT:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    size = 8 * (1 + 2 * len(names))
    starts = range(0, len(body) - size + 1, size)
    return Digests(names, {int.from_bytes(body[at : at + 8], "little"): body[at + 8 : at + size] for at in starts})


class DigestFile:
    """The file of a run, to be written.

    Args:
        step: up to which the run's records hold; later ones, and those of other parameters, are dropped.
    """

    def __init__(self, folder: Path, names: Sequence[str], step: int) -> None:
        self._path = folder / DIGESTS
        before = read_digests(folder) if step else None
        records = before.records if before is not None and before.names == tuple(names) else {}
        new = self._path.with_name(f".{DIGESTS}.{os.getpid()}.new")
        with open(new, "wb", opener=plain_file_to_write) as file:
            file.write(json.dumps({"format": _FORMAT, "names": [*names]}).encode() + b"\n")
            for each, record in records.items():
                if each <= step:
                    file.write(each.to_bytes(8, "little") + record)
        os.replace(new, self._path)

    def add(self, step: int, numbers: Sequence[int]) -> None:
        """Add a record. Raises OSError."""
        with open(self._path, "ab", opener=plain_file) as file:
            file.write(struct.pack(f"<{1 + len(numbers)}Q", step, *numbers))


def plain_file_to_write(path: str, flags: int) -> int:
    """Open a new file as `plain_file` does."""
    return plain_file(path, flags | os.O_CREAT)
