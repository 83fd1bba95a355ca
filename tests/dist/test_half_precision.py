"""`Trainer` with float16: losses near float32's, and one decision where gradients overflow; and with `step=`."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import photinus
from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks, values
from tests.small_run import Net, points

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
TEXT = Path("/usr/share/common-licenses/GPL-3")
QUIET = photinus.Reporting(progress=False, curves=False)


def train(
    precision: Any, *, overflow: int | None = None, rank: int = 0, steps: int = 12, **options: Any
) -> tuple[photinus.trainer.Result, list[float]]:
    """Train on points; on one rank the loss of step `overflow` is far too large for float16."""
    torch.manual_seed(0)
    model, calls = Net(dropout=0.0), [0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += torch.is_grad_enabled()
        loss = cross_entropy(outputs, targets)
        return loss * 1e20 if torch.is_grad_enabled() and calls[0] == overflow and rank == 1 else loss

    trainer = photinus.Trainer(
        model,
        optimizer,
        loss_fn,
        steps=steps,
        batch_size=8,
        precision=precision,
        clip_norm=1.0,
        report=QUIET,
        **options,
    )
    result = trainer.fit(points(64), points(32))
    found = photinus.predict(trainer._wrapped[1] if trainer._wrapped else model, points(16), on_all_ranks=True)
    return result, found.flatten().tolist()


def scaler(scale: float = 2.0**10) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    with photinus.init("auto", "cpu"):
        for strategy in STRATEGIES:
            result, outputs = train(scaler(), overflow=5, rank=rank, strategy=strategy)
            skipped = [row.get("skipped_steps") for row in result.history]
            found[strategy] = [skipped, result.metrics["loss_scale"], outputs]
    return found


@pytest.mark.timeout(120)
def test_a_gradient_that_overflows_on_one_rank_skips_the_step_on_all() -> None:
    first, second = values(
        run_ranks("tests.dist.test_half_precision:on_ranks", world_size=2, backend="photinus", timeout_s=100)
    )
    assert first == second
    # 4 good steps double the scale, the fifth halves it; the seven after it double it once.
    assert all(each[:2] == [[1.0, None], 2.0**11] for each in first.values()), first
    for strategy in STRATEGIES[1:]:
        assert first[strategy][2] == pytest.approx(first["ddp"][2], rel=1e-3, abs=1e-3)


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["x"]), batch["y"])


def by_step(rank: int, world_size: int) -> list[float]:
    """A dict of a batch, and one block of validation for two ranks."""
    found = []
    with photinus.init("auto", "cpu"):
        for strategy in ("ddp", "zero3"):
            torch.manual_seed(0)
            model = Net(dropout=0.0)
            rows = [{"x": x, "y": y} for x, y in points(20)]
            trainer = photinus.Trainer(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                step=step,
                epochs=1,
                batch_size=4,
                strategy=strategy,
                report=QUIET,
            )
            found.append(trainer.fit(rows, rows).metrics["valid_loss"])  # type: ignore[arg-type]
    return found


@pytest.mark.timeout(90)
def test_a_step_of_ones_own_validates_where_a_rank_has_no_block() -> None:
    function = "tests.dist.test_half_precision:by_step"
    first, second = values(run_ranks(function, world_size=2, backend="photinus", timeout_s=80))
    assert first == second
    assert first[1] == pytest.approx(first[0], rel=1e-5)


@pytest.fixture
def session() -> Iterator[None]:
    with photinus.init("gloo", "cpu"):
        yield


@pytest.mark.usefixtures("session")
def test_float16_trains_to_the_loss_of_float32() -> None:
    half, _ = train(torch.amp.GradScaler("cpu", init_scale=2.0**8), steps=60)  # without a step that is skipped
    full, _ = train("float32", steps=60)
    assert half.metrics["valid_loss"] == pytest.approx(full.metrics["valid_loss"], rel=0.01)
    assert "loss_scale" not in full.metrics


@pytest.mark.usefixtures("session")
def test_a_resumed_run_scales_and_trains_as_one_that_nobody_stopped(tmp_path: Path) -> None:
    straight = train(scaler(), out=tmp_path / "straight")
    train(scaler(), out=tmp_path / "cut", steps=7)
    resumed = train(scaler(1.0), out=tmp_path / "cut")  # the scale is the checkpoint's
    assert resumed[1] == straight[1]
    assert resumed[0].metrics["loss_scale"] == straight[0].metrics["loss_scale"] == 2.0**13


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision='half': needs 'float32', 'bfloat16', 'float16' or a torch\.amp"):
        photinus.Trainer(
            nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]), cross_entropy, epochs=1, precision="half"
        )


def gpt_on_ranks(rank: int, world_size: int) -> list[list[float]]:
    """The small GPT of the examples on characters of a text, in float32 and float16: losses, and skipped steps."""
    module = runpy.run_path(str(REPOSITORY / "examples" / "gpt" / "model.py"))
    text = torch.tensor([*TEXT.read_bytes()[:32_000]])
    inputs = text[: len(text) // 32 * 32].view(-1, 32)
    numbers = torch.utils.data.TensorDataset(inputs[:, :-1], inputs[:, 1:])
    found = []
    for precision in ("float32", "float16"):
        with photinus.init("auto", "cpu", seed=0):
            model = module["GPT"](128, context=31, width=64, layers=2)
            trainer = photinus.Trainer(
                model, torch.optim.AdamW(model.parameters(), lr=0.003), module["loss_function"], epochs=5,
                batch_size=16, precision=precision, clip_norm=1.0, report=QUIET,
            )  # fmt: skip
            last = trainer.fit(numbers, numbers).history[-1]
            found.append([last["loss"], last["valid_loss"], last.get("skipped_steps", 0.0)])
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not TEXT.exists(), reason=f"needs {TEXT}, which every Debian has")
def test_a_small_gpt_in_float16_trains_to_the_loss_of_float32() -> None:
    function = "tests.dist.test_half_precision:gpt_on_ranks"
    first, second = values(run_ranks(function, world_size=2, backend="photinus", timeout_s=380))
    assert first == second
    (loss, valid_loss, _), half = first
    assert valid_loss < 2.6  # of 4.85 at the start
    assert half[:2] == pytest.approx([loss, valid_loss], rel=0.01)
