"""Ranks of several hosts get the bits that ranks of one host get, and hosts are ranks that share memory.

Hosts are told apart by PHOTINUS_HOST_ID, which counts when a group is made: four processes, of which the default group
lies on one host, make a group for each placement.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks, values

PLACEMENTS = {"1x4": "aaaa", "2x2": "aabb", "4x1": "abcd", "3+1": "aaab", "round-robin": "abab"}
ALIGNED = ("2x2", "4x1")  # equal hosts with ranks that follow on each other: the tree of one host is only cut
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "bool")
REDUCTIONS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
ELEMS = (5, 30_000)  # of one rank: through a flat slot; in chunks


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, Any]]:
    """What each of four ranks found; one run, since starting takes most of the time."""
    results = run_ranks(f"{__name__}:_in_all_placements", world_size=4, backend="photinus", timeout_s=150)
    return values(results)


def _in_all_placements(rank: int, world_size: int) -> dict[str, Any]:
    import torch.distributed as dist

    collectives, weights = {}, {}
    for placement, hosts in PLACEMENTS.items():
        os.environ["PHOTINUS_HOST_ID"] = hosts[rank]
        group = dist.new_group(backend="photinus")
        collectives[placement] = dict(_collectives(group, rank, world_size))
        if placement in ("1x4", *ALIGNED):
            weights[placement] = _weights_after_50_steps(group, rank)
        dist.destroy_process_group(group)
    return {"collectives": collectives, "weights": weights}


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "1x4"])
def test_every_collective_equals_that_of_one_host(four_ranks: list[dict[str, Any]], placement: str) -> None:
    for rank, found in enumerate(four_ranks):
        one, several = found["collectives"]["1x4"], found["collectives"][placement]
        assert one.keys() == several.keys()
        assert len(one) > 800
        # These round, in the order of the tree, which other placements cut elsewhere.
        wide = () if placement in ALIGNED else ("float32", "float64")
        order_counts = tuple(f"{dtype} {reduction}" for dtype in wide for reduction in ("SUM", "AVG", "PRODUCT"))
        differs = [what for what in one if one[what] != several[what] and not what.startswith(order_counts)]
        assert differs == [], f"rank {rank}"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_all_ranks_get_is_the_same_to_the_last_bit(four_ranks: list[dict[str, Any]], placement: str) -> None:
    first, *others = (found["collectives"][placement] for found in four_ranks)
    shared = [what for what in first if what.endswith("everywhere")]
    assert len(shared) > 250
    assert [what for what in shared if any(first[what] != other[what] for other in others)] == []


def test_ddp_trains_a_gpt_to_the_same_weights_on_any_number_of_hosts(four_ranks: list[dict[str, Any]]) -> None:
    weights = [each for found in four_ranks for each in found["weights"].values()]
    assert len(weights) == 12
    assert len(set(weights)) == 1


def _digest(*tensors: Any) -> str:
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.flatten())
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _values(dtype: str, elems: int, seed: int) -> Any:
    """Any numbers in wide floats; in halves such that sums and products of four are exact."""
    import torch

    chance = torch.Generator().manual_seed(seed)
    if dtype in ("float32", "float64"):
        return torch.randn(elems, generator=chance, dtype=getattr(torch, dtype))
    exact = torch.tensor([-1.0, 0.5, 1.0, 1.5] if dtype in FLOATS else [0.0, 1.0, 2.0, 3.0])
    return exact[torch.randint(0, 2 if dtype == "bool" else 4, (elems,), generator=chance)].to(getattr(torch, dtype))


def _collectives(group: Any, rank: int, size: int) -> Iterator[tuple[str, str]]:
    """The name of each result and its digest; of those that all ranks share, the name ends with "everywhere"."""
    import torch

    layouts: dict[str, Callable[[Any], Any]] = {
        "ordinary": lambda t: t,
        "arena": lambda t: group.allocate_tensor(t.shape, dtype=t.dtype).copy_(t),
        "every second": lambda t: torch.stack((t, t), 1)[:, 0],
    }
    for layout, laid in layouts.items():
        for dtype in (*FLOATS, *INTEGERS) if layout == "ordinary" else ("float32", "bfloat16", "int64"):
            for elems in ELEMS:
                which = f"of {elems}, {layout}"

                def make(many: int = elems, salt: int = 0, dtype: str = dtype, laid: Any = laid) -> Any:
                    return laid(_values(dtype, many, 10 * salt + rank))

                for reduction in REDUCTIONS if dtype != "bool" else ("SUM", "PRODUCT"):
                    for name, result in _reductions(group, reduction, make, elems, rank, size):
                        yield f"{dtype} {reduction} {which}: {name}", _digest(result)
                for name, result in _moves(group, make, elems, rank, size):
                    yield f"{dtype} {which}: {name}", _digest(*result)
    yield from _others(group, rank, size)


def _reductions(
    group: Any, reduction: str, make: Callable[..., Any], elems: int, rank: int, size: int
) -> Iterator[tuple[str, Any]]:
    import torch.distributed as dist

    op = getattr(dist.ReduceOp, reduction)
    dist.all_reduce(total := make(), op, group)
    yield "all_reduce, everywhere", total
    dist.reduce(total := make(), size - 1, op, group)
    yield "reduce", total
    dist.reduce_scatter_tensor(part := make(salt=1), make(elems * size), op, group)
    yield "reduce_scatter_tensor", part
    dist.reduce_scatter(part := make(salt=1), [make(salt=2 + i) for i in range(size)], op, group)
    yield "reduce_scatter", part


def _moves(group: Any, make: Callable[..., Any], elems: int, rank: int, size: int) -> Iterator[tuple[str, list[Any]]]:
    import torch.distributed as dist

    def empty(many: int = elems) -> Any:
        return make(many).zero_()

    for root in (0, size - 1):
        dist.broadcast(given := make(), root, group)
        yield f"broadcast from {root}, everywhere", [given]
        dist.gather(make(), outs := [empty() for _ in range(size)] if rank == root else None, root, group)
        yield f"gather to {root}", outs or []
        parts = [make(salt=3 + i) for i in range(size)] if rank == root else None
        dist.scatter(part := empty(), parts, root, group)
        yield f"scatter from {root}", [part]
    dist.all_gather(outs := [empty() for _ in range(size)], make(), group)
    yield "all_gather, everywhere", outs
    dist.all_gather(outs := [empty(3 * i + elems) for i in range(size)], make(3 * rank + elems), group)
    yield "all_gather, uneven, everywhere", outs
    dist.all_gather_into_tensor(out := empty(elems * size), make(), group)
    yield "all_gather_into_tensor, everywhere", [out]
    dist.all_to_all_single(out := empty(elems * size), make(elems * size), group=group)
    yield "all_to_all_single", [out]
    dist.all_to_all(
        outs := [empty(rank + 2 * i) for i in range(size)], [make(2 * rank + i) for i in range(size)], group
    )
    yield "all_to_all, uneven", outs
    right, left = (rank + 1) % size, (rank - 1) % size
    works = [dist.irecv(got := empty(), left, group, 7), dist.isend(make(), right, group, 7)]
    for work in works:
        work.wait()
    yield "message", [got]


def _others(group: Any, rank: int, size: int) -> Iterator[tuple[str, str]]:
    """What is not of tensors of any kind and place: sparse ones, objects, several at once, receives from anybody."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, size]]), torch.tensor([0.1 * rank, 0.3]), (size + 1,))
    dist.all_reduce(sparse, group=group)
    yield "sparse all_reduce, everywhere", _digest(sparse.to_dense())
    dist.all_gather_object(objects := [None] * size, {"rank": rank}, group)
    yield "all_gather_object, everywhere", repr(objects)
    several = [_values("float32", many, rank) for many in (3, 20_000)]
    with _coalescing_manager(group):
        for tensor in several:
            dist.all_reduce(tensor, group=group)
    yield "float32 SUM coalesced, everywhere", _digest(*several)
    works = [dist.all_reduce(tensor := _values("int32", 100 + i, rank), group=group, async_op=True) for i in range(20)]
    for work in works:
        work.wait()
    yield "many at once, everywhere", _digest(*(work.result()[0] for work in works), tensor)
    if rank == 0:
        came = {dist.recv(got := torch.zeros(2), group=group): got.tolist() for _ in range(size - 1)}
        yield "receive from whoever sends first", repr(sorted(came.items()))
    else:
        dist.send(torch.full((2,), float(rank)), 0, group)
        yield "receive from whoever sends first", ""
    dist.barrier(group)
    group.monitored_barrier()


def _weights_after_50_steps(group: Any, rank: int) -> str:
    import runpy

    import torch
    from torch.nn.parallel import DistributedDataParallel

    GPT = runpy.run_path(str(REPOSITORY / "examples" / "gpt" / "model.py"))["GPT"]  # noqa: N806 - a class
    torch.manual_seed(3)
    model = DistributedDataParallel(
        GPT(alphabet=31, context=16, width=32, layers=2, heads=2, dropout=0.0), process_group=group, bucket_cap_mb=0.05
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    text = torch.randint(0, 31, (2, 17), generator=torch.Generator().manual_seed(rank))
    losses = []
    for _ in range(50):
        loss = torch.nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    return _digest(*(parameter.detach() for parameter in model.parameters()))
