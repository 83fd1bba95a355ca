"""A run that is told how many steps it has: it ends inside an epoch, and goes on there when more are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from photinus.runlog.run import Run
from photinus.runlog.tables import read_rows
from photinus.trainer.checkpoint.position import Length, Position
from tests.small_run import QUIET, Numbered, points, right, train

STEPS_PER_EPOCH = 6  # 48 samples, 8 at a time


@pytest.fixture
def world() -> Iterator[Any]:
    with photinus.init("gloo", "cpu", seed=0) as session:
        yield session


def _rows(result: dict[str, Any]) -> list[list[float]]:
    return [[row[name] for name in ("epoch", "step", "loss", "right")] for row in result["history"]]


def _bodies(loop: photinus.Loop) -> Iterator[photinus.Loop]:
    for _ in loop:
        yield loop


def test_a_run_of_steps_ends_inside_an_epoch_and_closes_it(tmp_path: Path) -> None:
    found = train(tmp_path, epochs=None, steps=8)
    assert found["step"] == 8
    assert [row["step"] for row in found["history"]] == [6, 8]
    assert [row["epoch"] for row in read_rows(tmp_path / "metrics.csv")] == [1, 2]
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000006",
        "step-00000008",
    ]
    run = Run(tmp_path)
    run.refresh()
    assert (run.steps_wanted, run.step, run.state().word) == (8, 8, "finished")


def test_more_steps_go_on_inside_the_epoch_as_if_there_had_been_no_end(tmp_path: Path) -> None:
    # The body makes a step of the scheduler at each end of an epoch, so it has none here.
    def numbers(seen: list[list[int]], steps: int, out: Path | None) -> list[tuple[float, float]]:
        with photinus.init("gloo", "cpu", seed=0):
            model = torch.nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
            loop = photinus.Loop(model, optimizer, Numbered(48), batch_size=8, steps=steps, out=out, report=QUIET)
            for batch in loop:
                seen.append(batch.tolist())
                loop.backward(model(batch.float()[:, None]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            assert loop.finished
            return [(row["step"], row["loss"]) for row in loop.history]

    whole: list[list[int]] = []
    expected = numbers(whole, 15, None)
    parts: list[list[int]] = []
    for steps in (4, 8, 8, 15):
        rows = numbers(parts, steps, tmp_path)
    assert parts == whole
    assert [step for step, _ in rows] == [6, 12, 15]
    assert [loss for _, loss in rows] == pytest.approx([loss for _, loss in expected])
    assert [row["step"] for row in read_rows(tmp_path / "losses.csv")] == list(range(1, 16))


def test_stop_ends_a_run_of_steps(world: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop(steps: int) -> photinus.Loop:
        return photinus.Loop(
            model,
            optimizer,
            Numbered(48),
            batch_size=8,
            steps=steps,
            out=tmp_path,
            report=photinus.Reporting(curves=False),
        )

    first = loop(1000)
    for _ in first:
        if first.step == 6:
            first.stop()
    assert first.step == 6
    assert loop(1000).finished
    assert "the run was stopped early" in capsys.readouterr().out
    assert len(list(loop(1004))) == 998


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({}, TypeError, "epochs=None and steps=None: exactly one of both is needed"),
        ({"epochs": 3, "steps": 9}, TypeError, "epochs=3 and steps=9: exactly one"),
        ({"steps": 0}, ValueError, "steps"),
        ({"steps": 1.5}, TypeError, "steps"),
    ],
)
def test_exactly_one_of_epochs_and_steps_is_taken(
    world: Any, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=words):
        photinus.Trainer(model, optimizer, torch.nn.functional.cross_entropy, batch_size=8, **options)
    with pytest.raises(kind, match=words):
        photinus.Loop(model, optimizer, Numbered(48), batch_size=8, **options)


def test_the_trainer_counts_steps_and_validates_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = torch.nn.functional.cross_entropy
    trainer = photinus.Trainer(model, optimizer, loss, steps=9, batch_size=8, metrics={"right": right}, out=tmp_path)
    result = trainer.fit(points(48), points(16))
    assert [(row["step"], "valid_loss" in row) for row in result.history] == [(6, True), (9, True)]
    assert result.curves is not None
    told = capsys.readouterr().out
    assert "step 6/9  loss" in told
    assert "step 9/9  loss" in told


def test_places_are_told_in_what_the_run_counts() -> None:
    inside = Position(epochs_done=2, batches_done=3, step=15)
    assert Length(5, None).describe(inside) == "epoch 3 of 5, 3 batches done, step 15"
    assert Length(None, 40).describe(inside) == "step 15 of 40, in epoch 3"
    start = Position()
    assert (Length(None, 40).epochs_of(start, 6, 1), Length(None, 40).steps_of(start, 6, 1)) == (7, 40)
    assert (Length(5, None).epochs_of(start, 6, 1), Length(5, None).steps_of(start, 6, 1)) == (5, 30)
    assert (Length(5, None).steps_of(inside, 6, 1), Length(None, 40).epochs_of(inside, 6, 1)) == (30, 7)
    # Of 2 batches: 5 of an epoch's 6 are done, in 3 steps, so that one step is left of it.
    inside = Position(epochs_done=2, batches_done=5, step=9)
    assert (Length(5, None).steps_of(inside, 6, 2), Length(None, 12).epochs_of(inside, 6, 2)) == (16, 4)


def test_the_last_step_is_known_after_a_change_of_batch_size(tmp_path: Path, world: Any) -> None:
    def loop(batch_size: int, epochs: int) -> photinus.Loop:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"out": tmp_path, "validate_every_steps": 4, "report": QUIET}
        return photinus.Loop(model, optimizer, Numbered(24), batch_size=batch_size, epochs=epochs, **options)

    assert [body.validation_due for body in _bodies(loop(8, 1))] == [False, False, True]
    changed = loop(4, 2)
    assert [body.validation_due for body in _bodies(changed)] == [True, False, False, False, True, True]
    assert (changed.step, changed.steps) == (9, 9)
