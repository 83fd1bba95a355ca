"""What every benchmark of all_reduce shares: options, the network namespace, facts about the machine, the record."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from turns import Contestant, Effort, busy_share

CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
INSIDE = "PHOTINUS_BENCH_NAMESPACE"
MIB = 1 << 20


def options(doc: str | None, sizes: Sequence[int]) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default 2 4)")
    add_sizes(parser, sizes)
    add_effort(parser)
    return parser


def add_sizes(parser: argparse.ArgumentParser, sizes: Sequence[int]) -> None:
    """The option --sizes."""
    parser.add_argument(
        "--sizes", type=size_of, nargs="+", default=list(sizes), help="like 4, 64KiB, 16MiB (default: see above)"
    )


def add_effort(parser: argparse.ArgumentParser) -> None:
    """The options that say how long to measure, and what becomes of the figures."""
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: to see that it works")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which all take turns (default 7)")
    parser.add_argument("--turn-s", type=float, default=0.1, help="seconds that a turn lasts at least (default 0.1)")
    parser.add_argument(
        "--out", type=Path, help="write the figures to this .json file, and the tables to .md beside it"
    )
    parser.add_argument(
        "--wait-quiet-s", type=float, default=0, help="before each round, wait so long at most for others to be idle"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed, and say which (bars.py)")


def effort(arguments: argparse.Namespace) -> Effort:
    """How long to measure."""
    rounds, turn_s = (3, 0.02) if arguments.quick else (arguments.rounds, arguments.turn_s)
    return Effort(rounds, turn_s, wait_quiet_s=arguments.wait_quiet_s)


def size_of(text: str) -> int:
    """Bytes of a text like 4, 64KiB or 16MiB."""
    for unit, factor in (("KiB", 1 << 10), ("MiB", MIB), ("B", 1)):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def size_name(size_bytes: int) -> str:
    """The text of a number of bytes."""
    if size_bytes >= MIB:
        return f"{size_bytes / MIB:g} MiB"
    return f"{size_bytes / 1024:g} KiB" if size_bytes >= 1024 else f"{size_bytes} B"


def enter_namespace() -> None:
    """As root, starts this program again in a network namespace of its own, with loopback up and control reno."""
    if os.environ.get(INSIDE) or os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return
    script = f'ip link set lo up && echo reno > {CONTROL} && exec "$@"'
    command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, *sys.argv]
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode)
    sys.exit(130)


def machine() -> dict[str, str]:
    """What the figures are measured on."""
    model = [text for text in Path("/proc/cpuinfo").read_text().splitlines() if text.startswith("model name")]
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    return {
        "processor": model[0].split(":")[1].strip() if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "caches": _caches(),
        "memory": f"{memory / (1 << 30):.0f} GiB",
        "kernel": platform.release(),
        "governor": governor.read_text().strip() if governor.exists() else "none visible",
        "congestion control": CONTROL.read_text().strip(),
        "python": platform.python_version(),
        "load average at start": f"{os.getloadavg()[0]:.2f}",
        "busy before the start": f"{busy_share(1.0):.0%} of all cores",
    }


def _caches() -> str:
    found = []
    for folder in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((folder / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found.append(f"L{level} {size}")
    return ", ".join(found)


def warn(facts: dict[str, str]) -> None:
    """Says what makes these figures doubtful."""
    if facts["congestion control"] != "reno":
        print("(not in a namespace with reno: gloo may be slower here than it need be; run as root to compare fairly)")
    if int(facts["busy before the start"].split("%")[0]) > 5:
        print("(the machine is not quiet: take these figures for a test of the benchmark, not for a result)")


def record(facts: dict[str, str], contestants: Iterable[Contestant], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All that is kept of a run."""
    contestants = list(contestants)
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "machine": {**facts, "load average at end": f"{os.getloadavg()[0]:.2f}"},
        "unit": "seconds per call (sum, in place): median, least and most of the rounds, of the slowest rank; "
        "foreign: share of the cores that others used, sampled between the rounds",
        "versions": {each.name: each.version for each in contestants if each.version},
        "absent": {each.name: each.absent for each in contestants if each.absent},
        "rows": rows,
    }


def write(path: Path, kept: dict[str, Any], tables: str) -> None:
    """The record as JSON, and the tables as Markdown beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = kept["rows"]
    head = json.dumps({**kept, "rows": []}, indent=1)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(head.replace('"rows": []', f'"rows": [\n{lines}\n ]') + "\n")
    path.with_suffix(".md").write_text(tables)
