"""Ranks that do not join a group: the others say for whom they wait, and learn the cause long before the deadline."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.dist.test_run import run_job, script
from tests.ranks import run_ranks, values

HERE = "faults/test_joining.py"
LIMIT_S = 5.0  # for what takes some tenths of a second on a quiet machine


def test_a_rank_that_ends_before_a_new_group_is_named_to_those_who_wait_for_it_at_once() -> None:
    results = run_ranks(
        f"{__name__}:_ended_before_new_group",
        world_size=3,
        backend="photinus",
        expect={2: 3},
        environ={"PHOTINUS_WAITING_S": "0.5"},
    )
    for result in results[:2]:
        value = result.value
        assert value["error"].startswith("PeerLostError"), value
        assert f"rank 2 (pid {results[2].pid} on " in value["error"], value
        assert "making group 1 (ranks 0, 1, 2 of the world)" in value["error"], value
        assert f"new_group called at {HERE}:{value['line']}" in value["error"], value
        assert value["seconds"] < LIMIT_S, value
        assert f"rank {result.rank} of 3 has been waiting for" in result.output, result.output
        assert "for ranks [2] in making group 1" in result.output, result.output
    assert "joined" in results[0].output


def _ended_before_new_group(rank: int, world_size: int) -> dict[str, Any]:
    import torch.distributed as dist

    if rank == 2:
        time.sleep(1)
        os._exit(3)
    return _attempt(lambda: dist.new_group([0, 1, 2]))


def test_a_rank_that_ended_before_a_group_within_another_backends_is_known_by_its_number_in_the_world() -> None:
    results = run_ranks(f"{__name__}:_ended_in_a_gloo_world", world_size=3, backend="gloo")
    found = results[1].value
    assert found["error"].startswith("PeerLostError"), found
    assert "exited with code 0 before joining the group" in found["error"], found
    assert found["seconds"] < LIMIT_S, found


def _ended_in_a_gloo_world(rank: int, world_size: int) -> dict[str, Any] | None:
    import torch.distributed as dist

    if rank == 2:
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        store.set("photinus/ended", "2 ")  # as the launcher writes it
    if rank != 1:
        return None
    return _attempt(lambda: dist.new_group([1, 2], backend="photinus", timeout=timedelta(seconds=20)))


def _attempt(call: Callable[[], object]) -> dict[str, Any]:
    began, error = time.monotonic(), "no error"
    try:
        call()
    except (OSError, RuntimeError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    code: Any = getattr(call, "__code__")  # noqa: B009 - typed
    return {"error": error, "seconds": time.monotonic() - began, "line": code.co_firstlineno}


def test_groups_in_another_order_or_skipped_and_circles_over_several_groups_are_told(tmp_path: Path) -> None:
    results = run_ranks(f"{__name__}:_orders", world_size=3, timeout_s=90, arguments={"store": str(tmp_path / "store")})
    one, two, three = values(results)

    # Rank 0 makes [0, 1] first, the others [0, 1, 2]: under one name, so the same keys in the store.
    for value in (one, two, three):
        error = value["other groups under one name"]["error"]
        assert error.startswith("MismatchError"), value
        assert "of ranks [0, 1]" in error, value
        assert "ranks [0, 1, 2]" in error, value
        assert error.count(f"new_group called at {HERE}:") == 2, value
        assert value["other groups under one name"]["seconds"] < LIMIT_S

    # Rank 1 is alive, but makes no group: the default group's two seconds hold, torch's half an hour does not.
    skipped = one["skipped"]
    assert skipped["error"].startswith("CollectiveTimeoutError"), skipped
    assert "for rank 1, which is alive but has not come" in skipped["error"], skipped
    assert 1.9 < skipped["seconds"] < 2 + LIMIT_S, skipped

    # 0 waits for 1, 1 for 2, 2 for 0, each in a group of the two.
    for value in (one, two, three):
        circle = value["circle"]
        assert circle["error"].startswith("MismatchError: deadlock: ranks wait for each other"), circle
        for result in results:
            assert f"rank {result.rank} (pid {result.pid} on " in circle["error"], circle
        for pair in ("0, 1", "1, 2", "0, 2"):
            assert f"(ranks {pair} of the world)" in circle["error"], circle
        assert circle["seconds"] < LIMIT_S

    # Rank 0 makes a group, the others reduce.
    assert any("deadlock: ranks wait for each other" in value["made and reduced"]["error"] for value in (one, two))
    for value in (one, two, three):
        error = value["made and reduced"]["error"]
        assert error.startswith(("MismatchError", "PeerLostError")), value
        assert "in making group" in error, value
        assert "in all_reduce" in error, value
        assert value["made and reduced"]["seconds"] < LIMIT_S


def _orders(rank: int, world_size: int, store: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        "photinus", store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=2)
    )
    mine, found = torch.ones(3), {}
    some = lambda: dist.new_group([0, 1])  # noqa: E731 - a line to quote
    all_of_them = lambda: dist.new_group([0, 1, 2])  # noqa: E731
    if rank == 0:
        time.sleep(0.3)  # whoever comes when it is over is told otherwise
    found["other groups under one name"] = _attempt(all_of_them if rank else some)
    dist.barrier()
    if rank == 0:
        found["skipped"] = _attempt(lambda: dist.new_group([0, 1]))
    else:
        time.sleep(3)
        dist.distributed_c10d._world.group_count += 1  # what new_group would have counted
    dist.all_reduce(mine)
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    for pair in pairs:
        if dist.get_rank(pair) >= 0:
            dist.all_reduce(mine, group=pair)
    dist.barrier()
    found["circle"] = _attempt(lambda: dist.all_reduce(mine, group=pairs[rank]))
    dist.barrier()
    found["made and reduced"] = _attempt(lambda: dist.all_reduce(mine) if rank else dist.new_group([0, 1, 2]))
    return found


LEAVES = """
import os, sys, time
if os.environ["RANK"] == "1":
    time.sleep(1)
    sys.exit(0)
import photinus
with photinus.init(backend="photinus"):
    pass
"""


def test_a_worker_that_leaves_before_all_have_met_ends_the_job_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    ended = run_job("--nproc-per-node", "3", "--max-restarts", "0", script(tmp_path, LEAVES))
    assert time.monotonic() - began < 60
    assert ended.code == 1
    said = ended.out + ended.err
    assert "PeerLostError" in said, said
    assert "rank 1 exited with code 0 before joining the group" in said, said
    assert "init_process_group called at" in said, said
    assert "script.py:7" in said, said


def test_a_rank_that_other_hosts_cannot_reach_is_an_error_of_all_ranks_within_three_seconds(tmp_path: Path) -> None:
    results = run_ranks(f"{__name__}:_unreachable", world_size=2, hosts="ab", arguments={"folder": str(tmp_path)})
    one, two = values(results)
    wanted = {"card": "network card none-0 of host", "descriptors": "are there enough file descriptors, ulimit -n?"}
    for cause, words in wanted.items():
        assert words in two[cause]["error"], two[cause]
        assert one[cause]["error"].startswith("PeerLostError"), one[cause]
        assert "rank 1 cannot be reached by other hosts: " in one[cause]["error"], one[cause]
        assert words in one[cause]["error"], one[cause]
        assert max(one[cause]["seconds"], two[cause]["seconds"]) < 3, (one[cause], two[cause])


def _unreachable(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    def join(store: str) -> None:
        dist.init_process_group(
            "photinus", store=dist.FileStore(f"{folder}/{store}", world_size), rank=rank, world_size=world_size
        )

    found = {}
    if rank == 1:
        os.environ["PHOTINUS_INTERFACE"] = "none-0"
    found["card"] = _attempt(lambda: join("card"))
    os.environ.pop("PHOTINUS_INTERFACE", None)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    found["descriptors"] = _attempt(lambda: join("descriptors"))
    return found
