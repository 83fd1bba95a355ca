"""The folder and the checkpoint from which a run continues.

Decided by rank 0 in one place. `resume` means, for the run's folder `out`:

| resume | |
|---|---|
| "auto" | the newest complete checkpoint, else from the start |
| "never", None | from the start; what lies there is moved to `earlier-N/` |
| a path | that checkpoint (or the newest of that run's folder); what lies in `out` is moved |

A snapshot in memory (see `snapshots`) counts like a checkpoint of `out`: the newer one is taken.

A start whose last one in `out` had the same "never" or path, and is to be continued, goes on from the newest as "auto"
does: after it was suspended, killed (a path only), or restarted by the same launcher or requeued by Slurm.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...env import ATTEMPT, JOB_ID, OUT
from ...errors import CheckpointError
from ...parallel.exchange.agreement import JSON
from ...runlog.digests import DIGESTS
from ...runlog.events import read_events, this_process
from ...runlog.files import plain_file
from ...runlog.run import FILES
from ..checkpoint.folder import CHECKPOINTS, Checkpoint, CheckpointFolder, find_checkpoint
from ..checkpoint.image_reader import MemorySnapshot, is_kept
from .config import read_config
from .curves import PICTURE

_OF_A_RUN = (CHECKPOINTS, *FILES, DIGESTS, "tensorboard", "wandb", "mlflow", PICTURE, "report.html")


@dataclass(frozen=True)
class ResumePoint:
    """The start of a run, as rank 0 found it."""

    checkpoint: Checkpoint | MemorySnapshot | None  # None: from the very start
    goes_on: bool  # whether the files in `out` belong to the same run and stay
    note: str | None = None  # to tell the user
    is_unsaved: bool = False  # the disk lacks the last checkpoint that was begun before the snapshot


def describe_launch() -> dict[str, JSON]:
    """Return what stays the same when workers restart: the process that does it, and Slurm's job over requeues."""
    return {"job": JOB_ID.get(), "parent": this_process(os.getppid()), "slurm": os.environ.get("SLURM_JOB_ID")}


def choose_point(
    out: Path | None, resume: str | os.PathLike[str] | None, snapshot: MemorySnapshot | None, best: str | None
) -> ResumePoint:
    """Finds what to start from, and moves away what does not belong to the run. For rank 0.

    Args:
        snapshot: of the run in `out`; it counts like a checkpoint of it.
        best: of `Saving`.

    Raises:
        CheckpointError: the path holds no complete checkpoint, or does not exist.
    """
    own = None if out is None else CheckpointFolder(out / CHECKPOINTS)
    saved = [] if own is None else [manifest.step for _, manifest in own.readable()]
    note = None
    if snapshot is not None and best is not None:
        rows = [row["step"] for row in snapshot.content["position"]["history"]]
        if any(max(saved, default=-1) < step <= snapshot.saved_step for step in rows):
            note = (
                f"note: the snapshot of step {snapshot.step} is not used: the checkpoint of step {snapshot.saved_step} "
                f"was not written, and best={best!r} needs its weights"
            )
            snapshot = None
    newest: Checkpoint | MemorySnapshot | None = None
    if own is not None and (resume == "auto" or _is_to_be_continued(own.folder.parent, resume)):
        newest = _newest(own, snapshot)
    if newest is not None or resume == "auto":
        again = f"note: goes on with what resume={str(resume)!r} began in {out}; to begin again, give another `out`"
        is_unsaved = isinstance(newest, MemorySnapshot) and max(saved, default=-1) < newest.saved_step
        return ResumePoint(newest, newest is not None, note if resume == "auto" else again, is_unsaved)
    if resume is None or resume == "never":
        return ResumePoint(None, goes_on=False, note=None if out is None else _set_aside(out, "resume='never'"))
    if not Path(resume).exists():
        raise CheckpointError(
            f"resume={str(resume)!r}: nothing is there ({Path(resume).resolve()}). Give a checkpoint, a run's folder, "
            f'"auto" (the newest of this run) or "never".'
        )
    checkpoint = find_checkpoint(Path(resume))
    if out is None or own is None:
        return ResumePoint(checkpoint, goes_on=False)
    in_out = own.newest()
    if in_out is not None and in_out.path.resolve() == checkpoint.path.resolve():
        return ResumePoint(checkpoint, goes_on=True)
    # The folder holds other work: later checkpoints of this run, or another run. It must not be taken for what
    # follows from the path, and is not ours to delete.
    return _start_from_elsewhere(out, checkpoint)


def _newest(folder: CheckpointFolder, snapshot: MemorySnapshot | None) -> Checkpoint | MemorySnapshot | None:
    try:
        newest = folder.newest()
    except CheckpointError:  # all are damaged
        if snapshot is None:
            raise
        return snapshot
    return newest if snapshot is None or (newest is not None and newest.step >= snapshot.step) else snapshot


def folder_of_this_job(out: Path, options: Mapping[str, Any], number: int) -> list[JSON]:
    """`out`, or where the attempt before left this run: of a folder that is named by the time or pid. For rank 0.

    Args:
        options: of the run, for config.json: of the same run all but `out` are equal.
        number: how many runs this process has begun before.

    Returns:
        The folder, and what to tell.
    """
    run = OUT.get() or ""
    before, _, folder = run.partition(":")
    earlier = Path(folder)
    stays = before != str(number) or earlier == out
    if stays or _has_checkpoint(out) or not (_has_checkpoint(earlier) or is_kept(run)):
        return [str(out), None]
    advice = "give `out` a name that stays the same when the job is started again"
    then = options
    with suppress(ValueError):  # a damaged one tells of no other options
        then = {**read_config(earlier).get("options", {}), "out": options["out"]}
    if then != options:
        return [str(out), f"warning: the attempt before was in {earlier}, and this one begins in {out}: {advice}"]
    return [str(earlier), f"note: goes on in {earlier}, where the attempt before was, and not in {out}: {advice}"]


def _has_checkpoint(out: Path) -> bool:
    return bool(CheckpointFolder(out / CHECKPOINTS)._paths())


def _is_to_be_continued(out: Path, resume: object) -> bool:
    """Return whether the last start in `out` began as this one, which then continues it; see the table above."""
    config = read_config(out)
    starts: list[dict[str, Any]] = config.get("starts") or [{}]
    if config.get("options", {}).get("resume") != (None if resume is None else str(resume)):
        return False
    launch, before = describe_launch(), starts[-1].get("launch") or {}
    if ATTEMPT.get() > 0 and before.get("job") == launch["job"]:
        moved = launch["job"] not in ("", "none") and starts[-1]["hosts"][0] != socket.gethostname()
        if moved or before["parent"] == launch["parent"]:  # rank 0 has another parent on another host
            return True
    if int(os.environ.get("SLURM_RESTART_COUNT", 0)) > 0 and before.get("slurm") == launch["slurm"]:
        return True
    ends = [event for event in read_events(out) if event.kind in ("start", "end", "error")]
    is_killed = ends != [] and ends[-1].kind == "start"
    is_suspended = ends != [] and ends[-1].facts.get("how") == "suspended"
    return is_suspended or (is_killed and resume not in ("never", None))


def _set_aside(out: Path, why: str) -> str | None:
    """Moves the files of an earlier run into `earlier-N/`; returns what to tell, None when there were none."""
    present = [name for name in _OF_A_RUN if (out / name).exists()]
    if not present:
        return None
    earlier = out / f"earlier-{max(map(_number, out.glob('earlier-*')), default=0) + 1}"
    earlier.mkdir()
    for name in present:
        os.replace(out / name, earlier / name)
    return f"{why}: the earlier run in {out} was moved to {earlier}"


def _start_from_elsewhere(out: Path, checkpoint: Checkpoint) -> ResumePoint:
    """Moves what lies in `out` away. If the checkpoint lay there it stays, as do the losses of the steps up to it."""
    folder = (out / CHECKPOINTS).resolve()
    inside = folder in checkpoint.path.resolve().parents
    losses = checkpoint.path.parent.parent / "losses.csv"
    text = None
    if losses.exists():
        with open(losses, "rb", opener=plain_file) as file:
            text = file.read()
    note = _set_aside(out, f"resume={str(checkpoint.path)!r}")
    if inside:
        name = checkpoint.path.name
        moved = max(out.glob("earlier-*"), key=_number) / CHECKPOINTS / name
        folder.mkdir()
        os.rename(moved, folder / name)
        checkpoint = Checkpoint(folder / name)
    if text is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "losses.csv").write_bytes(text)  # the loop drops the rows after the checkpoint
    return ResumePoint(checkpoint, goes_on=True, note=note)


def _number(path: Path) -> int:
    text = path.name.removeprefix("earlier-")
    return int(text) if text.isdigit() else 0
