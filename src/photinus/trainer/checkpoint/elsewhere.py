"""A checkpoint that not all ranks see at its path: a rank that does sends it to those that do not."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ...job.world import name_ranks
from ...parallel.exchange.agreement import JSON, from_rank_0, gather_per_rank, place_in_group, together
from ...parallel.exchange.collectives import control_device, resolve_group

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

    def listed() -> JSON:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [[str(file.relative_to(path)), file.stat().st_size] for file in files]

    files, place = from_rank_0(listed, f"listing {path}"), path
    group = resolve_group(None)
    with contextlib.ExitStack() as ends:
        with together(f"making room for a copy of {path}"):
            if rank in lacking:
                place = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="photinus-")), path.name)
                for name, size in files:
                    (place / name).parent.mkdir(exist_ok=True)
                    with open(place / name, "wb") as file:
                        os.posix_fallocate(file.fileno(), 0, max(1, size))
                        file.truncate(size)
        for name, size in files:
            for start in range(0, size, _PIECE_BYTES):
                piece = torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8, device="cpu")
                if rank == 0:
                    with open(path / name, "rb") as read:
                        read.seek(start)
                        read.readinto(piece.numpy().data)
                sent = piece.to(control_device(group))
                dist.broadcast(sent, 0)
                if rank in lacking:
                    with open(place / name, "r+b") as written:
                        written.seek(start)
                        written.write(sent.cpu().numpy().data)
        yield place
