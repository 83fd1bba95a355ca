"""States whose tensors lie in parts on several ranks: one plain torch file for each entry, into which each host writes
the parts that its ranks hold. Nobody needs memory for the whole.

    lay out   the first host writes the files with holes in the places of tensors (torch.serialization.skip_data)
    fill      each host writes the bytes of its parts to where torch has left room for them
    finish    the first host, when all have: checksums, which torch cannot know before

Where several hosts take part, they see one folder, and tell each other in it how far they are: `laid-out`, then
`host-1` and so on, with a text if something went wrong there. A host that says nothing for long is given up.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import CheckpointError
from ...parallel.exchange.tensors import tensors_in
from .durable import failure_of_first, sync_folder, write_checksums
from .image import PLAIN_ITEMS
from .image_reader import File, Reader
from .manifest import file_name

_BLOCK_BYTES = 64 << 20  # written, and brought to disk, before another sign of life
_SILENT_S = 120.0
_SILENT_AFTER_END_S = 20.0
_LOOK_EVERY_S = 0.02
_LAID_OUT = "laid-out"


class Parts:
    """Some entries of a state, as one host sees them.

    Args:
        files: of this host's ranks.
        skeletons: by rank of the job, of what is common and of its own; of all hosts that take part.
        host, hosts: this one's number, from 0, and how many take part.
        is_wanted: whether the job that saves still runs: else other hosts are not waited for as long.
        one_file: name of a file for all that there is; default: a file for each of the ranks' own entries.
    """

    def __init__(
        self,
        files: Sequence[File],
        skeletons: Mapping[int, tuple[Any, Any]],
        host: int = 0,
        hosts: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
        one_file: str | None = None,
    ) -> None:
        self._host, self._hosts, self._is_wanted = host, hosts, is_wanted
        outline, own = _Outline(files), [skeletons[rank][1] for rank in sorted(skeletons)]
        if one_file is None:
            self._content = {file_name(entry): tree for entry, tree in outline.join(own).items()}
        else:
            self._content = {one_file: outline.join([skeletons[0][0], *own])}
        self._pieces = outline.found

    @property
    def names(self) -> list[str]:
        """Return the names of the files."""
        return list(self._content)

    @property
    def needed_bytes(self) -> int:
        """Return about how long the files will be."""
        tensors = {id(each): each for each in tensors_in(self._content)}
        return sum(each.nbytes + 4096 for each in tensors.values()) + (1 << 20) * len(self._content)

    def write(self, folder: Path) -> None:
        """On the first host: writes the files into the folder; returns when all hosts have, and all is on disk.

        Raises:
            OSError, CheckpointError: a file could not be written, or another host failed.
        """
        for name, tree in self._content.items():
            with _without_checksums(), torch.serialization.skip_data(materialize_fake_tensors=True):
                with open(folder / name, "xb") as file:
                    torch.save(tree, file)
        others = range(1, self._hosts)
        if others:
            sync_folder(folder)
            _tell(folder / _LAID_OUT, "")
        self._fill(folder)
        for host in others:
            self._await(folder / f"host-{host}", f"host {host} of this job's {self._hosts}", folder / f"at-{host}")
        for name in [_LAID_OUT, *(f"{kind}-{host}" for host in others for kind in ("host", "at"))]:
            (folder / name).unlink(missing_ok=True)
        for name in self._content:
            write_checksums(folder / name)

    def join_in(self, folder: Path, token: str) -> None:
        """On another host: fills its parts into the files that the first host lays out.

        Args:
            folder: of the checkpoints.
            token: ends the name of the unfinished checkpoint.

        Raises:
            CheckpointError: the first host says nothing. Other errors: its parts could not be written.
        """
        began_s = time.monotonic()
        while not (found := [*folder.glob(f"*-{token}/{_LAID_OUT}")]):
            if (folder / failure_of_first(token)).exists():
                raise CheckpointError(f"the first host could not write into {folder}; see its error")
            if time.monotonic() - began_s > _SILENT_S:
                raise CheckpointError(f"the first host laid out no checkpoint in {folder} for {_SILENT_S:.0f} s")
            time.sleep(_LOOK_EVERY_S)
        unfinished = found[0].parent
        try:
            self._fill(unfinished, unfinished / f"at-{self._host}")
            _tell(unfinished / f"host-{self._host}", "")
        except Exception as error:
            write_failure(folder, token, self._host, str(error))
            raise

    def _await(self, path: Path, who: str, sign: Path) -> None:
        """Waits until a host says that its part is there. Raises CheckpointError: it failed, or is silent for long."""
        before, heard_s = "", time.monotonic()
        while not path.exists():
            with contextlib.suppress(OSError):
                if (newest := sign.read_text()) != before:
                    before, heard_s = newest, time.monotonic()
            limit_s = _SILENT_S if self._is_wanted() else _SILENT_AFTER_END_S
            if time.monotonic() - heard_s > limit_s:
                raise CheckpointError(f"{who} has written nothing for {limit_s:.0f} s")
            time.sleep(_LOOK_EVERY_S)
        if error := path.read_text():
            raise CheckpointError(f"{who} could not write its parts: {error}")

    def _fill(self, folder: Path, sign: Path | None = None) -> None:
        for name, tree in self._content.items():
            with open(folder / name, "r+b") as file:
                with FakeTensorMode():
                    laid_out = torch.load(file, weights_only=True)
                unsynced = 0
                for planned, real in zip(tensors_in(tree), tensors_in(laid_out), strict=True):
                    start = real.untyped_storage()._checkpoint_offset
                    assert start is not None, "torch says where it left room"
                    assert planned.untyped_storage().nbytes() == real.untyped_storage().nbytes(), "the same order"
                    for at, piece in self._pieces.pop(id(planned), ()):
                        for block in range(0, len(piece), _BLOCK_BYTES):
                            unsynced += _write(file.fileno(), piece[block : block + _BLOCK_BYTES], start + at + block)
                            if unsynced >= _BLOCK_BYTES and sign is not None:
                                os.fdatasync(file.fileno())
                                _tell(sign, str(time.time()))
                                unsynced = 0
                os.fsync(file.fileno())


def write_failure(folder: Path, token: str, host: int, text: str) -> None:
    """Lets the first host know that another one cannot write its parts; waits a while for it to begin."""
    began_s = time.monotonic()
    while not (found := [*folder.glob(f"*-{token}/")]) and time.monotonic() - began_s < _SILENT_AFTER_END_S:
        time.sleep(_LOOK_EVERY_S)
    for unfinished in found:
        with contextlib.suppress(OSError):
            _tell(unfinished / f"host-{host}", text)


class _Outline(Reader):
    """A content with tensors that hold no data (torch's FakeTensor).

    Attributes:
        found: by id of a tensor, pieces of its bytes that are in these files, each with its offset in the tensor.
    """

    def __init__(self, files: Sequence[File]) -> None:
        super().__init__(files)
        self.found: dict[int, list[tuple[int, memoryview]]] = {}
        self._mode = FakeTensorMode()

    def _tensor(self, place: Sequence[Any]) -> torch.Tensor:
        return self._fake(place, place[3], place[4], [(0, place)])

    def _whole(self, places: Sequence[Sequence[Any]]) -> torch.Tensor:
        whole, filled = places[0][PLAIN_ITEMS], 0
        stride = torch.empty(whole, device="meta").stride()
        parts = []
        for place in places:
            part = torch.empty(place[PLAIN_ITEMS + 1], device="meta")
            filled += part.numel()
            parts.append((place[PLAIN_ITEMS + 3], place))
        if filled < torch.empty(whole, device="meta").numel():
            raise CheckpointError(f"parts of a split tensor of shape {whole} are missing")
        return self._fake(places[0], whole, stride, parts)

    def _fake(
        self, like: Sequence[Any], shape: Any, stride: Any, parts: Sequence[tuple[int, Sequence[Any]]]
    ) -> torch.Tensor:
        with self._mode:
            fake = torch.empty_strided(shape, stride, dtype=getattr(torch, like[2].removeprefix("torch.")))
        pieces = self.found[id(fake)] = []
        for offset, place in parts:
            at = offset * fake.element_size()
            for piece in self.pieces(place):
                pieces.append((at, piece))
                at += len(piece)
        return fake


def _write(descriptor: int, data: memoryview, offset: int) -> int:
    count = 0
    while count < len(data):
        count += os.pwrite(descriptor, data[count:], offset + count)
    return count


def _tell(path: Path, text: str) -> None:
    """Leaves a word for another host, whole at once."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    os.replace(new, path)


@contextlib.contextmanager
def _without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
