"""The main job, killed again and again: twenty runs of the digits example, one rank of each killed in mid-epoch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fork_server import REPOSITORY
from tests.worker_processes import rank_of

KILLS = 20
EPOCHS = 4
SCRIPT = REPOSITORY / "examples" / "digits" / "train.py"


def _start(out: Path, temporary: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "photinus", "run", "--nproc-per-node", "2", str(SCRIPT), "--backend", "photinus"]
    return subprocess.Popen(
        [*command, "--epochs", str(EPOCHS), "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )


def _workers(out: Path) -> dict[int, int]:
    """The pids of the run's ranks, by rank."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if str(out).encode() not in (process / "cmdline").read_bytes():
                continue
        except OSError:  # it has ended meanwhile
            continue
        if (rank := rank_of(int(process.name))) is not None:
            found[rank] = int(process.name)
    return found


def _result(out: Path) -> tuple[str, object]:
    """The final accuracy, and the digests of the newest checkpoint's model and optimizer."""
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    files = json.loads((newest / "manifest.json").read_text())["files"]
    header, *rows = (out / "metrics.csv").read_text().splitlines()
    last = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    return last["accuracy"], (files["model"], files["optimizer"])


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_rank_killed_in_mid_epoch_costs_one_restart_and_no_bit_twenty_times_in_a_row(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shared_before = set(os.listdir("/dev/shm"))
    quiet = _start(tmp_path / "quiet", temporary)
    output, _ = quiet.communicate(timeout=120)
    assert quiet.returncode == 0, output
    expected = _result(tmp_path / "quiet")
    seed = int(os.environ.get("PHOTINUS_TEST_SEED", "0"))
    chance = random.Random(seed)
    for run in range(KILLS):
        out = tmp_path / f"killed-{run}"
        process = _start(out, temporary)
        try:
            losses, deadline = out / "losses.csv", time.monotonic() + 120
            wanted = chance.randrange(1, EPOCHS)  # kill after so many epochs are on the disk
            while not (losses.exists() and len(losses.read_text().splitlines()) > 22 * wanted):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(chance.random() * 0.3)
            ranks = _workers(out)
            victim = chance.randrange(2)
            os.kill(ranks[victim], signal.SIGKILL)
            output, _ = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        told = f"seed {seed}, run {run}:\n{output}"
        assert process.returncode == 0, told
        assert f"rank {victim} (pid {ranks[victim]}) was killed by SIGKILL" in output, told
        assert "restart 1 of 3" in output, told
        assert "restart 2 of 3" not in output, told
        assert _result(out) == expected, told
        assert _workers(out) == {}, told
    # torch makes a (lasting) folder for its compiler's cache wherever an optimizer is used; the rest would be ours.
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared_before if "photinus" in name} == set()
