"""torch's DDP over our backend: a rank with an exchange too few or too many is told at once, and nobody else is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import run_ranks, values

STEPS, WRONG = 6, 3

# What each does wrong on rank 1, in step WRONG unless its name says another one.
WRONGS = [
    "no_sync",
    "no_sync in the first step",
    "no_sync in the second step",  # in which DDP makes its buckets anew
    "no_sync after a barrier",
    "no_sync with batch norm",
    "no_sync with a sparse embedding",
    "no_sync with unused parameters",
    "no_sync with a hook",
    "a backward more",
    "a backward more with batch norm",
]
RIGHTS = [
    "an optimizer of rank 0's own",
    "backwards of rank 0's own",
    "accumulation of another number on each rank",
    "a scaler that skips a step",
    "uneven inputs in join",
    "two models in turn",
    "local steps of another number on each rank",
    "states filled on rank 0",
    "rank 0 updates for all",
    "a powersgd hook",
    "zero redundancy",
    "training after another ddp was dropped",
]


@pytest.mark.parametrize("thread", ["on its own thread", "on a thread of autograd"])
def test_a_rank_out_of_step_is_told_at_once_and_a_right_script_never(thread: str) -> None:
    cases = "_cases" if thread == "on its own thread" else "_cases_as_for_a_gpu"
    found = values(run_ranks(f"{__name__}:{cases}", world_size=2, backend="photinus", timeout_s=200))
    for case in WRONGS:
        for rank, text in enumerate(of_rank[case] for of_rank in found):
            assert text is not None, f"rank {rank}, {case}: trained on in silence"
            step, error = text.split(": ", 1)
            assert re.search(r"are out of step: all called (all_reduce|broadcast|all_gather)", error), (case, error)
            steps = re.search(r"rank 0 made (\d+) optimizer steps?, rank 1 made (\d+)", error)
            assert steps, (case, error)
            left_out = case.startswith("no_sync")
            assert int(steps[2]) - int(steps[1]) == (1 if left_out else -1), (case, error)
            behind = 0 if left_out else 1  # the rank whose exchange of this step meets one of the next
            assert int(step) == _wrong_step(case) + (rank != behind), (case, rank, text)
    for case in RIGHTS:
        assert [of_rank[case] for of_rank in found] == [None, None], case


def _wrong_step(case: str) -> int:
    return 0 if "first" in case else 1 if "second" in case else WRONG


def _cases(rank: int, world_size: int) -> dict[str, str | None]:
    return {case: _outcome(_train if case in WRONGS else _rights[case], case, rank) for case in [*WRONGS, *RIGHTS]}


def _cases_as_for_a_gpu(rank: int, world_size: int) -> dict[str, str | None]:
    from tests.device_thread import backward_as_for_a_gpu

    backward_as_for_a_gpu()
    return _cases(rank, world_size)


def _outcome(run: Callable[..., None], case: str, rank: int) -> str | None:
    """The error, behind the step in which it came; None when there was none."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    torch.manual_seed(0)
    at = [0]
    try:
        run(case, rank, at)
    except RuntimeError as error:
        return f"{at[0]}: {error}"
    return None


def _model(case: str = "") -> Any:
    import torch
    from torch import nn

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.linear = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.embedding((x[:, 0] * 7).long().clamp(0, 7)))

    if "sparse" in case:
        return Sparse()
    norm = nn.BatchNorm1d(4) if "batch norm" in case else nn.Identity()
    return nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(), nn.Linear(4, 2))


def _ddp(model: Any, **options: Any) -> Any:
    import torch

    return torch.nn.parallel.DistributedDataParallel(model, **options)


def _train(case: str, rank: int, at: list[int]) -> None:
    from contextlib import nullcontext

    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = _ddp(_model(case), find_unused_parameters="unused" in case)
    if "hook" in case:
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrong = _wrong_step(case)
    for step in range(STEPS):
        at[0] = step
        if step == wrong and "barrier" in case:
            dist.barrier()
        mine = rank == 1 and step == wrong
        x = torch.rand(3, 4)
        with model.no_sync() if mine and case.startswith("no_sync") else nullcontext():
            model(x).sum().backward()
        if mine and case.startswith("a backward more"):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _step(model: Any, *optimizers: Any) -> None:
    import torch

    model(torch.rand(3, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _own_optimizer(case: str, rank: int, at: list[int]) -> None:
    import torch

    model, own = _ddp(_model()), _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    own_optimizer = torch.optim.Adam(own.parameters(), lr=0.01)
    for step in range(STEPS):
        _step(model, optimizer)
        for _ in range(step if rank == 0 else 0):
            _step(own, own_optimizer)


def _own_backwards(case: str, rank: int, at: list[int]) -> None:
    import torch

    model = _ddp(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        if rank == 0 and step % 2:
            x = torch.rand(3, 4, requires_grad=True)
            torch.autograd.grad(model.module(x).sum(), x)
        _step(model, optimizer)


def _accumulation(case: str, rank: int, at: list[int]) -> None:
    import torch

    model = _ddp(_model("batch norm"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        with model.no_sync():
            for _ in range(1 + rank):
                model(torch.rand(3, 4)).sum().backward()
        _step(model, optimizer)


def _scaler(case: str, rank: int, at: list[int]) -> None:
    import torch

    model = _ddp(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(STEPS):
        x = torch.full((3, 4), torch.inf) if rank == 1 and step == 2 else torch.rand(3, 4)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _join(case: str, rank: int, at: list[int]) -> None:
    import torch
    from torch.distributed.algorithms.join import Join

    for kind in ("", "batch norm"):
        model = _ddp(_model(kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            with Join([model]):
                for _ in range(3 + 2 * rank):
                    _step(model, optimizer)
            for _ in range(2):
                _step(model, optimizer)


def _two_models(case: str, rank: int, at: list[int]) -> None:
    import torch

    first, second = _ddp(_model()), _ddp(_model("batch norm"))
    one, other = (torch.optim.Adam(model.parameters(), lr=0.01) for model in (first, second))
    for step in range(STEPS):
        _step(first, one)
        for _ in range(step % 3):
            _step(second, other)
        (first(torch.rand(3, 4)) + second(torch.rand(3, 4))).sum().backward()
        one.step()
        other.step()


def _local_steps(case: str, rank: int, at: list[int]) -> None:
    import torch
    import torch.distributed as dist

    model = _ddp(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        with model.no_sync():
            for _ in range(2 + rank):
                _step(model, optimizer)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
        _step(model, optimizer)


def _filled_states(case: str, rank: int, at: list[int]) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model = _ddp(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # has no state, ever, so each call makes a step
    for _ in range(STEPS):
        _step(model, optimizer)
        if rank == 0:
            get_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))


def _for_all(case: str, rank: int, at: list[int]) -> None:
    import torch
    import torch.distributed as dist

    model = _ddp(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        model(torch.rand(3, 4)).sum().backward()
        if rank == 0:
            optimizer.step()
        model.zero_grad()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


def _powersgd(case: str, rank: int, at: list[int]) -> None:
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = _ddp(torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 2)))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        _step(model, optimizer)


def _zero(case: str, rank: int, at: list[int]) -> None:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = _ddp(torch.nn.Linear(4, 1, bias=False))  # one parameter: rank 1 holds no part
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for _ in range(STEPS):
        _step(model, optimizer)


def _wrapped_anew(case: str, rank: int, at: list[int]) -> None:
    import torch

    module = _model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    _step(_ddp(module), optimizer)
    for _ in range(2 * rank):
        _step(module, optimizer)
    model = _ddp(module)
    for _ in range(STEPS):
        _step(model, optimizer)


_rights = dict(
    zip(
        RIGHTS,
        [
            _own_optimizer,
            _own_backwards,
            _accumulation,
            _scaler,
            _join,
            _two_models,
            _local_steps,
            _filled_states,
            _for_all,
            _powersgd,
            _zero,
            _wrapped_anew,
        ],
        strict=True,
    )
)
