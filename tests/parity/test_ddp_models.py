"""Twenty steps of models as people train them: the gradients of each step, from the same weights, against two oracles.

The naive one: a bare copy whose gradients are averaged by one all-reduce per parameter after backward. Ours must have
the same bits over photinus, where the order of addition is that of the ranks wherever an element lies. And torch's
class: the same bits with two ranks (but for underflow in float16), and to 1e-6 with more.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from photinus.parallel import DistributedDataParallel
from tests.dist.ddp_checks import assert_close_in
from tests.dist.naive import average_gradients
from tests.ranks import RanksFailedError, run_ranks, values

STEPS = 20
SIZES = {"bucket_cap_mb": 0.1}  # several buckets, whose layout is learned anew after the first step


class Residual(nn.Module):
    """ResNet-18's basic block."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.short = nn.Conv2d(inputs, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + self.short(x))


def resnet() -> nn.Module:
    """ResNet-18 with a fourth of its widths and half of its blocks."""
    stages = [Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 64, 2), Residual(64, 128, 2)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def image_loss(net: nn.Module, step: int, data: torch.Generator) -> torch.Tensor:
    return F.cross_entropy(net(torch.randn(4, 3, 16, 16, generator=data)), torch.randint(10, (4,), generator=data))


class GPT(nn.Module):
    """Two blocks of GPT-2; the embedding is the head, so its gradient comes in two pieces."""

    def __init__(self, width: int = 32, vocabulary: int = 61, context: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, src_mask=mask)
        return F.linear(self.norm(x), self.tokens.weight)


def token_loss(net: nn.Module, step: int, data: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(61, (3, 12), generator=data)
    return F.cross_entropy(net(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Experts(nn.Module):
    """Each step uses other layers, other ones on each rank; one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 24)
        self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.head = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.head(torch.tanh(self.experts[chosen](self.gate(x))))


def expert_loss(net: nn.Module, step: int, data: torch.Generator) -> torch.Tensor:
    return net(torch.randn(5, 8, generator=data), (step + dist.get_rank()) % 3).square().mean()


class Recurrent(nn.Module):
    """One cell used many times, a decoder that shares the encoder's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 16)
        self.out = nn.Linear(16, 8, bias=False)
        self.back = nn.Linear(8, 16, bias=False)
        self.back.weight = nn.Parameter(self.out.weight.detach().t().clone())
        self.again = self.back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 16)
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state) + self.again(self.back(state[:, :8])[:, :8])
        return self.out(state)


def sequence_loss(net: nn.Module, step: int, data: torch.Generator) -> torch.Tensor:
    return net(torch.randn(4, 6, 8, generator=data)).square().mean()


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(6, 64)
        self.wide = nn.Linear(64, 64, dtype=torch.float64)
        self.brain = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.narrow = nn.Parameter(torch.randn(64, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(torch.tanh(self.single(x)).double())
        return self.brain(x.to(torch.bfloat16)).float() * self.narrow.float()


def vector_loss(net: nn.Module, step: int, data: torch.Generator) -> torch.Tensor:
    return net(torch.randn(5, 6, generator=data)).square().mean()


Loss = Callable[[nn.Module, int, torch.Generator], torch.Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Loss, dict[str, Any]]] = {
    "resnet": (resnet, image_loss, {}),
    "gpt": (GPT, token_loss, {}),
    "unused parameters": (Experts, expert_loss, {"find_unused_parameters": True}),
    "shared weights": (Recurrent, sequence_loss, {}),
    "mixed dtypes": (MixedDtypes, vector_loss, {}),
}


def twenty_steps(name: str, world_size: int, *, same_bits: bool) -> None:
    make, loss_of, options = MODELS[name]
    torch.manual_seed(5)
    bare = make()
    ours = DistributedDataParallel(copy.deepcopy(bare), **SIZES, **options)
    theirs = nn.parallel.DistributedDataParallel(copy.deepcopy(bare), **SIZES, **options)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.02, momentum=0.9)
    for step in range(STEPS):
        for net in (bare, theirs.module):
            net.load_state_dict(ours.module.state_dict())
        for net in (ours, theirs, bare):
            net.zero_grad()
            data = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            loss_of(net, step, data).backward()
        average_gradients(bare)
        named = ours.module.named_parameters()
        for (where, p), q, naive in zip(named, theirs.module.parameters(), bare.parameters(), strict=True):
            what = f"{name}, step {step}, {where}"
            assert (p.grad is None) == (q.grad is None) == (naive.grad is None), what
            if p.grad is None or q.grad is None or naive.grad is None:
                continue
            if same_bits:
                assert torch.equal(p.grad, naive.grad), f"{what}: not the naive average"
            else:
                assert_close_in(p.dtype, p.grad, naive.grad, what)
            if world_size == 2:
                assert same_but_for_underflow(p.grad, q.grad), f"{what}: not as torch's class has it"
            else:
                assert_close_in(p.dtype, p.grad, q.grad, what)
        optimizer.step()


def same_but_for_underflow(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """torch's class halves before it adds: a subnormal float16 loses a bit by that."""
    if ours.dtype != torch.float16:
        return torch.equal(ours, theirs)
    numbers = torch.finfo(ours.dtype)
    smallest, ulps = numbers.smallest_normal * numbers.eps, ours.abs().float() * numbers.eps
    return bool(((ours.float() - theirs.float()).abs() <= 2 * smallest + ulps).all())


def all_models(rank: int, world_size: int, same_bits: bool) -> dict[str, str | None]:
    outcome: dict[str, str | None] = {}
    for name in MODELS:
        try:
            twenty_steps(name, world_size, same_bits=same_bits)
            outcome[name] = None
        except Exception:  # noqa: BLE001 - reported as the model's outcome
            outcome[name] = traceback.format_exc()
    return outcome


@cache
def outcomes(backend: str, world_size: int) -> list[dict[str, str | None]] | RanksFailedError:
    """One set of processes trains all models."""
    try:
        run = run_ranks(
            "tests.parity.test_ddp_models:all_models",
            world_size=world_size,
            backend=backend,
            timeout_s=220,
            arguments={"same_bits": backend == "photinus" or world_size == 2},
        )
    except RanksFailedError as error:
        return error
    return values(run)


@pytest.mark.parametrize(
    ("backend", "world_size"),
    [
        ("photinus", 2),
        *(
            pytest.param(backend, world_size, marks=pytest.mark.slow)
            for backend, world_size in (("photinus", 3), ("photinus", 4), ("gloo", 2), ("gloo", 3), ("gloo", 4))
        ),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_each_of_twenty_steps_has_the_gradients_of_both_oracles(name: str, backend: str, world_size: int) -> None:
    results = outcomes(backend, world_size)
    if isinstance(results, RanksFailedError):
        pytest.fail(str(results), pytrace=False)
    failed = [f"----- rank {rank}\n{found[name]}" for rank, found in enumerate(results) if found[name]]
    if failed:
        pytest.fail("\n".join(failed), pytrace=False)
