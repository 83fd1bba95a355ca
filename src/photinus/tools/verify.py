"""The command `photinus verify`: do two runs have the same bits, and if not, from which step on and where?

It compares what both runs recorded: digests of parameters and optimizer states (`runlog.digests`), the losses of steps,
and rows of metrics with their learning rates. Nothing here needs torch.
"""

from __future__ import annotations

import csv
from argparse import SUPPRESS
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..cli.parser import Parser
from ..errors import UsageError
from ..runlog.digests import read_digests
from ..runlog.run import Run, run_folder
from ..runlog.tables import LOSSES, METRICS
from ..runlog.units import plural

_ABOUT = """\
Compare two runs bit by bit: digests of parameters and optimizer states, losses,
learning rates and metrics. Says the first step at which they differ, and what
differs there. The runs may have had another number of processes.

RUN is the run's folder, or a folder with runs: then the newest is taken."""
_MORE = """\
example:
  photinus verify runs/two-processes runs/four-processes

exit code: 0 the same; 1 different; 2 not comparable (other data, seed, batch
size, or no step that both recorded), or wrong use."""

_ALIKE = ("batch_size", "seed", "samples", "shuffle", "drop_last", "sample_order", "accumulate", "logical_shards")
_NAMED = 3
_OF_THE_START = ("samples_per_s", "elapsed_s", "start")  # columns of metrics.csv


def parser() -> Parser:
    """The command line."""
    parser = Parser("verify", "RUN RUN", about=_ABOUT, more=_MORE)
    parser.add("runs", SUPPRESS, metavar="RUN", nargs="*")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prints the answer, and returns the exit code."""
    options = parser().parse(arguments)
    if len(options.runs) != 2:
        raise UsageError(f"photinus verify: {plural(len(options.runs), 'run')} given, and two are needed.")
    first, second = (run_folder("verify", name) for name in options.runs)
    if first.resolve() == second.resolve():
        raise UsageError(f"photinus verify: {first} is given twice.")
    configs = []
    for folder in (first, second):
        run = Run(folder)
        run.refresh()
        configs.append(run.config)
    if reasons := [*differing_settings(*configs)]:
        print(f"not comparable: {first} and {second} have another {', another '.join(reasons)}")
        return 2
    found = compare(first, second)
    hints = [*_hints(*configs)]
    if found.step is not None:
        since = f"the last step that is known to be equal: {found.last_equal or 'none'}"
        print(f"different at step {found.step}: {'; '.join(found.differences)}\n{since}")
        for hint in hints:
            print(f"note: {hint}")
        return 1
    if not found.steps:
        print(f"not comparable: {first} and {second} have recorded no step in common")
        return 2
    print(f"the same bits: {', '.join(found.compared)}; the last one is step {found.last_equal}")
    return 0


def differing_settings(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Settings that make two runs train on other batches, by their config.json: name and both values."""
    a, b = (config.get("options", {}) for config in (first, second))
    for name in _ALIKE:
        if a.get(name) != b.get(name):
            yield f"{name} ({a.get(name)} and {b.get(name)})"


def _hints(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Yield what may explain a difference."""
    a, b = ((config.get("starts") or [{}])[0] for config in (first, second))
    if a.get("world_size") != b.get("world_size") and not first.get("options", {}).get("logical_shards"):
        yield (
            f"the runs began with {a.get('world_size')} and {b.get('world_size')} processes. Only runs with "
            f"photinus.init(logical_shards=...) have the same bits then"
        )
    for name in ("versions", "git", "machine"):
        if a.get(name) != b.get(name):
            yield f"the runs differ in {name}, as config.json has it"


class Comparison:
    """A comparison of two runs.

    Attributes:
        step: the first one that differs; None: none does.
        differences: what differs there.
        last_equal: the last step before it that was compared; 0 for none.
        steps: number of steps that were compared.
        compared: numbers of things that were equal.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self.differences: list[str] = []
        self.last_equal = self.steps = 0
        self.compared: list[str] = []


def compare(first: Path, second: Path) -> Comparison:
    """Compares the records of two runs."""
    found = Comparison()
    differences: list[tuple[int, str]] = []
    steps: set[int] = set()
    a, b = read_digests(first), read_digests(second)
    if a is not None and b is not None and a.names != b.names:
        only = sorted({*a.names} ^ {*b.names}) or ["their order"]
        differences.append((0, f"the models have other parameters: {_some(only)}"))
    elif a is not None and b is not None:
        common = sorted(a.records.keys() & b.records.keys())
        step = next((step for step in common if a.records[step] != b.records[step]), None)
        if step is not None:
            values, states = a.differing(step, b)
            if values:
                differences.append((step, f"parameter {_some(values)}"))
            if states:
                differences.append((step, f"the optimizer's state of {_some(states)}"))
        steps |= {each for each in common if step is None or each < step}
        found.compared.append(
            f"{plural(len(common), 'digest')} of {plural(len(a.names), 'parameter')} and their states"
        )
    for name, key in ((LOSSES, "losses"), (METRICS, "rows of metrics")):
        rows, others = _rows(first / name), _rows(second / name)
        common = sorted(rows.keys() & others.keys())
        for step in common:
            columns = [column for column in rows[step] if rows[step][column] != others[step].get(column)]
            if columns:
                pairs = [f"{column} {rows[step][column]} and {others[step].get(column)}" for column in columns]
                differences.append((step, ", ".join(pairs)))
                break
            steps.add(step)
        found.compared.append(f"{len(common)} {key}")
    found.step = min((step for step, _ in differences), default=None)
    found.differences = [text for step, text in differences if step == found.step]
    equal = [step for step in steps if found.step is None or step < found.step]
    found.last_equal, found.steps = max(equal, default=0), len(equal)
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def _rows(path: Path) -> dict[int, dict[str, str]]:
    """The rows of a table by their steps, as text, without what differs from start to start."""
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit()]
    except OSError:
        return {}
    return {int(row["step"]): {k: v for k, v in row.items() if k not in _OF_THE_START} for row in rows}
