"""`photinus.save` and `photinus.load`: states in one file, which plain torch.load reads, too.

The file is what torch.save makes, a zip archive, plus a digest of it all in the archive's comment, a place that torch
does not look at. So a cut-off or flipped file is told from a good one before anything is read from it; torch itself
checks nothing when it loads. Files that torch.save made without us are taken as well, with weights_only=True and
the archive's own checksums.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...parallel.exchange.agreement import gather_per_rank, place_in_group, together
from ...parallel.zero.split_states import copy_state
from ..data.loader import note_loaded
from .digest import file_digest
from .durable import DurableFile, explain_no_space, remove_dead_files, require_space, sync_folder, temporary
from .states import PlainState, apply_states, check_states, state_of

_COMMENT = b"photinus crc32 of 16 MiB blocks "  # 8 digits follow
_COMMENT_BYTES = len(_COMMENT) + 8
_END_BYTES = 22  # zip's end-of-central-directory record; its last two bytes are the length of the comment
_END_MAGIC = b"PK\x05\x06"


def save(path: str | os.PathLike[str], **state: Any) -> None:
    """Saves the state of everything given in one file: atomically, by rank 0, called by all ranks.

        photinus.save("runs/x/last.pt", model=model, optimizer=optimizer, loader=batches, epoch=epoch)

    When this returns, on any rank, the file is complete and on disk; when it raises, it raises on all ranks, and
    what `path` held before is untouched.

    Args:
        path: of the file; missing folders are made.
        state: by name: objects with state_dict (models wrapped or not: names are the user's own), tensors, numbers,
            text, and lists and dicts of such. Of a `photinus.loader` the place is saved: the order of the samples goes
            on, inside an epoch too.

    Raises:
        TypeError: something could not be read back safely.
        CheckpointError: the file could not be written (disk full: path, needed and free bytes).
    """
    path = Path(path)
    with together(f"saving {path}", is_long=True):
        if not state:
            raise ValueError(f"nothing to save in {path}: give it by name, as in save(path, model=model, epoch=3)")
        states = {name: state_of(value) for name, value in state.items()}  # on all ranks: some exchange for theirs
        if place_in_group()[0] == 0:
            write_state_file(path, states)


def load(path: str | os.PathLike[str], **objects: Any) -> dict[str, Any]:
    """Loads what `save` (or torch.save of a dict) wrote: into all the objects or into none. Called by all ranks.

        saved = photinus.load("runs/x/last.pt", model=model, optimizer=optimizer, loader=batches)
        epoch = saved["epoch"]

    Args:
        path: of the file; every rank reads it, and all must find the same.
        objects: by the names under which they were saved; each with load_state_dict. Optimizers and schedulers get
            the options that were saved, as in torch; of a Loop's checkpoints those that the script changed are its own.

    Returns:
        The entries of the file for which no object was given; tensors on the CPU.

    Raises:
        CheckpointError: the file is absent, damaged or for other objects; raised on all ranks when it is so on one,
            and then no object was changed on any.
        TypeError: an object has no load_state_dict.
    """
    path = Path(path)
    with together(f"loading {path}", is_long=True):
        # Ranks of a host share what they map, so there are not as many whole copies as ranks.
        states, digest = read_state_file(path, mapped=place_in_group()[1] > 1)
        check_states(objects, states, str(path))
    digests = [told["digest"] for told in gather_per_rank({"digest": digest})]
    if len(set(digests)) > 1:
        raise CheckpointError(f"the ranks find different files at {path}: digests by rank {digests}. Share the folder.")
    undo = None
    try:
        with together(f"loading {path}", is_long=True):
            undo = apply_states(objects, states, str(path))
    except Exception as error:
        if undo is None:
            raise
        raise CheckpointError(f"{error} {undo()}") from error  # another rank failed
    given = [states[name] for name in objects] or [*states.values()]
    if any(isinstance(each, Mapping) and "param_groups" in each for each in given):
        note_loaded(str(path))
    return {name: copy_state(value) for name, value in states.items() if name not in objects}


def write_state_file(path: Path, states: Mapping[str, Any]) -> None:
    """Writes plain states into `path`, atomically, replacing what was there. Raises TypeError, CheckpointError."""
    plain = PlainState(dict(states), "state")
    path = path.absolute()
    try:
        with explain_no_space(path.parent, plain.needed_bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_files(path)
            require_space(path.parent, plain.needed_bytes)
            unfinished = temporary(path)
            try:
                with _CommentedFile(unfinished) as file:
                    torch.save(plain.value, file)  # type: ignore[arg-type]
                    file.finish()
                os.replace(unfinished, path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}. What it held before is untouched.") from error


def read_state_file(path: Path, *, mapped: bool) -> tuple[dict[str, Any], str]:
    """(states, digest) of a file that `write_state_file` or torch.save made; verified before anything is read from it.

    Args:
        mapped: tensors are mapped from the file, where its format allows it; copy what is to last.

    Raises:
        CheckpointError: absent, damaged, no dict, or not readable without running code from it.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, not a file that photinus.save made")
    try:
        digest = _verify(path)
        states = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped and zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path} (seen from {Path.cwd()})") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(states, dict):
        raise CheckpointError(f"{path} holds a {type(states).__name__}, not a dict of named states")
    return states, digest


def _verify(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, size - _COMMENT_BYTES - _END_BYTES))
        tail = file.read()
    comment = tail[-_COMMENT_BYTES:]
    if comment.startswith(_COMMENT) and tail[:4] == _END_MAGIC:
        _, digest = file_digest(path, size - _COMMENT_BYTES)
        wanted = comment[len(_COMMENT) :].decode(errors="replace")
        if digest != wanted:
            raise CheckpointError(f"{path} is damaged: digest expected {wanted}, actual {digest}")
        return digest
    # A file that torch.save made without us has the archive's own checksums.
    plain_end, is_archive = tail[-_END_BYTES:], start[:2] == b"PK"
    if is_archive and not (plain_end[:4] == _END_MAGIC and plain_end[-2:] == b"\0\0"):
        raise CheckpointError(
            f"{path} is damaged: its end ({size} bytes in all) is that of neither our files nor torch's"
        )
    if is_archive:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"{path} is damaged: checksum of its record {damaged!r} does not fit")
    return file_digest(path)[1]


class _CommentedFile(DurableFile):
    """A zip archive on its way to disk, with the digest of itself appended as its comment."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held_back = b""

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _END_BYTES:
            held = self._held_back + bytes(view)
            super().write(held[:-_END_BYTES])
            self._held_back = held[-_END_BYTES:]
        else:
            super().write(self._held_back)
            super().write(view[:-_END_BYTES])
            self._held_back = bytes(view[-_END_BYTES:])
        return len(view)

    def finish(self) -> None:
        """Writes the archive's end record, changed to announce the comment, and the comment."""
        end = self._held_back
        assert end[:4] == _END_MAGIC, "torch.save no longer ends its files with a plain zip end record"
        assert end[-2:] == b"\0\0", "torch.save now writes a comment of its own"
        super().write(end[:-2] + _COMMENT_BYTES.to_bytes(2, "little"))
        super().write(_COMMENT + self.digest.hexdigest().encode())
