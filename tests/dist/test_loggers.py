"""Rank 0 alone calls loggers, whichever rank has them; one that hangs or raises leaves the ranks' weights alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import photinus
from photinus.trainer.record import loggers
from tests.ranks import run_ranks, values
from tests.small_run import train


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def log(self, step: int, row: Any) -> None:
        self.calls += 1


class Hanging:
    def log(self, step: int, row: Any) -> None:
        threading.Event().wait()


class Broken:
    def start(self, config: Any) -> None:
        raise RuntimeError("no network")

    def log(self, step: int, row: Any) -> None:
        raise AssertionError("called after it failed")


def train_with_loggers(rank: int, world_size: int, out: str) -> tuple[int, str, str]:
    loggers._END_S = 2.0
    counter = Counter()
    report = photinus.Reporting(progress=False, curves=False, loggers=[Broken(), counter, Hanging()])
    logged = train(Path(out, "logged"), report=report)["fingerprint"]
    return counter.calls, logged, train(Path(out, "plain"))["fingerprint"]


def test_only_rank_0_calls_loggers_and_a_broken_one_changes_no_weights(tmp_path: Path) -> None:
    results = run_ranks(
        "tests.dist.test_loggers:train_with_loggers",
        world_size=2,
        backend="gloo",
        arguments={"out": str(tmp_path)},
        timeout_s=120,
    )
    (first, *weights), (second, *others) = values(results)
    assert (first > 18, second) == (True, 0)
    assert len({*weights, *others}) == 1
    log = results[0].output
    assert log.count("the logger Broken is dropped") == log.count("it is still in log(1), with") == 1
