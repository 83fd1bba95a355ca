"""Values that travel between hosts in another type: which bits come of it, on which ranks, and what is left alone.

Two hosts of two ranks, told apart by PHOTINUS_HOST_ID.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks, values

SIZE = 4
ELEMS = (5, 30_000)  # through a flat slot; in chunks


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, list[str]]]:
    """For each rank what was not as it had to be, by subject; one run, since starting takes most of the time."""
    found = run_ranks(f"{__name__}:_on_two_hosts", world_size=SIZE, backend="photinus", hosts="aabb", timeout_s=90)
    return values(found)


@pytest.mark.parametrize("subject", ["narrow", "wide", "left alone", "gradients"])
def test_what_travels_in_another_type_has_the_bits_that_are_promised(
    four_ranks: list[dict[str, list[str]]], subject: str
) -> None:
    assert [found[subject] for found in four_ranks] == [[]] * SIZE


def test_ranks_that_ask_for_different_types_all_hear_of_it(four_ranks: list[dict[str, list[str]]]) -> None:
    for found in four_ranks:
        (message,) = found["mismatch"]
        assert "ranks 0-3 called" not in message
        assert "rank 3 called all_reduce of float32[7] (sum) as float16 between hosts" in message
        assert "ranks 0, 1, 2 called all_reduce of float32[7] (sum) as bfloat16 between hosts" in message


def _on_two_hosts(rank: int, world_size: int) -> dict[str, list[str]]:
    import os

    import torch
    import torch.distributed as dist

    from photinus.backend import Options

    found: dict[str, list[str]] = {"narrow": [], "wide": [], "left alone": []}
    groups = {
        wire: dist.new_group(backend="photinus", pg_options=Options(getattr(torch, wire)))
        for wire in ("bfloat16", "float16", "float32")
    }
    for wire in ("bfloat16", "float16"):
        found["narrow"] += _check_narrow(groups[wire], getattr(torch, wire), rank)
        found["left alone"] += _check_left_alone(groups[wire], rank)
    by_device = dist.new_group(backend="cpu:photinus,cuda:gloo", pg_options=Options(torch.bfloat16))
    found["narrow"] += _check_narrow(by_device, torch.bfloat16, rank)
    found["wide"] = _check_wide(groups["float32"], rank)
    found["gradients"] = _check_gradients(rank)
    found["mismatch"] = [_mismatch(dist.group.WORLD, torch.float16 if rank == 3 else torch.bfloat16)]
    os.environ["PHOTINUS_HOST_ID"] = "one"
    together = dist.new_group(backend="photinus", pg_options=Options(torch.bfloat16))
    if not torch.equal(_reduced(together, "SUM", (given := _given(1000))[rank]), _tree(*given)):
        found["left alone"].append("a sum inside one host")
    return found


def _given(elems: int, dtype: str = "float32") -> list[Any]:
    """What each rank gives."""
    import torch

    return [
        torch.randn(elems, generator=torch.Generator().manual_seed(10 * elems + rank)).to(getattr(torch, dtype))
        for rank in range(SIZE)
    ]


def _tree(a: Any, b: Any, c: Any, d: Any) -> Any:
    return (a + b) + (c + d)


def _reduced(group: Any, op: str, given: Any) -> Any:
    import torch.distributed as dist

    dist.all_reduce(result := given.clone(), getattr(dist.ReduceOp, op), group)
    return result


def _check_narrow(group: Any, wire: Any, rank: int) -> list[str]:
    import torch
    import torch.distributed as dist

    wrong = []
    for elems in ELEMS:
        given = _given(elems * SIZE)
        hosts = [(given[host] + given[host + 1]).to(wire).float() for host in (0, 2)]
        total = hosts[0] + hosts[1]
        for op, expected in (("SUM", total), ("AVG", total / SIZE)):
            crossed = expected.to(wire).float()
            if not torch.equal(_reduced(group, op, given[rank]), crossed):
                wrong.append(f"all_reduce {wire} {op} {elems}")
            reduced = given[rank].clone()
            dist.reduce(reduced, 2, getattr(dist.ReduceOp, op), group)
            if not torch.equal(reduced, crossed if rank == 2 else given[rank]):
                wrong.append(f"reduce {wire} {op} {elems}")
            part = torch.empty(elems)
            dist.reduce_scatter_tensor(part, given[rank], getattr(dist.ReduceOp, op), group)
            if not torch.equal(part, expected[rank * elems : (rank + 1) * elems]):
                wrong.append(f"reduce_scatter {wire} {op} {elems}")
        phased = torch.complex(given[rank], given[0])
        dist.all_reduce(phased, group=group)
        if not torch.equal(phased.real, total.to(wire).float()):
            wrong.append(f"all_reduce of complex numbers, {wire} {elems}")
    huge = _reduced(group, "SUM", torch.full((3,), 30_000.0))
    if wire is torch.float16 and not bool(huge.isinf().all()):  # 120,000 are no float16
        wrong.append("overflow")
    return wrong


def _check_wide(group: Any, rank: int) -> list[str]:
    import torch

    wrong = []
    for dtype in ("bfloat16", "float16"):
        for elems in ELEMS:
            given = _given(elems, dtype)
            expected = _tree(*(each.float() for each in given)).to(given[0].dtype)  # as on one host
            if not torch.equal(_reduced(group, "SUM", given[rank]), expected):
                wrong.append(f"{dtype} {elems}")
            if elems == ELEMS[1] and torch.equal(_reduced(None, "SUM", given[rank]), expected):
                wrong.append(f"{dtype}: no rounding between hosts would show")
    return wrong


def _check_left_alone(group: Any, rank: int) -> list[str]:
    import torch
    import torch.distributed as dist

    wrong = []
    for dtype, op, elems in (("float32", "MAX", 5000), ("float64", "SUM", 5000), ("int32", "SUM", 5000)):
        given = [(each * 1e6).to(getattr(torch, dtype)) for each in _given(elems)]
        if not torch.equal(_reduced(group, op, given[rank]), _reduced(None, op, given[rank])):
            wrong.append(f"{op} of {dtype}")
    given = _given(5000)
    dist.broadcast(sent := given[rank].clone(), 1, group)
    dist.all_gather(gathered := [torch.empty(5000) for _ in range(SIZE)], given[rank], group)
    if not torch.equal(sent, given[1]) or not torch.equal(torch.stack(gathered), torch.stack(given)):
        wrong.append("broadcast or all_gather")
    return wrong


def _check_gradients(rank: int) -> list[str]:
    """DDP's gradients travel in 16 bits, and nothing else does."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import photinus

    wrong = []
    for wire in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(40, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))
        model = photinus.DistributedDataParallel(plain, bucket_cap_mb=0.02, wire_dtype=wire)
        inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
        for _ in range(2):  # buckets are cut anew after the first backward
            model.zero_grad()
            with model.no_sync():
                model(inputs).square().mean().backward()
            local = [parameter.grad.clone() for parameter in plain.parameters()]  # type: ignore[union-attr]
            running = plain[1].running_mean.clone()
            model.zero_grad()
            plain[1].running_mean.copy_(running)
            model(inputs).square().mean().backward()
            for mine, (name, parameter) in zip(local, plain.named_parameters(), strict=True):
                dist.all_gather(of_all := [torch.empty_like(mine) for _ in range(SIZE)], mine.contiguous())
                hosts = [(of_all[host] + of_all[host + 1]).to(wire).float() for host in (0, 2)]
                if not torch.equal(parameter.grad, ((hosts[0] + hosts[1]) / SIZE).to(wire).float()):  # type: ignore[arg-type]
                    wrong.append(f"{wire} {name}")
        dist.all_gather(means := [torch.empty(300) for _ in range(SIZE)], plain[1].running_mean)
        if any(not torch.equal(mean, means[0]) for mean in means):
            wrong.append(f"{wire} buffers differ")
        if torch.equal(means[0], means[0].to(wire).float()):
            wrong.append(f"{wire} buffers were rounded")
        if not torch.equal(_reduced(None, "SUM", (given := _given(50))[rank]), _tree(*given)):
            wrong.append(f"{wire} a sum beside DDP")
    return wrong


def _mismatch(group: Any, wire: Any) -> str:
    import torch
    import torch.distributed as dist

    from photinus.errors import MismatchError

    try:
        group.all_reduce_as(torch.ones(7), dist.ReduceOp.SUM, wire).wait()
    except MismatchError as error:
        return str(error)
    return "no error"
