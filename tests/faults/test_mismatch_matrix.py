"""Ranks that call different collectives: all of them read why, at once, no output is touched, and the group goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import RankResult, run_ranks, values

WORLD_SIZES = [2, 3, pytest.param(4, marks=pytest.mark.slow)]
HOSTS = ["ab", pytest.param("aabb", marks=pytest.mark.slow), pytest.param("aaab", marks=pytest.mark.slow)]
LIMIT_S = 1.0  # 0.1 on a machine with nothing else to do
Call = Callable[[], object]
HERE = "test_mismatch_matrix.py"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_kind_of_disagreement_is_an_error_on_every_rank_and_the_group_goes_on(world_size: int) -> None:
    _check_matrix(world_size)


@pytest.mark.parametrize("hosts", HOSTS)
def test_disagreement_between_hosts_is_an_error_on_every_rank_and_the_group_goes_on(hosts: str) -> None:
    _check_matrix(len(hosts), hosts)


def _check_matrix(world_size: int, hosts: str | None = None) -> None:
    results = run_ranks(f"{__name__}:_matrix", world_size=world_size, backend="photinus", timeout_s=120, hosts=hosts)
    cases = values(results)
    slowest = 0.0
    for name in cases[0]:
        entries = [of_rank[name] for of_rank in cases]
        arrived = max(entry["called"] for entry in entries)
        lines = {f"{HERE}:{entry['line']}" for entry in entries}
        for rank, entry in enumerate(entries):
            assert entry["error"].startswith("MismatchError: "), (name, rank, entry["error"])
            assert entry["changed"] == [], (name, rank, entry["changed"])
            assert "[0]" not in entry["error"], (name, rank, entry["error"])  # a size that nobody gave
            assert f"{HERE}:{entry['line']}" in entry["error"], (name, rank, entry)
            if name.startswith("shape in "):
                assert "of shape [3, 4]" in entry["error"], (name, entry["error"])
                assert "of shape [4, 3]" in entry["error"], (name, entry["error"])
            if name not in SIZES_OF_PAIRS:  # there the engine compares pair by pair, and quotes its own side's line
                assert all(line in entry["error"] for line in lines), (name, rank, lines, entry["error"])
            assert entry["sum_after"] == world_size, (name, rank)
            slowest = max(slowest, entry["raised"] - arrived)
    print(
        f"{len(cases[0])} cases, {world_size} ranks: the slowest error came {slowest * 1e3:.1f} ms after the last rank"
    )
    assert slowest < LIMIT_S


SIZES_OF_PAIRS = ("uneven splits that do not fit", "sizes in a list that do not fit", "gather of another size")


def _matrix(rank: int, world_size: int) -> dict[str, Any]:
    return {name: _attempt(rank, *case) for name, case in _cases(rank, world_size).items()}


def _attempt(rank: int, call: Call, outputs: list[Any]) -> dict[str, Any]:
    """Makes the call that must fail, then one that must not."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    before = [output.clone() for output in outputs]
    time.sleep(0.01 * rank)
    called = time.monotonic()
    try:
        call()
        error = "no error"
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    raised_at = time.monotonic()
    changed = [i for i, (was, now) in enumerate(zip(before, outputs, strict=True)) if not torch.equal(was, now)]
    dist.all_reduce(after := torch.ones(1))
    code: Any = getattr(call, "__code__")  # noqa: B009 - typed
    return {
        "error": error,
        "called": called,
        "raised": raised_at,
        "changed": changed,
        "sum_after": after.item(),
        "line": code.co_firstlineno,
    }


def _cases(rank: int, size: int) -> dict[str, tuple[Call, list[Any]]]:
    """By name: this rank's call, one line each, and its outputs. The last rank is the odd one."""
    import torch
    import torch.distributed as dist

    op, odd = dist.ReduceOp, rank == size - 1
    x, y = torch.full((12,), rank + 1.0), torch.full((12,), 7.0)
    ints = torch.full((12,), rank, dtype=torch.int32)
    half, brain = torch.ones(12, dtype=torch.float16), torch.ones(12, dtype=torch.bfloat16)
    short, unsigned = torch.ones(12, dtype=torch.int16), torch.ones(12, dtype=torch.uint16)
    pairs = torch.ones(6, dtype=torch.complex64)
    shorter = x[: 12 - odd]
    parts = [torch.full((3,), 5.0) for _ in range(size)]
    int_parts = [torch.full((3,), 5, dtype=torch.int32) for _ in range(size)]
    uneven = [torch.full((3 + odd,), 5.0) for _ in range(size)]
    out3 = torch.zeros(3)
    wide = torch.zeros(3 * size)
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (size + 2 * odd,))

    def either(usual: tuple[Call, list[Any]], other: tuple[Call, list[Any]]) -> tuple[Call, list[Any]]:
        return other if odd else usual

    summed = (lambda: dist.all_reduce(x), [x])
    broadcast = (lambda: dist.broadcast(x, 0), [x])
    return {
        "size": (lambda: dist.all_reduce(shorter), [x]),
        "size, asynchronous": (lambda: dist.all_reduce(shorter, async_op=True).wait(), [x]),
        "size, strided": (lambda: dist.all_reduce(x[: 12 - 2 * odd : 2]), [x]),
        "size of a broadcast": (lambda: dist.broadcast(shorter, 0), [x]),
        "dtype of one width": either(summed, (lambda: dist.all_reduce(ints), [ints])),
        "two kinds of halves": either(
            (lambda: dist.all_reduce(half), [half]),
            (lambda: dist.all_reduce(brain), [brain]),
        ),
        "dtype of a broadcast": either(broadcast, (lambda: dist.broadcast(ints, 0), [ints])),
        "signed and unsigned": either(
            (lambda: dist.broadcast(short, 0), [short]),
            (lambda: dist.broadcast(unsigned, 0), [unsigned]),
        ),
        "complex and real": either(broadcast, (lambda: dist.group.WORLD.broadcast(pairs, 0).wait(), [pairs])),
        "dtype of a list": either(
            (lambda: dist.all_gather(parts, out3), parts),
            (lambda: dist.all_gather(int_parts, out3.int()), int_parts),
        ),
        "reduction": either(summed, (lambda: dist.all_reduce(x, op.MAX), [x])),
        "bitwise reduction": either(
            (lambda: dist.all_reduce(ints, op.BAND), [ints]),
            (lambda: dist.all_reduce(ints, op.BXOR), [ints]),
        ),
        "root": (lambda: dist.broadcast(x, rank), [x]),
        "root of a reduce": (lambda: dist.reduce(x, int(odd)), [x]),
        "root of a scatter": either(
            (lambda: dist.scatter(out3, parts if rank == 0 else None, 0), [out3]),
            (lambda: dist.scatter(out3, parts, size - 1), [out3]),
        ),
        "all_reduce and broadcast": either(summed, broadcast),
        "all_reduce and barrier": either(summed, (lambda: dist.barrier(), [])),
        "all_reduce and reduce": either(summed, (lambda: dist.reduce(x, 0), [x])),
        "gather and scatter": either(
            (lambda: dist.gather(out3, parts if rank == 0 else None, 0), parts),
            (lambda: dist.scatter(out3, parts if rank == 0 else None, 0), [out3]),
        ),
        "all_gather and all_to_all": either(
            (lambda: dist.all_gather(parts, out3), parts),
            (lambda: dist.all_to_all(parts, [out3] * size), parts),
        ),
        "reduce_scatter and all_gather": either(
            (lambda: dist.reduce_scatter_tensor(out3, wide), [out3]),
            (lambda: dist.all_gather_into_tensor(wide, out3), [wide]),
        ),
        "one barrier and another": either(
            (lambda: dist.barrier(), []),
            (lambda: dist.group.WORLD.monitored_barrier(), []),
        ),
        "dense and sparse": either(summed, (lambda: dist.all_reduce(sparse), [])),
        "shape of a sparse tensor": (lambda: dist.all_reduce(sparse), []),
        "uneven splits that do not fit": (
            lambda: dist.all_to_all_single(wide, torch.ones(3 * size), None, _splits(rank, size)),
            [wide],
        ),
        "sizes in a list that do not fit": (lambda: dist.all_to_all(parts, uneven), parts),
        "gather of another size": (lambda: dist.gather(uneven[0], parts if rank == 0 else None, 0), parts),
        **_shapes(rank, size),
        # The others are one call ahead: the odd rank has left one out, or they have made one too many.
        "a call left out": either((lambda: dist.all_reduce(y), [y]), (lambda: dist.all_gather(parts, out3), parts)),
    }  # fmt: skip


def test_messages_of_another_size_or_type_are_errors_on_both_sides_and_later_ones_arrive() -> None:
    found = values(run_ranks(f"{__name__}:_messages", world_size=2, backend="photinus", timeout_s=60))
    for value in found:
        for error in value["errors"]:
            assert error.startswith("MismatchError"), error
            assert all(f"{HERE}:{side['line']}" in error for side in found), (error, found)
        assert value["untouched"]
        assert value["after"] == 9.0
        assert value["seconds"] < LIMIT_S


def _messages(rank: int, world_size: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    wanted, errors = torch.zeros(4), []
    send: Any = lambda tensor: dist.send(tensor, 1)  # noqa: E731 - one line to quote
    recv: Any = lambda tensor: dist.recv(tensor, 0)  # noqa: E731
    dist.barrier()
    started = time.monotonic()
    for given in (torch.ones(3), torch.ones(4, dtype=torch.int32)):
        try:
            recv(wanted) if rank else send(given)
            errors.append("no error")
        except RuntimeError as error:
            errors.append(f"{type(error).__name__}: {error}")
    seconds, untouched = time.monotonic() - started, wanted.tolist() == [0.0] * 4
    late = torch.full((4,), 9.0)
    recv(wanted) if rank else send(late)
    return {
        "errors": errors,
        "line": (recv if rank else send).__code__.co_firstlineno,
        "untouched": untouched,
        "after": wanted[0].item() if rank else 9.0,
        "seconds": seconds,
    }


def _shapes(rank: int, size: int) -> dict[str, tuple[Call, list[Any]]]:
    """Tensors of as many elements, but of another shape on the last rank, in every collective."""
    import torch
    import torch.distributed as dist

    shape = (4, 3) if rank == size - 1 else (3, 4)
    x, out, flat = torch.full(shape, rank + 1.0), torch.zeros(shape), torch.zeros(12)
    wide, tall = torch.zeros(12 * size), torch.zeros(shape[0] * size, shape[1])
    parts = [torch.zeros(shape) for _ in range(size)]
    at_root = parts if rank == 0 else None
    return {
        "shape in all_reduce": (lambda: dist.all_reduce(x), [x]),
        "shape in reduce": (lambda: dist.reduce(x, 0), [x]),
        "shape in broadcast": (lambda: dist.broadcast(x, 0), [x]),
        "shape in all_gather": (lambda: dist.all_gather(parts, x), parts),
        "shape in all_gather_into_tensor": (lambda: dist.all_gather_into_tensor(wide, x), [wide]),
        "shape in reduce_scatter": (lambda: dist.reduce_scatter(out, parts), [out]),
        "shape in gather": (lambda: dist.gather(x, at_root, 0), parts),
        "shape in scatter": (lambda: dist.scatter(out, at_root, 0), [out]),
        "shape in all_to_all": (lambda: dist.all_to_all(parts, [x] * size), parts),
        "shape in all_reduce_coalesced": (lambda: dist.all_reduce_coalesced([x, x]), [x]),
        "shapes of a reduce_scatter_tensor": (lambda: dist.reduce_scatter_tensor(flat, tall), [flat]),
        "shapes of an all_to_all_single": (lambda: dist.all_to_all_single(tall, tall + 1), [tall]),
        "a number and a list of one": (lambda: dist.all_reduce(x[0, :1] if rank else x[0, 0]), [x]),
    }  # fmt: skip


def test_shapes_may_differ_where_the_operation_takes_them() -> None:
    for hosts in (None, "abb"):
        run_ranks(f"{__name__}:_free_shapes", world_size=3, backend="photinus", hosts=hosts)


def _free_shapes(rank: int, world_size: int) -> None:
    """Lists of sizes that differ, by chance of as many elements; results in one piece."""
    import torch
    import torch.distributed as dist

    shapes = [(2, 6), (3, 4), (5, 2)]
    x = torch.full(shapes[rank], rank + 1.0)
    outs = [torch.zeros(shape) for shape in shapes]
    dist.all_gather(outs, x)
    assert [out.unique().tolist() for out in outs] == [[1.0], [2.0], [3.0]]
    dist.gather(x, outs if rank == 0 else None, 0)
    dist.scatter(x, outs if rank == 0 else None, 0)
    assert x.unique().tolist() == [rank + 1.0]
    wide = torch.zeros(12 * world_size)
    dist.all_gather(list(wide.chunk(world_size)), torch.full((3, 4), rank + 1.0))
    dist.all_gather_into_tensor(wide.view(world_size, 3, 4), torch.full((3, 4), rank + 1.0))
    assert wide.sum() == 12 * 6
    if rank < 2:
        message = torch.ones(6) if rank else torch.zeros(2, 3)
        (dist.send if rank else dist.recv)(message, 1 - rank)
        assert message.sum() == 6


def _splits(rank: int, size: int) -> list[int]:
    return [4, 2, *[3] * (size - 2)] if rank == size - 1 else [3] * size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_tensors_of_one_size_in_another_order_are_noticed_by_the_lines_of_their_calls(world_size: int) -> None:
    results = run_ranks(
        f"{__name__}:_swapped",
        world_size=world_size,
        backend="photinus",
        timeout_s=90,
        environ={"PHOTINUS_STRICT_SITES": "1"},
    )
    for value in values(results):
        assert value["error"].startswith("MismatchError"), value
        assert all(f"{HERE}:{line}" in value["error"] for line in value["lines"]), value
        assert value["untouched"]
        assert value["sum_after"] == world_size
        assert value["seconds"] < LIMIT_S


def test_tensors_of_one_size_in_another_order_are_warned_of_once_by_default() -> None:
    results = run_ranks(f"{__name__}:_swapped", world_size=2, backend="photinus", timeout_s=90)
    assert all(value["error"] == "no error" for value in values(results))
    said = "".join(result.output for result in results)
    assert said.count("ranks may be out of step") == 2, said  # swapped from the start; and after calls in step
    assert all(f"{HERE}:{line}" in said for line in values(results)[0]["lines"]), said


def _swapped(rank: int, world_size: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    loss, accuracy = torch.ones(2), torch.ones(2)
    calls: list[Any] = [
        lambda: dist.all_reduce(loss),
        lambda: dist.all_reduce(accuracy),
    ]
    if not os.environ.get("PHOTINUS_STRICT_SITES"):
        first: list[Any] = [
            lambda: dist.all_reduce(loss),
            lambda: dist.all_reduce(accuracy),
        ]
        for _ in range(2):
            for call in first if rank else first[::-1]:
                call()
    for _ in range(3):
        for call in calls:
            call()
    before = [loss.clone(), accuracy.clone()]
    dist.barrier()
    started, error = time.monotonic(), "no error"
    try:
        calls[rank == world_size - 1]()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    seconds = time.monotonic() - started
    untouched = torch.equal(loss, before[0]) and torch.equal(accuracy, before[1])
    dist.all_reduce(after := torch.ones(1))
    return {
        "error": error,
        "lines": [call.__code__.co_firstlineno for call in calls],
        "untouched": untouched,
        "sum_after": after.item(),
        "seconds": seconds,
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("extra", [False, True])
def test_a_rank_that_leaves_a_call_out_or_makes_one_too_many_ends_the_wait_of_the_others(
    world_size: int, extra: bool
) -> None:
    results = run_ranks(
        f"{__name__}:_one_call_apart", world_size=world_size, backend="photinus", timeout_s=90,
        arguments={"extra": extra},
    )  # fmt: skip
    for value in _those_that_waited(results, extra, world_size):
        assert value["error"].startswith("PeerLostError"), value
        assert f"{HERE}:{value['line']}" in value["error"], value
        assert value["seconds_after_the_end"] < LIMIT_S + 0.3, value
        assert value["untouched"]


def _those_that_waited(results: list[RankResult], extra: bool, world_size: int) -> list[Any]:
    odd = world_size - 1
    return [result.value for result in results if (result.rank == odd) == extra]


def _one_call_apart(rank: int, world_size: int, extra: bool) -> dict[str, Any]:
    """The odd rank makes one call more or less than the others; those with fewer leave the group 0.3 s later."""
    import torch
    import torch.distributed as dist

    values = torch.ones(5)
    dist.barrier()
    started, error = time.monotonic(), "no error"
    if (rank == world_size - 1) == extra:
        call: Any = lambda: dist.all_reduce(values)  # noqa: E731 - one line to quote
        try:
            call()
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {raised}"
        return {
            "error": error,
            "line": call.__code__.co_firstlineno,
            "seconds_after_the_end": time.monotonic() - started - 0.3,
            "untouched": torch.equal(values, torch.ones(5)),
        }
    time.sleep(0.3)
    return {}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_that_wait_for_each_other_in_different_groups_read_so(world_size: int) -> None:
    results = run_ranks(f"{__name__}:_crossed_groups", world_size=world_size, backend="photinus", timeout_s=90)
    found = values(results)
    arrived = max(value["called"] for value in found)
    slowest = max(value["raised"] for value in found) - arrived
    for value in found:
        # A rank may learn of the circle from one that has found it and left, before it finds it itself.
        assert value["error"].startswith(("MismatchError", "PeerLostError")), value
        assert "wait for each other" in value["error"], value
        assert value["untouched"]
        assert f"{HERE}:{value['line']}" in value["error"], value
    assert any(value["error"].startswith("MismatchError") for value in found)
    print(f"{world_size} ranks in two groups: the slowest error came {slowest * 1e3:.1f} ms after the last rank")
    assert slowest < LIMIT_S


def _crossed_groups(rank: int, world_size: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    mine = torch.ones(3)
    for group in groups:
        dist.all_reduce(mine, group=group)
    before = mine.clone()
    dist.barrier()
    time.sleep(0.02 * rank)
    group = groups[rank == world_size - 1]
    call: Any = lambda: dist.all_reduce(mine, group=group)  # noqa: E731 - one line to quote
    called, error = time.monotonic(), "no error"
    try:
        call()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "called": called,
        "raised": time.monotonic(),
        "untouched": torch.equal(mine, before),
        "line": call.__code__.co_firstlineno,
    }
