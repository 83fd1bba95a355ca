"""all_reduce as it is now beside an older commit's, and Intel MPI's, on one host, all taking turns in one run.

    python benchmarks/all_reduce_commits.py --setup --before COMMIT   # once: builds that commit, installs Intel MPI
    python benchmarks/all_reduce_commits.py --out benchmarks/results/all_reduce_commits.json     # below six minutes
    python benchmarks/all_reduce_commits.py --native ...       # both times: ours from C++ alone, which takes less

Ours from C++ (tensors in the arena, ordinary ones) and through torch.distributed (ordinary ones), Intel's by its own
IMB-MPI1; float32. The older Python runs in the interpreter and with the torch of this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import bars
import engines
import harness
import report
from harness import MIB, size_name
from turns import Contestant, take_turns

SIZES = [4, 256, 4 << 10, 16 << 10, 64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
NOW = ["arena", "ordinary", "torch"]
BEFORE = [f"{name}, before" for name in NOW]
RELEASE = ["-DCMAKE_BUILD_TYPE=Release"]
PARALLEL = ["--parallel", str(os.cpu_count())]


def install(folder: Path, commit: str, *, only_native: bool) -> None:
    """Builds a commit's bench under `folder`, and its Python package with an environment that imports it."""
    shutil.rmtree(folder, ignore_errors=True)
    source, build = folder / "source", folder / "build"
    source.mkdir(parents=True)
    found = subprocess.run(
        ["git", "rev-parse", "--short", f"{commit}^{{commit}}"], cwd=engines.SOURCE, capture_output=True, text=True
    )
    if found.returncode != 0:
        sys.exit(f"--before {commit}: {found.stderr.strip()}")
    archive = subprocess.Popen(["git", "archive", commit], cwd=engines.SOURCE, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(source)], stdin=archive.stdout, check=True)
    (folder / "commit").write_text(found.stdout.strip())
    if only_native:
        _output([engines.cmake(), "-S", str(source / "native"), "-B", str(build / "native"), *RELEASE])
        _output([engines.cmake(), "--build", str(build / "native"), *PARALLEL, "--target", "all_reduce_bench"])
        return
    nanobind = _output([sys.executable, "-m", "nanobind", "--cmake_dir"])
    configure = ["-S", str(source), "-B", str(build), *RELEASE, "-DPHOTINUS_BUILD_BINDINGS=ON"]
    places = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind}"]
    cmake = engines.cmake()
    _output([cmake, *configure, *places])
    _output([cmake, "--build", str(build), *PARALLEL, "--target", "all_reduce_bench", "_native"])
    (module,) = (build / "bindings").glob("_native*.so")
    shutil.copy(module, source / "src/photinus")
    # Everything but Photinus comes from the running environment; its .pth files, editable installs among them, do not.
    _output([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    (packages / "before.pth").write_text(f"{source / 'src'}\n{sysconfig.get_paths()['purelib']}\n")


def _output(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout.strip()


def contestants(folder: Path, ranks: int, *, only_native: bool) -> list[Contestant]:
    """Now and before, from C++ and through torch, and Intel MPI."""
    before = folder / "before"
    older = before / "build/native/bench/all_reduce_bench"
    ours = [
        engines.native(engines.build_native(folder / "native"), ranks, {NOW[0]: "arena", NOW[1]: "ordinary"}),
        engines.native(older, ranks, {BEFORE[0]: "arena", BEFORE[1]: "ordinary"}),
    ]
    if only_native:
        return ours
    here = engines.through_torch("photinus", ranks, {NOW[2]: "all_reduce:ordinary"})
    there = engines.through_torch(
        "photinus", ranks, {BEFORE[2]: "all_reduce:ordinary"}, python=str(before / "venv/bin/python")
    )
    there.name += ", before"
    return [*ours, here, there, engines.intel_mpi_alone(folder, ranks)]


def figure(row: dict[str, Any], column: str) -> str:
    """Median and, in brackets, the least of the rounds, in microseconds."""
    if column not in row["seconds"]:
        return "–"
    times = [row[kind][column] * 1e6 for kind in ("seconds", "least")]
    digits = 2 if times[0] < 10 else 1 if times[0] < 1000 else 0
    return f"{times[0]:,.{digits}f} ({times[1]:,.{digits}f})"


def tables(kept: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = [
        "# all_reduce: now, before"
        + (", and Intel MPI" if any(bars.IMB in row["seconds"] for row in kept["rows"]) else ""),
        report.facts(kept) + f"\n- before: commit {kept['before']}",
        "Microseconds of a call: the median of the rounds, and in brackets the least of them, which is the better "
        "figure where others used the machine.",
    ]
    for ranks, dtype, rows in report.by_kind(kept["rows"]):
        measured = {name for row in rows for name in row["seconds"]}
        ours = [name for name in NOW if name in measured]
        others = [bars.IMB] if bars.IMB in measured else []
        columns = [*(name for our in ours for name in (our, f"{our}, before")), *others]
        lines = [[size_name(row["bytes"]), *(figure(row, column) for column in columns)] for row in rows]
        parts += [f"## {ranks} ranks, {dtype}", report.table(["size", *columns], lines)]
        for kind, of_kind in (("medians", rows), ("least times", [{**row, "seconds": row["least"]} for row in rows])):
            beside = ", and Intel MPI by now (arena / ordinary)," if others else ""
            parts += [
                f"Before divided by now{beside} of the {kind}; below 1: slower now.",
                report.table(["size", *ours, *others], [_ratios(row, ours, others) for row in of_kind]),
            ]
        for our in NOW[:2] if others else []:
            ahead = [size_name(row["bytes"]) for row in rows if _is_behind(row["least"], our)]
            parts.append(f"Sizes at which Intel MPI's least time is below that of {our}: {', '.join(ahead) or 'none'}.")
    return "\n\n".join(parts) + "\n"


def _ratios(row: dict[str, Any], ours: list[str], others: list[str]) -> list[str]:
    seconds = row["seconds"]

    def ratio(their: str, our: str) -> str:
        return f"{seconds[their] / seconds[our]:.2f}" if their in seconds and our in seconds else "–"

    return [
        size_name(row["bytes"]),
        *(ratio(f"{our}, before", our) for our in ours),
        *(" / ".join(ratio(other, our) for our in NOW[:2]) for other in others),
    ]


def _is_behind(times: dict[str, float], our: str) -> bool:
    return bars.IMB in times and our in times and times[bars.IMB] < times[our]


def main() -> None:
    parser = harness.options(__doc__, SIZES)
    parser.set_defaults(rounds=9, turn_s=0.01)
    parser.add_argument("--setup", action="store_true", help="build the older commit, install Intel MPI, then end")
    parser.add_argument("--before", metavar="COMMIT", help="the older commit (with --setup)")
    parser.add_argument("--native", action="store_true", help="ours from C++ alone, without torch and Intel MPI")
    parser.add_argument("--engines-dir", type=Path, default=engines.SOURCE / "build/engines", help="where they lie")
    arguments = parser.parse_args()
    folder = arguments.engines_dir.resolve()
    if arguments.setup:
        if not arguments.before:
            parser.error("--setup needs --before COMMIT")
        engines.install(folder, [] if arguments.native else ["intelmpi"])
        install(folder / "before", arguments.before, only_native=arguments.native)
        return
    if not (folder / "before/commit").exists():
        parser.error("no older commit is built; --setup --before COMMIT does it")
    harness.enter_namespace()
    facts = harness.machine()
    harness.warn(facts)
    rows: list[dict[str, Any]] = []
    everybody: list[Contestant] = []
    for ranks in arguments.ranks:
        field = contestants(folder, ranks, only_native=arguments.native)
        kinds = [("float32", size) for size in arguments.sizes]
        for row in take_turns(field, ranks, kinds, harness.effort(arguments)):
            rows.append(row)
            print(report.progress(row), flush=True)
        everybody += field
    kept = harness.record(facts, everybody, rows)
    kept["before"] = (folder / "before/commit").read_text()
    wanted = [bar for bar in bars.COMMITS if not (arguments.native and bar.ours == NOW[2])]
    report.finish(arguments, kept, tables, wanted)


if __name__ == "__main__":
    main()
