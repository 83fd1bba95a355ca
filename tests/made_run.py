"""A run's folder as a training would leave it, made without training: for the tests of what reads it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from photinus.runlog.events import EVENTS
from photinus.runlog.tables import PHASES, RANKS, RunFiles, StepLoss, Window

BEGAN_S = 1_790_000_000.0  # Unix time of the first start

USUAL = {"data": 0.0001, "forward": 0.001, "backward": 0.002, "waiting": 0.0004, "optimizer": 0.0003, "other": 0.0002}


def put_in_the_way(path: Path, kind: str) -> None:
    """What is not a plain file of a run, in place of one: a "folder", "FIFO", "device" or "bytes" (too many)."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 3 << 30)


def window(
    step: int, *, ranks: int = 2, steps: int = 10, slow: Mapping[int, Mapping[str, float]] | None = None, **other: Any
) -> Window:
    """A window that ends at `step`: every rank as in USUAL, but for what `slow` says of some."""
    phases = {p: [dict(USUAL, **(slow or {}).get(rank, {}))[p] for rank in range(ranks)] for p in PHASES}
    memory = {
        "resident": [300 << 20] * ranks,
        "peak": [340 << 20] * ranks,
        "cuda": [0] * ranks,
        "cuda_peak": [0] * ranks,
    }
    facts = {"time_s": BEGAN_S + step / 100, "epoch": 1, "start": 1, "samples": 64 * steps, "memory": memory, **other}
    return Window(step=step, steps=steps, phases=phases, **facts)


def write_run(
    folder: Path,
    *,
    epochs: int = 3,
    epochs_wanted: int = 3,
    steps: int = 20,
    ranks: int = 2,
    valid: bool = True,
    nan_steps: Sequence[int] = (),
    slow: Mapping[int, Mapping[str, float]] | None = None,
    restart_at: int | None = None,
    ended: bool = True,
    window_every: int = 10,
    user: Mapping[str, Any] | None = None,
    hosts: Sequence[str] | None = None,
) -> Path:
    """Writes a run of `epochs` epochs (of `epochs_wanted`) with `steps` steps each; returns its folder."""
    folder.mkdir(parents=True)
    files = RunFiles(folder)
    total = epochs * steps
    places = list(hosts or ["a"] * ranks)
    first = restart_at if restart_at is not None else total
    rows = [
        StepLoss(i, (i - 1) // steps + 1, math.nan if i in nan_steps else 2.0 / (1 + i / steps), 64)
        for i in range(1, total + 1)
    ]
    files.add_losses(rows[:first], 1)
    files.add_losses(rows[first:], 2)
    files.add_row(
        [
            {
                "epoch": e,
                "step": e * steps,
                "loss": 2.0 / (1 + e),
                "learning_rate": 0.1 / e,
                **({"valid_loss": 2.2 / (1 + e), "accuracy": 1 - 0.5 / e} if valid else {}),
                "samples_per_s": 12_345.0,
                "elapsed_s": e * 1.5,
                "start": 1,
            }
            for e in range(1, epochs + 1)
        ]
    )
    with open(folder / RANKS, "w") as file:
        for step in range(window_every, total + 1, window_every):
            start = 1 if step <= first else 2
            epoch = (step - 1) // steps + 1
            file.write(window(step, ranks=ranks, steps=window_every, slow=slow, epoch=epoch, start=start).to_line())
    events: list[dict[str, Any]] = []

    def tell(kind: str, step: int, **facts: Any) -> None:
        events.append({"time": BEGAN_S + step / 100, "event": kind, "step": step, **facts})

    start = {
        "epochs": epochs_wanted,
        "steps_per_epoch": steps,
        "batch_size": 64,
        "world_size": ranks,
        "hosts": places,
        "backend": "photinus",
        "boot": "another boot",
        "pid": 1,
        "pids": [4711 + rank for rank in range(ranks)],
    }
    tell("start", 0, start=1, attempt=0, resumed_from=None, **start)
    for epoch in range(1, epochs + 1):
        if restart_at is not None and (epoch - 1) * steps < restart_at <= epoch * steps:
            tell("start", restart_at, start=2, attempt=1, resumed_from=f"step-{restart_at:08}", **start)
        tell("epoch", epoch * steps, epoch=epoch, validation_s=0.1)
        tell("checkpoint", epoch * steps, name=f"step-{epoch * steps:08}", seconds=0.06)
    if ended:
        tell("end", total, how="finished", epochs=epochs)
    (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    config = {
        "options": {"batch_size": 64, "epochs": epochs_wanted, "seed": 0},
        "user": dict(user or {"lr": 0.1}),
        "starts": [
            {
                "time": "2026-09-21T14:13:20+0000",
                "command": ["python", "train.py", "--out", str(folder)],
                "environ": {"OMP_NUM_THREADS": "1"},
                "started_with": f"photinus run -n 2 train.py --out {folder}",
                "resumed_step": 0,
                "world_size": ranks,
                "hosts": places,
                "device": "cpu",
                "backend": "photinus",
                "launcher": "photinus run",
                "versions": {"photinus": "0.1.0", "torch": "2.13.0", "cuda": None},
                "git": {"commit": "0123456789abcdef", "changed": True},
                "machine": {"processor": "A processor", "cores": 2, "memory_bytes": 8 << 30},
            }
        ],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
