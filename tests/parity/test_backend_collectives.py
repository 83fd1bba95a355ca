"""Every collective of backend photinus against gloo and against the obvious sum of what the ranks hold."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_ranks, values

FLOATS = ["float32", "float64", "float16", "bfloat16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
REDUCTIONS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives_equal_gloo_and_the_naive_reduction(world_size: int) -> None:
    results = run_ranks(f"{__name__}:_compare", world_size=world_size, backend="photinus", timeout_s=150)
    for checks, wrong in values(results):
        assert wrong == []
        assert checks > 400


@pytest.mark.parametrize("hosts", ["ab", pytest.param("abc", marks=pytest.mark.slow)])
def test_a_group_on_several_hosts_gives_the_same_results(hosts: str) -> None:
    results = run_ranks(f"{__name__}:_compare", world_size=len(hosts), backend="photinus", timeout_s=150, hosts=hosts)
    for checks, wrong in values(results):
        assert wrong == []
        assert checks > 400


class _Checks:
    """Compares and counts; `wrong` describes what differs."""

    def __init__(self) -> None:
        self.count = 0
        self.wrong: list[str] = []

    def same(self, what: str, got: Any, expected: Any, relative: float = 0.0) -> None:
        import torch

        self.count += 1
        if got.shape != expected.shape or got.dtype != expected.dtype:
            self.wrong.append(f"{what}: {got.shape} {got.dtype}, expected {expected.shape} {expected.dtype}")
        elif relative == 0.0 and not torch.equal(got, expected):
            self.wrong.append(f"{what}: {got.flatten()[:6]} expected {expected.flatten()[:6]}")
        elif relative and not torch.allclose(got.double(), expected.double(), rtol=relative, atol=relative):
            self.wrong.append(f"{what}: {got.flatten()[:6]} expected about {expected.flatten()[:6]}")


def _compare(rank: int, world_size: int) -> tuple[int, list[str]]:
    import torch
    import torch.distributed as dist

    gloo = dist.new_group(backend="gloo")
    checks = _Checks()
    for part in (_reductions, _layouts, _movements, _complex_numbers, _coalesced, _rest, _interface):
        part(checks, rank, world_size, gloo, torch, dist)
    return checks.count, checks.wrong


def _values(torch: Any, dtype: str, elems: int, rank: int, salt: int = 0) -> Any:
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, (elems,), generator=generator).to(kind)
    if kind.is_floating_point:
        return (torch.rand(elems, generator=generator, dtype=torch.float64) + 0.5).to(kind)
    low = 0 if dtype == "uint8" else -3
    return torch.randint(low, 4, (elems,), generator=generator).to(kind)


def _naive(torch: Any, reduction: str, parts: list[Any]) -> Any:
    """In the engine's order, a binary tree over ranks; halves in float32; booleans: sum is or, product is and."""
    dtype = parts[0].dtype
    if dtype is torch.bool:
        parts, reduction = [p.to(torch.uint8) for p in parts], {"SUM": "MAX"}.get(reduction, reduction)
    elif dtype in (torch.float16, torch.bfloat16):
        parts = [p.float() for p in parts]
    step = {"MIN": torch.minimum, "MAX": torch.maximum, "PRODUCT": torch.mul}.get(reduction, torch.add)

    def tree(parts: list[Any]) -> Any:
        if len(parts) == 1:
            return parts[0].clone()
        left = 1 << (len(parts) - 1).bit_length() - 1  # the largest power of two below
        return step(tree(parts[:left]), tree(parts[left:]))

    total = tree(parts)
    if reduction == "AVG":
        total = total / len(parts) if total.is_floating_point() else total.div(len(parts), rounding_mode="trunc")
    return total.to(dtype)


def _gathered(dist: Any, tensor: Any, world_size: int, gloo: Any) -> list[Any]:
    """What each rank holds, moved as bytes."""
    import torch

    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    parts = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(parts, flat, group=gloo)
    return [part.view(tensor.dtype).view(tensor.shape) for part in parts]


def _reductions(checks: _Checks, rank: int, size: int, gloo: Any, torch: Any, dist: Any) -> None:
    for dtype, name in itertools.product([*FLOATS, *INTEGERS, "bool"], REDUCTIONS):
        op = getattr(dist.ReduceOp, name)
        if (dtype, name) == ("bool", "AVG"):  # NCCL refuses it too
            with pytest.raises(ValueError, match="means nothing"):
                dist.all_reduce(torch.ones(3, dtype=torch.bool), op)
            continue
        half = dtype in ("float16", "bfloat16")
        exact = name != "AVG" or not dtype.startswith("float")
        for salt, elems in enumerate([0, 1, 7, 1000, 70_001] if dtype in ("float32", "bfloat16") else [1, 1000]):
            what = f"all_reduce {name} of {elems} {dtype}"
            mine = _values(torch, dtype, elems, rank, salt)
            naive = _naive(torch, name, _gathered(dist, mine, size, gloo)) if elems else mine
            got = mine.clone()
            dist.all_reduce(got, op)
            checks.same(what, got, naive, 0.03 if half else 0.0 if exact else 1e-5)
            if dtype == "bool":
                checks.same(f"{what}, as bytes", got.view(torch.uint8), naive.view(torch.uint8))
            elif dtype != "int16" and (name != "AVG" or mine.is_floating_point()):
                expected = mine.clone()
                dist.all_reduce(expected, op, group=gloo)
                bits = size <= 2 and not half and name != "AVG"
                checks.same(f"{what}, gloo", got, expected, 0.0 if bits else 0.04 if half else 1e-5)
            if elems in (7, 1000):
                mine = _values(torch, dtype, elems * size, rank, salt + 7)
                naive = _naive(torch, name, _gathered(dist, mine, size, gloo))[rank * elems : (rank + 1) * elems]
                relative = 0.03 if half else 0.0 if exact else 1e-5
                got = torch.empty(elems, dtype=mine.dtype)
                dist.reduce_scatter_tensor(got, mine, op)
                checks.same(f"reduce_scatter_single {name} of {elems} {dtype}", got, naive, relative)
                got = torch.empty(elems, dtype=mine.dtype)
                dist.reduce_scatter(got, list(mine.chunk(size)), op)
                checks.same(f"reduce_scatter {name} of {elems} {dtype}", got, naive, relative)


def _layouts(checks: _Checks, rank: int, size: int, gloo: Any, torch: Any, dist: Any) -> None:
    """Tensors that are not dense, each with its dense values reduced by gloo as the expectation."""

    def base(salt: int) -> Any:
        return _values(torch, "float32", 2 * 6 * 8 * 10, rank, salt).view(2, 6, 8, 10)

    views: dict[str, Callable[[Any], Any]] = {
        "every second": lambda t: t.view(-1)[::2],
        "transposed": lambda t: t[0, 0].t(),
        "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
        "a column": lambda t: t[0, 0, :, 3],
        "permuted on odd ranks": lambda t: t[0, 0].t().contiguous().t() if rank % 2 else t[0, 0].contiguous(),
        "negated lazily": lambda t: torch.view_as_complex(t[..., :2].contiguous()).conj().imag,
        "scalar": lambda t: t[0, 0, 0, 0],
        "needs grad": lambda t: t.view(-1)[:96].view(8, 12)[:, ::3].requires_grad_(),
        "empty, strided": lambda t: t.view(-1)[0:0:2],
    }
    for salt, (name, view) in enumerate(views.items()):
        got = view(base(salt))
        around = got.detach().clone()
        expected = got.detach().clone(memory_format=torch.contiguous_format).resolve_neg()
        dist.all_reduce(expected, group=gloo)
        dist.all_reduce(got)
        checks.same(f"all_reduce, {name}", got.detach().resolve_neg(), expected, 1e-6)
        got = view(base(salt))
        expected = around.contiguous().resolve_neg()
        dist.broadcast(expected, size - 1, group=gloo)
        dist.broadcast(got, size - 1)
        checks.same(f"broadcast, {name}", got.detach().resolve_neg(), expected)
        outputs = [view(base(20 + i)).detach() for i in range(size)]
        dist.all_gather(outputs, around)
        parts = _gathered(dist, around.resolve_neg(), size, gloo) if around.numel() else outputs
        for i in range(size):
            checks.same(f"all_gather, {name}, part {i}", outputs[i].resolve_neg(), parts[i])
        got, mine = view(base(salt)).detach(), view(base(salt)).detach()
        reference = mine.contiguous().resolve_neg()
        dist.reduce(got, size - 1)
        dist.reduce(reference, size - 1, group=gloo)
        if rank == size - 1:
            checks.same(f"reduce, {name}", got.resolve_neg(), reference, 1e-6)
    whole = base(50).view(-1)
    beside = whole.clone()
    dist.all_reduce(whole[::2])
    checks.same("what lies between the strides stays", whole[1::2], beside[1::2])
    strided = torch.zeros(size, 5, 2)[:, :, 0]
    dist.all_gather_into_tensor(strided, torch.arange(10.0)[::2] + rank)
    expected = torch.stack([torch.arange(10.0)[::2] + i for i in range(size)])
    checks.same("all_gather_single, strided both ways", strided, expected)
    output = torch.zeros(6)[::2]
    dist.reduce_scatter_tensor(output, torch.arange(6.0 * size)[::2])
    expected = torch.arange(6.0 * size)[::2].view(size, 3)[rank] * size
    checks.same("reduce_scatter_single, strided both ways", output, expected)


def _movements(checks: _Checks, rank: int, size: int, gloo: Any, torch: Any, dist: Any) -> None:
    for dtype in [*FLOATS, *INTEGERS, "bool"]:
        mine = _values(torch, dtype, 33, rank)
        parts = _gathered(dist, mine, size, gloo)
        outputs = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(outputs, mine)
        one = torch.empty(size * 33, dtype=mine.dtype)
        dist.all_gather_into_tensor(one, mine)
        slices = list(torch.empty(size * 33, dtype=mine.dtype).chunk(size))
        dist.all_gather(slices, mine)
        for i, part in enumerate(parts):
            checks.same(f"all_gather of {dtype}, part {i}", outputs[i], part)
            checks.same(f"all_gather_single of {dtype}, part {i}", one[33 * i : 33 * (i + 1)], part)
            checks.same(f"all_gather into slices of {dtype}, part {i}", slices[i], part)
        for root in range(size):
            got = mine.clone()
            dist.broadcast(got, root)
            checks.same(f"broadcast of {dtype} from {root}", got, parts[root])
            into = [torch.empty_like(mine) for _ in range(size)] if rank == root else None
            dist.gather(mine, into, root)
            for i, part in enumerate(into or []):
                checks.same(f"gather of {dtype} to {root}, part {i}", part, parts[i])
            scattered = torch.empty_like(mine)
            dist.scatter(scattered, list(reversed(parts)) if rank == root else None, root)
            checks.same(f"scatter of {dtype} from {root}", scattered, parts[size - 1 - rank])
        sent = mine[: 3 * size].clone()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        expected = torch.cat([p[3 * rank : 3 * (rank + 1)] for p in parts])
        checks.same(f"all_to_all_single of {dtype}", received, expected)
        rows = [torch.empty(3, dtype=mine.dtype) for _ in range(size)]
        dist.all_to_all(rows, list(sent.chunk(size)))
        checks.same(f"all_to_all of {dtype}", torch.cat(rows), expected)
        rows = [torch.empty(rank + 1, 2, dtype=mine.dtype)[:, 0] for _ in range(size)]
        dist.all_to_all(rows, [mine[i : 2 * i + 1] for i in range(size)])
        expected = torch.cat([p[rank : 2 * rank + 1] for p in parts])
        checks.same(f"all_to_all of {dtype}, uneven and strided", torch.cat(rows), expected)


def _complex_numbers(checks: _Checks, rank: int, size: int, gloo: Any, torch: Any, dist: Any) -> None:
    group = dist.group.WORLD
    for dtype in (torch.complex64, torch.complex128):
        mine = torch.complex(torch.arange(4.0) + rank, torch.arange(4.0) - rank).to(dtype)
        for name in ("SUM", "AVG"):
            expected = mine.clone()
            dist.all_reduce(expected, getattr(dist.ReduceOp, name), group=gloo)
            got = mine.clone()
            dist.all_reduce(got, getattr(dist.ReduceOp, name))
            checks.same(f"all_reduce {name} of {dtype}", got.real, expected.real, 1e-6)
            checks.same(f"all_reduce {name} of {dtype}, imaginary", got.imag, expected.imag, 1e-6)
            direct = mine.clone().conj()  # past dist.all_reduce, which views complex tensors as real itself
            group.allreduce([direct], getattr(dist.ReduceOp, name)).wait()
            checks.same(f"allreduce {name} of conjugated {dtype}", direct.resolve_conj().imag, -expected.imag, 1e-6)
        parts = [torch.empty(4, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, mine)
        checks.same(f"all_gather of {dtype}", parts[-1].imag, torch.arange(4.0).to(parts[-1].imag.dtype) - (size - 1))
        try:
            group.allreduce([mine.clone()], dist.ReduceOp.MAX)
            checks.wrong.append(f"maximum of {dtype} was not refused")
        except ValueError:
            checks.count += 1


def _coalesced(checks: _Checks, rank: int, size: int, gloo: Any, torch: Any, dist: Any) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    total = sum(range(size)) + size
    tensors = [torch.full((5,), rank + 1.0), torch.full((2, 3), rank + 1), torch.full((8,), rank + 1.0)[::2]]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    with _coalescing_manager(async_ops=True) as pending:
        dist.all_reduce(late := torch.full((5,), rank + 1.0))
    pending.wait()
    for i, tensor in enumerate([*tensors, late]):
        checks.same(f"coalesced all_reduce {i}", tensor, torch.full_like(tensor, total))
    outputs = [torch.zeros(size * 3), torch.zeros(size * 2, dtype=torch.int64)]
    with _coalescing_manager():
        dist.all_gather_into_tensor(outputs[0], torch.full((3,), float(rank)))
        dist.all_gather_into_tensor(outputs[1], torch.full((2,), rank))
    checks.same("coalesced all_gather 0", outputs[0], torch.arange(float(size)).repeat_interleave(3))
    checks.same("coalesced all_gather 1", outputs[1], torch.arange(size).repeat_interleave(2))
    outputs = [torch.zeros(3), torch.zeros(2)]
    with _coalescing_manager():
        dist.reduce_scatter_tensor(outputs[0], torch.arange(3.0 * size))
        dist.reduce_scatter_tensor(outputs[1], torch.arange(2.0 * size))
    checks.same("coalesced reduce_scatter 0", outputs[0], torch.arange(3.0 * size).chunk(size)[rank] * size)
    checks.same("coalesced reduce_scatter 1", outputs[1], torch.arange(2.0 * size).chunk(size)[rank] * size)
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.group.WORLD.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((3,), float(rank))]).wait()
    checks.same("allgather_coalesced", torch.cat(lists[-1]), torch.full((5,), size - 1.0))
    work = dist.group.WORLD.allreduce_coalesced([torch.ones(3), torch.ones(2)])
    both = work.get_future().wait()
    checks.same("future of allreduce_coalesced", torch.cat(both), torch.full((5,), float(size)))


def _rest(checks: _Checks, rank: int, size: int, gloo: Any, torch: Any, dist: Any) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        got = torch.zeros(8)[::2]
        pending = [dist.irecv(got, left, tag=3), dist.isend(torch.arange(8.0)[::2] + rank, right, tag=3)]
        for work in pending:
            work.wait()
        checks.same("send and receive, strided", got, torch.arange(8.0)[::2] + left)
        if rank == 0:
            total = torch.zeros(3)
            for _ in range(size - 1):
                part = torch.zeros(3)
                sender = dist.recv(part)
                checks.same("receive from any source", part, torch.full((3,), float(sender)))
                total += part
            checks.same("all senders came", total, torch.full((3,), float(sum(range(size)))))
        else:
            dist.send(torch.full((3,), float(rank)), 0)
        dist.barrier()  # or rank 0's receive from any source takes a message of what comes next
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.tensor([rank], dtype=torch.int16), right),
             dist.P2POp(dist.irecv, from_left := torch.zeros(1, dtype=torch.int16), left)]
        )  # fmt: skip
        for work in works:
            work.wait()
        checks.same("batched send and receive of int16", from_left, torch.tensor([left], dtype=torch.int16))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    checks.count += 1
    if objects != [{"rank": i} for i in range(size)]:
        checks.wrong.append(f"all_gather_object: {objects}")
    said = [f"from {rank}"]
    dist.broadcast_object_list(said, size - 1)
    if said != [f"from {size - 1}"]:
        checks.wrong.append(f"broadcast_object_list: {said}")
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.tensor([2.0]), (size,))
    dist.all_reduce(sparse)
    checks.same("sparse all_reduce", sparse.to_dense(), torch.full((size,), 2.0))
    for name, step in (("BAND", "bitwise_and"), ("BOR", "bitwise_or"), ("BXOR", "bitwise_xor")):
        bits = torch.tensor([1 << rank, 7, rank])
        expected = torch.tensor([1, 7, 0])
        for i in range(1, size):
            expected = getattr(torch, step)(expected, torch.tensor([1 << i, 7, i]))
        dist.all_reduce(bits, getattr(dist.ReduceOp, name))
        checks.same(f"all_reduce {name}", bits, expected)
    uneven_in = torch.arange(float(size * (size + 1) // 2)) + 100 * rank
    splits = list(range(1, size + 1))
    uneven_out = torch.zeros(size * (rank + 1))
    dist.all_to_all_single(uneven_out, uneven_in, [rank + 1] * size, splits)
    start = rank * (rank + 1) // 2
    expected = torch.cat([torch.arange(float(start), start + rank + 1) + 100 * i for i in range(size)])
    checks.same("all_to_all_single, uneven", uneven_out, expected)
    dist.group.WORLD.monitored_barrier()
    dist.barrier()


def _interface(checks: _Checks, rank: int, size: int, gloo: Any, torch: Any, dist: Any) -> None:
    """Call forms that libraries use, work objects, futures."""
    from datetime import timedelta

    group = dist.group.WORLD
    ones = [torch.ones(3) for _ in range(6)]
    group.allreduce(ones[0]).wait()
    group.allreduce(ones[1], dist.ReduceOp.SUM).wait()
    group.allreduce([ones[2]], op=dist.ReduceOp.SUM).wait()
    group.allreduce([ones[3]], dist.AllreduceOptions()).wait(timedelta(seconds=20))
    work = dist.all_reduce(ones[4], async_op=True)
    doubled = work.get_future().then(lambda future: [tensor * 2 for tensor in future.value()])
    checks.same("future's value", doubled.wait()[0], torch.full((3,), 2.0 * size))
    work.wait()
    # torch 2.11 cannot make a Python object of what its own works answer to `exception`.
    exception = None if torch.__version__ < (2, 13) else work.exception()
    said = (work.is_completed(), work.is_success(), exception, len(work.result()))
    if said != (True, True, None, 1):
        checks.wrong.append(f"a finished work says {said}")
    work = dist.all_reduce(ones[5], async_op=True)
    work.wait()
    checks.same("future made after the end", work.get_future().wait()[0], torch.full((3,), float(size)))
    for i, tensor in enumerate(ones):
        checks.same(f"call form {i}", tensor, torch.full((3,), float(size)))
    group.broadcast(lent := torch.full((2,), float(rank)), size - 1).wait()
    checks.same("broadcast(tensor, root)", lent, torch.full((2,), size - 1.0))
    group.barrier().wait()
    group.barrier(timeout=timedelta(seconds=20)).wait()
    memory = group.allocate_tensor((3, 5), dtype=torch.bfloat16)
    memory.fill_(1.0)
    dist.all_reduce(memory)
    checks.same("all_reduce in the arena", memory, torch.full((3, 5), float(size), dtype=torch.bfloat16))
    backend = group._get_backend(torch.device("cpu"))
    if not backend.supports_tensor_alloc(torch.device("cpu")):
        checks.wrong.append("the backend does not offer memory")
    from_backend = backend.allocate_tensor(7, dtype=torch.float32, device=torch.device("cpu"))
    checks.same("memory from the backend", from_backend.fill_(1.0), torch.ones(7))
    works = [dist.all_reduce(torch.ones(2, 50)[:, ::2], async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
        checks.same("strided and dropped", work.result()[0].contiguous(), torch.full((2, 25), float(size)))
    with torch.inference_mode():
        inferred = torch.ones(4, 4).t()
        dist.all_reduce(inferred)
    checks.same("inference tensor, transposed", inferred.clone(), torch.full((4, 4), float(size)))
    if dist.get_backend() != "photinus" or group.name() != "photinus":
        checks.wrong.append(f"names: {dist.get_backend()}, {group.name()}")
