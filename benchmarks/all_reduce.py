"""all_reduce through torch.distributed: backend photinus (tensors in the arena, and ordinary ones) against gloo.

    python benchmarks/all_reduce.py --quick
    python benchmarks/all_reduce.py --out benchmarks/results/all_reduce.json --check

Default sizes: 4 B to 256 MiB in powers of 4, float32. At the end, in a world of one, what our layer of Python costs: a
call through torch.distributed less the same call to the native engine. What is measured and which traps are avoided
stands in README.md beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bars
import engines
import harness
import report
from turns import DTYPES, Contestant, Effort, take_turns

SIZES = [4**power for power in range(1, 15)]
QUICK = [4, *(4**power for power in range(6, 14, 2)), 4**13]
OURS = ["photinus arena", "photinus"]
LAYER_CALLS = 10_000


def layer(binary: Path, rounds: int) -> tuple[dict[str, Any], list[Contestant]]:
    """A row of one call of 4 B in a world of one: through torch, native, and the difference."""
    contestants = [
        engines.through_torch("photinus", 1, {"through torch": "all_reduce:ordinary"}),
        engines.native(binary, 1),
    ]
    (row,) = take_turns(contestants, 1, [("float32", 4)], Effort(rounds, fixed_calls=LAYER_CALLS))
    seconds = row["seconds"]
    if "through torch" in seconds and "ordinary" in seconds:
        seconds["python layer"] = seconds["through torch"] - seconds["ordinary"]
    return row, contestants


def tables(kept: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = ["# all_reduce through torch.distributed", report.facts(kept)]
    for ranks, dtype, rows in report.by_kind(kept["rows"]):
        if ranks == 1:
            parts += [
                f"## One call of 4 B in a world of one, mean of {LAYER_CALLS}",
                report.absolute(rows, ["through torch", "ordinary", "python layer"]),
            ]
            continue
        parts += [
            f"## {ranks} ranks, {dtype}",
            report.absolute(rows, [*OURS, bars.GLOO]),
            "gloo's time divided by ours (tensors in the arena / ordinary tensors):",
            report.ratios(rows, OURS, [bars.GLOO]),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = harness.options(__doc__, SIZES)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32"], help="element types")
    arguments = parser.parse_args()
    harness.enter_namespace()
    sizes = QUICK if arguments.quick and arguments.sizes == SIZES else arguments.sizes
    effort = harness.effort(arguments)
    facts = harness.machine()
    harness.warn(facts)
    binary = engines.build_native(engines.SOURCE / "build/engines/native")
    rows: list[dict[str, Any]] = []
    everybody: dict[str, Contestant] = {}
    for ranks in arguments.ranks:
        contestants = [
            engines.through_torch(
                "photinus", ranks, {"photinus arena": "all_reduce", "photinus": "all_reduce:ordinary"}
            ),
            engines.through_torch("gloo", ranks, {bars.GLOO: "all_reduce:ordinary"}),
        ]
        for row in take_turns(
            contestants, ranks, [(dtype, size) for dtype in arguments.dtypes for size in sizes], effort
        ):
            rows.append(row)
            print(report.progress(row), flush=True)
        everybody.update({each.name: each for each in contestants if each.name not in everybody or each.absent})
    row, contestants = layer(binary, effort.rounds)
    rows.append(row)
    print(report.progress(row), flush=True)
    everybody.update({each.name: each for each in contestants if each.name not in everybody or each.absent})
    report.finish(arguments, harness.record(facts, everybody.values(), rows), tables, bars.TORCH)


if __name__ == "__main__":
    main()
