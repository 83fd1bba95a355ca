"""Training steps over several hosts, which are network namespaces: our DistributedDataParallel and torch's.

    sudo .venv/bin/python benchmarks/host_steps.py --quick
    sudo .venv/bin/python benchmarks/host_steps.py --out benchmarks/results/host_steps.json --check

A step is that of ddp_steps.py. "no exchange" is our wrapper in no_sync, "forward" the way to its loss alone. No step
can be shorter than one without exchange, nor than forward and the time that the least bytes of the gradients take at
the cards' rate; "bound" is the larger of both.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import emulated
import engines
import harness
import host_bars
import report
from ddp_steps import milliseconds
from emulated import Layout, bits_per_s
from host_contestants import HostContestant, environment
from turns import Effort, take_turns

sys.path.append(str(engines.RANKS))

import models

OURS, THEIRS, GLOO = "our DDP, photinus", "torch DDP, photinus", "torch DDP, gloo"
QUIET, FORWARD, BOUND = "no exchange", "forward", "bound"
MODELS = ["gpt-20m:1x16", "gpt-20m:4x64", "gpt-20m:16x64"]


@dataclass(frozen=True)
class Bar:
    """How much longer than the bound our step may take."""

    at_most: float = 1.15

    def is_for(self, row: dict[str, Any]) -> bool:
        """Whether it says something about this row."""
        return row["case"] == "2x2" and row["rate"] == "1gbit"

    def verdict(self, row: dict[str, Any]) -> tuple[bool, str]:
        """Whether the row clears the bar, and a line about it."""
        where = f"{row['case']}, rate {row['rate']}, {row['dtype']}"
        if not {OURS, BOUND} <= set(row["seconds"]):
            return False, f"{where}: not measured"
        ratio = row["seconds"][OURS] / row["seconds"][BOUND]
        return ratio <= self.at_most, f"{where}: our step takes {ratio:.3f} x the bound, at most {self.at_most} wanted"


def contestant(where: Layout, wrapper: str, backend: str, columns: dict[str, str], names: list[str]) -> HostContestant:
    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        script = [sys.executable, engines.RANKS / "step_rank.py", wrapper, backend]
        found = []
        for rank, (host, _) in enumerate(where.ranks):
            words = where.hosts[host].command([*script, str(rank), str(len(where.ranks)), folder])
            found.append((words, environment(where, rank, 0)))
        return found

    return HostContestant(next(iter(columns)), where, commands, columns, dtypes=names)


def bound_s(row: dict[str, Any], case: str, rate: str) -> float | None:
    """The least that a step can take; None where what it is made of was not measured."""
    seconds = row["seconds"]
    if not {QUIET, FORWARD} <= set(seconds):
        return None
    model, _ = models.make(row["dtype"])
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    moving_s = host_bars.least_bytes("all_reduce", case, gradients) * 8 / bits_per_s(rate)
    return max(seconds[QUIET], seconds[FORWARD] + moving_s)


def tables(kept: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = ["# Training steps over several hosts", report.facts(kept)]
    names = [OURS, THEIRS, GLOO, QUIET, FORWARD, BOUND]
    lines = []
    for row in kept["rows"]:
        seconds = row["seconds"]
        ratios = [
            f"{seconds[over] / seconds[under]:.2f}" if {over, under} <= set(seconds) else "–"
            for over, under in ((OURS, BOUND), (GLOO, OURS), (GLOO, THEIRS))
        ]
        cells = [row["case"], row["rate"], row["dtype"], *(milliseconds(seconds.get(name)) for name in names)]
        lines.append([*cells, *ratios])
    head = [
        "hosts",
        "rate",
        "model:batch per rank",
        *names,
        "ours / bound",
        "gloo / ours",
        "gloo / torch DDP, photinus",
    ]
    return "\n\n".join([*parts, report.table(head, lines)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_effort(parser)
    emulated.add_where(parser, ["2x2"], ["1gbit"])
    parser.add_argument("--models", nargs="+", default=MODELS, help="model:batch, of those of ddp_steps.py")
    parser.set_defaults(turn_s=1.0)
    arguments = parser.parse_args()
    emulated.begin(arguments.limit_s)
    facts = {**harness.machine(), "congestion control": "reno"}
    harness.warn(facts)
    names = MODELS[:1] if arguments.quick and arguments.models == MODELS else arguments.models
    rounds = 3 if arguments.quick else arguments.rounds
    effort = Effort(rounds, arguments.turn_s, wait_quiet_s=arguments.wait_quiet_s, prepare_each_round=False)
    rows: list[dict[str, Any]] = []
    everybody: dict[str, HostContestant] = {}
    for case in arguments.cases:
        with emulated.layout(case) as where:
            for rate in arguments.rates:
                ours = {OURS: "sync", QUIET: "no_sync", FORWARD: "forward"}
                contestants = [
                    contestant(where, "photinus", "photinus", ours, names),
                    contestant(where, "torch", "photinus", {THEIRS: "sync"}, names),
                    contestant(where, "torch", "gloo", {GLOO: "sync"}, names),
                ]
                with where.limited(rate):
                    for row in take_turns(contestants, len(where.ranks), [(name, 0) for name in names], effort):
                        bound = bound_s(row, case, rate)
                        row["seconds"].update({} if bound is None else {BOUND: bound})
                        rows.append({"case": case, "rate": rate, **row})
                        cells = [f"{name} {milliseconds(seconds)}" for name, seconds in row["seconds"].items()]
                        print(f"{case} rate {rate} {row['dtype']}: {', '.join(cells)}", flush=True)
                everybody.update({each.name: each for each in contestants if each.name not in everybody or each.absent})
    report.finish(arguments, harness.record(facts, everybody.values(), rows), tables, [Bar()])


if __name__ == "__main__":
    main()
