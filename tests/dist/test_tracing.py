"""photinus.trace on several processes: what it shows of real steps."""

from __future__ import annotations

import json
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import photinus
from photinus.parallel import DistributedDataParallel
from tests.ranks import run_ranks

BUCKETS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(BUCKETS)])


def traced_steps(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with photinus.trace(Path(folder, "trace.json"), skip=1, steps=3) as trace:
        for _ in range(6):
            with ddp.no_sync():
                ddp(torch.ones(8, 128)).sum().backward()
            ddp(torch.ones(8, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"ranks": len(trace.ranks), "text": str(trace)}


def failing_steps(rank: int, world_size: int, folder: str) -> bool:
    ddp = DistributedDataParallel(net())
    try:
        with photinus.trace(Path(folder, "trace.json")):
            ddp(torch.ones(8, 128)).sum().backward()
            raise KeyError("the script's own error")
    except KeyError:
        return Path(folder, f"trace.rank{rank}.json").exists()


def steps_that_fail_on_one_rank(rank: int, world_size: int, folder: str) -> bool:
    ddp = DistributedDataParallel(net())
    try:
        with photinus.trace(Path(folder, "trace.json")):
            ddp(torch.ones(8, 128)).sum().backward()
            if rank == 1:
                raise KeyError("the script's own error")
    except (KeyError, photinus.PeerLostError):
        return Path(folder, f"trace.rank{rank}.json").exists()
    return False


def first_launches(rank: int, world_size: int, **options: Any) -> bool:
    """Whether, in the very first iteration, all buckets but the last are launched while backward still computes."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.05, **options)
    with tempfile.TemporaryDirectory() as folder, photinus.trace(Path(folder, "trace.json")) as trace:
        ddp(torch.ones(8, 128)).sum().backward()
    own = next(each for each in trace.ranks if each.rank == rank)
    (backward,) = (event for event in own.events if event["name"] == "backward")
    began = sorted(event["ts"] for event in own.events if event["name"].startswith("bucket "))
    return len(began) == BUCKETS and all(begin < backward["ts"] + backward["dur"] for begin in began[:-1])


@pytest.mark.parametrize("backend", ["photinus", "gloo"])
def test_a_trace_shows_every_rank_step_and_bucket(backend: str, tmp_path: Path) -> None:
    results = run_ranks(
        "tests.dist.test_tracing:traced_steps",
        world_size=2,
        backend=backend,
        arguments={"folder": str(tmp_path)},
    )
    assert [result.value["ranks"] for result in results] == [2, 1]
    assert "rank 1: 3 steps, each: forward" in results[0].value["text"]
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    buckets = [f"bucket {i}" for i in range(BUCKETS)]
    per_step = ["forward", "backward", "wait for averages", "Optimizer.step#SGD.step", *buckets]
    for rank in range(2):
        own = [e for e in events if e["pid"] == rank]
        begins = sorted(e["ts"] for e in own if e["name"].startswith("ProfilerStep#"))
        assert len(begins) == 3
        for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True):
            names = [e["name"].partition(" (")[0] for e in own if begin <= e["ts"] < end]
            assert sorted(name for name in names if name in per_step) == sorted(per_step), (rank, begin)
        assert any(e["name"] == "aten::mm" for e in own)
    assert f"bucket 1 ({128 * 128 * 4} bytes)" in {e["name"] for e in events}
    assert all(e["dur"] >= 0 for e in events)
    assert_rows_nest(events)


def assert_rows_nest(events: list[dict[str, Any]]) -> None:
    """Viewers drop events of one row that overlap without one being inside the other."""
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        around = rows.setdefault((event["pid"], event["tid"]), [])
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        assert not around or event["ts"] + event["dur"] <= around[-1]["ts"] + around[-1]["dur"] + 0.01, (event, around)
        around.append(event)


def profiled_exchanges(rank: int, world_size: int, folder: str) -> list[str]:
    """The names of exchanges that a profiler shows without their ends, although all were waited for."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.05)
    path = Path(folder, f"profile.{rank}.json")
    with torch.profiler.profile() as profile:
        for _ in range(20):
            dist.all_reduce(torch.ones(4), async_op=True).wait()
            ddp(torch.ones(8, 128)).sum().backward()
    assert all(event.is_async for event in profile.events() if event.name == "photinus:all_reduce")
    profile.export_chrome_trace(str(path))
    shown = [e for e in json.loads(path.read_text())["traceEvents"] if e["name"].startswith(("bucket ", "photinus:"))]
    assert len(shown) >= 20 * BUCKETS
    return [e["name"] for e in shown if not e["args"].get("finished", True)]


@pytest.mark.parametrize("backend", ["photinus", "gloo"])
def test_a_profiler_has_the_end_of_each_exchange_that_was_waited_for(backend: str, tmp_path: Path) -> None:
    """One that ends later writes into memory that the profiler has given back."""
    arguments = {"folder": str(tmp_path)}
    results = run_ranks(
        "tests.dist.test_tracing:profiled_exchanges", world_size=2, backend=backend, arguments=arguments
    )
    assert [result.value for result in results] == [[], []]


def exchanges_of_a_rank_that_waits(rank: int, world_size: int) -> list[list[float]]:
    """The begin and the end of each bucket on rank 0, while rank 1 begins its backward later."""
    ddp = DistributedDataParallel(net(), bucket_cap_mb=0.05)
    for _ in range(2):  # buckets are built in the first step
        with torch.profiler.profile() as profile:
            loss = ddp(torch.ones(8, 128)).sum()
            if rank == 1:
                time.sleep(0.2)
            loss.backward()
    spans = [event.time_range for event in profile.events() if event.name.startswith("bucket ")]
    return [[span.start, span.end] for span in spans]


@pytest.mark.parametrize("backend", ["photinus", "gloo"])
def test_a_profiler_does_not_make_an_exchange_wait_for_the_one_before(backend: str) -> None:
    function = "tests.dist.test_tracing:exchanges_of_a_rank_that_waits"
    spans = run_ranks(function, world_size=2, backend=backend)[0].value
    assert len(spans) == BUCKETS
    assert max(begin for begin, _ in spans) < min(end for _, end in spans)


def error_of_a_dropped_exchange(rank: int, world_size: int) -> str:
    with torch.profiler.profile():
        dist.all_reduce(torch.ones(2 + rank), async_op=True)
        time.sleep(0.5)
        try:
            dist.all_reduce(torch.ones(2))
        except photinus.MismatchError as error:
            return str(error)
    return "none"


def test_a_profiler_does_not_hide_the_error_of_an_exchange_that_nobody_waited_for() -> None:
    for result in run_ranks("tests.dist.test_tracing:error_of_a_dropped_exchange", world_size=2, backend="photinus"):
        assert "rank 1 called all_reduce of float32[3]" in result.value


class HostName(str):
    """A host's name that runs code where it is unpickled: it makes a file of this name."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path(self),))


def traced_with_odd_host_name(rank: int, world_size: int, folder: str) -> list[str]:
    if rank == 1:
        socket.gethostname = lambda: HostName(Path(folder, "unpickled"))
    with photinus.trace(Path(folder, "trace.json")) as trace:
        DistributedDataParallel(net())(torch.ones(8, 128)).sum().backward()
    return [str(each.host) for each in trace.ranks]


def test_what_other_ranks_tell_is_not_unpickled(tmp_path: Path) -> None:
    results = run_ranks(
        "tests.dist.test_tracing:traced_with_odd_host_name",
        world_size=2,
        backend="photinus",
        arguments={"folder": str(tmp_path)},
    )
    assert not (tmp_path / "unpickled").exists()
    assert results[0].value[1] == str(tmp_path / "unpickled")


@pytest.mark.parametrize("backend", ["photinus", "gloo"])
def test_exchange_overlaps_backward_from_the_first_iteration_on(backend: str) -> None:
    results = run_ranks("tests.dist.test_tracing:first_launches", world_size=2, backend=backend)
    assert [result.value for result in results] == [True, True]


def test_gradients_that_are_views_of_buckets_overlap_as_well() -> None:
    results = run_ranks(
        "tests.dist.test_tracing:first_launches",
        world_size=2,
        backend="photinus",
        arguments={"gradient_as_bucket_view": True},
    )
    assert [result.value for result in results] == [True, True]


@pytest.mark.parametrize("function", ["failing_steps", "steps_that_fail_on_one_rank"])
def test_a_script_that_fails_leaves_each_ranks_own_file(function: str, tmp_path: Path) -> None:
    results = run_ranks(
        f"tests.dist.test_tracing:{function}",
        world_size=2,
        backend="photinus",
        arguments={"folder": str(tmp_path)},
    )
    assert [result.value for result in results] == [True, True]
    assert not (tmp_path / "trace.json").exists()
