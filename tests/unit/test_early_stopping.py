"""`photinus.EarlyStopping` ends a run when a metric no longer improves, and a run that goes on counts from there."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import photinus
from photinus import EarlyStopping, Saving
from photinus.errors import PhotinusError
from photinus.runlog.events import read_events
from photinus.tools.view.event_text import describe_event
from tests.small_run import QUIET, Net, points

VALUES = (0.5, 0.7, 0.6, 0.7, 0.8, 0.75, 0.8, 0.79, 0.95, 0.9)  # best of each 3 in a row: row 5, then row 9


@pytest.fixture(autouse=True)
def _session() -> Iterator[None]:
    with photinus.init("gloo", "cpu", seed=3):
        yield


def run(
    stopping: Any, values: Sequence[float] = VALUES, *, cut_at: int = 0, **options: Any
) -> tuple[photinus.Loop, list[int]]:
    """Train, with one of the values in each row; returns the loop and the steps of its bodies."""
    torch.manual_seed(0)
    model, optimizer = photinus.wrap(net := Net(0.0), torch.optim.SGD(net.parameters(), lr=0.1))
    options = {"epochs": 10, "report": QUIET, **options}
    loop = photinus.Loop(model, optimizer, points(), batch_size=16, state={"stopping": stopping}, **options)
    steps = []
    for inputs, targets in loop:
        steps.append(loop.step)
        loop.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if loop.validation_due:
            loop.log(right=values[len(loop.history)])
        if loop.step == cut_at:
            break
    return loop, steps


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        ({"metric": "right", "patience": 1}, 3),
        ({"metric": "right", "patience": 2}, 4),  # an equal value is no improvement
        ({"metric": "right", "patience": 3}, 8),
        ({"metric": "right", "patience": 4}, 10),
        ({"metric": "right", "patience": 3, "min_delta": 0.15}, 4 + 1),
        ({"metric": "-right", "patience": 4}, 5),
        ({"metric": "-loss", "patience": 2}, 10),
    ],
    ids=str,
)
def test_the_run_ends_after_as_many_rows_without_an_improvement(arguments: dict[str, Any], rows: int) -> None:
    loop, _ = run(EarlyStopping(**arguments))
    assert len(loop.history) == rows
    assert loop.finished


def test_the_summary_and_the_events_say_why(tmp_path: Path) -> None:
    loop, steps = run(EarlyStopping("right", patience=3), out=tmp_path)
    reason = "right did not rise above 0.8000 in the last 3 rows"
    assert loop.summary().startswith(f"stopped: 8 of 10 epochs done, step 24 ({reason}), loss ")
    texts = [describe_event(event) for event in read_events(tmp_path) if event.kind in ("stop", "end")]
    assert texts == ["told to stop at step 24", f"stopped early at step 24 ({reason})"]
    assert steps == list(range(1, 25))
    assert loop.checkpoint == tmp_path / "checkpoints" / "step-00000024"


def test_a_stopped_run_has_nothing_to_do_until_it_gets_more_patience(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(EarlyStopping("right", patience=3), out=tmp_path)
    capsys.readouterr()
    for epochs in (10, 20):  # more epochs would have stopped there, too
        loop, steps = run(EarlyStopping("right", patience=3), out=tmp_path, epochs=epochs)
        assert steps == []
        assert "(right did not rise above 0.8000 in the last 3 rows)" in loop.summary()
        said = capsys.readouterr().out
        assert said.startswith("finished already: the run was stopped early (")
        assert "nothing to do; give more patience to continue, or resume='never' to start over" in said
    more = EarlyStopping("right", patience=4)
    loop, steps = run(more, out=tmp_path)
    assert steps == list(range(25, 31))
    assert (more.best, more.rows) == (0.95, 1)
    assert loop.summary().startswith("finished: 10 epochs")


def test_a_run_that_was_cut_off_counts_on_from_its_checkpoint(tmp_path: Path) -> None:
    run(EarlyStopping("right", patience=3), out=tmp_path, cut_at=20, save=Saving(every_steps=19))
    stopping = EarlyStopping("right", patience=3)
    loop, steps = run(stopping, out=tmp_path)
    assert steps[0] == 20  # row 6 was one without an improvement
    assert (len(loop.history), stopping.rows, stopping.best) == (8, 3, 0.8)


def test_another_metric_begins_to_count_anew(tmp_path: Path) -> None:
    run(EarlyStopping("right", patience=3), out=tmp_path)
    loop, _ = run(EarlyStopping("-loss", patience=2), out=tmp_path)
    assert len(loop.history) == 10


def test_rows_within_an_epoch_count_and_end_it_there(tmp_path: Path) -> None:
    loop, steps = run(EarlyStopping("right", patience=2), out=tmp_path, validate_every_steps=2)
    assert (len(loop.history), steps[-1]) == (4, 8)
    assert loop.summary().startswith("stopped: epoch 3 of 10, 2 batches done, step 8 (right did not rise")
    assert loop.checkpoint == tmp_path / "checkpoints" / "step-00000008"
    assert run(EarlyStopping("right", patience=2), out=tmp_path, validate_every_steps=2)[1] == []
    assert run(EarlyStopping("right", patience=3), out=tmp_path, validate_every_steps=2)[1][0] == 9


def test_a_row_that_the_runs_end_cuts_short_does_not_count(tmp_path: Path) -> None:
    stopping = EarlyStopping("right", patience=1)
    loop, _ = run(stopping, (0.9, 0.1), epochs=None, steps=5, out=tmp_path)
    assert (len(loop.history), stopping.rows) == (2, 0)
    assert loop.summary().startswith("finished: 1 epoch, 5 steps")


def test_a_missing_metric_is_an_error_and_one_that_is_not_finite_is_no_improvement(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PhotinusError, match=r"the row of step 3 has no 'rigth'; .* Did you mean 'right'\? Log it"):
        run(EarlyStopping("rigth"))
    loop, _ = run(EarlyStopping("-right", patience=2), (0.5, math.nan, math.inf, 0.1))
    assert len(loop.history) == 3
    said = capsys.readouterr().out
    assert "right is nan, which EarlyStopping('-right', patience=2, min_delta=0) counts as a row without" in said
    assert (
        run(EarlyStopping("right", patience=2), [math.nan] * 9)[0]
        .summary()
        .startswith("stopped: 2 of 10 epochs done, step 6 (right was not a finite number in the last 2 rows)")
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"metric": 3}, r"EarlyStopping\(3\): needs the name of a metric"),
        ({"metric": "-"}, r"needs the name of a metric"),
        ({"metric": "valid_loss"}, r"the lowest loss is best: write EarlyStopping\('-valid_loss'\)"),
        ({"metric": "x", "patience": 0}, r"patience=0 is too small"),
        ({"metric": "x", "min_delta": -1.0}, r"min_delta=-1\.0: needs a number from 0"),
    ],
)
def test_what_cannot_be_right_is_refused(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError), match=error):
        EarlyStopping(**arguments)


def test_a_second_run_with_the_same_object_begins_without_the_rows_of_the_first(tmp_path: Path) -> None:
    stopping = EarlyStopping("right", patience=2)
    first, _ = run(stopping, out=tmp_path / "fold-1")
    assert (len(first.history), stopping.rows, bool(stopping.stopped)) == (4, 2, True)
    second, _ = run(stopping, (0.1, 0.2, 0.3, 0.2, 0.1, 0.4), out=tmp_path / "fold-2")
    assert (len(second.history), stopping.best, stopping.rows) == (5, 0.3, 2)
    again, steps = run(stopping, out=tmp_path / "fold-1")
    assert (steps, again.summary(), stopping.best) == ([], first.summary(), 0.7)


class AtRow3:
    def after_row(self, row: dict[str, float]) -> str:
        return "three are enough" if row["epoch"] == 3 else ""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_an_object_of_ones_own_ends_a_run_too(tmp_path: Path) -> None:
    loop, _ = run(AtRow3(), out=tmp_path)
    assert loop.summary().startswith("stopped: 3 of 10 epochs done, step 9 (three are enough)")
    assert run(AtRow3(), out=tmp_path)[1] == []


def trainer(callbacks: Any, **options: Any) -> photinus.Trainer:
    torch.manual_seed(0)
    model: nn.Module = Net(0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"epochs": 10, "batch_size": 16, "report": QUIET, "callbacks": callbacks, **options}
    return photinus.Trainer(model, optimizer, cross_entropy, **options)


def test_the_trainer_takes_it_among_its_callbacks(tmp_path: Path) -> None:
    def measure(loop: photinus.Loop) -> None:
        loop.log(right=VALUES[len(loop.history)])

    result = trainer([measure, EarlyStopping("right", patience=3)], out=tmp_path).fit(points(), points(20))
    assert len(result.history) == 8
    again = trainer([measure, EarlyStopping("right", patience=3)], out=tmp_path).fit(points(), points(20))
    assert again.history == result.history
    more = trainer([measure, EarlyStopping("right", patience=4)], out=tmp_path).fit(points(), points(20))
    assert len(more.history) == 10
    config = json.loads((tmp_path / "config.json").read_text())
    assert "EarlyStopping('right', patience=4, min_delta=0)" in str(config)


def test_the_trainer_refuses_a_metric_that_no_row_will_have() -> None:
    with pytest.raises(
        ValueError, match=r"EarlyStopping\('-valid_loss', .* a row of this training without a valid_set"
    ):
        trainer([EarlyStopping("-valid_loss")]).fit(points())
    with pytest.raises(TypeError, match=r"callbacks\[0\] is the class EarlyStopping, but a function \(loop\)"):
        trainer([EarlyStopping])
    with pytest.raises(TypeError, match=r"callbacks\[0\] is a int, but a function \(loop\) is needed"):
        trainer([3])
