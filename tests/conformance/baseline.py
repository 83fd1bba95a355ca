"""What gloo and torch's DDP do with PyTorch's suite: the oracle of the conformance tests, kept in baseline.json.

    python -m tests.conformance.baseline        # runs it all again and writes the file; half an hour
    python -m tests.conformance.baseline 'cuda on cpu, world 2'    # one run of it

The file holds for the version of torch that it names. An outcome under another version is compared with nothing.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from tests.conformance.apart import Outcomes, measure
from tests.conformance.plan import Plan

FILE = Path(__file__).with_name("baseline.json")
PLANS = [Plan("gloo", world_size, cuda_on_cpu=cuda_on_cpu) for cuda_on_cpu in (False, True) for world_size in (2, 3, 4)]
AGAIN = f"make it anew with `python -m tests.conformance.baseline` and look at what changed in {FILE.name}"


def version() -> str:
    """torch's version without the build's name, which says nothing of the suite."""
    return torch.__version__.partition("+")[0]


def unknown_because() -> str | None:
    """Why the baseline says nothing of this torch; None if it does."""
    known = json.loads(FILE.read_text())["torch"]
    if known == version():
        return None
    return f"{FILE.name} holds what gloo does under torch {known}; this is torch {version()}: {AGAIN}"


def recorded(plan: Plan) -> dict[str, Any]:
    """The oracle's run of the tests that the plan offers: {"pass": [...], "ddp": [...], "fail": {...}, ...}."""
    return json.loads(FILE.read_text())["runs"][plan.oracle]


def passing(plan: Plan) -> list[str]:
    """The tests that pass with gloo and torch's DDP, by name."""
    return recorded(plan)["pass"]


def passing_with_ddp(plan: Plan) -> list[str]:
    """Those of them that make a DistributedDataParallel."""
    run = recorded(plan)
    return [name for name in run["pass"] if name in set(run["ddp"])]


def condensed(outcomes: Outcomes) -> dict[str, Any]:
    """Outcomes as the file keeps them: names by status, skips by reason, failures with their error's line."""
    skips: dict[str, list[str]] = defaultdict(list)
    for name, outcome in sorted(outcomes.items()):
        if outcome["status"] == "skip":
            skips[outcome["why"]].append(name)
    failures = {name: cause(outcome["why"]) for name, outcome in outcomes.items() if outcome["status"] == "fail"}
    return {
        "pass": sorted(name for name, outcome in outcomes.items() if outcome["status"] == "pass"),
        "ddp": sorted(name for name, outcome in outcomes.items() if outcome["ddp"]),
        "fail": dict(sorted(failures.items())),
        "timeout": sorted(name for name, outcome in outcomes.items() if outcome["status"] == "timeout"),
        "skip": dict(sorted(skips.items())),
    }


def cause(why: str) -> str:
    """The line of a failure's output that names the error."""
    lines = [line.strip() for line in why.splitlines() if re.match(r"\s*[\w.]*(Error|Exception|Assert)\w*\b", line)]
    return (lines or why.splitlines() or ["?"])[0][:160]


def main(keys: list[str]) -> None:
    for plan in PLANS:
        if keys and plan.oracle not in keys:
            continue
        run = condensed(measure(plan, deadline_s=3600))
        # Read only now and written at once: a run takes minutes, in which another may end.
        document = json.loads(FILE.read_text()) if FILE.exists() else {}
        if document.get("torch") != version():
            document = {"torch": version(), "runs": {}}
        document["date"] = datetime.date.today().isoformat()
        document["runs"][plan.oracle] = run
        FILE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
