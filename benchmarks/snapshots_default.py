"""Measures what snapshots cost: where the user says nothing (at most 1 % of the time), and one after each step.

    python benchmarks/snapshots_default.py --out benchmarks/results/snapshots_default.json

Two ranks train one model in turns of 30 s, with the default, with `snapshot_every=1` and without snapshots
(`snapshot_every=0`), each turn by a Loop of its own. Models: the digits example (58 k parameters), and the GPT example
with 20 M parameters; AdamW. A turn's figure is the time of its steps divided by their number, without the first 45 (the
first two snapshots take new memory); the cost is the median over the rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import report

WAYS: dict[str, int | None] = {"default": None, "each step": 1, "none": 0}
FIRST_STEPS = 45


def train(folder: str, name: str, turns: int, turn_s: float) -> None:
    """In each rank: trains in turns, and writes seconds a step and the number of snapshots."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import photinus

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / name))
    import model as example  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    with photinus.init(seed=0) as world:
        if name == "digits":
            model, batch = example.DigitsNet(), 32
            data = torch.utils.data.TensorDataset(torch.rand(1437, 1, 8, 8), torch.randint(10, (1437,)))
        else:
            model, batch = example.GPT(1024, width=512, layers=6, heads=8), 2
            data = torch.utils.data.TensorDataset(*torch.randint(1024, (2, 4096, model.context)))
        model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        found: list[dict[str, Any]] = []
        for turn in range(3 * turns):
            way = [*WAYS][(turn + turn // 3) % 3]  # each is by turns the first of a round
            loop: Any = photinus.Loop(
                model, optimizer, data, batch_size=batch * world.world_size, steps=10**9, out=f"{folder}/{turn}",
                save=photinus.Saving(snapshot_every=WAYS[way], every_epochs=10**6),
                report=photinus.Reporting(progress=False, curves=False),
            )  # fmt: skip
            began_s, is_over = 0.0, torch.zeros(1)
            for given, wanted in loop:
                if loop.step == FIRST_STEPS + 1:
                    dist.barrier()
                    began_s = time.perf_counter()
                if loop.step % 10 == 0 and loop.step > FIRST_STEPS:
                    is_over.fill_(time.perf_counter() - began_s > turn_s)
                    dist.broadcast(is_over, 0)
                    if is_over:
                        break
                loop.backward(cross_entropy(model(given).flatten(0, -2), wanted.flatten()))
                optimizer.step()
                optimizer.zero_grad()
            steps, snapshots = loop.step - FIRST_STEPS, loop._checkpointer.snapshots._count
            found.append({"way": way, "step_s": (time.perf_counter() - began_s) / steps, "snapshots": snapshots})
        if world.is_main:
            Path(folder, "found.json").write_text(json.dumps(found))


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7, help="rounds of three turns (default 7)")
    parser.add_argument("--turn-s", type=float, default=30.0, help="seconds of a turn (default 30)")
    parser.add_argument("--models", nargs="+", default=["digits", "gpt"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        folder, name = arguments.train
        return train(folder, name, arguments.turns, arguments.turn_s)
    machine, rows, lines = harness.machine(), [], []
    for name in arguments.models:
        with tempfile.TemporaryDirectory(prefix="snapshots-") as folder:
            command = [sys.executable, "-m", "photinus", "run", "--cpu", "--max-restarts", "0", "-n", "2", __file__]
            words = ["--train", folder, name, "--turns", arguments.turns, "--turn-s", arguments.turn_s]
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            subprocess.run([*command, *map(str, words)], check=True, stdout=sys.stderr, env=environ)
            turns = json.loads(Path(folder, "found.json").read_text())
        rows.append({"model": name, "turns": turns})
        rounds = [{each["way"]: each for each in turns[at : at + 3]} for at in range(0, len(turns), 3)]
        without_s = statistics.median(each["none"]["step_s"] for each in rounds)
        for way in WAYS.keys() - {"none"}:
            costs = [100 * (each[way]["step_s"] / each["none"]["step_s"] - 1) for each in rounds]
            count = statistics.median(each[way]["snapshots"] for each in rounds)
            cells = [f"{1e3 * without_s:.2f} ms", f"{count:.0f}", f"{statistics.median(costs):+.2f} %"]
            lines.append([name, way, *cells, f"{min(costs):+.2f} to {max(costs):+.2f} %"])
    lines.sort()
    table = report.table(
        ["model", "snapshots", "step without", "snapshots in a turn", "cost", "of single rounds"], lines
    )
    print(table)
    if arguments.out is not None:
        date, command_line = datetime.date.today().isoformat(), " ".join(["python", *sys.argv])
        kept = {"date": date, "command": command_line, "machine": machine, "unit": "seconds a step", "rows": rows}
        known = [f"{date}, `{command_line}`", "", *(f"- {key}: {value}" for key, value in machine.items())]
        text = f"2 ranks, {arguments.turns} rounds of turns of {arguments.turn_s:g} s."
        lines_of_it = ["# The cost of snapshots", "", text, "", *known, "", table, ""]
        harness.write(arguments.out, kept, "\n".join(lines_of_it))
    return None


if __name__ == "__main__":
    main()
