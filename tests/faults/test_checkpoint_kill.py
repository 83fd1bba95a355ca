"""kill -9 at any moment of a save leaves a complete checkpoint, and the next save cleans up.

Two ways: at every single call to the operating system in turn, which covers the narrow places (between fsync and
rename, in the middle of deleting an old one), and at random moments of time, which needs no list of such calls.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from photinus.trainer.checkpoint.folder import CheckpointFolder
from photinus.trainer.checkpoint.statefile import load, save
from tests.ranks import run_ranks

KEEP = 2


def state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"model": {"weight": torch.randn(2000, generator=generator)}, "step": step}


def check(folder: Path, at_least: int) -> int:
    """The newest checkpoint loads, is one of those written, and not older than the last that was reported complete."""
    found = CheckpointFolder(folder).newest()
    if found is None:
        assert at_least < 0, f"step {at_least} was complete, and now there is none"
        return -1
    loaded = found.load()
    assert found.step == loaded["step"] >= at_least
    assert torch.equal(loaded["model"]["weight"], state(found.step)["model"]["weight"])
    return found.step


@contextmanager
def killed_at_call(number: int, more: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
    """In this process, the number-th call that changes the file system is not made: the process is killed before it.

    Args:
        more: functions that count, too, each with its module.
    """
    count = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return call

    names = ("open", "write", "pwrite", "fsync", "close", "rename", "replace", "unlink", "rmdir", "mkdir", "ftruncate")
    originals = [(module, name, getattr(module, name)) for module, name in (*((os, name) for name in names), *more)]
    for module, name, original in originals:
        setattr(module, name, counting(original))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def in_child(work: Callable[[], None], kill_after_s: float | None = None) -> int:
    """Runs `work` in a forked process, killed some time after it has begun; returns its wait status."""
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(begins, b"1")
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - a forked child must not run its parent's code; it is shown
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(code)
    os.read(begun, 1)
    os.close(begun)
    os.close(begins)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def killed_at_every_call(rank: int, world_size: int, folder: str) -> dict[str, int]:
    """Kills the third save, which also deletes the first checkpoint, at its 1st, 2nd, 3rd ... call until it lives."""
    torch.set_num_threads(1)  # a forked process must not need its parent's threads
    rounds, steps_found, debris_seen = 0, set(), 0
    while True:
        rounds += 1
        run = Path(folder, f"round-{rounds}")
        checkpoints = CheckpointFolder(run, keep_last=KEEP)
        for step in (0, 1):
            checkpoints.save(step, state(step), description={})

        def third(number: int = rounds, checkpoints: CheckpointFolder = checkpoints) -> None:
            with killed_at_call(number):
                checkpoints.save(2, state(2), description={})

        status = in_child(third)
        steps_found.add(check(run, at_least=1))
        debris_seen += any(path.name.startswith(".tmp-") for path in run.iterdir())
        checkpoints.save(3, state(3), description={})  # a restarted run goes on in the same folder
        assert check(run, at_least=3) == 3
        assert not [path for path in run.iterdir() if path.name.startswith(".tmp-")]
        assert len([path for path in run.iterdir() if path.name.startswith("step-")]) == KEEP
        if status == 0:
            return {"calls": rounds - 1, "found": len(steps_found), "debris": debris_seen}
        assert os.WIFSIGNALED(status), f"the save itself failed, status {status}"


def test_killed_at_every_call_of_a_save_there_is_a_complete_checkpoint(tmp_path: Path) -> None:
    (result,) = run_ranks(
        "tests.faults.test_checkpoint_kill:killed_at_every_call",
        world_size=1,
        arguments={"folder": str(tmp_path)},
        timeout_s=150,
    )
    assert result.value["calls"] > 30  # files, folders, rename, deletion of the oldest: the test did reach them
    assert result.value["found"] == 2  # before the rename the old one is the newest, after it the new one
    assert result.value["debris"] > 10


def killed_at_random(rank: int, world_size: int, folder: str, rounds: int) -> dict[str, int]:
    torch.set_num_threads(1)
    draw, run, progress = random.Random(4), Path(folder), Path(folder, "progress")
    run.mkdir(exist_ok=True)
    progress.write_text("-0000001")
    written = 0

    def saving(first: int) -> None:
        checkpoints = CheckpointFolder(run, keep_last=KEEP)
        with progress.open("r+") as report:
            for step in range(first, first + 10_000):
                checkpoints.save(step, state(step), description={}, metric=draw.random())
                report.seek(0)
                report.write(f"{step:08d}")
                report.flush()

    began = time.monotonic()
    for step in range(4):
        CheckpointFolder(run / "how long does it take here").save(step, state(step), description={})
    save_s = (time.monotonic() - began) / 4

    patience = 1.0  # a busy machine starts a child so slowly that each would be killed before its first save
    for _ in range(rounds):
        first = check(run, int(progress.read_text())) + 1
        kill_after_s = draw.uniform(0.0, 3 * save_s * patience)
        status = in_child(lambda first=first: saving(first), kill_after_s=kill_after_s)  # type: ignore[misc]
        assert os.WIFSIGNALED(status), f"the save itself failed, status {status}"
        now = check(run, int(progress.read_text()))
        patience = max(1.0, patience / 1.5) if now > written else min(50.0, patience * 1.1)
        written = max(written, now)
    CheckpointFolder(run, keep_last=KEEP).save(10**6, state(10**6), description={})
    return {"written": written, "left": len(list(run.glob("step-*"))), "debris": len(list(run.glob(".tmp-*")))}


def test_killed_at_random_moments_there_is_a_complete_checkpoint(tmp_path: Path) -> None:
    (result,) = run_ranks(
        "tests.faults.test_checkpoint_kill:killed_at_random",
        world_size=1,
        arguments={"folder": str(tmp_path / "run"), "rounds": 100},
        timeout_s=150,
    )
    assert result.value["written"] > 10  # the kills did not all come before the first save
    assert result.value["left"] <= KEEP + 1  # the best is kept besides
    assert result.value["debris"] == 0


def file_killed_at_every_call(rank: int, world_size: int, folder: str) -> int:
    torch.set_num_threads(1)
    path, rounds, seen = Path(folder, "last.pt"), 0, set()
    while True:
        rounds += 1
        save(path, **state(0))

        def second(number: int = rounds) -> None:
            with killed_at_call(number):
                save(path, **state(1))

        status = in_child(second)
        loaded = load(path)
        assert torch.equal(loaded["model"]["weight"], state(loaded["step"])["model"]["weight"])
        seen.add(loaded["step"])
        if status == 0:
            assert seen == {0, 1}
            assert os.listdir(folder) == ["last.pt"]
            return rounds - 1
        assert os.WIFSIGNALED(status), f"the save itself failed, status {status}"


def test_killed_at_every_call_a_single_file_is_the_old_or_the_new(tmp_path: Path) -> None:
    (result,) = run_ranks(
        "tests.faults.test_checkpoint_kill:file_killed_at_every_call",
        world_size=1,
        arguments={"folder": str(tmp_path)},
        timeout_s=150,
    )
    assert result.value > 8
