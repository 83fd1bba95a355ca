"""Everything that is to be learned of a GPU, in one command of less than nine minutes: `make gpu`.

    python tools/gpu.py            on a machine with one
    python tools/gpu.py --fake     the same script on CPU tensors, slowly and to no purpose but itself

Needs torch, numpy, pytest, nanobind, scikit-build-core, cmake, ninja and a C++ compiler; no network, git or virtual
environment.

Stages run one after the other, the most telling first. Each has a limit in seconds, and all limits together are less
than nine minutes; what a stage leaves of its time lengthens those behind it, to twice their limits at most. None stops
the next. What was not done when a stage's time was over is "unfinished", which is no miss and no pass. Results go, as
they come, to the folder that OUT names (default build/gpu/out): machine.txt, results.jsonl (a line for each check),
log.txt (what the stages wrote), collectives.json, overlap.json, steps.json, and at the end summary.md. Clocks, MIG, MPS
and persistence are read, never set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SITE = REPOSITORY / "build" / "gpu" / "site"
TOTAL_S = 520.0
_FAKE_IS_SLOWER = 8.0
_END_S = 5.0
_LOG_BYTES = 3 << 19  # of each stage: ten of them stay below the 16 MiB of a file
_LINE_BYTES = 400
_FIGURES = ("collectives.json", "overlap.json", "steps.json")


@dataclass(frozen=True)
class Stage:
    """A part of the work: a command, and the seconds that it has for sure."""

    name: str
    limit_s: float
    command: tuple[str, ...]


def stages(fake: bool) -> list[Stage]:
    """What is run, in this order."""
    python = sys.executable

    def tests(name: str, limit_s: float, over: str = "") -> Stage:
        words = ["-m", "pytest", "-q", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-W", "ignore"]
        words += ["-k", f"over_{over}"] if over else []
        return Stage(f"{name}_{over}" if over else name, limit_s, (python, *words, f"tests/gpu/test_{name}.py"))

    install = ("--no-build-isolation", "--no-deps", "--no-index", "--disable-pip-version-check", "--upgrade")
    build = ("-m", "pip", "install", *install, "--target", str(SITE), "--config-settings=build-dir=build/gpu/native")
    # Without the interpreter's own site: an editable install would come first.
    loads = f"import sys; sys.path.insert(0, {str(SITE)!r}); from photinus import engine; print(engine.__file__)"
    return [
        Stage("machine", 20, (python, __file__, "--machine")),
        Stage("build", 80, (python, *build, ".")),
        Stage("engine", 5, (python, "-S", "-c", loads)),
        tests("photinus", 55),
        Stage("collectives", 70, (python, "benchmarks/gpu_collectives.py")),
        tests("two_ranks", 35, over="photinus"),
        tests("training", 35),
        Stage("overlap", 50, (python, "benchmarks/gpu_overlap.py")),
        tests("one_rank", 30),
        tests("commands", 65),
        tests("two_ranks", 25, over="gloo"),
        Stage("steps", 50, (python, "benchmarks/gpu_steps.py")),
    ]


class Results:
    """The files that a run leaves.

    Args:
        out: the folder; made, and emptied of what an earlier run left.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        for name in ("machine.txt", "results.jsonl", "log.txt", *_FIGURES, "summary.md"):
            (out / name).unlink(missing_ok=True)
        self.lines = out / "results.jsonl"

    def tell(self, stage: str, check: str, outcome: str, seconds: float, *, figure: str = "", reason: str = "") -> None:
        """Adds a line for a check; of several the last counts."""
        facts = {"stage": stage, "check": check, "outcome": outcome, "figure": figure, "reason": reason}
        with open(self.lines, "a", encoding="utf-8") as file:
            file.write(json.dumps({**facts, "seconds": round(seconds, 2)}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every check once, in the order in which they were planned."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for line in self.lines.read_text(encoding="utf-8").splitlines() if self.lines.exists() else []:
            try:
                each = json.loads(line)
                found[each["stage"], each["check"]] = each
            except (ValueError, KeyError):  # of a process that was killed while it wrote
                continue
        return list(found.values())

    def log(self, stage: Stage, text: bytes) -> None:
        """Adds the end of what a stage wrote."""
        head = f"\n======== {stage.name}: {' '.join(stage.command)}\n".encode()
        with open(self.out / "log.txt", "ab") as file:
            file.write(head + text[-_LOG_BYTES:])

    def summarise(self, title: str) -> list[dict[str, Any]]:
        """Writes the summary; returns the checks that it holds."""
        checks = self.read()
        counts = {o: sum(c["outcome"] == o for c in checks) for o in ("pass", "miss", "unfinished", "skip")}
        lines = [f"# {title}", "", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".", ""]
        machine = self.out / "machine.txt"
        lines += machine.read_text(encoding="utf-8").splitlines()[:12] if machine.exists() else []
        lines += ["", "| stage | check | outcome | s | figure, or reason |", "|---|---|---|---|---|"]
        # What went wrong is what one looks for.
        order = {"miss": 0, "unfinished": 1, "pass": 2, "skip": 3}
        for each in sorted(checks, key=lambda c: order.get(c["outcome"], 0)):
            words = each.get("figure") or _last_words(each.get("reason", ""))
            cells = (each["stage"], each["check"], each["outcome"], each.get("seconds", ""), words)
            lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
        (self.out / "summary.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return checks


def run(stages: Sequence[Stage], results: Results, *, fake: bool, total_s: float = TOTAL_S) -> bool:
    """Runs the stages; whether all was done and nothing missed. The summary is written after each, should this process
    be ended.
    """
    title = "`make gpu FAKE=1`: CPU tensors in a GPU's place" if fake else "`make gpu`"
    slower = _FAKE_IS_SLOWER if fake else 1.0
    end = time.monotonic() + total_s * slower
    saved_until = time.monotonic()  # when the stages so far would have ended, had each taken its limit
    for stage in stages:
        now, own_s = time.monotonic(), stage.limit_s * slower
        limit_s = min(own_s + min(max(saved_until - now, 0.0), own_s), end - now)
        saved_until += own_s
        if limit_s < 2:
            results.tell(stage.name, "(the stage)", "skip", 0, reason="no time was left for it")
        else:
            _run(stage, limit_s, results, fake=fake)
        checks = results.summarise(title)
    print((results.out / "summary.md").read_text(encoding="utf-8"))
    return all(each["outcome"] in ("pass", "skip") for each in checks)


def _run(stage: Stage, limit_s: float, results: Results, *, fake: bool) -> None:
    print(f"---- {stage.name} (at most {limit_s:.0f} s)", flush=True)
    began = time.monotonic()
    environ = dict(os.environ)
    environ.pop("GPU_FAKE", None)
    path = os.pathsep.join(filter(None, [str(SITE), str(REPOSITORY), environ.get("PYTHONPATH")]))
    facts = {"GPU_RESULTS": str(results.lines), "GPU_STAGE": stage.name, "GPU_OUT": str(results.out)}
    environ |= {
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
        "FRESH_PYTHON": "1",
        **facts,
        **({"GPU_FAKE": "1"} if fake else {}),
    }
    output = results.out.parent / f".{results.out.name}-{stage.name}.log"  # beside it: OUT holds few files
    reason = ""
    is_late = False
    try:
        with open(output, "wb") as log:
            process = subprocess.Popen(
                stage.command, cwd=REPOSITORY, env=environ, stdout=log, stderr=log, start_new_session=True
            )
            try:
                code = process.wait(limit_s)
                if code:
                    reason = f"ended with code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
            except subprocess.TimeoutExpired:
                is_late = True
                reason = f"not done within {limit_s:.0f} s"
            finally:
                _end(process)
        text = output.read_bytes()
    except OSError as error:
        reason, text = f"could not be started: {error}", b""
    finally:
        output.unlink(missing_ok=True)
    results.log(stage, text)
    told = [each for each in results.read() if each["stage"] == stage.name]
    failure = "unfinished" if is_late else "miss"
    for each in told:
        if each["outcome"] in ("planned", "begun"):
            how = "did not begin" if each["outcome"] == "planned" else "did not end"
            results.tell(stage.name, each["check"], failure, 0, reason=f"{how}: the stage {reason or 'ended'}")
    misses = any(each["outcome"] == "miss" for each in told)
    seconds = time.monotonic() - began
    if reason and not (misses and reason == "ended with code 1"):  # pytest's code for tests that have told so
        last = _last_words(text.decode(errors="replace"))
        results.tell(stage.name, "(the stage)", failure, seconds, reason=f"{reason}: {last}")
    else:
        results.tell(stage.name, "(the stage)", "pass", seconds)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of a stage goes on: it is the leader of a session of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that hangs holds a killed process: others go on
        process.wait(_END_S)


def _last_words(text: str) -> str:
    """The lines that say most of a failure: pytest's that begin with E, else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return " ".join((errors or lines[-1:])[:3])[:_LINE_BYTES]


_QUERIES = (
    ("nvidia-smi", "-L"),
    (
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,compute_cap,pcie.link.gen.current,pcie.link.width.current,"
        "persistence_mode,mig.mode.current,compute_mode,clocks.sm,clocks.max.sm,power.limit",
        "--format=csv",
    ),
    ("nvidia-smi",),
    ("nvidia-smi", "topo", "-m"),
    ("uname", "-a"),
    ("lscpu",),
    ("free", "-g"),
    ("ulimit", "-a"),
)
_VERSIONS = """
import platform, sys
print("Python", sys.version.split()[0], platform.platform())
from importlib.metadata import PackageNotFoundError, version
for name in ("torch", "numpy", "pytest", "pytest-timeout", "nanobind", "scikit-build-core", "cmake", "ninja", "triton"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print(name, "is not installed")
import torch
import torch.distributed as dist
print("CUDA", torch.version.cuda, "seen:", torch.cuda.is_available(), torch.cuda.device_count())
if torch.cuda.is_available():
    print("cuDNN", torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version())
    print(torch.cuda.get_device_properties(0))
print(torch.__config__.show())
"""


def record_machine(path: Path) -> None:
    """What ran where: read-only questions, each with a deadline of its own; a hanging one leaves time for the rest."""
    commands = [("date", "-u"), (sys.executable, "-c", _VERSIONS), *_QUERIES]
    with open(path, "w", encoding="utf-8") as file:
        for command in commands:
            name = "versions" if command[0] == sys.executable else " ".join(command)
            words = ("bash", "-c", "ulimit -a") if command[0] == "ulimit" else command
            try:
                limit_s = 12 if command[0] == sys.executable else 3  # torch is imported there
                asked = subprocess.run(words, capture_output=True, text=True, timeout=limit_s)
                said = (asked.stdout or asked.stderr).strip()
            except (OSError, subprocess.TimeoutExpired) as error:
                said = str(error)
            file.write(f"## {name}\n{said}\n\n")
            file.flush()


def main() -> int:
    """Runs all stages; 0 unless one missed a check or was out of time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fake", action="store_true", help="CPU tensors in the GPU's place")
    parser.add_argument("--machine", action="store_true", help="only write machine.txt (a stage of this script)")
    arguments = parser.parse_args()
    if arguments.machine:
        record_machine(Path(os.environ["GPU_OUT"], "machine.txt"))
        return 0
    results = Results(Path(os.environ.get("OUT") or REPOSITORY / "build" / "gpu" / "out").absolute())
    SITE.parent.mkdir(parents=True, exist_ok=True)
    return 0 if run(stages(arguments.fake), results, fake=arguments.fake) else 1


if __name__ == "__main__":
    sys.exit(main())
