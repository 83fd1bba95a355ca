"""Event files for TensorBoard, read back by TensorBoard's own reader."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import photinus
from photinus.errors import PhotinusError
from photinus.runlog.tables import read_rows
from tests.small_run import CutOffError, Net, points, right, train


def scalars(out: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: Any = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_a_run_cut_off_and_gone_on_with_shows_each_step_once(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=4, cut_at_step=11, report=photinus.Reporting(tensorboard=True))
    train(tmp_path, save_every=4, report=photinus.Reporting(tensorboard=True))
    found = scalars(tmp_path)
    rows = read_rows(tmp_path / "losses.csv")
    assert found["loss/step"] == [(row["step"], pytest.approx(row["loss"])) for row in rows]
    assert [step for step, _ in found["epoch/right"]] == [6, 12, 18]
    assert {"loss/epoch", "learning_rate", "samples_per_s", "step_ms/forward", "memory_mib/rank_0"} <= set(found)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_the_trainer_takes_the_option(tmp_path: Path) -> None:
    model = Net()
    trainer = photinus.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        cross_entropy,
        epochs=1,
        batch_size=8,
        out=tmp_path,
        metrics={"right": right},
        report=photinus.Reporting(tensorboard=True),
    )
    trainer.fit(points(), points(31))
    assert [step for step, _ in scalars(tmp_path)["epoch/valid_loss"]] == [6]


def test_without_the_package_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PhotinusError, match=r"pip install tensorboard"):
        train(tmp_path / "run", report=photinus.Reporting(tensorboard=True))
    assert not (tmp_path / "run").exists()


def test_event_files_need_a_folder() -> None:
    with pytest.raises(ValueError, match=r"tensorboard=True writes event files .*: give out="):
        train(None, report=photinus.Reporting(tensorboard=True))
