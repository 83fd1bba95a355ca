"""Runs PyTorch's distributed suite, or some tests of it, under one plan.

    python -m tests.conformance --backend photinus --world-size 2
    python -m tests.conformance --backend gloo --ddp photinus --cuda-on-cpu --only 'test_ddp_join'
    python -m tests.conformance --backend photinus --world-size 3 --against-gloo

The last runs gloo with torch's DDP too, and ends with 1 if a test that passes so does not pass under the plan.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from tests.conformance.apart import TEST_TIMEOUT_S, Outcomes, measure
from tests.conformance.plan import DDP_CLASSES, Plan


def run_plan(plan: Plan, wanted: Callable[[str], bool], timeout_s: float, shown: Callable[[str], None]) -> Outcomes:
    """The outcome of each wanted test, in this process, which is of use for no other plan afterwards."""
    from tests.conformance import suite, trial

    loaded = suite.load(plan)
    names = [name for name in loaded.names if wanted(name)]
    outcomes: Outcomes = {}
    for count, name in enumerate(names, 1):
        outcome = trial.run(loaded, name, timeout_s)
        outcomes[name] = asdict(outcome)
        shown(f"[{count}/{len(names)}] {outcome.status:7} {outcome.seconds:6.1f} s  {name}")
        if outcome.status in ("fail", "timeout"):
            shown(outcome.why)
    return outcomes


def counts(outcomes: Outcomes) -> str:
    """In words: 91 pass, 194 skip."""
    found = Counter(outcome["status"] for outcome in outcomes.values())
    return ", ".join(f"{found[status]} {status}" for status in ("pass", "fail", "timeout", "skip") if found[status])


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="photinus")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--like", default="gloo", help="take the suite's branches for this backend (gloo)")
    parser.add_argument("--answers-as", help="what get_backend says of the backend's groups (the truth)")
    parser.add_argument("--ddp", default="torch", help=f"{', '.join(DDP_CLASSES)} or module:Class (torch)")
    parser.add_argument("--cuda-on-cpu", action="store_true", help="run the tests that want CUDA devices on CPU")
    parser.add_argument("--hosts", help="a letter for each rank: those of one letter are on one host, as in aabb (all)")
    parser.add_argument("--only", default="", metavar="REGEX", help="tests in whose names this is found")
    parser.add_argument("--names", type=Path, metavar="FILE", help="tests named in this file, one per line")
    parser.add_argument("--timeout", type=float, default=TEST_TIMEOUT_S, help="seconds for each test (180)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    parser.add_argument("--against-gloo", action="store_true", help="compare with gloo and torch's DDP, run now")
    return parser


def main() -> int:
    given = arguments().parse_args()
    plan = Plan(
        given.backend, given.world_size, given.like, given.answers_as, given.ddp, given.cuda_on_cpu, given.hosts
    )
    names = set(given.names.read_text().split()) if given.names else None
    wanted = lambda name: bool(re.search(given.only, name)) and (names is None or name in names)  # noqa: E731
    outcomes = run_plan(plan, wanted, given.timeout, lambda line: print(line, flush=True))
    print(f"{plan}: {counts(outcomes)}")
    if given.json:
        given.json.write_text(json.dumps(outcomes, indent=1, sort_keys=True))
    if not given.against_gloo:
        return 0
    oracle = replace(plan, backend="gloo", answers_as=None, ddp="torch", hosts=None)
    expected = measure(oracle, outcomes, timeout_s=given.timeout, deadline_s=60 + given.timeout * len(outcomes))
    print(f"{oracle}: {counts(expected)}")
    lost = [name for name in outcomes if expected[name]["status"] == "pass" != outcomes[name]["status"]]
    won = [name for name in outcomes if outcomes[name]["status"] == "pass" != expected[name]["status"]]
    print(f"passes with gloo and torch's DDP only: {', '.join(lost) or 'none'}")
    print(f"passes under this plan only: {', '.join(won) or 'none'}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
