"""Several process groups of backend photinus at once: they share ranks, but neither order nor fate."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ranks import run_ranks, values


@pytest.mark.parametrize("hosts", [None, "aab"])
def test_overlapping_groups_may_be_used_in_another_order_on_every_rank(hosts: str | None) -> None:
    results = run_ranks(f"{__name__}:_overlapping", world_size=3, backend="photinus", timeout_s=90, hosts=hosts)
    for value in values(results):
        assert value == {"sums": [6.0, 3.0, 5.0, 4.0], "rounds": 20}


def _overlapping(rank: int, world_size: int) -> dict[str, Any]:
    """Asynchronous calls on all groups first, in an order of the rank's own, then their waits in yet another one."""
    import torch
    import torch.distributed as dist

    members = [[0, 1, 2], [0, 1], [1, 2], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in members]
    mine = [i for i, ranks in enumerate(members) if rank in ranks]
    sums = [float(sum(r + 1 for r in ranks)) for ranks in members]
    for turn in range(20):
        order = mine[(rank + turn) % len(mine) :] + mine[: (rank + turn) % len(mine)]
        tensors = {i: torch.full((1 + 5000 * (turn % 3),), rank + 1.0) for i in order}
        works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order}
        lists = {i: [torch.zeros(r + 1) for r in members[i]] for i in order}
        others = {
            i: dist.all_gather(lists[i], torch.full((rank + 1,), float(rank)), group=groups[i], async_op=True)
            for i in reversed(order)
        }
        for i in reversed(order) if rank % 2 else order:
            others[i].wait()
            works[i].wait()
            assert tensors[i].unique().tolist() == [sums[i]]
            assert [part.tolist() for part in lists[i]] == [[float(r)] * (r + 1) for r in members[i]]
    return {"sums": sums, "rounds": 20}


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_twenty_groups_work_at_once(hosts: str | None) -> None:
    results = run_ranks(f"{__name__}:_many", world_size=2, backend="photinus", timeout_s=120, hosts=hosts)
    assert values(results) == [20, 20]


def _many(rank: int, world_size: int) -> int:
    import torch
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]) for _ in range(20)]
    order = groups if rank == 0 else list(reversed(groups))
    tensors = {id(group): torch.full((3000,), rank + 1.0) for group in groups}
    works = [dist.all_reduce(tensors[id(group)], group=group, async_op=True) for group in order]
    pending = [dist.irecv(torch.zeros(1), 1 - rank, group=group) for group in groups]
    pending += [dist.isend(torch.ones(1), 1 - rank, group=group) for group in reversed(groups)]
    for work in [*works, *pending]:
        work.wait()
    right = sum(tensor.unique().tolist() == [3.0] for tensor in tensors.values())
    for group in groups:
        dist.destroy_process_group(group)
    return right


def test_uneven_inputs_may_be_joined_in_every_epoch() -> None:
    found = values(run_ranks(f"{__name__}:_joined", world_size=2, backend="photinus", timeout_s=60))
    # In three epochs, three steps by 0.1 * the mean gradient of 2, and one by half of it, for 16 weights.
    assert found == [pytest.approx(-3 * (3 * 0.2 + 0.1) * 16, rel=1e-5)] * 2


def _joined(rank: int, world_size: int) -> float:
    import torch

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.module.weight.detach().clone()
    for _ in range(3):
        with model.join():
            for _ in range(3 + rank):
                optimizer.zero_grad()
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
    return float((model.module.weight - before).sum().item())


PARTS = ([0, 1], [2, 3], [0, 3], [3, 0, 2], [1])


def test_parts_of_a_group_over_two_hosts_lie_on_one_of_them_or_both_and_one_line_says_who_is_where() -> None:
    results = run_ranks(f"{__name__}:_parts", world_size=4, backend="photinus", timeout_s=60, hosts="aabb")
    for rank, (sums, told) in enumerate(values(results)):
        assert (
            told
            == ["split_group needs different ranks below 3, got [1, 1]", 7.0, " (ranks 2, 3 of the world)"][
                : 0 if rank == 1 else 1 if rank == 0 else 3
            ]
        )
        parts = [*(ranks for ranks in PARTS if rank in ranks), [rank % 2, 2 + rank % 2]]
        assert sums == [[str(ranks), sum(10.0**member for member in ranks)] for ranks in parts]
    said = [line for result in results for line in result.output.splitlines() if "hosts" in line]
    assert len(said) == 1
    there = r"photinus: 4 ranks on 2 hosts: \S+ \[a\] \(ranks 0, 1; lo\), \S+ \[b\] \(ranks 2, 3; lo\)"
    measured = (
        r"; (\S+ µs and \S+ [MG]B/s between them(, only .*)?; levels 2 \(the only list for 2 hosts\)"
        r"|not measured: too little data arrived in 40 ms; levels 2 \(by the number of hosts\))"  # on a busy machine
    )
    assert re.fullmatch(there + measured, said[0])


def _parts(rank: int, world_size: int) -> tuple[list[tuple[str, float]], list[Any]]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    groups = [(ranks, dist.new_group(ranks)) for ranks in PARTS]
    mine = [rank % 2, 2 + rank % 2]
    sums = []
    for ranks, group in [*groups, (mine, dist.group.WORLD.split_group(mine))]:
        if rank in ranks:
            group.allreduce([total := torch.tensor([10.0**rank])]).wait()
            sums.append((str(ranks), total.item()))

    told: list[Any] = []
    of_three = groups[3][1]
    if rank != 1:
        with pytest.raises(ValueError, match="needs different ranks") as refused:
            of_three.split_group([1, 1])
        told.append(str(refused.value))
        part = of_three.split_group([1, 2], timeout=timedelta(seconds=7))
        if part is not None:
            part.allreduce([torch.ones(3)]).wait()
            part.shutdown()
            with pytest.raises(RuntimeError, match="was destroyed") as ended:
                part.allreduce([torch.ones(3)])
            told += [part.timeout_s, re.search(r" \(ranks .* of the world\)", str(ended.value))[0]]
    return sums, told
