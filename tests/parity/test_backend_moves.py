"""What backend photinus does beyond gloo: any dtype and sizes in what moves, bitwise and premultiplied reductions."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.test_backend_collectives import _Checks
from tests.ranks import run_ranks, values

FOREIGN = ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex32", "complex64", "complex128"]
KNOWN = ["float32", "bfloat16", "int16", "bool"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_moves_and_reductions_give_the_expected_values(world_size: int) -> None:
    results = run_ranks(f"{__name__}:_compare", world_size=world_size, backend="photinus", timeout_s=150)
    for checks, wrong in values(results):
        assert wrong == []
        assert checks > 150


def _compare(rank: int, world_size: int) -> tuple[int, list[str]]:
    import torch
    import torch.distributed as dist

    checks = _Checks()
    parts = [_moves, _uneven, _rows, _bitwise, _premultiplied, _reduce_scatter_lists, _sparse, _refusals]
    for part in [*parts, _messages] if world_size > 1 else parts:
        part(checks, rank, world_size, torch, dist)
    return checks.count, checks.wrong


def _tensor(torch: Any, dtype: str, rows: int, rank: int) -> Any:
    """[rows, 3] of bit patterns that differ from rank to rank."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(rows * 100 + rank)
    if dtype == "bool":
        return torch.randint(0, 2, (rows, 3), generator=generator).to(kind)
    # Small enough to be a number in each dtype: bytes of 0x40 to 0x5f are no NaN in any of them.
    raw = torch.randint(0x40, 0x60, (rows * 3 * kind.itemsize,), generator=generator).to(torch.uint8)
    return raw.view(kind).view(rows, 3)


def _bits(torch: Any, tensor: Any) -> Any:
    return tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _moves(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """Every collective that only moves, on dense tensors and on transposed ones, for every dtype."""
    last = size - 1
    for dtype in [*FOREIGN, *KNOWN]:
        of_ranks = [_tensor(torch, dtype, 4, r) for r in range(size)]
        for layout in ("dense", "transposed"):

            def laid(tensor: Any, layout: str = layout) -> Any:
                return tensor.clone() if layout == "dense" else tensor.t().contiguous().t()

            def empty(laid: Any = laid, like: Any = of_ranks[0]) -> Any:
                return laid(like.new_zeros(like.shape))

            def same(what: str, got: Any, expected: Any, about: str = f"of {dtype}, {layout}") -> None:
                checks.same(f"{what} {about}", _bits(torch, got), _bits(torch, expected))

            mine = laid(of_ranks[rank])
            got = laid(of_ranks[rank])
            dist.broadcast(got, last)
            same("broadcast", got, of_ranks[last])
            into = [empty() for _ in range(size)]
            dist.all_gather(into, mine)
            one = mine.new_zeros((size * 4, 3))
            dist.all_gather_into_tensor(one, mine)
            gathered = [empty() for _ in range(size)] if rank == last else None
            dist.gather(mine, gathered, last)
            for r, of_rank in enumerate(of_ranks):
                same(f"all_gather part {r}", into[r], of_rank)
                same(f"all_gather_single part {r}", one[4 * r : 4 * r + 4], of_rank)
                if gathered:
                    same(f"gather part {r}", gathered[r], of_rank)
            got = empty()
            dist.scatter(got, [laid(t) for t in reversed(of_ranks)] if rank == last else None, last)
            same("scatter", got, of_ranks[last - rank])
            into = [empty() for _ in range(size)]
            dist.all_to_all(into, [mine] * size)
            for r, of_rank in enumerate(of_ranks):
                same(f"all_to_all part {r}", into[r], of_rank)


def _uneven(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """Lists whose tensors differ in size, an empty one included, asynchronous and not."""
    for dtype in ("float32", "uint16"):
        of_ranks = [_tensor(torch, dtype, 2 * r, r) for r in range(size)]
        for asynchronous in (False, True):
            all_of = [torch.zeros_like(t) for t in of_ranks]
            at_root = [torch.zeros_like(t) for t in of_ranks] if rank == 0 else None
            part = torch.zeros_like(of_ranks[rank])
            to_all = [torch.zeros_like(of_ranks[rank]) for _ in range(size)]
            calls = [
                lambda a=asynchronous, out=all_of, t=of_ranks: dist.all_gather(out, t[rank], async_op=a),
                lambda a=asynchronous, out=at_root, t=of_ranks: dist.gather(t[rank], out, 0, async_op=a),
                lambda a=asynchronous, out=part, t=of_ranks: dist.scatter(out, t if rank == 0 else None, 0, async_op=a),
                lambda a=asynchronous, out=to_all, t=of_ranks: dist.all_to_all(out, t, async_op=a),
            ]
            works = [call() for call in calls]
            for work in works if asynchronous else []:
                work.get_future().wait()
                work.wait()
            for r, of_rank in enumerate(of_ranks):
                checks.same(f"uneven all_gather part {r}", _bits(torch, all_of[r]), _bits(torch, of_rank))
                if at_root:
                    checks.same(f"uneven gather part {r}", _bits(torch, at_root[r]), _bits(torch, of_rank))
                checks.same(f"uneven all_to_all part {r}", _bits(torch, to_all[r]), _bits(torch, of_ranks[rank]))
            checks.same("uneven scatter", _bits(torch, part), _bits(torch, of_ranks[rank]))


def _rows(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """Split sizes count rows, whatever a row holds; rank r sends r + 1 + peer rows to its peer."""
    for dtype in ("float32", "uint64", "complex64"):
        for strided in (False, True):
            sends, recvs = [rank + 1 + peer for peer in range(size)], [peer + 1 + rank for peer in range(size)]
            of_ranks = [_tensor(torch, dtype, sum(r + 1 + peer for peer in range(size)), r) for r in range(size)]
            given = of_ranks[rank].t().contiguous().t() if strided else of_ranks[rank]
            into = given.new_zeros((sum(recvs), 3))
            dist.all_to_all_single(into, given, recvs, sends)
            expected = []
            for r in range(size):
                start = sum(r + 1 + peer for peer in range(rank))
                expected.append(of_ranks[r][start : start + r + 1 + rank])
            checks.same(f"rows of {dtype}", _bits(torch, into), _bits(torch, torch.cat(expected)))
    nothing = torch.zeros(0, 3)
    dist.all_to_all_single(nothing, torch.zeros(0, 3))
    dist.all_to_all_single(nothing, torch.zeros(0, 3), [0] * size, [0] * size)


def _bitwise(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    steps = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    for dtype in ("int8", "int16", "int32", "int64", "uint8", "bool"):
        of_ranks = [
            torch.randint(0, 2 if dtype == "bool" else 100, (41,), generator=torch.Generator().manual_seed(r)).to(
                getattr(torch, dtype)
            )
            for r in range(size)
        ]
        for name, step in steps.items():
            expected = of_ranks[0]
            for of_rank in of_ranks[1:]:
                expected = step(expected, of_rank)
            op = getattr(dist.ReduceOp, name)
            got = of_ranks[rank].clone()
            dist.all_reduce(got, op)
            checks.same(f"all_reduce {name} of {dtype}", got, expected)
            strided = torch.stack([of_ranks[rank]] * 2, 1)[:, 0]
            dist.reduce(strided, size - 1, op)
            checks.same(f"reduce {name} of {dtype}", strided, expected if rank == size - 1 else of_ranks[rank])


def _premultiplied(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """Each rank brings a factor of its own, as a number or as a tensor."""
    for dtype in ("float32", "float64", "float16", "bfloat16", "complex64"):
        kind = getattr(torch, dtype)
        factor: Any = 0.5 * (rank + 1) if rank % 2 else torch.tensor([0.5 * (rank + 1)])
        op = dist._make_nccl_premul_sum(factor)
        expected = torch.full((5,), sum(0.5 * (r + 1) * (r + 2) for r in range(size))).to(kind)
        got = torch.full((5,), rank + 2.0).to(kind)
        dist.all_reduce(got, op)
        checks.same(f"premultiplied all_reduce of {dtype}", got, expected)
        got = torch.full((5, 2), rank + 2.0).to(kind)[:, 1]
        dist.reduce(got, 0, op)
        if rank == 0:
            checks.same(f"premultiplied reduce of {dtype}", got, expected)
        part = torch.zeros(5, dtype=kind)
        dist.reduce_scatter_tensor(part, torch.full((5 * size,), rank + 2.0).to(kind), op)
        checks.same(f"premultiplied reduce_scatter of {dtype}", part, expected)


def _reduce_scatter_lists(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    for dtype in ("float32", "int32", "complex64"):
        kind = getattr(torch, dtype)
        for name, asynchronous in (("SUM", False), ("AVG", True)):
            inputs = [torch.full((r + 1, 2), 2 * rank + r).to(kind) for r in range(size)]
            given = [t.t().contiguous().t() if rank % 2 else t for t in inputs]
            total = sum(2 * r + rank for r in range(size))
            expected = torch.full((rank + 1, 2), total if name == "SUM" else total / size).to(kind)
            output = torch.zeros(rank + 1, 4, dtype=kind)[:, ::2]
            work = dist.reduce_scatter(output, given, getattr(dist.ReduceOp, name), async_op=asynchronous)
            if asynchronous:
                work.wait()
            checks.same(f"reduce_scatter {name} of uneven {dtype}", output, expected)


def _sparse(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """Ranks with different numbers of entries, none among them; entries that meet; rows as entries."""
    for dtype in ("float32", "float64", "bfloat16", "int64", "complex64"):
        kind = getattr(torch, dtype)
        for asynchronous in (False, True):
            index = torch.tensor([[0] * rank + list(range(rank))])
            own = torch.sparse_coo_tensor(index, torch.ones(2 * rank, 3).to(kind), (size, 3))
            expected = sum(
                torch.sparse_coo_tensor(
                    torch.tensor([[0] * r + list(range(r))]), torch.ones(2 * r, 3).to(kind), (size, 3)
                ).to_dense()
                for r in range(size)
            )
            # Past dist.all_reduce, which gives a copy of complex ones, viewed as real.
            direct = asynchronous or own.is_complex()
            work = dist.group.WORLD.allreduce([own]) if direct else dist.all_reduce(own)
            result = own
            if direct:
                work.wait()
                result = work.get_future().wait()[0]
            checks.same(f"sparse all_reduce of {dtype}", result.to_dense(), expected)
    matrix = torch.sparse_coo_tensor(torch.tensor([[rank, 0], [0, 1]]), torch.tensor([1.0, 2.0]), (size, 2))
    dist.all_reduce(matrix)
    expected = torch.cat([torch.ones(size, 1), torch.zeros(size, 1)], 1)
    expected[0, 1] = 2.0 * size
    checks.same("sparse all_reduce of a matrix", matrix.to_dense(), expected)


def _refusals(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    """Before anything is exchanged, with the reason; the group goes on."""
    group, op = dist.group.WORLD, dist.ReduceOp
    number, sparse = torch.ones(4), torch.ones(4).to_sparse()
    cases = [
        (TypeError, "torch.uint16", lambda: dist.all_reduce(torch.ones(3, dtype=torch.uint16))),
        (TypeError, "torch.float8_e5m2", lambda: dist.reduce(number.to(torch.float8_e5m2), 0)),
        (TypeError, "torch.uint64", lambda: dist.reduce_scatter_tensor(
            torch.zeros(1, dtype=torch.uint64), torch.zeros(size, dtype=torch.uint64))),
        (ValueError, "means nothing", lambda: dist.all_reduce(number, op.BAND)),
        (ValueError, "means nothing", lambda: dist.all_reduce(number.bool(), op.AVG)),
        (ValueError, "means nothing", lambda: dist.all_reduce(number.int(), dist._make_nccl_premul_sum(2.0))),
        (ValueError, "complex", lambda: group.allreduce([number.to(torch.complex64)], op.PRODUCT)),
        (ValueError, "SUM only", lambda: dist.all_reduce(sparse, op.MAX)),
        (TypeError, "sparse_csr", lambda: group.allreduce([torch.eye(2).to_sparse_csr()])),
        (TypeError, "dense tensors", lambda: group.broadcast([sparse], 0)),
        (ValueError, "one output per rank", lambda: group.allgather([[number] * (size + 1)], [number])),
        (ValueError, "one dtype", lambda: group.allgather([[number.int()] * size], [number])),
        (ValueError, "one dtype", lambda: group.alltoall([number.int()] * size, [number] * size)),
        (ValueError, "divide evenly", lambda: group.all_to_all_single(
            torch.zeros(size), torch.tensor(1.0), [], [])),
        (ValueError, "add up to 4 rows", lambda: group.all_to_all_single(number, number, [5] * size, [5] * size)),
        (ValueError, "not a rank", lambda: group.gather([], [number], size)),
    ]  # fmt: skip
    for kind, text, call in cases:
        try:
            call()
            checks.wrong.append(f"not refused: {text}")
        except kind as error:
            checks.count += 1
            if text not in str(error):
                checks.wrong.append(f"{text!r} is not in {error!r}")
    dist.all_reduce(after := torch.ones(1))
    checks.same("after refusals", after, torch.full((1,), float(size)))


def _messages(checks: _Checks, rank: int, size: int, torch: Any, dist: Any) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    for dtype in [*FOREIGN, *KNOWN]:
        for rows in (0, 5, 70_000):
            sent, got = (_tensor(torch, dtype, rows, r) for r in (rank, rank))
            strided = got.t().contiguous().t()
            works = [dist.irecv(strided, left, tag=7), dist.isend(sent, right, tag=7)]
            for work in works:
                work.wait()
            expected = _tensor(torch, dtype, rows, left)
            checks.same(f"{rows} rows of {dtype} from the left", _bits(torch, strided), _bits(torch, expected))
    # Received in another order than sent, by tags, while collectives go on.
    numbers = [torch.full((3,), 10.0 * rank + tag) for tag in range(6)]
    sends = [dist.isend(number, right, tag=tag) for tag, number in enumerate(numbers)]
    dist.all_reduce(torch.ones(100))
    for tag in reversed(range(6)):
        got = torch.zeros(3)
        dist.recv(got, left, tag=tag)
        checks.same(f"message with tag {tag}", got, torch.full((3,), 10.0 * left + tag))
    for work in sends:
        work.wait()
    # A future of a message that comes last holds up no other future.
    late, early = torch.zeros(1), torch.zeros(1)
    last = dist.irecv(late, left, tag=21)
    last_future, first = last.get_future(), dist.irecv(early, left, tag=20)
    sending = dist.isend(torch.full((1,), 1.0), right, tag=20)
    checks.same("the early message's future", first.get_future().wait()[0], torch.ones(1))
    summed = dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()[0]
    checks.same("a collective's future", summed, torch.full((1,), float(size)))
    sending.wait()
    sending = dist.isend(torch.full((1,), 2.0), right, tag=21)
    checks.same("the late message's future", last_future.wait()[0], torch.full((1,), 2.0))
    sending.wait()
    # From any source.
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            got = torch.zeros(4, dtype=torch.uint16)
            work = dist.irecv(got, tag=30)
            work.wait()
            senders.add(work.source_rank())
            checks.same("from any source", got, torch.full((4,), work.source_rank(), dtype=torch.uint16))
        if senders != set(range(1, size)):
            checks.wrong.append(f"senders {senders}")
    else:
        dist.send(torch.full((4,), rank, dtype=torch.uint16), 0, tag=30)
    # Objects.
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    elif rank == 1:
        dist.recv_object_list(objects := [None, None], 0)
        if objects != [{"a": 1}, "b"]:
            checks.wrong.append(f"objects {objects}")
    at_root = [None] * size if rank == size - 1 else None
    dist.gather_object(("rank", rank, "x" * 10**rank), at_root, size - 1)
    if at_root is not None and at_root != [("rank", r, "x" * 10**r) for r in range(size)]:
        checks.wrong.append("gather_object")
    dist.scatter_object_list(one := [None], [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    if one != [f"for {rank}"]:
        checks.wrong.append(f"scatter_object_list {one}")
