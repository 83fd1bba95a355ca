"""The parts of photinus.trace that need no exchange."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import photinus
from photinus.parallel.tracing import trace as tracing
from photinus.parallel.tracing.spans import is_followed, span, until_done
from photinus.parallel.tracing.trace import RankTrace, _shares, chrome_events
from tests.small_run import QUIET


def rank_trace(
    rank: int, *events: dict[str, Any], clock: str = "a", meeting_ns: int = 0, base_ns: int = 0
) -> RankTrace:
    return RankTrace(rank, "host", 100 + rank, clock, meeting_ns, base_ns, list(events))


def event(name: str, ts: float, dur: float, cat: str = "user_annotation", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 4711, "tid": 4711, "ts": ts, "dur": dur, **more}


def drawn(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_backward_and_exchanges_that_overlap_get_rows_of_their_own() -> None:
    spans = [
        event("forward", 0, 5),
        event("backward", 5, 95),
        event("bucket 0 (8 bytes)", 10, 20),
        event("bucket 1 (8 bytes)", 20, 20),
        event("bucket 2 (8 bytes)", 30, 20),
        event("backward", 10, 5, "gpu_user_annotation"),
    ]
    rows = [(each["name"].partition(" (")[0], each["tid"]) for each in drawn(chrome_events([rank_trace(0, *spans)]))]
    assert rows == [
        ("forward", 4711),
        ("backward", 2),
        ("bucket 0", 3),
        ("bucket 1", 4),
        ("bucket 2", 3),
        ("backward", 4711),
    ]


def test_times_are_microseconds_from_the_first_event_on() -> None:
    ranks = [
        rank_trace(0, event("forward", 5_000, 1_000), base_ns=1_000_000),
        rank_trace(1, event("forward", 500, 2_500, id=7), base_ns=5_000_000),
    ]
    events = drawn(chrome_events(ranks))
    assert [(each["pid"], each["ts"], each["dur"]) for each in events] == [(0, 500, 1000), (1, 0, 2500)]
    assert events[1]["id"] == "1.7"


def test_hosts_with_other_clocks_are_lined_up_by_the_moment_at_which_all_met() -> None:
    ranks = [
        rank_trace(0, event("forward", 1, 1), clock="a", meeting_ns=9_000),
        rank_trace(1, event("forward", 501, 1), clock="b", meeting_ns=509_000),
    ]
    assert [each["ts"] for each in drawn(chrome_events(ranks))] == [0, 0]


def test_shares_are_sums_over_the_events_of_the_device_where_there_are_some() -> None:
    spans = [
        event("ProfilerStep#1", 0, 400),
        event("ProfilerStep#2", 400, 400),
        event("forward", 0, 100),
        event("backward", 100, 200),
        event("bucket 0 (8 bytes)", 200, 80),
        event("bucket 1 (8 bytes)", 250, 100),
        event("Optimizer.step#Outer.step", 350, 50),
        event("Optimizer.step#SGD.step", 360, 20),
        event("Optimizer.step#SGD.step", 500, 40, "gpu_user_annotation"),
        event("ProfilerStep#1", 0, 10, "gpu_user_annotation"),
    ]
    (shares,) = (_shares(rank_trace(0, *spans)),)
    used = [shares.forward, shares.backward, shares.exchange, shares.exposed, shares.optimizer]
    assert shares.steps == 2
    assert [round(seconds * 2e6) for seconds in used] == [100, 200, 150, 50, 40]
    assert "67% of it behind backward" in str(shares)


def test_an_exchange_is_shown_until_its_work_is_done() -> None:
    class Work:
        def __init__(self, error: Exception | None = None) -> None:
            self.error = error
            self.future: Any = torch.futures.Future()

        def get_future(self) -> Any:
            return self.future

        def wait(self) -> None:
            threading.Timer(0.05, self.future.set_result, [None]).start()
            if self.error is not None:
                raise self.error

        def is_completed(self) -> bool:
            return True

    with torch.profiler.profile() as profiler:
        shown = until_done("bucket 0", Work)
        assert not shown.is_completed(), "the work is, and its span has not ended"
        shown.wait()
        assert shown.is_completed()
        until_done("bucket 1", object)  # without a future: its start is shown
        with pytest.raises(OSError, match="lost"):
            until_done("bucket 2", lambda: Work(OSError("lost"))).wait()
    milliseconds = {event.name: event.time_range.elapsed_us() / 1e3 for event in profiler.events()}
    assert min(milliseconds["bucket 0"], milliseconds["bucket 2"]) >= 50 > milliseconds["bucket 1"]


def test_one_process_is_traced_without_a_process_group(tmp_path: Path) -> None:
    with photinus.trace(tmp_path / "trace.json") as trace, span("data"):
        pass
    assert drawn(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == []  # no step was made
    assert "no step was recorded" in str(trace)


def test_a_process_of_any_name_is_traced(tmp_path: Path) -> None:
    code = """
import photinus, torch
open("/proc/self/comm", "wb").write(b'a "b}\\\\ gr\\xc3\\n')
with photinus.init("gloo", "cpu"):
    plain = torch.nn.Linear(1, 1)
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with photinus.trace("trace.json") as trace:
        for _ in range(2):
            model(torch.ones(1)).sum().backward()
            optimizer.step()
    print(trace)
"""
    printed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=True)
    json.loads((tmp_path / "trace.json").read_text())
    assert b"rank 0: 2 steps" in printed.stdout


def test_waiting_for_the_loops_next_batch_is_traced(tmp_path: Path) -> None:
    with photinus.init("gloo", "cpu"):
        plain = torch.nn.Linear(1, 1)
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        data = [torch.ones(1)] * 8
        loop = photinus.Loop(model, optimizer, data, batch_size=2, epochs=1, report=QUIET)
        with photinus.trace(tmp_path / "trace.json") as trace:
            for x in loop:
                loop.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
    spans = [event["name"] for event in drawn(json.loads((tmp_path / "trace.json").read_text())["traceEvents"])]
    assert spans.count("data") == 3  # between the steps; before the first one there is none that it could belong to
    (shares,) = trace.shares()
    assert 0 < shares.data < 1
    assert str(shares).startswith("rank 0: 4 steps, each: data ")


def test_a_trace_inside_a_trace_is_refused_and_the_outer_one_goes_on(tmp_path: Path) -> None:
    with photinus.trace(tmp_path / "outer.json"):
        with pytest.raises(RuntimeError, match="a trace is on in this process"):
            with photinus.trace(tmp_path / "inner.json"):
                pass
        assert is_followed()
    assert not is_followed()
    assert not (tmp_path / "inner.json").exists()


def test_a_trace_beside_a_profiler_is_refused(tmp_path: Path) -> None:
    with torch.profiler.profile(), pytest.raises(RuntimeError, match=r"a torch.profiler is on in this process"):
        photinus.trace(tmp_path / "trace.json").__enter__()
    assert not is_followed()


def test_after_an_error_a_device_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: Any) -> None:
    hung = SimpleNamespace(now=lambda: SimpleNamespace(passed=False))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(tracing, "clock_of", lambda device: hung)
    monkeypatch.setattr(tracing, "_DEVICE_LIMIT_S", 0.05)
    trace = photinus.trace(tmp_path / "trace.json")
    trace._profile = SimpleNamespace(start=lambda: None, step=None, stop=lambda: pytest.fail("it waits"))  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError), trace:
        raise ZeroDivisionError
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize("wrong", [{"skip": -1}, {"steps": 0}])
def test_a_wrong_number_of_steps_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="skip is 0 or more, steps 1 or more"):
        photinus.trace(tmp_path / "trace.json", **wrong)


def test_a_folder_that_does_not_exist_is_named_before_any_step_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        photinus.trace(tmp_path / "absent" / "trace.json")


def test_an_optimizer_outside_of_any_step_is_not_recorded(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    with photinus.trace(tmp_path / "trace.json") as trace:
        torch.optim.SGD([parameter], lr=0.1).step()
    assert drawn(trace.ranks[0].events) == []
