"""Loggers get what a run measures, and cost it nothing: a broken one is named once, and the weights are the same."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy

import photinus
from photinus.runlog.events import read_events
from photinus.runlog.tables import read_rows
from tests.small_run import CutOffError, Net, points, right, train


class Recorder:
    """Keeps all calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def start(self, config: Any) -> None:
        self.calls.append(("start", config))

    def log(self, step: int, row: Any) -> None:
        self.calls.append(("log", step, row))

    def picture(self, name: str, path: Path) -> None:
        self.calls.append(("picture", name, path))

    def end(self, status: str) -> None:
        self.calls.append(("end", status))

    def logged(self, name: str) -> list[tuple[int, float]]:
        return [(each[1], each[2][name]) for each in self.calls if each[0] == "log" and name in each[2]]


class Lines:
    """The least that a logger needs."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def log(self, step: int, row: Any) -> None:
        self.rows.append((step, row))


def reporting(*loggers: Any, curves: bool = False, config: Any = None) -> photinus.Reporting:
    return photinus.Reporting(progress=False, curves=curves, loggers=loggers, config=config)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the run without a logger."""
    return str(train(tmp_path_factory.mktemp("plain"))["fingerprint"])


def test_a_logger_gets_the_options_each_loss_each_row_the_picture_and_the_end(tmp_path: Path, plain: str) -> None:
    found, least = Recorder(), Lines()
    config = {"width": 16, "api_key": "secret", "out": "elsewhere"}
    done = train(tmp_path, report=reporting(found, least, curves=True, config=config))
    assert done["fingerprint"] == plain
    kinds = [call[0] for call in found.calls]
    assert (kinds[0], kinds[-2:], set(kinds[1:-2])) == ("start", ["picture", "end"], {"log"})
    (_, options), *logs, picture, end = found.calls
    assert options["width"] == 16
    assert options["api_key"] == "***"
    assert (options["out"], options["batch_size"], options["resumed_step"]) == (str(tmp_path), 8, 0)
    losses = [(row["step"], row["loss"]) for row in read_rows(tmp_path / "losses.csv")]
    assert found.logged("loss/step") == losses
    assert found.logged("epoch/right") == [(row["step"], row["right"]) for row in done["history"]]
    assert found.logged("loss/epoch") == [(row["step"], row["loss"]) for row in done["history"]]
    assert found.logged("learning_rate")[0] == (6, 0.05)
    assert found.logged("step_ms/forward")
    assert picture == ("picture", "curves", tmp_path / "curves.png")
    assert end == ("end", "finished")
    steps = [call[1] for call in logs]
    assert steps == sorted(steps)
    assert [("log", *row) for row in least.rows] == logs


def test_a_logger_may_change_what_it_gets(tmp_path: Path) -> None:
    class Changing(Lines):
        def start(self, config: Any) -> None:
            config.clear()

        def log(self, step: int, row: Any) -> None:
            row.clear()

    found = Recorder()
    train(tmp_path, report=reporting(Changing(), found))
    assert all(each[-1] for each in found.calls)
    assert found.logged("loss/step")


def test_numbers_that_a_logger_draws_when_it_starts_change_nothing(tmp_path: Path, plain: str) -> None:
    class Drawing(Recorder):
        def start(self, config: Any) -> None:
            random.random(), numpy.random.random(), torch.rand(3)

    assert train(tmp_path, report=reporting(Drawing()))["fingerprint"] == plain
    after = random.random(), numpy.random.random(), torch.rand(1)
    train(tmp_path / "again")
    assert after == (random.random(), numpy.random.random(), torch.rand(1))


@pytest.mark.parametrize("where", ["start", "log", "picture", "end"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SystemExit(3)], ids=["OSError", "SystemExit"]
)
def test_a_logger_that_raises_is_named_once_and_the_weights_are_the_same(
    tmp_path: Path, plain: str, where: str, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Recorder):
        pass

    def fail(self: Recorder, *arguments: Any) -> None:
        self.calls.append((where,))
        if len(self.calls) > 3 or where == "start":
            raise error

    setattr(Broken, where, fail)
    broken, sound = Broken(), Recorder()
    assert train(tmp_path, report=reporting(broken, sound, curves=True))["fingerprint"] == plain
    assert sound.calls[-1] == ("end", "finished")
    assert broken.calls[-1] == (where,)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Broken" in line)
    assert line.startswith("warning: the logger Broken is dropped, the training is not affected: ")
    assert f"{where}(" in line or f"{where} raised" in line
    assert str(error) in line
    assert [event.facts["text"] for event in read_events(tmp_path) if event.kind == "warning"] == [line[9:]]


class Hanging(Recorder):
    """Hangs in the fifth call until the test is over."""

    def __init__(self, released: threading.Event) -> None:
        super().__init__()
        self.released = released

    def log(self, step: int, row: Any) -> None:
        super().log(step, row)
        if len(self.calls) == 5:
            self.released.wait(60)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("photinus the logger"):
            thread.join(10)


def test_the_end_of_a_run_waits_for_a_hanging_logger_a_few_seconds_and_names_it(
    tmp_path: Path,
    plain: str,
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("photinus.trainer.record.loggers._END_S", 2.0)
    hanging, sound = Hanging(released), Recorder()
    began = time.monotonic()
    assert train(tmp_path, report=reporting(hanging, sound))["fingerprint"] == plain
    assert time.monotonic() - began < 30
    assert sound.calls[-1] == ("end", "finished")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Hanging" in line)
    assert line.startswith("warning: the logger Hanging is dropped, the training is not affected: it is still in log(")
    assert line.endswith(" more calls to make")


@pytest.mark.parametrize(("limit", "value"), [("_CALL_S", 0.5), ("_MOST_CALLS", 12)])
def test_a_logger_that_does_not_keep_up_is_dropped_while_the_model_trains(
    tmp_path: Path,
    plain: str,
    released: threading.Event,
    limit: str,
    value: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hanging = Hanging(released)
    monkeypatch.setattr(f"photinus.trainer.record.loggers.{limit}", value)
    assert train(tmp_path, report=reporting(hanging), wait_s=0.05)["fingerprint"] == plain
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "Hanging" in line)
    assert line.startswith("warning: the logger Hanging is dropped, the training is not affected: it is still in log(")
    released.set()
    (thread,) = (each for each in threading.enumerate() if each.name == "photinus the logger Hanging")
    thread.join(10)
    assert len(hanging.calls) == 5  # a dropped one makes no call that was waiting


@pytest.mark.seconds
def test_a_logger_that_hangs_when_it_starts_delays_the_run_only_for_a_while(
    tmp_path: Path, plain: str, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Recorder):
        def start(self, config: Any) -> None:
            released.wait(60)
            super().start(config)

    monkeypatch.setattr("photinus.trainer.record.loggers._START_S", 0.2)
    late = Late()
    threading.Timer(1.5, released.set).start()
    assert train(tmp_path, report=reporting(late), wait_s=0.02)["fingerprint"] == plain
    assert len(late.logged("loss/step")) == 18  # what came meanwhile has waited
    assert late.calls[-1] == ("end", "finished")


@pytest.mark.seconds
def test_a_logger_learns_how_a_start_ended_and_from_which_step_the_next_one_continues(tmp_path: Path) -> None:
    acts = {9: lambda: photinus.suspend("test"), 14: sys.exit}

    def act(step: int) -> None:
        acts.pop(step, lambda: None)()

    found = [Recorder() for _ in range(4)]
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=1, cut_at_step=3, report=reporting(found[0]))
    for recorder in found[1:3]:
        with pytest.raises(SystemExit):
            train(tmp_path, save_every=1, kill=act, report=reporting(recorder))
    train(tmp_path, report=reporting(found[3]))
    starts = [call[1]["resumed_step"] for recorder in found for call in recorder.calls if call[0] == "start"]
    ends = [call[1] for recorder in found for call in recorder.calls if call[0] == "end"]
    assert ends == ["error", "suspended", "left", "finished"]
    assert starts == [0, 2, 8, 13]


@pytest.mark.parametrize("wrong", [True, "wandb", [photinus.TensorBoard], [print], photinus.TensorBoard(), None])
def test_what_is_no_logger_is_refused_where_it_is_given(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"loggers=.*: needs a list of objects with log\(step, row\)"):
        photinus.Reporting(loggers=wrong)


def test_loggers_need_a_folder() -> None:
    with pytest.raises(ValueError, match=r"loggers=\[...\] need the run's folder.*: give out="):
        train(None, report=reporting(Lines()))


def test_the_trainer_sends_its_validation(tmp_path: Path) -> None:
    found, model = Recorder(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "out": tmp_path, "metrics": {"right": right}}
    photinus.Trainer(model, optimizer, cross_entropy, **options, report=reporting(found)).fit(points(), points(31))
    assert [step for step, _ in found.logged("epoch/valid_loss")] == [6]
    assert [step for step, _ in found.logged("epoch/right")] == [6]
