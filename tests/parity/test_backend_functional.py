"""What is built on the collectives: functional ones and their derivatives, DTensor, groups of groups, DDP's helpers.

Each is compared with what its definition gives, worked out here from every rank's input.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from tests.parity.test_backend_collectives import _Checks
from tests.ranks import run_ranks, values


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_what_torch_builds_on_collectives_gives_the_expected_values(world_size: int) -> None:
    results = run_ranks(f"{__name__}:_compare", world_size=world_size, backend="photinus", timeout_s=150)
    for checks, wrong in values(results):
        assert wrong == []
        assert checks > 50


def _compare(rank: int, world_size: int) -> tuple[int, list[str]]:
    import torch
    import torch.distributed as dist

    checks = _Checks()
    for part in (_functional, _derivatives, _older_derivatives, _dtensor, _groups, _together, _ddp_helpers, _awkward):
        part(checks, rank, world_size, torch, dist)
    return checks.count, checks.wrong


def _functional(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    from torch.distributed import _functional_collectives as functional

    group, total = dist.group.WORLD, float(sum(range(1, size + 1)))
    mine = torch.full((2, 2), rank + 1.0)
    wait = functional.wait_tensor
    checks.same("all_reduce", wait(functional.all_reduce(mine, "sum", group)), torch.full((2, 2), total))
    checks.same("its input stays", mine, torch.full((2, 2), rank + 1.0))
    whole = torch.full((3,), rank + 1)
    checks.same(
        "average of integers", wait(functional.all_reduce(whole, "avg", group)), (whole * 0) + int(total) // size
    )
    columns = torch.arange(1.0, size + 1).repeat_interleave(2).expand(2, -1)
    checks.same("all_gather by columns", wait(functional.all_gather_tensor(mine, 1, group)), columns)
    table = torch.arange(4.0 * size).view(2, 2 * size)
    got = wait(functional.reduce_scatter_tensor(table, "avg", 1, group))
    checks.same("reduce_scatter by columns", got, table.chunk(size, 1)[rank])
    row = torch.arange(2.0 * size) + 10 * rank
    got = wait(functional.all_to_all_single(row, [2] * size, [2] * size, group))
    expected = torch.cat([torch.arange(2.0 * rank, 2.0 * rank + 2) + 10 * r for r in range(size)])
    checks.same("all_to_all", got, expected)
    checks.same("broadcast", wait(functional.broadcast(mine, 1, group)), torch.full((2, 2), 2.0))
    to_right = [(i + 1) % size for i in range(size)]
    got = wait(functional.permute_tensor(mine.flatten(), to_right, group))
    checks.same("permutation", got, torch.full((4,), (rank - 1) % size + 1.0))
    several = functional.all_reduce_coalesced([mine, torch.full((3,), rank)], "sum", group)
    checks.same("all_reduce of several 1", [wait(one) for one in several][1], torch.full((3,), sum(range(size))))
    several = functional.all_gather_into_tensor_coalesced([mine, torch.full((3,), rank)], group)
    checks.same("all_gather of several", [wait(one) for one in several][1], torch.arange(size).repeat_interleave(3))
    several = functional.reduce_scatter_tensor_coalesced([row, table.flatten()], "sum", [0, 0], group)
    checks.same(
        "reduce_scatter of several", [wait(one) for one in several][1], table.flatten().chunk(size)[rank] * size
    )
    into = torch.zeros(2 * size)
    torch.ops._c10d_functional.all_gather_into_tensor_out(
        torch.full((2,), 1.0 * rank), size, group.group_name, out=into
    )
    checks.same("all_gather into a tensor", wait(into), torch.arange(float(size)).repeat_interleave(2))
    functional.all_reduce_inplace(in_place := mine.clone(), "max", group)
    checks.same("in place", in_place, torch.full((2, 2), float(size)))

    def step(x: Any) -> Any:
        return functional.all_reduce(x * 2, "sum", group) + 1

    checks.same("compiled", torch.compile(step, backend="aot_eager")(mine), torch.full((2, 2), 2 * total + 1))


def _derivatives(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    from torch.distributed import _functional_collectives as functional

    group, total = dist.group.WORLD, float(sum(range(1, size + 1)))
    of_ranks = torch.arange(1.0, size + 1).repeat_interleave(2)[:, None].expand(-1, 2)
    x = torch.full((2, 2), rank + 1.0, requires_grad=True)
    weights = torch.arange(4.0 * size).view(2 * size, 2)
    (functional.all_gather_tensor_autograd(x, 0, group) * weights * (rank + 1)).sum().backward()
    checks.same("derivative of all_gather", x.grad, weights.chunk(size)[rank] * total)
    x = torch.full((2 * size, 2), rank + 1.0, requires_grad=True)
    y = functional.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    (y * (rank + 1)).sum().backward()
    checks.same("reduce_scatter", y.detach() + 0, torch.full((2, 2), total))
    checks.same("derivative of reduce_scatter", x.grad, of_ranks)
    x = torch.full((2 * size, 2), rank + 1.0, requires_grad=True)
    (functional.all_to_all_single_autograd(x, None, None, group) * (rank + 1)).sum().backward()
    checks.same("derivative of all_to_all", x.grad, of_ranks)


def _older_derivatives(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """torch.distributed.nn.functional."""
    import torch.distributed.nn.functional as older

    total = float(sum(range(1, size + 1)))

    def leaf() -> Any:
        return torch.full((2,), rank + 1.0, requires_grad=True)

    (older.all_reduce(x := leaf()) * (rank + 1)).sum().backward()
    checks.same("derivative of all_reduce", x.grad, torch.full((2,), total))
    (torch.stack(older.all_gather(x := leaf())) * (rank + 1)).sum().backward()
    checks.same("derivative of all_gather to a list", x.grad, torch.full((2,), total))
    (older.broadcast(x := leaf(), 1) * (rank + 1)).sum().backward()
    checks.same("derivative of broadcast", x.grad, torch.full((2,), total if rank == 1 else 0.0))
    (older.reduce(x := leaf(), 0) * (rank + 1)).sum().backward()
    checks.same("derivative of reduce", x.grad, torch.ones(2))
    (torch.stack(older.gather(x := leaf(), 0)) * 2).sum().backward()
    checks.same("derivative of gather", x.grad, torch.full((2,), 2.0))
    parts = [leaf() for _ in range(size)]
    (older.scatter(parts, 0) * (rank + 1)).sum().backward()
    for i, part in enumerate(parts if rank == 0 else []):
        checks.same(f"derivative of scatter, part {i}", part.grad, torch.full((2,), i + 1.0))
    parts = [leaf() for _ in range(size)]
    (older.reduce_scatter(torch.empty(2), parts) * (rank + 1)).sum().backward()
    for i, part in enumerate(parts):
        checks.same(f"derivative of reduce_scatter of a list, part {i}", part.grad, torch.full((2,), i + 1.0))
    x = torch.ones(2 * size, requires_grad=True)
    (older.all_to_all_single(torch.empty(2 * size), x) * (rank + 1)).sum().backward()
    checks.same("derivative of older all_to_all", x.grad, torch.arange(1.0, size + 1).repeat_interleave(2))


def _dtensor(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))
    line = mesh["a"]
    x = torch.arange(21.0).view(7, 3)  # no even parts
    rows = distribute_tensor(x, line, [Shard(0)])
    checks.same("rows to all", rows.redistribute(line, [Replicate()]).to_local(), x)
    checks.same("rows to columns", rows.redistribute(line, [Shard(1)]).full_tensor(), x)
    checks.same("sum over all parts", rows.sum().full_tensor(), x.sum())
    product = rows @ rows.redistribute(line, [Replicate()]).t()
    checks.same("product", product.full_tensor(), x @ x.t())
    part = DTensor.from_local(torch.full((5,), rank + 1.0), line, [Partial()])
    total = torch.full((5,), float(sum(range(1, size + 1))))
    checks.same("partial sums to parts", part.redistribute(line, [Shard(0)]).full_tensor(), total)
    leaf = rows.detach().requires_grad_()
    leaf.redistribute(line, [Replicate()]).pow(2).sum().backward()
    checks.same("derivative of redistribution", leaf.grad.full_tensor(), 2 * x)
    flat = mesh["a", "b"]._flatten()
    dist.all_reduce(ones := torch.ones(1), group=flat.get_group())
    checks.same("flattened mesh", ones, torch.full((1,), float(size)))


def _groups(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    def total(group: Any) -> Any:
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        return tensor

    everyone = torch.tensor([float(sum(range(1, size + 1)))])
    own, groups = dist.new_subgroups(size)
    checks.same("new_subgroups of all", total(own), everyone)
    own, groups = dist.new_subgroups_by_enumeration([[0, 1], *[[r] for r in range(2, size)]])
    checks.same("new_subgroups_by_enumeration", total(own), torch.tensor([3.0 if rank < 2 else rank + 1.0]))
    if len(groups) != max(1, size - 1) or dist.get_process_group_ranks(own) != ([0, 1] if rank < 2 else [rank]):
        checks.wrong.append(f"subgroups: {len(groups)}, {dist.get_process_group_ranks(own)}")
    if rank < 2:  # the others do not take part
        own = dist.new_group([0, 1], use_local_synchronization=True, group_desc="two of them")
        checks.same("group made by its members alone", total(own), torch.tensor([3.0]))
        if (own.group_desc, dist.get_group_rank(own, 1), dist.get_global_rank(own, 1)) != ("two of them", 1, 1):
            checks.wrong.append(f"names: {own.group_desc}")
    for _ in range(2):  # the second split must not meet the first one's keys in the store
        part = dist.group.WORLD.split_group([0, 1], group_desc="split")
        if (part is None) != (rank >= 2):
            checks.wrong.append(f"split_group gave {part}")
        if part is not None:
            part.allreduce([tensor := torch.tensor([rank + 1.0])]).wait()
            checks.same("split_group", tensor, torch.tensor([3.0]))
            half = part.split_group([rank])
            if (half.size(), half.group_desc, part.group_desc) != (1, "split:split", "split"):
                checks.wrong.append(f"part of a part: {half.size()} {half.group_desc} {part.group_desc}")
            half.shutdown()
            part.shutdown()
    for wrong in ([0, 0], [0, size], [-1]):
        with pytest.raises(ValueError, match="different ranks below"):
            dist.group.WORLD.split_group(wrong)


def _together(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """The coalescing manager for a device, which torch's gloo refuses (and then loses every later all_reduce)."""
    from torch.distributed.distributed_c10d import _coalescing_manager

    cpu, right, left = torch.device("cpu"), (rank + 1) % size, (rank - 1) % size
    summed, sent, got = torch.ones(4)[::2], torch.full((3,), float(rank)), torch.zeros(3)
    with _coalescing_manager(device=cpu):
        dist.all_reduce(summed)
    checks.same("coalesced for a device", summed, torch.full((2,), float(size)))
    with _coalescing_manager(device=cpu, async_ops=True) as pending:
        dist.isend(sent, right)
        dist.irecv(got, left)
    pending.wait()
    checks.same("coalesced messages", got, torch.full((3,), float(left)))
    dist.all_reduce(after := torch.ones(1))
    checks.same("after coalescing", after, torch.full((1,), float(size)))
    with pytest.raises(RuntimeError, match="not coalescing"):
        dist.group.WORLD._end_coalescing(cpu)


def _ddp_helpers(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    from torch.distributed.utils import _verify_param_shape_across_processes

    _verify_param_shape_across_processes(dist.group.WORLD, [torch.ones(2, 3), torch.ones(4)])
    # Each rank compares its own with rank 0's.
    with pytest.raises(RuntimeError, match="params") if rank else nullcontext():
        _verify_param_shape_across_processes(dist.group.WORLD, [torch.ones(2, 3 + rank)])
    tensors = [torch.full((3,), 1.0 * rank), torch.full((2, 2), rank), torch.full((6,), 1.0 * rank)[::2]]
    dist._broadcast_coalesced(dist.group.WORLD, tensors, 16, 1)
    for i, tensor in enumerate(tensors):
        checks.same(f"_broadcast_coalesced {i}", tensor, torch.ones_like(tensor))
    with pytest.warns(FutureWarning):
        dist.all_reduce_coalesced(several := [torch.ones(3), torch.full((2,), 1.0 * rank)])
    checks.same("dist.all_reduce_coalesced", several[1], torch.full((2,), float(sum(range(size)))))


def _awkward(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """Shapes and tensors that are easily forgotten."""
    leaf = torch.ones(3, requires_grad=True)
    dist.all_reduce(leaf)
    checks.same("a leaf that requires a gradient", leaf.detach(), torch.full((3,), float(size)))
    if not leaf.requires_grad or leaf.grad_fn is not None:
        checks.wrong.append("the leaf is no leaf any more")
    leaves = [torch.zeros(3, requires_grad=True) for _ in range(size)]
    dist.all_gather(leaves, torch.full((3,), 1.0 * rank, requires_grad=True))
    checks.same("all_gather of leaves", leaves[-1].detach(), torch.full((3,), size - 1.0))
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number)
    checks.same("no dimension", number, torch.tensor(float(sum(range(1, size + 1)))))
    dist.all_gather_into_tensor(line := torch.zeros(size), torch.tensor(rank + 1.0))
    checks.same("gathered numbers", line, torch.arange(1.0, size + 1))
    dist.reduce_scatter_tensor(one := torch.tensor(0.0), torch.arange(float(size)))
    checks.same("scattered numbers", one, torch.tensor(float(rank * size)))
    dist.all_gather_into_tensor(stack := torch.zeros(size, 2, 3), torch.full((2, 3), 1.0 * rank))
    checks.same("gathered to a stack", stack[:, 1, 2], torch.arange(float(size)))
    nothing = torch.ones(0, 3)
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather([torch.ones(0, 3) for _ in range(size)], nothing)
    dist.all_to_all_single(torch.ones(0), torch.ones(0))
    dist.gather(nothing, [torch.ones(0, 3) for _ in range(size)] if rank == 0 else None, 0)
    dist.reduce(nothing, 0)
    spread = torch.tensor([rank + 1.0]).expand(4)
    dist.all_gather(parts := [torch.zeros(4) for _ in range(size)], spread)
    checks.same("an expanded input", parts[-1], torch.full((4,), float(size)))
    windows = torch.arange(5.0).as_strided((3, 3), (1, 1))
    for call in (
        lambda: dist.all_reduce(spread),
        lambda: dist.broadcast(spread, 0),
        lambda: dist.all_reduce(windows),
        lambda: dist.all_to_all([spread] * size, [torch.ones(4)] * size),
    ):
        with pytest.raises(ValueError, match="its elements share memory"):
            call()
    checks.same("a refused output stays", windows, torch.arange(5.0).as_strided((3, 3), (1, 1)))
