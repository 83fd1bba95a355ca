"""Validation by steps: `validate_every_steps=N`, for runs whose epochs are long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import photinus
from photinus.runlog.events import read_events
from photinus.runlog.tables import read_rows
from tests.small_run import CutOffError, points, right

SAMPLES, BATCH = 48, 8  # 6 steps an epoch


@pytest.fixture
def world() -> Iterator[Any]:
    with photinus.init(device="cpu") as session:
        yield session


def fit(out: Path | None, *, steps: int = 16, cut_at_step: int | None = None, **options: Any) -> photinus.Result:
    """Trains a net with dropout, and is cut off by its callback."""

    def cut(loop: photinus.Loop) -> None:
        if loop.step == cut_at_step:
            raise CutOffError

    with photinus.init(device="cpu", seed=0):
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss = nn.functional.cross_entropy
        metrics = {"right": right}
        options = {"batch_size": BATCH, "metrics": metrics, "out": out, "callbacks": [cut], **options}
        return photinus.Trainer(model, optimizer, loss, steps=steps, **options).fit(points(SAMPLES), points(16))


def test_it_validates_after_every_so_many_steps_and_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[int] = []
    result = fit(tmp_path, validate_every_steps=5, callbacks=[lambda loop: called.append(loop.step)])
    rows = read_rows(tmp_path / "metrics.csv")
    assert rows == result.history
    assert [(row["step"], row["epoch"]) for row in rows] == [(5, 1), (10, 2), (15, 3), (16, 3)]
    assert all({"valid_loss", "right"} <= set(row) for row in rows)
    assert called == [5, 10, 15, 16]
    losses = [row["loss"] for row in read_rows(tmp_path / "losses.csv")]
    means = [sum(part) / len(part) for part in (losses[:5], losses[5:10], losses[10:15], losses[15:])]
    assert [row["loss"] for row in rows] == pytest.approx(means)
    assert "step  5/16  loss" in capsys.readouterr().out
    events = [(event.kind, event.step) for event in read_events(tmp_path) if event.kind in ("validation", "epoch")]
    assert events == [("validation", 5), ("validation", 10), ("validation", 15), ("validation", 16)]
    assert result.curves is not None


def test_validating_more_often_changes_no_bit_of_the_training() -> None:
    often, seldom = fit(None, validate_every_steps=1), fit(None)
    for one, other in zip(often.model.parameters(), seldom.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert often.metrics["valid_loss"] == seldom.metrics["valid_loss"]


@pytest.mark.parametrize(("save_every", "cut"), [(3, 5), (3, 10), (4, 15), (5, 10)])
def test_an_interruption_between_two_validations_changes_no_bit(tmp_path: Path, save_every: int, cut: int) -> None:
    options: dict[str, Any] = {"validate_every_steps": 5, "save": photinus.Saving(every_steps=save_every)}
    whole = fit(tmp_path / "whole", **options)
    with pytest.raises(CutOffError):
        fit(tmp_path / "cut", cut_at_step=cut, **options)
    resumed = fit(tmp_path / "cut", **options)
    for one, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)
    hidden = ("samples_per_s", "elapsed_s", "start")
    shown = [[{k: v for k, v in row.items() if k not in hidden} for row in run.history] for run in (resumed, whole)]
    assert shown[0] == shown[1]


def test_more_steps_go_on_as_if_there_had_been_no_end(tmp_path: Path) -> None:
    fit(tmp_path, steps=8, validate_every_steps=5)
    fit(tmp_path, steps=10, validate_every_steps=5)
    more, whole = fit(tmp_path, validate_every_steps=5), fit(None, validate_every_steps=5)
    assert [row["step"] for row in more.history] == [5, 10, 15, 16]
    assert [row["loss"] for row in more.history] == pytest.approx([row["loss"] for row in whole.history])


def test_the_best_validation_has_a_checkpoint(tmp_path: Path) -> None:
    result = fit(tmp_path, validate_every_steps=5, save=photinus.Saving(best="-valid_loss", keep_last=1))
    best = min(result.history, key=lambda row: row["valid_loss"])
    assert f"step-{int(best['step']):08}" in [path.name for path in (tmp_path / "checkpoints").iterdir()]


def test_epochs_are_counted_on_beside_it(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    trainer = photinus.Trainer(
        model, optimizer, nn.functional.cross_entropy, epochs=2, batch_size=BATCH, scheduler=scheduler,
        validate_every_steps=4,
    )  # fmt: skip
    result = trainer.fit(points(SAMPLES), points(16))
    assert [(row["epoch"], row["step"], row["learning_rate"]) for row in result.history] == [
        (1, 4, 1.0),
        (2, 8, 0.5),
        (2, 12, 0.5),  # that of its step; the scheduler has made its own since
    ]


def test_a_loop_of_ones_own_is_told_when_to_validate(world: Any) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for every, wanted in ((None, [6, 9]), (4, [4, 8, 9])):
        loop = photinus.Loop(model, optimizer, points(SAMPLES), batch_size=BATCH, steps=9, validate_every_steps=every)
        assert [loop.step for _ in loop if loop.validation_due] == wanted
        assert not loop.validation_due


@pytest.mark.parametrize(("value", "kind"), [(0, ValueError), (2.5, TypeError), (-1, ValueError)])
def test_what_is_no_number_of_steps_is_refused(world: Any, value: Any, kind: type[Exception]) -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match="validate_every_steps"):
        photinus.Loop(model, optimizer, points(SAMPLES), batch_size=BATCH, steps=9, validate_every_steps=value)
