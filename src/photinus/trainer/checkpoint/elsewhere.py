"""A checkpoint that not all ranks see at its path: a rank that does sends it to those that do not."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ...parallel.exchange.agreement import JSON, from_rank_0, gather_per_rank, place_in_group, together
from ...parallel.exchange.collectives import control_device
from ...world.ranks import name_ranks

_PIECE_BYTES = 64 << 20


@contextmanager
def seen_by_all(path: Path, digest: str) -> Iterator[Path]:
    """Where this rank can read, for the length of the block, what rank 0 finds at `path`. Called by all ranks.

    It is `path`, or a copy among this host's temporary files.

    Args:
        digest: of what this rank finds there; "" for nothing.
    """
    digests, rank = gather_per_rank(digest), place_in_group()[0]
    lacking = [other for other, found in enumerate(digests) if found != digests[0]]
    if not lacking:
        yield path
        return
    if rank == 0:
        there = "something else" if any(digests[other] for other in lacking) else "nothing"
        text = f"{path} is not shared: {name_ranks(lacking)} found {there} there, so rank 0 sends it"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    with contextlib.ExitStack() as ends:
        with together(f"making room for {path}"):
            if rank in lacking:
                ends.enter_context(temporary := tempfile.TemporaryDirectory(prefix="photinus-"))
        copy = Path(temporary.name, path.name) if rank in lacking else None
        with together(f"sending {path} from rank 0"):
            _send(path if rank == 0 else None, copy)
        yield copy or path


def _send(source: Path | None, copy: Path | None) -> None:
    """All ranks exchange every piece, also one that cannot read or write it, which raises OSError at the end."""

    def listed() -> JSON:
        assert source is not None
        files = sorted(source.iterdir()) if source.is_dir() else [source]
        return [[str(file.relative_to(source)), file.stat().st_size] for file in files]

    error: OSError | None = None
    group = dist.group.WORLD
    assert group is not None, "several ranks have a group"
    for name, size in from_rank_0(listed, "listing a checkpoint"):
        for start in range(0, size, _PIECE_BYTES):
            piece = torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8, device="cpu")
            try:
                if source is not None:
                    with open(source / name, "rb") as file:
                        file.seek(start)
                        file.readinto(piece.numpy().data)
            except OSError as failed:
                error = failed
            sent = piece.to(control_device(group))
            dist.broadcast(sent, 0)
            try:
                if copy is not None and error is None:
                    (copy / name).parent.mkdir(exist_ok=True)
                    with open(copy / name, "ab") as written:
                        written.write(sent.cpu().numpy().data)
            except OSError as failed:
                error = failed
    if error is not None:
        raise error
