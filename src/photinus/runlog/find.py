"""Finds the run that somebody means: the folder they name, or the newest one below where they stand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .run import is_run, written_at_s

DEPTH = 4
_MOST_FOLDERS = 20_000
_WITHOUT_RUNS = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


def find_runs(below: Path) -> Iterator[Path]:
    """The folders of runs in a folder, itself included, down to DEPTH folders below it.

    What lies in a run's folder (checkpoints, earlier runs moved aside) is not looked at, nor are hidden folders and
    links. Nor does it go on for ever: after 20,000 folders it has looked enough.
    """
    level, looked_at = [below], 0
    for _ in range(DEPTH + 1):
        deeper: list[Path] = []
        for folder in level:
            looked_at += 1
            if looked_at > _MOST_FOLDERS:
                return
            if is_run(folder):
                yield folder
                continue
            deeper += _folders_in(folder)
        level = deeper


def newest_run(below: Path) -> Path | None:
    """The run in a folder whose files changed last; None when there is no run."""
    return max(find_runs(below), key=written_at_s, default=None)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in entries
                if not entry.name.startswith(".")
                and entry.name not in _WITHOUT_RUNS
                and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []
