"""Losses that are no means over samples have one curve at every number of ranks, under every strategy.

Class weights, targets that are ignored, means over tokens with padding, sums, a GAN; batches that accumulate; 32
samples on 3 ranks; ranks whose part has nothing that counts. The loss of each step, the norm before clipping,
valid_loss and the last weights are compared with one process's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import TensorDataset

import photinus
from photinus.runlog.tables import read_rows
from photinus.trainer.checkpoint.folder import find_checkpoint
from photinus.trainer.weighted_means import WeightedMeans
from tests.ranks import run_ranks
from tests.small_run import QUIET

STRATEGIES = ["ddp", "zero1", "zero2", "zero3"]
SAMPLES, BATCH_SIZE, TOKENS, CLASSES, WIDTH = 80, 32, 6, 5, 8
PAD = 0
ONCE = photinus.Saving(every_epochs=1000)  # an epoch has two batches


def texts(samples: int = SAMPLES, seed: int = 1) -> TensorDataset:
    """Inputs [n, TOKENS] and targets of the same shape, which are PAD in most places: in half the rows everywhere."""
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(1, CLASSES, (samples, TOKENS), generator=generator) for _ in range(2))
    lengths = torch.randint(-TOKENS, TOKENS, (samples, 1), generator=generator)
    return TensorDataset(inputs, torch.where(torch.arange(TOKENS) < lengths, targets, PAD))


def rows(samples: int = SAMPLES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


class Tokens(nn.Sequential):
    """Tokens [n, TOKENS] -> scores [n, CLASSES, TOKENS]."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = super().forward(tokens)  # type: ignore[no-untyped-call]
        return scores.transpose(1, 2)


def per_token(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over the tokens that are no padding, and how many these are."""
    losses = cross_entropy(scores, targets, reduction="none")
    return (losses * (targets != PAD)).sum(), (targets != PAD).sum()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


CLASS_WEIGHTS = torch.tensor([0.1, 1.0, 3.0, 0.5, 9.0])
# By name: the model, the data and the loss of a Trainer.
LOSSES: dict[str, tuple[Any, Any, Any]] = {
    "class weights": (classifier, rows, lambda: nn.CrossEntropyLoss(CLASS_WEIGHTS, label_smoothing=0.1)),
    "ignored": (Tokens, texts, lambda: nn.CrossEntropyLoss(ignore_index=PAD)),
    "both": (
        lambda: nn.Sequential(Tokens(), nn.LogSoftmax(1)),
        texts,
        lambda: nn.NLLLoss(CLASS_WEIGHTS, ignore_index=PAD),
    ),
    "sum": (classifier, rows, lambda: nn.CrossEntropyLoss(reduction="sum")),
    "sum and weight": (Tokens, texts, lambda: per_token),
}
KINDS = [*LOSSES, "loop", "gan"]


def by_trainer(name: str, strategy: str, steps: int, accumulate: int, out: Path) -> dict[str, Any]:
    make, data, loss = LOSSES[name]
    model, rate = make(), 0.003 if name == "sum" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    trainer = photinus.Trainer(
        model, optimizer, loss(), steps=steps, accumulate=accumulate, batch_size=BATCH_SIZE, out=out,
        strategy=strategy, clip_norm=50.0 if name == "sum" else 1.0, report=QUIET, save=ONCE, validate_every_steps=5,
    )  # fmt: skip
    result = trainer.fit(data(), data(30, seed=2))
    return {"valid": [row["valid_loss"] for row in result.history]}


def by_loop(strategy: str, steps: int, accumulate: int, out: Path) -> dict[str, Any]:
    """A mean over tokens in a body, whose loss is NaN where a rank has none."""
    plain = Tokens()
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1), strategy=strategy)
    loop = photinus.Loop(
        model,
        optimizer,
        texts(),
        batch_size=BATCH_SIZE,
        accumulate=accumulate,
        steps=steps,
        out=out,
        report=QUIET,
        save=ONCE,
    )
    norms = []
    for inputs, targets in loop:
        parts = 2 if accumulate == 1 else 1
        for part, counted in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            total, count = per_token(model(part), counted)
            loop.backward(total / count, weight=count, share=1 / parts)
        if loop.step_due:
            norms.append(loop.clip(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    return {"norms": norms}


def by_gan(strategy: str, steps: int, out: Path) -> dict[str, Any]:
    """Two models with an optimizer each; a row weighs as much as it is long."""
    plain, critic = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.05), strategy=strategy)
    judge, second = photinus.wrap(critic, torch.optim.SGD(critic.parameters(), lr=0.05), strategy=strategy)
    loop = photinus.Loop(
        model, optimizer, rows(), batch_size=BATCH_SIZE, steps=steps, out=out, report=QUIET, save=ONCE,
        state={"critic": judge, "second": second},
    )  # fmt: skip

    def mean(points: Tensor, weights: Tensor, is_real: Tensor) -> Tensor:
        losses = binary_cross_entropy_with_logits(judge(points)[:, 0], is_real.float(), weights, reduction="sum")
        return losses / weights.sum()

    for inputs, _ in loop:
        weights, fakes = inputs.square().sum(1), model(inputs.flip(1))
        twice, both = weights.repeat(2), torch.cat([inputs, fakes.detach()])
        loop.backward(mean(both, twice, torch.arange(len(both)) < len(inputs)), weight=twice.sum())
        second.step()
        second.zero_grad()
        loop.backward(mean(fakes, weights, torch.ones(len(inputs))), weight=weights.sum())
        optimizer.step()
        optimizer.zero_grad()
        second.zero_grad()
    return {}


def curves(
    rank: int, world_size: int, strategies: list[str], kinds: list[str], steps: int, out: str, plant: bool = False
) -> dict[str, Any]:
    """Each kind's numbers, by kind and strategy."""
    torch.set_num_threads(1)
    if plant:  # each rank's mean counts alike: the error that all this is about
        part = WeightedMeans.part
        WeightedMeans.part = lambda self, weight, share: part(self, 1.0, share)  # type: ignore[method-assign]
    found = {}
    with photinus.init("auto", "cpu", seed=0):
        for kind in kinds:
            for strategy in strategies:
                for accumulate in (1,) if kind == "gan" else (1, 2):
                    folder = Path(out, f"{kind}-{strategy}-{accumulate}")
                    torch.manual_seed(0)
                    if kind == "gan":
                        numbers = by_gan(strategy, steps, folder)
                    elif kind == "loop":
                        numbers = by_loop(strategy, steps, accumulate, folder)
                    else:
                        numbers = by_trainer(kind, strategy, steps, accumulate, folder)
                    if rank == 0:
                        numbers["losses"] = [row["loss"] for row in read_rows(folder / "losses.csv")]
                        state = find_checkpoint(folder).load(only=["model"])
                        numbers["weights"] = torch.cat([each.flatten() for each in state["model"].values()]).tolist()
                    found[f"{kind}, {strategy}, {accumulate}"] = numbers
    return found


def alone(kind: str, accumulate: int, steps: int) -> list[float]:
    """Plain torch in one process: the loss of each step, over all samples of its batches at once."""
    torch.manual_seed(0)
    make, data, loss = LOSSES[kind]
    model, loss_fn = make(), loss()
    losses: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = photinus.loader(data(), batch_size=BATCH_SIZE, seed=0, place=(0, 1))
    while len(losses) < steps:
        epoch = [*batches]
        for first in range(0, len(epoch), accumulate):
            inputs, targets = (torch.cat(each) for each in zip(*epoch[first : first + accumulate], strict=True))
            value = loss_fn(model(inputs), targets)
            value = value[0] / value[1] if isinstance(value, tuple) else value
            optimizer.zero_grad()
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(value.item())
    return losses[:steps]


def run(world_size: int, out: Path, timeout_s: float = 100.0, **arguments: Any) -> dict[str, Any]:
    where, given = "tests.parity.test_one_curve:curves", {"out": str(out / str(world_size)), **arguments}
    found: dict[str, Any] = run_ranks(
        where, world_size=world_size, backend="photinus", timeout_s=timeout_s, arguments=given
    )[0].value
    return found


def furthest(one: dict[str, Any], other: dict[str, Any], strategy: str) -> dict[str, float]:
    """How far a strategy's numbers are from those of "ddp" in one process: relative, for weights to the largest."""
    found = {}
    for name, numbers in other.items():
        kind, of, accumulate = name.split(", ")
        if of == strategy:
            pairs = {
                key: (torch.tensor(a), torch.tensor(one[f"{kind}, ddp, {accumulate}"][key]))
                for key, a in numbers.items()
            }
            scales = {key: b.abs().max() if key == "weights" else b.abs() for key, (_, b) in pairs.items()}
            found[name] = max(float(((a - b).abs() / scales[key]).max()) for key, (a, b) in pairs.items())
    return found


def test_one_process_has_the_losses_of_plain_torch_and_three_ranks_those_of_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kinds": ["class weights", "loop", "gan"], "steps": (steps := 6)}
    one = run(1, tmp_path, strategies=["ddp"], **options)
    for accumulate in (1, 2):
        losses = one[f"class weights, ddp, {accumulate}"]["losses"]
        assert losses == pytest.approx(alone("class weights", accumulate, steps), rel=1e-5)
    three = run(3, tmp_path, strategies=["ddp", "zero3"], **options)
    for strategy in ("ddp", "zero3"):
        apart = furthest(one, three, strategy)
        assert max(apart.values()) < 1e-5, apart


def test_means_of_the_ranks_means_would_be_noticed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategies": ["ddp"], "kinds": ["class weights", "loop", "gan"], "steps": 6}
    one, three = run(1, tmp_path, **options), run(3, tmp_path, plant=True, **options)
    apart = furthest(one, three, "ddp")
    assert min(apart.values()) > 1e-3, apart


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hundred_steps_have_one_curve_at_every_number_of_ranks(tmp_path: Path, strategy: str) -> None:
    options: dict[str, Any] = {"kinds": KINDS, "steps": 100, "timeout_s": 400.0}
    one = run(1, tmp_path, strategies=["ddp"], **options)
    for world_size in (2, 3, 4):
        apart = furthest(one, run(world_size, tmp_path, strategies=[strategy], **options), strategy)
        assert max(apart.values()) < 1e-5, (world_size, apart)
