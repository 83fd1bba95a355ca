"""manifest.json: what a checkpoint consists of, so that a damaged one can be told from a good one.

    step-00000123/
      model.pt  optimizer.pt  ...     one torch file per entry of the state
      manifest.json                   written last: format, versions, step, files with sizes and digests, description

The last line of the manifest is the CRC-32 of everything before it, so that no bit of it can change unnoticed either.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, PhotinusError
from ...parallel.exchange.agreement import JSON
from ...runlog.files import plain_file
from ...version import __version__
from .durable import DurableFile, directory_checksum, verify_archive

NAME = "manifest.json"
ENTRY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
"""Names that an entry may have: none of them leads out of the folder."""
_FORMAT = 3
_READABLE = (2, 3)  # 2: digests of other bytes, which are not compared


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint: its size, and as its digest the checksum of its directory (see durable.py)."""

    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """One checkpoint.

    Attributes:
        step: of the training.
        serial: how many checkpoints this folder had seen; orders them by when they were written.
        files: by name of the state's entry; the file is `<entry>.pt`.
        description: the caller's own JSON.
        metric: the caller's measure of how good this one is, or None.
        photinus, torch: versions that wrote it.
        format: of manifest and content; see _FORMAT.
    """

    step: int
    serial: int
    files: dict[str, FileRecord]
    description: dict[str, JSON] = field(default_factory=dict)
    metric: float | None = None
    photinus: str = __version__
    torch: str = str(torch.__version__)
    format: int = _FORMAT


def record_of(path: Path) -> FileRecord:
    """Return what a manifest keeps of a file that was just written."""
    return FileRecord(path.stat().st_size, directory_checksum(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest, durably. Raises OSError; ValueError or TypeError when the description is not JSON."""
    text = json.dumps({**asdict(manifest), "format": _FORMAT}, indent=1)
    head = text.removesuffix("\n}").encode()
    with DurableFile(folder / NAME) as file:
        file.write(head + _seal(head))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder; its files are not looked at.

    Raises:
        CheckpointError: absent, damaged, or of a format that this version does not know.
    """
    path = folder / NAME
    try:
        with open(path, "rb", opener=plain_file) as file:
            raw = file.read()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {NAME}: not a checkpoint, or one that was never completed") from None
    except (OSError, PhotinusError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    length = len(_seal(b""))
    head, seal = raw[:-length], raw[-length:]
    if seal != _seal(head):
        shown = seal.decode(errors="replace").replace("\n", "").strip()
        raise CheckpointError(f"{path} is damaged: its last line should read {_digits(head)!r} and is {shown!r}")
    try:
        return _parse(json.loads(raw))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest of photinus ({type(error).__name__}: {error})") from error


def check_files(folder: Path, manifest: Manifest, *, digests: bool = True) -> None:
    """Raises CheckpointError unless every file is there with its size and (unless `digests=False`) its content."""
    for entry, wanted in manifest.files.items():
        path = folder / file_name(entry)
        try:
            size = path.stat().st_size
            if size != wanted.bytes:
                raise CheckpointError(f"{path} is damaged: it has {size} bytes instead of {wanted.bytes}")
            if digests:
                verify_archive(path, wanted.digest if manifest.format == _FORMAT else "")
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing, though the manifest of the checkpoint lists it") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error


def file_name(entry: str) -> str:
    """The file that holds an entry of the state."""
    return f"{entry}.pt"


def _parse(data: Mapping[str, Any]) -> Manifest:
    if data["format"] not in _READABLE:
        raise ValueError(
            f"format {data['format']}, written by photinus {data.get('photinus')}; this one reads "
            f"{' and '.join(map(str, _READABLE))}"
        )
    wrong = [entry for entry in data["files"] if not ENTRY.fullmatch(entry)]
    if wrong:
        raise ValueError(f"it lists {wrong[0]!r}, which cannot be an entry of a checkpoint")
    metric = None if data["metric"] is None else float(data["metric"])
    if not isinstance(data["description"], dict) or metric != metric:
        raise TypeError("its description is not an object, or its metric not a number")
    files = {entry: FileRecord(_whole(found, "bytes"), str(found["digest"])) for entry, found in data["files"].items()}
    rest = {name: data[name] for name in ("description", "photinus", "torch", "format")}
    return Manifest(_whole(data, "step"), _whole(data, "serial"), files, metric=metric, **rest)


def _whole(data: Mapping[str, Any], name: str) -> int:
    value = data[name]
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} is {value!r:.40}, but a whole number from 0 is needed")
    return value


def _digits(head: bytes) -> str:
    return f'"crc32": "{zlib.crc32(head):08x}"'


def _seal(head: bytes) -> bytes:
    return f",\n {_digits(head)}\n}}\n".encode()
