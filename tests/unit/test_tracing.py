"""The parts of photinus.trace that need no exchange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from photinus import optimizer_steps
from photinus.parallel.tracing.recording import EXCHANGE, MAIN, Recording, Span, current_recording, recorded_span
from photinus.parallel.tracing.trace import RankTrace, chrome_events, enumerate_rows
from tests.small_run import QUIET


def rank_trace(rank: int, spans: list[Span], *, clock: str = "a", meeting_ns: int = 0) -> RankTrace:
    return RankTrace(rank, "host", 100 + rank, clock, meeting_ns, spans)


def drawn(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def test_a_recording_keeps_the_steps_asked_for() -> None:
    recording = Recording(skip=1, steps=2)
    recording.add("before the first step", MAIN, 1, 2)
    for _ in range(5):
        recording.begin_step()
        recording.add(f"step {recording.step}", MAIN, 10, 20)
    assert [span.name for span in recording.spans()] == ["step 1", "step 2"]


def test_exchanges_that_overlap_get_rows_of_their_own() -> None:
    spans = [
        Span("backward", MAIN, 0, 100, 0),
        Span("bucket 0", EXCHANGE, 10, 30, 0),
        Span("bucket 1", EXCHANGE, 20, 40, 0),
        Span("bucket 2", EXCHANGE, 30, 50, 0),
    ]
    assert [(row, span.name) for row, span in enumerate_rows(spans)] == [
        (0, "backward"),
        (1, "bucket 0"),
        (2, "bucket 1"),
        (1, "bucket 2"),
    ]


def test_times_are_microseconds_from_the_first_span_on() -> None:
    events = chrome_events(
        [
            rank_trace(0, [Span("forward", MAIN, 5_000_000, 6_000_000, 3)]),
            rank_trace(1, [Span("forward", MAIN, 4_500_000, 7_000_000, 3, {"bytes": 8})]),
        ]
    )
    assert [(event["pid"], event["ts"], event["dur"]) for event in drawn(events)] == [(0, 500, 1000), (1, 0, 2500)]
    assert drawn(events)[1]["args"] == {"step": 3, "bytes": 8}


def test_hosts_with_other_clocks_are_lined_up_by_the_moment_at_which_all_met() -> None:
    events = chrome_events(
        [
            rank_trace(0, [Span("forward", MAIN, 1_000, 2_000, 0)], clock="a", meeting_ns=9_000),
            rank_trace(1, [Span("forward", MAIN, 501_000, 502_000, 0)], clock="b", meeting_ns=509_000),
        ]
    )
    assert [event["ts"] for event in drawn(events)] == [0, 0]


def test_one_process_is_traced_without_a_process_group(tmp_path: Path) -> None:
    with photinus.trace(tmp_path / "trace.json") as trace, recorded_span("data"):
        pass
    assert drawn(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == []  # no step was made
    assert "no step was recorded" in str(trace)


def test_waiting_for_the_loops_next_batch_is_traced(tmp_path: Path) -> None:
    with photinus.init("gloo", "cpu"):
        plain = torch.nn.Linear(1, 1)
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        data = [torch.ones(1)] * 8
        loop = photinus.Loop(model, optimizer, data, batch_size=2, epochs=1, report=QUIET)
        with photinus.trace(tmp_path / "trace.json") as trace:
            for x in loop:
                loop.backward(model(x).sum())
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
        assert current_recording(any_step=True) is not None
    assert current_recording(any_step=True) is None
    assert not (tmp_path / "inner.json").exists()


def test_a_trace_that_ends_watches_no_steps(tmp_path: Path) -> None:
    before = optimizer_steps._present()
    trace = photinus.trace(tmp_path / "trace.json")
    trace.__enter__()
    assert optimizer_steps._present() == [*before, trace]
    trace.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert optimizer_steps._present() == before
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
    assert trace.ranks[0].spans == []
