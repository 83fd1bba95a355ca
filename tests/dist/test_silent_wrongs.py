"""What torch gets wrong without a word, or refuses on CPU, is right here or refused with a reason.

Every case says "right", "wrong: ..." or "refused: ..." of what it was run with, so that the same case shows what
torch's own classes over gloo do. docs/conformance.md has the table.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import pytest

from tests.conformance import baseline
from tests.ranks import RanksFailedError, run_ranks, values

OF_THE_BACKEND = {"two_dtypes": "refused: MismatchError", "strided": "right", "strided_lists": "right"}
OF_DDP = [
    "delayed_parameters",
    "sync_batch_norm",
    "bf16_hook",
    "mixed_precision",
    "optimizer_in_backward",
    "overlap_in_the_first_step",
]
TORCH = {
    "two_dtypes": "wrong",
    "strided": "wrong",
    "strided_lists": "wrong",
    "delayed_parameters": "wrong",
    "sync_batch_norm": "refused: ValueError: SyncBatchNorm layers only work with GPU modules",
    "bf16_hook": "refused",
    "mixed_precision": "refused: RuntimeError: cpu backend doesn't support events.",
    "optimizer_in_backward": "refused: RuntimeError: Cannot access accelerator device when none is available.",
    "overlap_in_the_first_step": "wrong: the exchange began after the last gradient",
}


@pytest.mark.parametrize("case", OF_THE_BACKEND)
def test_the_backend_is_right_or_refuses(case: str) -> None:
    assert_all_say(OF_THE_BACKEND[case], case, "photinus", "photinus")


@pytest.mark.parametrize("backend", ["gloo", "photinus"])
@pytest.mark.parametrize("case", OF_DDP)
def test_ddp_is_right(case: str, backend: str) -> None:
    assert_all_say("right", case, "photinus", backend)


@pytest.mark.slow
@pytest.mark.parametrize("case", TORCH)
def test_torch_is_as_the_table_says(case: str) -> None:
    if (unknown := baseline.unknown_because()) is not None:
        pytest.skip(unknown)
    found = said("torch", "gloo")
    assert any(rank[case].startswith(TORCH[case]) for rank in found), (
        f"{[rank[case] for rank in found]}: torch does better than docs/conformance.md says; change its table"
    )


def assert_all_say(expected: str, case: str, classes: str, backend: str) -> None:
    for rank, cases in enumerate(said(classes, backend)):
        assert cases[case].startswith(expected), f"rank {rank}: {cases[case]}"


def said(classes: str, backend: str) -> list[dict[str, str]]:
    """What each rank says of every case; the processes run once per kind of classes and backend."""
    found = _outcome(classes, backend)
    if isinstance(found, RanksFailedError):
        pytest.fail(str(found), pytrace=False)
    return found


@cache
def _outcome(classes: str, backend: str) -> list[dict[str, str]] | RanksFailedError:
    case = f"{__name__}:_cases"
    try:
        return values(
            run_ranks(case, world_size=2, backend=backend, timeout_s=120, arguments={"classes": classes})
        )  # fmt: skip
    except RanksFailedError as error:
        return error


def _cases(rank: int, world_size: int, classes: str) -> dict[str, str]:
    import torch
    import torch.distributed as dist
    from torch import nn

    import photinus

    ddp: Any = photinus.DistributedDataParallel if classes == "photinus" else nn.parallel.DistributedDataParallel
    batch_norm: Any = photinus.SyncBatchNorm if classes == "photinus" else nn.SyncBatchNorm
    cases: dict[str, Callable[[Any], str]] = {
        "two_dtypes": two_dtypes,
        "strided": strided,
        "strided_lists": strided_lists,
        "delayed_parameters": lambda group: delayed_parameters(group, ddp),
        "sync_batch_norm": lambda group: sync_batch_norm(group, ddp, batch_norm),
        "bf16_hook": lambda group: bf16_hook(group, ddp),
        "mixed_precision": lambda group: mixed_precision(group, ddp),
        "optimizer_in_backward": lambda group: optimizer_in_backward(group, ddp),
        "overlap_in_the_first_step": lambda group: overlap_in_the_first_step(group, ddp),
    }
    found: dict[str, str] = {}
    for name, case in cases.items():
        print(name, flush=True)  # shown should one hang or end the process
        group = dist.new_group(timeout=timedelta(seconds=20))
        torch.manual_seed(7)
        try:
            found[name] = case(group)
        except Exception as error:  # noqa: BLE001 - what is raised is what is looked at
            found[name] = f"refused: {type(error).__name__}: {error}"
        dist.barrier()
    return found


def verdict(got: Any, expected: Any, tolerance: float = 1e-6) -> str:
    import torch

    if torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance):
        return "right"
    return f"wrong: {got.flatten()[:6].tolist()} in place of {expected.flatten()[:6].tolist()}"


def model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))


def batch(place: int) -> Any:
    import torch

    return torch.randn(5, 6, generator=torch.Generator().manual_seed(place))


def averages(net: Any, size: int) -> list[Any]:
    """The gradients of `net`, averaged over the batches of all ranks, by one process."""
    import torch

    twins = [copy.deepcopy(net) for _ in range(size)]
    for place, twin in enumerate(twins):
        twin(batch(place)).square().mean().backward()
    return [torch.stack([p.grad for p in same]).mean(0) for same in zip(*(t.parameters() for t in twins), strict=True)]


def all_equal(got: list[Any], expected: list[Any], tolerance: float = 1e-6) -> str:
    verdicts = [verdict(a, b, tolerance) for a, b in zip(got, expected, strict=True)]
    return next((said for said in verdicts if said != "right"), "right")


# ---- the backend


def two_dtypes(group: Any) -> str:
    """One rank adds floats, the other integers of the same width."""
    import torch
    import torch.distributed as dist

    tensor = torch.full((4,), 2, dtype=torch.int32 if group.rank() else torch.float32)
    dist.all_reduce(tensor, group=group)
    return verdict(tensor, torch.full((4,), 4.0))


def strided(group: Any) -> str:
    """Every second element is added; those between stay."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(12)
    dist.all_reduce(whole[::2], group=group)
    return verdict(whole, torch.tensor([float(group.size()), 1.0]).repeat(6))


def strided_lists(group: Any) -> str:
    """Columns go round in every collective that takes lists."""
    import torch
    import torch.distributed as dist

    size, mine = group.size(), torch.arange(10.0).view(5, 2) + 100 * group.rank()
    expected = torch.stack([torch.arange(0.0, 10, 2) + 100 * place for place in range(size)], 1)
    gathered = torch.full((5, 2 * size), -1.0)
    columns = [gathered[:, 2 * place] for place in range(size)]
    dist.all_gather(columns, mine[:, 0], group=group)
    swapped = torch.full((5, 2 * size), -1.0)
    dist.all_to_all([swapped[:, 2 * place] for place in range(size)], [mine[:, 0]] * size, group=group)
    scattered = torch.full((5, 2), -1.0)
    dist.scatter(scattered[:, 0], list(expected.unbind(1)) if group.rank() == 0 else None, 0, group=group)
    sent = mine.clone()
    dist.broadcast(sent[:, 0], size - 1, group=group)
    between = torch.cat([gathered[:, 1::2], swapped[:, 1::2], scattered[:, 1:]], 1)
    return all_equal(
        [gathered[:, ::2], swapped[:, ::2], scattered[:, 0], sent[:, 0], between],
        [expected, expected, expected[:, group.rank()], expected[:, -1], torch.full_like(between, -1.0)],
    )


# ---- DDP


def delayed_parameters(group: Any, ddp: Any) -> str:
    """`delay_all_reduce_named_params`: one rank comes late to them alone; they are looked at right after backward."""
    from torch import nn

    net = nn.Sequential(nn.Linear(6, 40, bias=False), nn.ReLU(), nn.Linear(40, 3))
    expected = averages(net, group.size())
    first = net[0].weight
    wrapped = ddp(
        net, process_group=group, delay_all_reduce_named_params=[("0.weight", first)], param_to_hook_all_reduce=first
    )  # fmt: skip
    if group.rank() == group.size() - 1:
        first.register_hook(lambda gradient: time.sleep(0.5))
    wrapped(batch(group.rank())).square().mean().backward()
    return all_equal([p.grad.clone() for p in net.parameters()], expected)


def sync_batch_norm(group: Any, ddp: Any, batch_norm: Any) -> str:
    import torch
    from torch import nn

    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    whole = copy.deepcopy(net)
    whole(torch.cat([batch(place) for place in range(group.size())])).square().mean().backward()
    wrapped = ddp(batch_norm.convert_sync_batchnorm(net, group), process_group=group)
    wrapped(batch(group.rank())).square().mean().backward()
    got = [p.grad for p in wrapped.module.parameters()] + [wrapped.module[1].running_var]
    return all_equal(got, [p.grad for p in whole.parameters()] + [whole[1].running_var], 1e-5)


def bf16_hook(group: Any, ddp: Any) -> str:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    net = model()
    expected = averages(net, group.size())
    wrapped = ddp(net, process_group=group)
    wrapped.register_comm_hook(group, bf16_compress_hook)
    wrapped(batch(group.rank())).square().mean().backward()
    return all_equal([p.grad for p in net.parameters()], expected, 2e-2)


def mixed_precision(group: Any, ddp: Any) -> str:
    import torch
    from torch.nn.parallel.distributed import _MixedPrecision

    net = model()
    expected = averages(net, group.size())
    low = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
    wrapped = ddp(net, process_group=group, mixed_precision=low)
    output = wrapped(batch(group.rank()))
    if output.dtype != torch.bfloat16:
        return f"wrong: the output is of {output.dtype}"
    output.float().square().mean().backward()
    return all_equal([p.grad for p in net.parameters()], expected, 3e-2)


def optimizer_in_backward(group: Any, ddp: Any) -> str:
    import torch
    from torch.distributed.optim import _apply_optimizer_in_backward

    net = model()
    expected = [p - 0.5 * g for p, g in zip(copy.deepcopy(net).parameters(), averages(net, group.size()), strict=True)]
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.5})
    wrapped = ddp(net, process_group=group)
    wrapped(batch(group.rank())).square().mean().backward()
    return all_equal(list(net.parameters()), expected)


def overlap_in_the_first_step(group: Any, ddp: Any) -> str:
    """In the first backward, the last gradient is held back until a bucket's average has come from the other rank."""
    import torch
    import torch.distributed as dist

    net, futures = model(), []
    wrapped = ddp(net, process_group=group, bucket_cap_mb=1 / 1024)

    def averaged(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        futures.append(work.get_future())
        return futures[-1].then(lambda future: future.value()[0])

    averaged.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    seen = []

    def wait_for_the_first(gradient: torch.Tensor) -> None:
        deadline = time.monotonic() + 5
        while futures and not futures[0].done() and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append("before" if futures and futures[0].done() else "after")

    wrapped.register_comm_hook(None, averaged)
    net[0].weight.register_hook(wait_for_the_first)
    wrapped(batch(group.rank())).square().mean().backward()
    return "right" if seen == ["before"] else f"wrong: the exchange began {', '.join(seen)} the last gradient"
