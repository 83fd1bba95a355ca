"""Collectives over several hosts, which are network namespaces: photinus against gloo, MPI, and plain sockets.

    sudo .venv/bin/python benchmarks/hosts.py --setup                # once: Open MPI and MPICH, into build/engines
    sudo .venv/bin/python benchmarks/hosts.py --quick
    sudo .venv/bin/python benchmarks/hosts.py --out benchmarks/results/hosts.json --check
    sudo .venv/bin/python benchmarks/hosts.py --cases 2x2 --rates 1gbit --sizes 16MiB --contestants gloo photinus bare

"bare" is native/bench/bare: plain sockets that move the same bytes between as many processes, and add nothing. What is
measured and which traps are avoided stands in README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import emulated
import engines
import harness
import host_bars
import host_contestants
import report
from harness import MIB, size_name
from host_bars import BARS, CASES
from host_contestants import HostContestant
from turns import DTYPES, Effort, take_turns

SIZES = [4 << 10, 64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
RATES = ["100mbit", "1gbit", "none"]
QUICK = {"cases": ["2x1", "2x2"], "rates": ["1gbit"], "sizes": [64 << 10, 16 * MIB]}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_sizes(parser, SIZES)
    harness.add_effort(parser)
    emulated.add_where(parser, CASES, RATES)
    names = list(host_contestants.NAMES)
    usual = [name for name in names if name not in host_contestants.VARIABLES]
    parser.add_argument("--contestants", nargs="+", choices=names, default=usual, help="who takes part")
    parser.add_argument(
        "--operation", choices=OPERATIONS, default="all_reduce", help="others: by torch's backends alone"
    )
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=["float32"], help="element types")
    parser.add_argument(
        "--add", action="store_true", help="keep what the file of --out has of other cases, rates, sizes"
    )
    parser.add_argument("--setup", action="store_true", help="install Open MPI and MPICH, then end")
    parser.add_argument("--engines-dir", type=Path, default=engines.SOURCE / "build/engines", help="where they lie")
    parser.set_defaults(rounds=5)
    arguments = parser.parse_args()
    if arguments.add and not arguments.out:
        parser.error("--add goes with --out")
    if arguments.quick:
        for name, value in QUICK.items():
            if getattr(arguments, name) == parser.get_default(name):
                setattr(arguments, name, value)
    if arguments.operation != "all_reduce":
        arguments.contestants = [name for name in arguments.contestants if name in host_contestants.OF_TORCH]
    return arguments


def measured(
    arguments: argparse.Namespace, where: emulated.Layout, rate: str, everybody: dict[str, HostContestant]
) -> Iterator[dict[str, Any]]:
    """A row for each type and size, all contestants taking turns; what they are is added to `everybody`."""
    operation, folder = arguments.operation, arguments.engines_dir.resolve()
    contestants = [
        host_contestants.contestant(name, where, {name: operation}, folder) for name in arguments.contestants
    ]
    rounds, turn_s = (3, 0.05) if arguments.quick else (arguments.rounds, arguments.turn_s)
    effort = Effort(rounds, turn_s, wait_quiet_s=arguments.wait_quiet_s, fewest=1)
    kinds = [(dtype, size) for dtype in arguments.dtypes for size in arguments.sizes]
    for row in take_turns(contestants, len(where.ranks), kinds, effort):
        uses = {each.name: each.uses[operation][-rounds:] for each in contestants if each.name in row["seconds"]}

        def median(of: str, uses: dict[str, list[host_contestants.Use]] = uses) -> dict[str, float]:
            values = {name: [getattr(use, of) for use in turns] for name, turns in uses.items()}
            return {name: statistics.median(each) for name, each in values.items() if None not in each}

        yield {
            "case": where.case,
            "rate": rate,
            "operation": operation,
            **row,
            "payload": median("payload_bytes"),
            "card": median("card_bytes"),
            "processor_s": median("processor_s"),
            "memory": median("memory_bytes"),
        }
    for each in contestants:
        if each.name not in everybody or each.absent:
            everybody[each.name] = each


def together(before: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """One record of two runs, of which the later has what both have measured."""

    def kind(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row[what] for what in ("operation", "case", "rate", "dtype", "bytes"))

    new = {kind(row) for row in kept["rows"]}
    rows = [row for row in before["rows"] if kind(row) not in new] + kept["rows"]
    found = {what: before[what] | kept[what] for what in ("versions", "absent")}
    commands = [command for command in before["command"].split("; ") if command != kept["command"]]
    return {**kept, **found, "command": "; ".join([*commands, kept["command"]]), "rows": rows}


def tables(kept: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = ["# Several hosts", report.facts(kept)]
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in kept["rows"]:
        kinds.setdefault((row["operation"], row["case"], row["rate"], row["dtype"]), []).append(row)
    for (operation, case, rate, dtype), rows in kinds.items():
        names = [name for name in host_contestants.NAMES if any(name in row["seconds"] for row in rows)]
        limit = "no limit" if rate == "none" else rate
        parts += [
            f"## {operation}, {case}, {limit}, {dtype}",
            _times(rows, names),
            "What a call takes: bytes of the host and direction with most divided by the least possible, as payload "
            "and on the card; processor time of all ranks; memory of the rank with most, beyond its tensor "
            f"({' / '.join(names)}):",
            _uses(rows, names),
        ]
    return "\n\n".join(parts) + "\n"


def _times(rows: list[dict[str, Any]], names: list[str]) -> str:
    found = [host_bars.ratios(row) for row in rows]
    shown = [what for what in host_bars.OF_TIME if any(what in each for each in found)]
    lines = []
    for row, ratios in zip(rows, found, strict=True):
        times = [_time(row["seconds"].get(name), row["least"].get(name)) for name in names]
        lines.append([size_name(row["bytes"]), *times, *(_number(ratios.get(what)) for what in shown)])
    return report.table(["size: median (least)", *names, *shown], lines)


def _uses(rows: list[dict[str, Any]], names: list[str]) -> str:
    lines = []
    for row in rows:
        least = host_bars.least_bytes(row["operation"], row["case"], row["bytes"])
        columns = [("payload", least, 4), ("card", least, 3), ("processor_s", 1e-3, 2), ("memory", MIB, 1)]
        cells = [
            " / ".join(_number(row[what][name] / unit if name in row[what] else None, digits) for name in names)
            for what, unit, digits in columns
        ]
        lines.append([size_name(row["bytes"]), *cells])
    return report.table(["size", "payload", "card", "processor, ms", "memory, MiB"], lines)


def _time(median: float | None, least: float | None) -> str:
    if median is None or least is None:
        return "–"
    unit, name = (1e-6, "us") if median < 1e-3 else (1e-3, "ms")
    return f"{median / unit:.4g} {name} ({least / unit:.4g})"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def main() -> None:
    arguments = parsed()
    if arguments.setup:
        engines.install(arguments.engines_dir.resolve(), [host_contestants.OPEN_MPI, host_contestants.MPICH])
        return
    emulated.begin(arguments.limit_s)
    facts = {**harness.machine(), "congestion control": "reno"}
    harness.warn(facts)
    if host_contestants.PLAIN in arguments.contestants:
        engines.build_native(arguments.engines_dir.resolve() / "native", host_contestants.PLAIN)
    rows: list[dict[str, Any]] = []
    everybody: dict[str, HostContestant] = {}
    for case in arguments.cases:
        with emulated.layout(case) as where:
            for rate in arguments.rates:
                with where.limited(rate):
                    for row in measured(arguments, where, rate, everybody):
                        rows.append(row)
                        print(f"{case} rate {rate} {report.progress(row)}", flush=True)
    kept = harness.record(facts, everybody.values(), rows)
    if arguments.add and arguments.out.exists():
        kept = together(json.loads(arguments.out.read_text()), kept)
    report.finish(arguments, kept, tables, BARS)


if __name__ == "__main__":
    main()
