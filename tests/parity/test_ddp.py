"""Our DistributedDataParallel trains as torch's does: same model, same data, same group, step by step.

With two ranks bit for bit. With three, gloo's order of addition depends on where an element lies in a buffer, and the
two lay out buffers differently, so there to 1e-6.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from photinus.parallel import DistributedDataParallel
from tests.dist.ddp_checks import TwoHeads, assert_close_in, run_each_check

STEPS = 6


def train_side_by_side(
    group: dist.ProcessGroup,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, int, torch.Generator], torch.Tensor],
    *,
    accumulate: int = 1,
    **options: Any,
) -> None:
    """Trains a copy under each class and compares gradients, parameters and buffers after every step."""
    torch.manual_seed(21 + group.rank())  # each rank its own weights: rank 0's count
    model = make_model()
    ours = DistributedDataParallel(copy.deepcopy(model), process_group=group, bucket_cap_mb=0.05, **options)
    theirs = nn.parallel.DistributedDataParallel(model, process_group=group, **options)
    optimizers = [make_optimizer(net.parameters()) for net in (ours, theirs)]
    exact = group.size() == 2
    for step in range(STEPS):
        for net, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            for micro in range(accumulate - 1):
                with net.no_sync():
                    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + group.rank())
                    loss_of(net, step, generator).backward()
            loss_of(net, step, torch.Generator().manual_seed(5000 + 10 * step + group.rank())).backward()
        for (name, p), q in zip(ours.module.named_parameters(), theirs.module.parameters(), strict=True):
            compare(p.grad, q.grad, exact, f"gradient of {name}, step {step}")
        for optimizer in optimizers:
            optimizer.step()
        if not exact:  # each step from the same weights: rounding is compared, not what it grows into
            ours.module.load_state_dict(theirs.module.state_dict())
            continue
        parameters = dict(theirs.module.named_parameters())
        for (name, a), b in zip(ours.module.state_dict().items(), theirs.module.state_dict().values(), strict=True):
            if name in parameters or group.rank() == 0:  # others get rank 0's buffers later than here, see below
                compare(a, b, True, f"{name}, step {step}")


def compare(a: torch.Tensor | None, b: torch.Tensor | None, exact: bool, what: str) -> None:
    assert (a is None) == (b is None), what
    if a is None or b is None:
        return
    if a.is_sparse or b.is_sparse:
        assert a.is_sparse, what
        assert b.is_sparse, what
        a, b = a.to_dense(), b.to_dense()
    if exact:
        assert torch.equal(a, b), f"{what}: {(a - b).abs().max()}"
    else:
        assert_close_in(a.dtype, a, b, what)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(parameters: Any) -> torch.optim.Optimizer:
    # eps large enough that rounding of a gradient near zero does not decide the sign of a step
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-3)


# ---- models


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def image_loss(net: nn.Module, step: int, generator: torch.Generator) -> torch.Tensor:
    images = torch.randn(4, 1, 8, 8, generator=generator)
    return nn.functional.cross_entropy(net(images), torch.randint(10, (4,), generator=generator))


class SharedWeights(nn.Module):
    """A language model in small: tied embeddings and a block that is used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for _ in range(3):
            x = x + self.block(x)
        return self.head(x)


def token_loss(net: nn.Module, step: int, generator: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(30, (3, 7), generator=generator)
    return nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(6, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.brain = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.narrow = nn.Parameter(torch.randn(8, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(torch.tanh(self.single(x)).double())
        x = self.brain(x.to(torch.bfloat16))
        return x.float() * self.narrow.float()


def vector_loss(net: nn.Module, step: int, generator: torch.Generator) -> torch.Tensor:
    return net(torch.randn(5, 6, generator=generator)).square().mean()


def branch_loss(net: nn.Module, step: int, generator: torch.Generator) -> torch.Tensor:
    """Other heads on each rank and step; the third head never."""
    head = (step + dist.get_rank()) % 2 if step < 4 else 0
    return net(torch.randn(5, 6, generator=generator), head)["out"][0].square().mean()


class SparseRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(12, 5, sparse=True)
        self.out = nn.Linear(5, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.out(self.rows(indices))


def sparse_loss(net: nn.Module, step: int, generator: torch.Generator) -> torch.Tensor:
    return net(torch.randint(12, (2, 3), generator=generator)).square().mean()


# ---- checks


def check_convolutions_and_batch_norm_with_momentum(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, convolutional, sgd, image_loss)


def check_convolutions_and_batch_norm_with_adam(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, convolutional, adam, image_loss)


def check_shared_weights(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, SharedWeights, adam, token_loss)


def check_gradient_accumulation_in_no_sync(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, SharedWeights, sgd, token_loss, accumulate=3)


def check_mixed_dtypes(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, MixedDtypes, sgd, vector_loss)


def check_unused_parameters(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, TwoHeads, adam, branch_loss, find_unused_parameters=True)


def check_unused_parameters_with_accumulation(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, TwoHeads, sgd, branch_loss, find_unused_parameters=True, accumulate=2)


def check_sparse_gradients(group: dist.ProcessGroup) -> None:
    train_side_by_side(group, SparseRows, lambda p: torch.optim.SGD(p, lr=0.1), sparse_loss)


def check_validation_on_all_ranks_sees_what_it_sees_under_torchs_class(group: dist.ProcessGroup) -> None:
    """With the statistics of rank 0, and bit for bit: after steps, after accumulation, and again after validation."""
    torch.manual_seed(21)
    model = convolutional()
    ours = DistributedDataParallel(copy.deepcopy(model), process_group=group)
    theirs = nn.parallel.DistributedDataParallel(model, process_group=group)
    nets = (ours, theirs)
    optimizers = [sgd(net.parameters()) for net in nets]
    images = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(3))  # the same on every rank

    for step in range(4):
        seen = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            net.train()
            optimizer.zero_grad()
            if step % 2:
                with net.no_sync():
                    image_loss(net, step, torch.Generator().manual_seed(90 * step + group.rank())).backward()
            image_loss(net, step, torch.Generator().manual_seed(70 * step + group.rank())).backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                seen.append([net(images), *net.module.buffers()])
        for a, b in zip(*seen, strict=True):
            if step % 2 == 0:  # torch's leaves each rank its own after no_sync
                compare(a, b, group.size() == 2, f"validation after step {step}")
        everyone = [torch.empty_like(seen[0][0]) for _ in range(group.size())]
        dist.all_gather(everyone, seen[0][0], group=group)
        assert all(torch.equal(everyone[0], other) for other in everyone)
        ours.module.load_state_dict(theirs.module.state_dict() if group.size() > 2 else ours.module.state_dict())


test_training_as_under_torchs_class = run_each_check(__name__)
