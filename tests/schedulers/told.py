"""What the ranks of `tell.py` wrote down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["TELL", "check_ranks", "told"]

TELL = Path(__file__).with_name("tell.py")


def told(folder: Path) -> list[dict[str, Any]]:
    """By rank, as many as have written."""
    ranks = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(ranks, key=lambda seen: seen["rank"])


def check_ranks(folder: Path, *, launcher: str, local_sizes: tuple[int, ...], arguments: tuple[str, ...] = ()) -> None:
    """Every rank saw its own place, the right number of others on each host, and the script's arguments."""
    ranks, world_size = told(folder), sum(local_sizes)
    places = [(local, size) for size in local_sizes for local in range(size)]
    seen_places = [(seen["rank"], seen["local_rank"], seen["local_world_size"]) for seen in ranks]
    assert seen_places == [(rank, *place) for rank, place in enumerate(places)], ranks
    for seen in ranks:
        assert (seen["world_size"], seen["sum"]) == (world_size, world_size * (world_size + 1) / 2), seen
        assert (seen["launcher"], seen["device"], seen["arguments"]) == (launcher, "cpu", list(arguments)), seen
