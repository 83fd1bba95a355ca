"""Runs whose batches are cut into logical shards have the same bits on any number of ranks.

The model has all that could tell the number of ranks: dropout, batch norms, a parameter that some shards do not use,
gradients that are clipped, a learning rate that follows the validation loss, samples that draw random numbers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import get_ema_multi_avg_fn

import photinus
from photinus.parallel import strategy_of
from photinus.trainer import unwrap
from tests.ranks import run_ranks, values
from tests.small_run import CLASSES, FEATURES, QUIET, CutOffError, Net, Noisy, points, right

V, BATCH_SIZE = 6, 25  # uneven shards
SAMPLES, OF_STREAM = 87, 75  # a short batch ends an epoch


class Branching(Net):
    """Has a parameter that only some shards use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("extra", nn.Parameter(torch.ones(CLASSES)))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = super().forward(inputs)
        return outputs * self.extra if bool(inputs[0, 0] > 0) else outputs


class Tokens(nn.Module):
    """A small transformer over the features as tokens, whose loss is a mean over some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(1, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.block(self.embedding(inputs[..., None])).mean(dim=1))
        return outputs


def forward(dtype: str, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[0].to(getattr(torch, dtype))), batch[1]


def _digest(values: Any) -> str:
    digest = hashlib.sha256()
    for value in values:
        data = value.detach().cpu().contiguous() if isinstance(value, Tensor) else torch.tensor(value)
        digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def train(
    rank: int,
    world_size: int,
    *,
    shards: int = V,
    strategy: str = "ddp",
    model: str = "branching",
    steps: int = 7,
    samples: int = SAMPLES,
    drop_last: bool = False,
    accumulate: int = 1,
    workers: int = 0,
    dtype: str = "float32",
    cut_at: int | None = None,
    is_stream: bool = False,
    out: str | None = None,
    audit_every: int | Literal["auto"] | None = None,
    **wrapping: Any,
) -> dict[str, Any]:
    with photinus.init(device="cpu", seed=5, logical_shards=shards):
        plain: nn.Module = {"branching": Branching, "tokens": Tokens}[model]().to(getattr(torch, dtype))
        optimizer: Any = torch.optim.AdamW(plain.parameters(), lr=0.01)
        wrapped, optimizer = photinus.wrap(
            plain, optimizer, strategy=strategy, find_unused_parameters=model == "branching",
            **wrapping,
            )  # fmt: skip
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        average = photinus.Average(wrapped, get_ema_multi_avg_fn(0.9), use_buffers=True)
        options: Any = {"batch_size": BATCH_SIZE, "num_workers": workers, "drop_last": drop_last}
        data = photinus.loader(read if is_stream else Noisy(points(samples)), **options)
        loop = photinus.Loop(
            wrapped, optimizer, data, steps=steps, accumulate=accumulate, validate_every_steps=2, report=QUIET,
            out=out, state={"scheduler": scheduler, "average": average}, save=photinus.Saving(every_steps=1),
            audit_every=audit_every,
        )  # fmt: skip
        numbers: list[Any] = []
        for inputs, targets in loop:
            outputs = wrapped(inputs.to(getattr(torch, dtype))).float()
            if model == "tokens":  # a mean over some samples, none perhaps
                weights = torch.tensor([2.0, 1.0, 0.0])
                loop.backward(cross_entropy(outputs, targets, weight=weights), weight=weights[targets].sum())
            else:
                loop.backward(cross_entropy(outputs, targets))
            if loop.step_due:
                numbers.append(loop.clip(0.5))
                optimizer.step()
                optimizer.zero_grad()
            if loop.validation_due:
                found = photinus.evaluate(wrapped, points(31), right, batch_size=8, forward=partial(forward, dtype))
                loop.log(right=found)
                scheduler.step(found)
            if loop.step == cut_at and loop.step_due:
                raise CutOffError
        kept = strategy_of(optimizer).save(optimizer)["state"]
        rows = [[row[name] for name in ("step", "loss", "right", "learning_rate")] for row in loop.history]
        return {
            "weights": _digest(unwrap(wrapped).state_dict().values()),
            "average": _digest(average.state_dict().values()),
            "states": _digest([each for state in kept.values() for each in state.values()]) if rank == 0 else "",
            "numbers": _digest(numbers),
            "rows": rows,
        }


def read(shard: int, shards: int) -> Iterator[Any]:
    """A stream whose shards have other numbers of samples, so that some end before others."""
    data = points(OF_STREAM)
    for index in range(shard, OF_STREAM - 11 * (shard % 2), shards):
        point, target = data[index]
        yield point + 0.1 * torch.randn(FEATURES), target


def cut(rank: int, world_size: int, **options: Any) -> None:
    with pytest.raises(CutOffError):
        train(rank, world_size, **options)


def run(ranks: int, hosts: str | None = None, backend: str = "photinus", **options: Any) -> Mapping[str, Any]:
    """The results of rank 0. The other ranks' weights are equal to them."""
    function = "tests.dist.test_logical_shards:train"
    found = values(
        run_ranks(function, world_size=ranks, arguments=options, hosts=hosts, backend=backend, timeout_s=120)
    )
    assert len({each["weights"] for each in found}) == 1
    assert len({json.dumps(each["rows"]) for each in found}) == 1
    first: Mapping[str, Any] = found[0]
    return first


@pytest.fixture(scope="module")
def alone() -> Mapping[str, Any]:
    return run(1)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"backend": "gloo"}),
        (2, {"workers": 2}),
        (3, {"gradient_as_bucket_view": True}),
        (4, {"strategy": "zero1"}),
        (4, {"hosts": "aabb", "bucket_cap_mb": 0.0001}),
        (5, {"hosts": "aabbb", "backend": "gloo"}),
        (6, {}),
        (1, {"audit_every": 1}),
        (2, {"audit_every": "auto"}),
        (4, {"audit_every": 1, "strategy": "zero1"}),
        (6, {"audit_every": 1}),
    ],
)
def test_a_run_has_the_same_bits_on_any_number_of_ranks(
    alone: Mapping[str, Any], ranks: int, options: dict[str, Any]
) -> None:
    assert run(ranks, **options) == alone


@pytest.mark.parametrize("options", [{"drop_last": True}, {"accumulate": 2, "model": "tokens"}])
def test_a_stream_has_the_same_bits_on_any_number_of_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"is_stream": True, "steps": 5, **options}
    alone = run(1, **options)
    assert run(3, workers=2, **options) == alone
    assert run(6, audit_every=1, **options) == alone
    arguments = {**options, "out": str(tmp_path), "cut_at": 3}
    run_ranks(f"{__name__}:cut", world_size=2, backend="photinus", arguments=arguments, timeout_s=120)
    assert {**run(4, out=str(tmp_path), **options), "numbers": ""} == {**alone, "numbers": ""}


@pytest.mark.parametrize("ranks", [3, 4])
def test_weighted_losses_that_add_up_have_the_same_bits(ranks: int) -> None:
    options = {"model": "tokens", "accumulate": 2, "shards": 8, "samples": 78, "steps": 5}  # the last batch has 3
    assert run(ranks, audit_every=1, **options) == run(1, **options)


def test_gradients_in_16_bits_are_added_in_32_on_any_number_of_ranks() -> None:
    options = {"model": "tokens", "dtype": "bfloat16", "shards": 4, "steps": 3}
    assert run(4, **options) == run(3, **options) == run(1, **options) == run(2, **options)


def test_a_run_goes_on_with_another_number_of_ranks_and_the_same_bits(alone: Mapping[str, Any], tmp_path: Path) -> None:
    for ranks, step in ((3, 2), (1, 5)):
        arguments = {"out": str(tmp_path), "cut_at": step}
        function = "tests.dist.test_logical_shards:cut"
        run_ranks(function, world_size=ranks, backend="photinus", arguments=arguments, timeout_s=120)
    end = dict(run(2, out=str(tmp_path), strategy="zero1"))
    assert {**end, "numbers": ""} == {**alone, "numbers": ""}  # those of the steps since


def test_another_seed_gives_other_bits(alone: Mapping[str, Any]) -> None:
    assert run(1, shards=5)["weights"] != alone["weights"]
