"""What a rank reads when another one does wrong, dies or never comes."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks, values


def test_ranks_that_call_differently_all_read_both_sides_and_go_on() -> None:
    results = run_ranks(f"{__name__}:_mismatches", world_size=2, backend="photinus", timeout_s=90)
    for value in values(results):
        for name, error in value["errors"].items():
            assert error.startswith("MismatchError"), (name, error)
            assert "rank 0" in error, (name, error)
            assert "rank 1" in error, (name, error)
        assert "float32" in value["errors"]["dtype"]
        assert "int32" in value["errors"]["dtype"]
        assert value["after"] == 2.0


def _mismatches(rank: int, world_size: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    calls = {
        "size": lambda: dist.all_reduce(torch.ones(4 + rank)),
        "dtype": lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32)),
        "reduction": lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "operation": lambda: dist.broadcast(torch.ones(4), 0) if rank else dist.all_reduce(torch.ones(4)),
        "root": lambda: dist.broadcast(torch.ones(4), rank),
        "asynchronous": lambda: dist.all_reduce(torch.ones(4 + rank), async_op=True).wait(),
        "strided": lambda: dist.all_reduce(torch.ones(8 + 2 * rank)[::2]),
    }
    errors = {}
    for name, call in calls.items():
        try:
            call()
            errors[name] = "no error"
        except RuntimeError as error:
            errors[name] = f"{type(error).__name__}: {error}"
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return {"errors": errors, "after": tensor.item()}


@pytest.mark.parametrize("hosts", [None, "abc", "abb"])
def test_killed_peer_is_named_in_the_error(hosts: str | None) -> None:
    expect = {0: 1, 1: -signal.SIGKILL, 2: 1}
    results = run_ranks(
        f"{__name__}:_killed", world_size=3, backend="photinus", timeout_s=90, expect=expect, hosts=hosts
    )
    for survivor in (results[0], results[2]):
        assert "PeerLostError: rank 1" in survivor.output
        assert str(results[1].pid) in survivor.output
    if hosts != "abc":  # how it ended is known where another rank of its host lives
        assert all("SIGKILL" in survivor.output for survivor in (results[0], results[2]))


def _killed(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    for step in range(100):
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1000))


def test_exception_of_a_rank_is_quoted_by_its_peers() -> None:
    results = run_ranks(f"{__name__}:_raises", world_size=2, backend="photinus", timeout_s=90, expect={0: 1, 1: 1})
    assert "PeerLostError" in results[0].output
    assert "raised ValueError: the learning rate is a fish" in results[0].output
    assert f"{results[1].pid}" in results[0].output
    assert "ValueError: the learning rate is a fish" in results[1].output


def _raises(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    if rank == 1:
        raise ValueError("the learning rate is a fish\nand a long one")
    dist.all_reduce(torch.ones(1))


def test_a_backward_that_fails_on_one_rank_is_quoted_by_its_peers() -> None:
    results = run_ranks(f"{__name__}:_misses", world_size=2, backend="photinus", timeout_s=90, expect={0: 1, 1: 1})
    assert "PeerLostError" in results[0].output
    assert "raised MissingGradientError: rank 1: 1 of 2 parameters of Linear got no gradient" in results[0].output
    assert "MissingGradientError: rank 1: 1 of 2 parameters of Linear got no gradient" in results[1].output


def _misses(rank: int, world_size: int) -> None:
    import torch

    from photinus.parallel import DistributedDataParallel

    model = torch.nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    for step in range(3):
        loss = ddp(torch.ones(1, 2)).sum()
        if rank == 1 and step == 1:
            loss = loss.detach() + model.weight.sum()
        loss.backward()


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_missing_ranks_are_named_by_all_within_the_timeout(tmp_path: Path, kind: str) -> None:
    """Also where rank 0 waits for all ranks in torch's store over TCP, which says only how many there are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    timeout_s = {"file": 2, "tcp": 8}[kind]  # in which rank 0 also leaves torch's store
    places = {"store": str(tmp_path / "store"), "port": port, "kind": kind, "timeout_s": timeout_s}
    results = run_ranks(f"{__name__}:_incomplete", world_size=2, timeout_s=60, arguments=places)
    for value in values(results):
        assert value["error"].startswith("CollectiveTimeoutError"), value
        assert "ranks 2, 3 did not join" in value["error"]
        assert value["seconds"] < 2 * timeout_s + 4


def _incomplete(rank: int, world_size: int, store: str, port: int, kind: str, timeout_s: float) -> dict[str, Any]:
    import time
    from datetime import timedelta

    import torch.distributed as dist

    here = dist.FileStore(f"{store}-here", world_size)  # the ranks' starts may lie seconds apart
    here.add("here", 1)
    while here.add("here", 0) < world_size:
        time.sleep(0.01)
    started = time.monotonic()
    try:
        url = f"file://{store}" if kind == "file" else f"tcp://127.0.0.1:{port}"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("photinus", init_method=url, rank=rank, world_size=4, timeout=timeout)
        error = "no error"
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {"error": error, "seconds": time.monotonic() - started}


def test_rank_that_skips_a_collective_is_named_and_timeouts_are_per_operation() -> None:
    results = run_ranks(f"{__name__}:_skips", world_size=2, backend="photinus", timeout_s=90)
    value = values(results)[0]
    for error in (value["of_the_options"], value["of_the_group"]):
        assert error.startswith("CollectiveTimeoutError"), error
        assert "rank 1" in error, error
    assert max(value["seconds"]) < 8


def _skips(rank: int, world_size: int) -> dict[str, Any]:
    import time
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]) for _ in range(2)]
    errors, seconds = [], []
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1)
        groups[1].set_timeout(timedelta(seconds=1))
        calls = [
            lambda: groups[0].allreduce([torch.ones(2)], options).wait(),
            lambda: dist.all_reduce(torch.ones(2), group=groups[1]),
        ]
        for call in calls:
            started = time.monotonic()
            try:
                call()
            except RuntimeError as error:
                errors.append(f"{type(error).__name__}: {error}")
            seconds.append(time.monotonic() - started)
    else:
        time.sleep(4)
    return {"of_the_options": errors[0], "of_the_group": errors[1], "seconds": seconds} if rank == 0 else {}


def test_monitored_barrier_names_all_missing_ranks() -> None:
    results = run_ranks(f"{__name__}:_monitored", world_size=3, backend="photinus", timeout_s=60)
    value = values(results)[0]
    assert value["error"].startswith("CollectiveTimeoutError: Ranks 1, 2 failed to pass monitoredBarrier"), value
    assert "rank 1" in value["error"], value
    assert "rank 2" in value["error"], value
    assert value["seconds"] < 2


def _monitored(rank: int, world_size: int) -> dict[str, Any]:
    import time
    from datetime import timedelta

    import torch.distributed as dist

    group = dist.new_group([0, 1, 2])
    group.monitored_barrier(timedelta(seconds=20))
    started, error = time.monotonic(), "no error"
    if rank == 0:
        try:
            group.monitored_barrier(timedelta(seconds=0.5), wait_all_ranks=True)
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
    else:
        time.sleep(1.5)
    return {"error": error, "seconds": time.monotonic() - started}


def test_another_world_size_than_the_launcher_means_is_refused() -> None:
    (value,) = values(run_ranks(f"{__name__}:_alone", world_size=1, timeout_s=60, environ={"PHOTINUS_WORLD_SIZE": "2"}))
    assert value.startswith("WorldSizeError")
    assert "has 1 rank," in value
    assert "expects 2" in value


def _alone(rank: int, world_size: int) -> str:
    import torch.distributed as dist

    try:
        dist.init_process_group("photinus", store=dist.HashStore(), rank=0, world_size=1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_forked_child_leaves_its_parents_group_alone() -> None:
    assert values(run_ranks(f"{__name__}:_forks", world_size=2, backend="photinus", timeout_s=90)) == [[0, 2.0]] * 2


def _forks(rank: int, world_size: int) -> list[float]:
    import sys

    import torch
    import torch.distributed as dist

    child = os.fork()
    if child == 0:
        sys.exit(0)  # through atexit, as a script's own os.fork() ends
    _, status = os.waitpid(child, 0)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return [os.waitstatus_to_exitcode(status), tensor.item()]
