"""Measures recovery: from SIGKILL of a rank to the end of the next optimizer step of the last rank; 2 ranks on the CPU.

    python benchmarks/recovery.py --out benchmarks/results/recovery.json

`photinus run` with a snapshot after every step, and torchrun with a script that saves every 10 steps (torch.save by
rank 0, without fsync), take turns. Every kill is in a job of its own, because launchers wait after repeated failures.
It strikes a random rank at a random moment, after 12 steps. Models: the digits example (58 k parameters, real data),
and the GPT example with 20 M parameters; AdamW.

    report       from the kill until the launcher prints the failure; by then the other rank has ended
    start        until the script's first line runs in the last new worker
    import       until that worker has imported all it needs
    join         until it is in the group
    load         until model and data are made, and the state is loaded
    first step   until the first optimizer step has ended
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import harness
import report

_RANK = Path(__file__).with_name("ranks") / "recovering.py"
_RANKS = 2
_STEPS_BEFORE = 12
_LIMIT_S = 120.0
_RECOVERY_LIMIT_S = 30.0
PARTS = ("report", "start", "import", "join", "load", "first step")
_MARKS = ("started", "imported", "joined", "loaded", "step")
COMMANDS = {
    "photinus": [sys.executable, "-m", "photinus", "run", "--cpu", "--max-restarts", "1"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1"],
}


def noted(folder: Path, name: str, attempt: int) -> list[str]:
    """Return what each rank has written so far into its file of this name."""
    return [path.read_text() for path in sorted(folder.glob(f"{name}.{attempt}.*"))]


def recover(system: str, model: str, chance: random.Random) -> dict[str, float] | None:
    """Runs a job, kills a rank, and returns the seconds of each part, all of it, and the number of steps lost.

    None: there was no step within 30 s, or the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        folder, lines = Path(name), list[tuple[float, str]]()
        command = [*COMMANDS[system], "--nproc-per-node", str(_RANKS), str(_RANK), system, model, name]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
        assert job.stdout is not None
        output = job.stdout
        reader = threading.Thread(target=lambda: lines.extend((time.monotonic(), line) for line in output), daemon=True)
        reader.start()
        try:
            deadline, seen, step_s = time.monotonic() + _LIMIT_S, dict[int, float](), 0.0
            while len(seen) < _STEPS_BEFORE or max(seen) < _STEPS_BEFORE:
                for text in noted(folder, "finished", 0):
                    seen.setdefault(int(text), time.monotonic())
                if job.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("".join(line for _, line in lines))
                time.sleep(0.0005)
            step_s = (seen[max(seen)] - seen[min(seen) + 1]) / (max(seen) - min(seen) - 1)
            time.sleep(chance.uniform(0, 2 * step_s))
            victim = chance.choice([int(text) for text in noted(folder, "pid", 0)])
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            finished = max(map(int, noted(folder, "finished", 0)))
            if job.wait(_RECOVERY_LIMIT_S):  # gloo's addresses of the attempt before, in torchrun's store
                return None
        except subprocess.TimeoutExpired:
            return None
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(_LIMIT_S)
            reader.join()
            output.close()
        reported = min(at for at, _ in lines if at > killed)
        clocks = [killed, reported] + [max(float(t.split()[0]) for t in noted(folder, mark, 1)) for mark in _MARKS]
        parts = {part: after - before for part, before, after in zip(PARTS, clocks[:-1], clocks[1:], strict=True)}
        resumed = min(int(text.split()[1]) for text in noted(folder, "loaded", 1))
    return {**parts, "all": clocks[-1] - killed, "step": step_s, "steps lost": float(finished - resumed)}


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each launcher and model (default 20)")
    parser.add_argument("--models", nargs="+", default=["digits", "gpt"])
    parser.add_argument("--systems", nargs="+", default=[*COMMANDS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine, chance = harness.machine(), random.Random(arguments.seed)
    rows, lines = [], []
    for model in arguments.models:
        kills: dict[str, list[dict[str, float] | None]] = {system: [] for system in arguments.systems}
        for turn in range(arguments.kills):
            for system in arguments.systems if turn % 2 else reversed(arguments.systems):
                kill = recover(system, model, chance)
                kills[system].append(kill)
                shown = (f"{name} {value:.2f}" for name, value in kill.items()) if kill else ["no step"]
                print(model, system, *shown, sep="  ", flush=True)
        for system, all_of_it in kills.items():
            rows.append({"model": model, "system": system, "kills": all_of_it})
            each = [kill for kill in all_of_it if kill is not None]
            if not each:
                continue
            median = {part: statistics.median(kill[part] for kill in each) for part in each[0]}
            cells = [f"{median['all']:.2f}", f"{max(kill['all'] for kill in each):.2f}"]
            cells += [f"{median[part]:.2f}" for part in (*PARTS, "step")]
            lost = [kill["steps lost"] for kill in each]
            lines.append([model, system, *cells, f"{statistics.median(lost):.0f} ({max(lost):.0f})"])
            lines[-1].insert(2, f"{len(each)} of {len(all_of_it)}")
    head = ["model", "launcher", "recovered within 30 s", "median", "worst", *PARTS, "a step", "steps lost (most)"]
    table = report.table(head, lines)
    print(table)
    if arguments.out is not None:
        date, command = datetime.date.today().isoformat(), " ".join(["python", *sys.argv])
        kept = {"date": date, "command": command, "machine": machine, "unit": "seconds of each kill", "rows": rows}
        text = f"Seconds from SIGKILL of a rank to the end of the next optimizer step, {arguments.kills} kills each."
        known = [f"{date}, `{command}`", "", *(f"- {key}: {value}" for key, value in machine.items())]
        harness.write(arguments.out, kept, "\n".join(["# Recovery", "", text, "", *known, "", table, ""]))


if __name__ == "__main__":
    main()
