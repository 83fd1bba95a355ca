"""all_reduce of the engine alone against everybody else on one host, all taking turns in one run.

    python benchmarks/all_reduce_engines.py --setup         # installs the others under build/engines
    python benchmarks/all_reduce_engines.py --quick         # a few minutes
    python benchmarks/all_reduce_engines.py --out benchmarks/results/all_reduce_engines.json --check

Default sizes: 4 B, 4 KiB, 64 KiB, 1, 4, 16, 64 and 256 MiB, of float32 and bfloat16. What is measured and which traps
are avoided stands in README.md beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bars
import engines
import harness
import report
from harness import MIB
from turns import DTYPES, Contestant, take_turns

SIZES = [4, 4 << 10, 64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK = [4 << 10, MIB, 16 * MIB, 64 * MIB]
OURS = ["arena", "ordinary"]
THEIRS = [bars.LOOP, bars.GLOO, bars.OPEN_MPI, "Open MPI, heap kept", bars.MPICH, bars.INTEL_MPI, bars.DEEPSPEED]


def tables(kept: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = ["# all_reduce: the engine against others", report.facts(kept)]
    for ranks, dtype, rows in report.by_kind(kept["rows"]):
        theirs = [name for name in THEIRS if any(name in row["seconds"] for row in rows)]
        parts += [
            f"## {ranks} ranks, {dtype}",
            report.absolute(rows, [*OURS, *theirs]),
            "Their time divided by ours (tensors in the arena / ordinary tensors):",
            report.ratios(rows, OURS, theirs),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = harness.options(__doc__, SIZES)
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES), help="element types")
    parser.add_argument("--setup", action="store_true", help="install the others, then end")
    parser.add_argument("--engines-dir", type=Path, default=engines.SOURCE / "build/engines", help="where they lie")
    arguments = parser.parse_args()
    engines_dir = arguments.engines_dir.resolve()
    if arguments.setup:
        engines.install(engines_dir)
        return
    harness.enter_namespace()
    sizes = QUICK if arguments.quick and arguments.sizes == SIZES else arguments.sizes
    facts = harness.machine()
    harness.warn(facts)
    binary = engines.build_native(engines_dir / "native")
    rows: list[dict[str, Any]] = []
    everybody: dict[str, Contestant] = {}
    for ranks in arguments.ranks:
        contestants = [engines.native(binary, ranks), *engines.others(engines_dir, ranks)]
        kinds = [(dtype, size) for dtype in arguments.dtypes for size in sizes]
        for row in take_turns(contestants, ranks, kinds, harness.effort(arguments)):
            rows.append(row)
            print(report.progress(row), flush=True)
        everybody.update({each.name: each for each in contestants if each.name not in everybody or each.absent})
    report.finish(arguments, harness.record(facts, everybody.values(), rows), tables, bars.ENGINES)


if __name__ == "__main__":
    main()
