"""What a run of two ranks leaves for people to look at: times of both, events, the slow rank named."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import photinus
from photinus.cli.main import main
from photinus.runlog.run import Run
from photinus.runlog.stragglers import shares, stragglers
from photinus.waiting_time import waiting_time
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, CutOffError, Net, points, train

SLOW_S = 0.02


def waited_ms(rank: int) -> dict[str, float]:
    """How long this rank waited in each of several collectives to which rank 1 comes late, as it was counted."""
    tensor, parts = torch.ones(8), [torch.ones(8), torch.ones(8)]
    calls: dict[str, Any] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "all_reduce, waited for": lambda: dist.all_reduce(tensor, async_op=True).wait(),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, [part.clone() for part in parts]),
        "all_gather": lambda: dist.all_gather(parts, tensor),
        "all_to_all": lambda: dist.all_to_all_single(
            torch.empty(8), tensor, *([[3, 5], [3, 5]] if rank == 0 else [[5, 3], [5, 3]])
        ),
    }
    found = {}
    waiting_time.start()
    for name, call in calls.items():
        before = waiting_time.total_ns
        time.sleep(0.05 * rank)
        call()
        found[name] = (waiting_time.total_ns - before) / 1e6
    waiting_time.stop()
    return found


def slow_rank_1(rank: int, world_size: int, out: str) -> tuple[dict[str, float], float, float]:
    """Trains; rank 1 sleeps in each forward. Returns what `waited_ms` does, before, the seconds of training, and those
    that a step slept, which on a busy machine are more than were asked for.
    """
    waited, slept_s = waited_ms(rank), 0.0
    with photinus.init("auto", "cpu", seed=1):
        plain = Net()
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
        options: dict[str, Any] = {"report": QUIET, "save": photinus.Saving(every_epochs=2)}
        loop = photinus.Loop(model, optimizer, points(240), batch_size=8, epochs=2, out=out, **options)
        for inputs, targets in loop:
            outputs = model(inputs)
            if rank == 1:
                began = time.perf_counter()
                time.sleep(SLOW_S)
                slept_s += time.perf_counter() - began
            loop.backward(cross_entropy(outputs, targets))
            optimizer.step()
            optimizer.zero_grad()
            if loop.epoch_ended:
                loop.log(right=photinus.evaluate(model, points(31), lambda o, t: o.argmax(1) == t))
    return waited, float(loop.history[-1]["elapsed_s"]), slept_s / 60


@pytest.mark.parametrize("backend", ["photinus", pytest.param("gloo", marks=pytest.mark.slow)])
def test_the_slow_rank_is_named_and_the_phases_are_the_whole_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str
) -> None:
    out = tmp_path / "run"
    function = "tests.dist.test_watch:slow_rank_1"
    ended = run_ranks(function, world_size=2, backend=backend, arguments={"out": str(out)}, timeout_s=120)
    results = values(ended)
    if backend == "photinus":  # over others only waits of Photinus' own floors are seen
        for name, waited in results[0][0].items():
            assert waited > 35, name
    run = Run(out)
    run.refresh()
    assert run.pids == [each.pid for each in ended]
    ranks = shares(run.windows)
    (slow,) = stragglers(run.windows)
    assert (slow.rank, slow.phase) == (1, "forward")
    slept_s = results[1][2]
    assert slow.excess_s == pytest.approx(slept_s, rel=0.35)
    fast_waits = ranks[0].phases[3]
    assert fast_waits > 0.7 * slept_s  # SyncBatchNorm and the gradients wait for rank 1, and not the other way round
    assert ranks[1].phases[3] < 0.5 * fast_waits

    # All phases together are the time that the rank's loop measured for its throughput, validation left out.
    for rank, (_, measured, _) in enumerate(results):
        in_phases = sum(window.step_s(rank) * window.steps for window in run.windows)
        assert in_phases == pytest.approx(measured, rel=0.05)
    assert sum(window.steps for window in run.windows) == 60
    assert sum(window.samples for window in run.windows) == 480
    assert all(each[rank] > 0 for window in run.windows for rank in (0, 1) for each in [window.memory["resident"]])

    assert [event.kind for event in run.events] == ["start", "epoch", "epoch", "checkpoint", "end"]
    assert run.state().word == "finished"
    assert main(["top", "--once", str(out)]) == 0
    assert re.search(r"rank 1 holds the others up: \d+(\.\d+)? ms a step, in forward", capsys.readouterr().out)
    assert main(["report", str(out)]) == 0
    assert "Rank 1 holds the others up" in (out / "report.html").read_text()


def fails_on_rank_1(rank: int, world_size: int, out: str) -> None:
    def kill(step: int) -> None:
        if rank == 1 and step == 4:
            raise ValueError("no such luck")

    with contextlib.suppress(Exception):  # the run's events are what is looked at
        train(out, kill=kill)


@pytest.mark.slow
def test_the_rank_that_failed_is_the_reason_and_another_world_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(CutOffError):
        train(out, save_every=2, cut_at_step=3)
    function = "tests.dist.test_watch:fails_on_rank_1"
    run_ranks(function, world_size=2, backend="photinus", arguments={"out": str(out)})
    run = Run(out)
    run.refresh()
    state = run.state()
    assert (state.word, state.why) == ("failed", "rank 1: ValueError: no such luck")
    kinds = [event.kind for event in run.events if event.kind in ("start", "world_size")]
    assert kinds == ["start", "world_size", "start"]
    assert [event.step for event in run.starts] == [0, 2]
