"""Two runs compared bit by bit, by what both recorded: digests of parameters and optimizer states, losses, metrics."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from .digests import read_digests
from .run import Run
from .tables import LOSSES, METRICS
from .units import plural

SAME, DIFFERENT, NOT_COMPARABLE = 0, 1, 2
_ORDER = ("batch_size", "seed", "random_seed", "samples", "shuffle", "drop_last", "sample_order")
_ALIKE = (*_ORDER, "accumulate", "logical_shards")
_NAMED = 3
_OF_THE_START = ("samples_per_s", "elapsed_s", "start")  # columns of metrics.csv


def verdict(first: Run, second: Run) -> tuple[int, list[str]]:
    """Return SAME, DIFFERENT or NOT_COMPARABLE, and lines of text that say so of two runs whose files were read."""
    if reasons := [*differing_settings(first.option, second.option)]:
        text = f"not comparable: {first.folder} and {second.folder} have another {', another '.join(reasons)}"
        return NOT_COMPARABLE, [text]
    found = compare(first.folder, second.folder)
    if found.step is not None:
        since = f"the last step that is known to be equal: {found.last_equal or 'none'}"
        text = f"different at step {found.step}: {'; '.join(found.differences)}"
        return DIFFERENT, [text, since, *(f"note: {hint}" for hint in _hints(first, second))]
    if not found.steps:
        return NOT_COMPARABLE, [f"not comparable: {first.folder} and {second.folder} have recorded no step in common"]
    return SAME, [f"the same bits: {', '.join(found.compared)}; the last one is step {found.last_equal}"]


def differing_settings(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """Yield the options by which two runs train on different batches: name and both values."""
    for name in _ALIKE:
        if a.get(name) != b.get(name):
            yield f"{name} ({a.get(name)} and {b.get(name)})"


def _hints(first: Run, second: Run) -> Iterator[str]:
    """Yield what may explain a difference."""
    a, b = ((run.config_starts or [{}])[0] for run in (first, second))
    if a.get("world_size") != b.get("world_size") and not first.option.get("logical_shards"):
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
            kinds = ("parameter", values), ("the optimizer's state of", states)
            differences += [(step, f"{kind} {_some(names)}") for kind, names in kinds if names]
        steps |= {each for each in common if step is None or each < step}
        digests = _share(common, {*a.records, *b.records}, "digests")
        found.compared.append(f"{digests} of {plural(len(a.names), 'parameter')} and their states")
    elif a is not None or b is not None:
        found.compared.append(f"no digests (none can be read in {first if a is None else second})")
    for name, key in ((LOSSES, "losses"), (METRICS, "rows of metrics")):
        rows, others = _rows(first / name), _rows(second / name)
        common = sorted(rows.keys() & others.keys())
        for step in common:
            a_row, b_row = rows[step], others[step]
            if columns := [column for column in a_row | b_row if a_row.get(column) != b_row.get(column)]:
                pairs = [f"{column} {a_row.get(column)} and {b_row.get(column)}" for column in columns]
                differences.append((step, ", ".join(pairs)))
                break
            steps.add(step)
        found.compared.append(_share(common, {*rows, *others}, key))
    found.step = min((step for step, _ in differences), default=None)
    found.differences = [text for step, text in differences if step == found.step]
    equal = [step for step in steps if found.step is None or step < found.step]
    found.last_equal, found.steps = max(equal, default=0), len(equal)
    return found


def _share(common: Sequence[int], every: Collection[int], key: str) -> str:
    return f"{len(common)} of " * (len(common) < len(every)) + f"{len(every)} {key}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + f" and {len(names) - _NAMED} more" * (len(names) > _NAMED)


def _rows(path: Path) -> dict[int, dict[str, str]]:
    """The rows of a table by their steps, as text, without what differs from start to start."""
    try:
        with open(path, newline="", encoding="utf-8", errors="replace") as file:
            rows = [row for row in csv.DictReader(file) if (row.get("step") or "").isdigit()]
    except (OSError, csv.Error):
        return {}
    return {int(row["step"]): {k: v for k, v in row.items() if k not in _OF_THE_START} for row in rows}
