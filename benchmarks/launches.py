"""Measures launches, and recovery after a kill; kills at random and compares the trained bits.

    python benchmarks/launches.py                                   this checkout, beside torchrun
    python benchmarks/launches.py --other OTHER/.venv/bin/python    beside another checkout of Photinus
    python benchmarks/launches.py --kills 34                        random kills instead

Everybody takes turns, 2 workers on the CPU. Seconds, medians over the rounds:

    empty script   from the start of the launcher to its end, of a script that does nothing
    first step     from the start of the launcher to the end of the first training step of the last rank
    recovery       from a SIGKILL to a rank in step 15 to the end of the next step of the last rank

--kills N: trains once undisturbed, then N times with a kill of a worker, the launcher or both at a random moment;
where the launcher was killed the same command is started again. Each run must end with the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_SCRIPT = Path(__file__).parent / "ranks" / "launched.py"
_LIMIT_S = 120.0
_WORKERS = ("--nproc-per-node", "2")


def launchers(other: str | None) -> dict[str, list[str]]:
    """The commands that start a script, without the script."""
    ours = [sys.executable, "-m", "photinus", "run", *_WORKERS, "--cpu"]
    if other is not None:
        return {"photinus": ours, "other": [other, *ours[1:]]}
    return {"photinus": ours, "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", *_WORKERS]}


def run(command: Sequence[str | Path], code: int = 0) -> None:
    """Runs a job to its end.

    Raises:
        RuntimeError: another exit code than `code`, or it took too long; with what it printed.
    """
    try:
        ended = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{command} did not end within {_LIMIT_S:.0f} s") from error
    if ended.returncode != code:
        raise RuntimeError(f"{command} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")


def clock(folder: Path, *names: str) -> float:
    """The latest clock that these files hold."""
    return max(float((folder / name).read_text()) for name in names)


def measure(launcher: Sequence[str]) -> dict[str, float]:
    """One turn of a launcher."""
    taken = {}
    with tempfile.TemporaryDirectory(prefix="launches-") as name:
        empty = Path(name, "empty.py")
        empty.write_text("")
        began = time.monotonic()
        run([*launcher, empty])
        taken["empty script"] = time.monotonic() - began
        for what in ("first-step", "recover"):
            if what == "recover" and "torch.distributed.run" in launcher:
                continue  # it restarts only with --max-restarts, and the checkpoints are ours
            folder = Path(name, what)
            folder.mkdir()
            began = time.monotonic()
            run([*launcher, _SCRIPT, what, folder])
            done = clock(folder, "step.0", "step.1")
            label = "first step" if what == "first-step" else "recovery"
            taken[label] = done - (began if what == "first-step" else clock(folder, "killed"))
    return taken


def compare(rounds: int, other: str | None) -> dict[str, dict[str, float]]:
    """Medians of all launchers, which take turns."""
    names = launchers(other)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name in names if number % 2 else reversed(names):
            turns[name].append(measure(names[name]))
    return {n: {what: statistics.median(t[what] for t in taken) for what in taken[0]} for n, taken in turns.items()}


def disturb(launcher: Sequence[str], folder: Path, whom: str, after_s: float) -> None:
    """Runs a job, kills after so many seconds, and has it trained to its end."""
    command = [*launcher, str(_SCRIPT), "train", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as job:
        time.sleep(after_s)
        victims = [job.pid] if whom != "worker" else []
        with suppress(OSError, ValueError):
            victims += [int((folder / "pid.1").read_text())] if whom != "launcher" else []
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            job.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
    if not (folder / "weights").exists():
        run(command)


def kill_at_random(count: int, seed: int) -> int:
    """Kills `count` runs at random; returns how many ended with other bits than an undisturbed run."""
    launcher, numbers, wrong = launchers(None)["photinus"], random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="launches-") as name:
        whole = Path(name, "whole")
        whole.mkdir()
        began = time.monotonic()
        run([*launcher, _SCRIPT, "train", whole])
        lasts_s = time.monotonic() - began
        for number in range(count):
            folder = Path(name, str(number))
            folder.mkdir()
            whom, after_s = numbers.choice(["worker", "launcher", "both"]), numbers.uniform(0.2, 0.95) * lasts_s
            disturb(launcher, folder, whom, after_s)
            same = (folder / "weights").read_bytes() == (whole / "weights").read_bytes()
            wrong += not same
            print(f"{number}: {whom} after {after_s:.1f} s: {'the same bits' if same else 'OTHER BITS'}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which all take turns (default 5)")
    parser.add_argument("--other", help="the Python of another checkout, in torchrun's place")
    parser.add_argument("--kills", type=int, help="number of random kills, in place of measurements")
    parser.add_argument("--seed", type=int, default=0, help="of the random kills (default 0)")
    parser.add_argument("--out", type=Path, help="write the medians to this .json file")
    arguments = parser.parse_args()
    if arguments.kills is not None:
        return int(kill_at_random(arguments.kills, arguments.seed) > 0)
    figures = compare(arguments.rounds, arguments.other)
    for what in figures["photinus"]:
        print(f"{what:14}", "  ".join(f"{name} {each[what]:.2f} s" for name, each in figures.items() if what in each))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
