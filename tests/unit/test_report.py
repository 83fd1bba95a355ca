from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.runlog.tables import RunFiles, StepLoss, read_rows
from photinus.trainer.record.curves import draw_curves


def _write_run(folder: Path, *, epochs: int = 4, steps: int = 5, loss_of_step: float = 1.0, **extra: float) -> None:
    files = RunFiles(folder)
    losses = [StepLoss(i + 1, i // steps + 1, loss_of_step / (i + 1), 8) for i in range(epochs * steps)]
    files.add_losses(losses[: epochs * steps // 2], start=1)
    files.add_losses(losses[epochs * steps // 2 :], start=2)
    common = {"learning_rate": 0.1, "samples_per_s": 100.0, "start": 1}
    files.add_row(
        [
            {
                "epoch": e,
                "step": e * steps,
                "loss": 1 / e,
                "accuracy": 1 - 0.5 / e,
                "elapsed_s": e * 1.5,
                **common,
                **extra,
            }
            for e in range(1, epochs + 1)
        ]
    )


def _size(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_run_is_drawn_with_a_panel_each_for_loss_metric_and_speed(tmp_path: Path) -> None:
    _write_run(tmp_path)
    picture = draw_curves(tmp_path)
    assert picture == tmp_path / "curves.png"
    width, height = _size(picture)
    assert width > 3 * height
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_metrics_of_other_size_get_a_panel_of_their_own(tmp_path: Path) -> None:
    _write_run(tmp_path, perplexity=30.0)
    wide, _ = _size(draw_curves(tmp_path) or tmp_path)
    _write_run(tmp_path)
    narrow, _ = _size(draw_curves(tmp_path) or tmp_path)
    assert wide > narrow


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0, -1.0])
def test_odd_numbers_are_drawn_too(tmp_path: Path, loss: float) -> None:
    _write_run(tmp_path, loss_of_step=loss, valid_loss=loss)
    width, height = _size(draw_curves(tmp_path) or tmp_path)
    assert width // height == (3 if math.isfinite(loss) else 2)  # panels; of what is no number there is none


def test_one_epoch_is_enough(tmp_path: Path) -> None:
    _write_run(tmp_path, epochs=1, steps=1)
    width, height = _size(draw_curves(tmp_path) or tmp_path)
    assert width > 3 * height


def test_without_a_finished_epoch_there_is_a_warning_and_no_picture(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"metrics.csv holds no finished epoch"):
        assert draw_curves(tmp_path) is None


def test_without_matplotlib_there_is_a_warning_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_run(tmp_path)
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"matplotlib cannot be imported .*pip install matplotlib"):
        assert draw_curves(tmp_path) is None


def test_numbers_come_back_from_the_files_as_they_went_in(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    row = {"epoch": 1, "step": 3, "loss": 0.1 + 0.2, "tiny": 5e-324, "none": math.nan, "samples_per_s": 1e22}
    files.add_row([row])
    (back,) = read_rows(files.metrics)
    assert math.isnan(back.pop("none"))
    assert back == {name: value for name, value in row.items() if name != "none"}


@pytest.mark.seconds
def test_the_trainer_is_imported_without_the_heavy_packages() -> None:
    script = (
        "import sys, photinus.trainer; "
        "print(sorted({'matplotlib', 'sklearn', 'torch.distributed.checkpoint', 'photinus.engine'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.strip() == "[]"
