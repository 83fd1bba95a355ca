from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler as schedules
from torch.utils.data import TensorDataset

import photinus
from photinus import Saving
from photinus.errors import CheckpointError, PhotinusError
from photinus.runlog.events import read_events
from photinus.runlog.run import FILES
from photinus.runlog.tables import METRICS, read_rows, read_window
from tests.made_run import put_in_the_way
from tests.optimizers import KINDS, Matrices, make_step
from tests.small_run import QUIET, CutOffError, Net, Numbered, points, train

STEPS_PER_EPOCH = 6  # 48 samples, 8 at a time


@pytest.fixture
def world() -> Iterator[Any]:
    with photinus.init("gloo", "cpu", seed=0) as session:
        yield session


LINES = photinus.Reporting(curves=False)


def _loop(
    dataset: Any = None, *, epochs: int = 2, batch_size: int = 4, drop_last: bool = True, **options: Any
) -> photinus.Loop:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = photinus.loader(dataset or Numbered(12), batch_size=batch_size, drop_last=drop_last)
    return photinus.Loop(model, optimizer, batches, **{"epochs": epochs, "report": QUIET, **options})


def _checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def _rows(result: dict[str, Any]) -> list[list[float]]:
    """Of each epoch what must not depend on interruptions."""
    return [[row[name] for name in ("epoch", "step", "loss", "learning_rate", "right")] for row in result["history"]]


def _loss(loop: photinus.Loop, value: float = 1.0) -> torch.Tensor:
    weight: torch.Tensor = next(loop.model.parameters())
    return (weight * 0).sum() + value


def _train_on(out: Path, epochs: int) -> None:
    for _ in (loop := _loop(epochs=epochs, out=out)):
        loop.record(_loss(loop))


@pytest.mark.parametrize("name", [*FILES, ".run.lock", "checkpoints/.writer.lock"])
@pytest.mark.parametrize("kind", ["folder", "FIFO", "device"])
def test_a_file_of_the_run_that_is_not_plain_is_named(tmp_path: Path, world: Any, name: str, kind: str) -> None:
    _train_on(tmp_path, epochs=1)
    put_in_the_way(tmp_path / name, kind)
    if name == METRICS and kind != "folder":  # replaced, not written to
        assert _loop(epochs=2, out=tmp_path).step == 3
        return
    with pytest.raises(PhotinusError, match=rf"{tmp_path / name} is a (link|{kind}), but a run's folder"):
        _train_on(tmp_path, epochs=2)


def test_a_lock_that_is_a_link_leaves_its_target_alone(tmp_path: Path, world: Any) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(PhotinusError, match=r"\.run\.lock is a link"):
        _loop(out=tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "mine"


# -- accumulating, clipping, loading ----------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_batches_are_accumulated_and_clipped_once(world: Any, compiled: bool) -> None:
    plain = torch.nn.Linear(1, 1, bias=False)
    start = plain.weight.item()
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    trained = torch.compile(model, backend="eager") if compiled else model
    data = TensorDataset(torch.full((4, 1), 3.0))
    loop = photinus.Loop(trained, optimizer, data, batch_size=1, accumulate=4, epochs=1, report=QUIET)
    for (x,) in loop:
        loop.backward(trained(x).sum())
        if loop.step_due:
            assert loop.clip(0.5).item() == pytest.approx(3.0)
            optimizer.step()
    assert plain.weight.item() == pytest.approx(start - 0.5)
    for limits in ({"max_norm": 0}, {"value": -1.0}, {"max_norm": 1.0, "value": 1.0}, {}):
        with pytest.raises(ValueError, match=r"loop\.clip: max_norm=.* value=.*: needs one of both, a number above 0"):
            loop.clip(**limits)


def test_what_was_loaded_keeps_no_hold_of_the_checkpoints_files(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    began = train(tmp_path, epochs=2)["began_at"]
    assert began == STEPS_PER_EPOCH
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# -- the iterator -----------------------------------------------------------------------------------------------------


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(world: Any) -> None:
    batches = [batch.tolist() for batch in _loop(epochs=3)]
    epochs = [[*batches[i], *batches[i + 1], *batches[i + 2]] for i in range(0, 9, 3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_epoch_and_step_count_from_one(world: Any) -> None:
    loop = _loop()
    seen = [(loop.epoch, loop.step, loop.epoch_ended) for _ in loop]
    assert seen == [(1, 1, False), (1, 2, False), (1, 3, True), (2, 4, False), (2, 5, False), (2, 6, True)]
    assert (loop.epoch, loop.step, loop.epoch_ended, loop.finished) == (2, 6, False, True)


def test_a_body_that_was_left_is_not_done_and_its_loss_is_forgotten(world: Any, tmp_path: Path) -> None:
    loop = _loop(epochs=1, out=tmp_path)
    for _ in loop:
        loop.record(_loss(loop, loop.step))
        if loop.step == 2:
            loop.record(_loss(loop, 100.0))
            break
    assert loop.step == 1
    for _ in loop:
        loop.record(_loss(loop, loop.step))
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path / "losses.csv")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_stop_ends_the_run_within_sixteen_steps_and_its_last_step_is_saved(world: Any, tmp_path: Path) -> None:
    loop = _loop(Numbered(400), epochs=1, out=tmp_path)
    for _ in loop:
        if loop.step == 3:
            loop.stop()
    assert 3 < loop.step <= 19
    assert _checkpoints(tmp_path) == [f"step-{loop.step:08d}"]


def test_checkpoints_are_as_many_epochs_apart_as_was_asked(world: Any, tmp_path: Path) -> None:
    for _ in _loop(epochs=5, out=tmp_path, save=Saving(every_epochs=2, keep_last=9)):
        pass
    assert _checkpoints(tmp_path) == ["step-00000006", "step-00000012", "step-00000015"]


def test_the_time_that_saving_takes_is_no_part_of_the_rows(world: Any, tmp_path: Path) -> None:
    class Slow:
        def state_dict(self) -> dict[str, int]:
            time.sleep(0.3)
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    loop = _loop(epochs=1, out=tmp_path, save=Saving(every_steps=1), state={"slow": Slow()})
    began = time.monotonic()
    for _ in loop:
        pass
    assert loop.history[-1]["elapsed_s"] < time.monotonic() - began - 0.6  # all but the last of three


def test_after_an_exception_the_folder_is_free_and_the_same_process_may_go_on(tmp_path: Path) -> None:
    left = []  # as in a notebook, which keeps what failed
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"

    def fail_after(step: int) -> None:
        with photinus.init("gloo", "cpu", seed=0):
            left.append(loop := _loop(out=tmp_path, save=Saving(every_steps=1)))
            assert loop.step == step
            for _ in loop:
                if loop.step == step + 3:
                    raise CutOffError

    for step in (0, 2):
        with pytest.raises(CutOffError):
            fail_after(step)
        subprocess.run([sys.executable, "-S", "-c", take, tmp_path / ".run.lock"], check=True, timeout=60)


def test_stop_ends_the_run_after_the_epochs_last_body(world: Any, tmp_path: Path) -> None:
    loop = _loop(epochs=5, out=tmp_path)
    for _ in loop:
        if loop.epoch_ended and loop.epoch == 2:
            loop.stop()
    assert (loop.step, loop.finished) == (6, True)
    assert _loop(epochs=5, out=tmp_path).finished
    assert len(list(_loop(epochs=6, out=tmp_path))) == 12


def test_the_last_short_batch_is_kept_on_request(world: Any) -> None:
    assert [len(batch) for batch in _loop(Numbered(10), epochs=1, drop_last=False)] == [4, 4, 2]


# -- loss and metrics -------------------------------------------------------------------------------------------------


def test_the_logged_loss_of_an_epoch_is_the_mean_over_its_samples(world: Any) -> None:
    loop = _loop(Numbered(10), epochs=1, drop_last=False)
    for batch in loop:
        loop.backward(_loss(loop, float(len(batch))))
    assert loop.history[0]["loss"] == pytest.approx((4 * 4 + 4 * 4 + 2 * 2) / 10)


@pytest.mark.parametrize(
    ("share", "logged"),
    [
        (1.0, 1.5),  # two losses of one body
        (0.5, 0.75),  # two parts of its batch
    ],
)
def test_several_losses_in_one_body_add_up(world: Any, share: float, logged: float) -> None:
    loop = _loop(Numbered(16), epochs=1)
    for _ in loop:
        loop.backward(_loss(loop, 1.0), share=share)
        loop.backward(_loss(loop, 0.5), share=share)
        loop._optimizer.step()
    assert loop.history[0]["loss"] == logged


def test_an_epoch_without_logged_loss_has_none(world: Any) -> None:
    loop = _loop(epochs=1)
    for _ in loop:
        pass
    assert math.isnan(loop.history[0]["loss"])


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (torch.zeros(3, requires_grad=True), ValueError, r"shape \[3\].*take its mean"),
        (torch.tensor(1.0), ValueError, "requires a gradient"),
        (1.0, TypeError, "loss is a float"),
    ],
)
def test_a_loss_that_cannot_go_backward_is_refused(world: Any, loss: Any, kind: type[Exception], message: str) -> None:
    loop = _loop()
    for _ in loop:
        with pytest.raises(kind, match=message):
            loop.backward(loss)
    with pytest.raises(kind, match=message):
        photinus.backward(loss)


def _typed(loop: photinus.Loop, optimizer: Any, body: Callable[[Tensor], None]) -> None:
    for batch in loop:
        body(loop.model(batch.float()[:, None]).square().mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_plain_backward_is_an_error_that_says_what_to_type(world: Any, scaled: bool) -> None:
    loop = _loop(Numbered(10), drop_last=False)
    optimizer = loop._optimizer
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    before = loop.model.weight.item()  # type: ignore[union-attr, operator]

    def body(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)

    with pytest.raises(PhotinusError, match=r"SGD\.step\(\) found gradients .* write loop\.backward\(loss\) in place"):
        _typed(loop, optimizer, body)
    assert loop.model.weight.item() == before  # type: ignore[union-attr, operator]
    optimizer.step()  # outside the loop's body nobody minds


def test_a_second_step_behind_one_backward_is_named_as_such(world: Any) -> None:
    loop = _loop()
    with pytest.raises(PhotinusError, match=r"SGD\.step\(\) twice in step 1, and no loop\.backward came since"):
        _typed(loop, loop._optimizer, lambda loss: [loop.backward(loss), loop._optimizer.step()])


def test_a_closure_logs_its_first_loss_and_a_plain_backward_inside_is_an_error(world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    loop = photinus.Loop(model, optimizer, Numbered(4), batch_size=4, epochs=2, report=QUIET)
    first = model(torch.arange(4.0)[:, None]).square().mean().item()

    def train_on(backward: Callable[[Tensor], None]) -> None:
        for batch in loop:

            def closure() -> float:
                optimizer.zero_grad()
                loss = model(batch.float()[:, None]).square().mean()  # noqa: B023 - called in this body
                backward(loss)
                return loss.item()

            if loop.epoch == 2 and backward == loop.backward:
                break
            optimizer.step(closure)

    train_on(loop.backward)
    assert loop.history[0]["loss"] == first
    with pytest.raises(PhotinusError, match=r"LBFGS\.step\(\) found gradients"):
        train_on(lambda loss: loss.backward())


@pytest.mark.parametrize(("accumulate", "parts"), [(1, 1), (1, 2), (4, 1)])
def test_losses_are_logged_alike_where_a_scaler_leaves_steps_out(
    tmp_path: Path, world: Any, accumulate: int, parts: int
) -> None:
    def logged(out: Path, left_out: tuple[int, ...]) -> list[float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        loop = _loop(Numbered(32 * accumulate), epochs=3, accumulate=accumulate, out=out, report=LINES)
        for _ in loop:
            for _ in range(parts):
                loop.backward(_loss(loop, float(loop.step)) / 2, share=1 / parts, scaler=scaler)
            if loop.step_due:
                if loop.step in left_out:
                    next(loop.model.parameters()).grad[0] = math.inf  # type: ignore[index]
                scaler.step(loop._optimizer)
                scaler.update()
                loop._optimizer.zero_grad()
        return [row["loss"] for row in read_rows(out / "losses.csv")]

    whole = logged(tmp_path / "all", ())
    assert whole == [step / 2 for step in range(1, 25)]
    assert logged(tmp_path / "some", (1, 2, 4)) == whole


def test_an_optimizer_with_a_backward_before_its_closure_logs_the_loss_of_that(world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.LBFGS(model.parameters())  # in place of SAM
    loop = photinus.Loop(model, optimizer, Numbered(4), batch_size=4, epochs=1, report=QUIET)
    for batch in loop:

        def closure() -> Tensor:
            loss = model(batch.float()[:, None]).square().mean()  # noqa: B023 - called in this body
            loop.backward(loss)
            return loss

        first = closure().item()
        optimizer.step(closure)
    assert loop.history[0]["loss"] == first


def test_gradients_made_by_hand_are_recorded_by_hand(world: Any) -> None:
    loop = _loop(Numbered(10), epochs=1, drop_last=False)
    optimizer = loop._optimizer
    _typed(loop, optimizer, lambda loss: (loss * loop.weight).backward() or loop.record(loss))
    assert math.isfinite(loop.history[0]["loss"])


def test_a_scaler_scales_the_gradient_and_not_the_logged_loss(world: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    loop = _loop(epochs=1)
    for _ in loop:
        loss = next(loop.model.parameters()).sum()
        loop.backward(loss * 0 + loss.detach() * 0 + 2.0 + (loss - loss.detach()), scaler=scaler)
        assert next(loop.model.parameters()).grad.item() == 1024.0  # type: ignore[union-attr]
        scaler.step(loop._optimizer)
        scaler.update()
        loop._optimizer.zero_grad()
    assert loop.history[0]["loss"] == pytest.approx(2.0)


def test_what_leaves_no_gradient_to_use_is_no_error(world: Any) -> None:
    loop = _loop(epochs=1)
    for _ in loop:
        loop._optimizer.step()  # nothing there
        loop.backward(_loss(loop))
        loop._optimizer.step()
        loop._optimizer.zero_grad(set_to_none=False)
        loop._optimizer.step()  # zeros


def test_backward_outside_the_body_is_refused(world: Any) -> None:
    loop = _loop()
    with pytest.raises(PhotinusError, match="belongs inside"):
        loop.backward(_loss(loop))


def test_backward_with_a_weight_scales_the_gradient(world: Any) -> None:
    weight = torch.ones(1, requires_grad=True)
    photinus.backward(weight.sum(), weight=0.25)
    assert weight.grad is not None
    assert weight.grad.item() == 0.25


def test_a_loss_that_is_not_finite_is_told_once(world: Any) -> None:
    loop = _loop(epochs=2)

    def train_on() -> None:
        for _ in loop:
            loop.backward(_loss(loop, math.nan if loop.step >= 2 else 1.0))

    with pytest.warns(UserWarning, match="the loss is nan at step 2") as told:
        train_on()
    assert len(told) == 1


def test_columns_of_the_loop_cannot_be_logged_over(world: Any) -> None:
    loop = _loop()
    for _ in loop:
        with pytest.raises(ValueError, match="'step' is a column"):
            loop.log(step=3)
        with pytest.raises(ValueError, match=r"'x' has shape \[2\]"):
            loop.log(x=torch.zeros(2))
        with pytest.raises(ValueError, match="'x' is None, but one number is needed"):
            loop.log(x=None)  # type: ignore[arg-type]


def test_a_loss_that_requires_gradients_is_logged_without_a_warning(world: Any) -> None:
    loop = _loop()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in loop:
            loss = _loss(loop, 2.0)
            loop.log(critic=loss)
            loop.backward(loss)
    assert [row["critic"] for row in loop.history] == [2.0, 2.0]


# -- wrong use, told before work starts -------------------------------------------------------------------------------


def test_what_cannot_be_right_about_saving_is_told_at_once_where_it_is_written() -> None:
    with pytest.raises(ValueError, match=r"every_epochs=0 is too small.*\nkeep_last=0.*\nevery_steps=-1"):
        Saving(every_steps=-1, every_epochs=0, keep_last=0)
    for best in (3, "-"):
        with pytest.raises(TypeError, match=f"best={best!r}: needs the name of a metric"):
            Saving(best=best)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="curves needs True or False, not 'yes'"):
        photinus.Reporting(curves="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config is a int, but a dict"):
        photinus.Reporting(config=3)


@pytest.mark.parametrize(
    ("function", "name", "words"),
    [
        (
            photinus.Loop,
            "validate_every_step",
            r"photinus\.Loop has no option .*\. Did you mean 'validate_every_steps'\?",
        ),
        (photinus.loader, "batchsize", r"photinus\.loader has no option 'batchsize'\. Did you mean 'batch_size'\?"),
        (photinus.init, "num_workers", r"photinus\.init has no option 'num_workers'"),
    ],
)
def test_an_option_that_is_not_there_names_the_one_that_is_meant(function: Any, name: str, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        function(**{name: 1})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"batch_size": 64}, ValueError, "batch_size=64 is more than the 12 samples"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"epochs": 0}, ValueError, "epochs=0"),
        ({"validate_every_steps": 0}, ValueError, "validate_every_steps=0"),
        ({"dataset": "absent"}, TypeError, r"'absent' is a path, not a dataset \(and it does not exist"),
        ({"dataset": "/tmp"}, TypeError, "is a path, not a dataset"),
        ({"resume": True}, TypeError, 'resume=True: needs "auto", "never", or the path'),
        ({"resume": "absent", "out": None}, CheckpointError, "resume='absent': nothing is there"),
        ({"save": 500}, TypeError, r"save=500: needs a photinus\.Saving"),
        ({"report": False}, TypeError, r"report=False: needs a photinus\.Reporting"),
        ({"out": 3}, TypeError, "out=3: needs the path"),
        ({"state": [1]}, TypeError, r"state=\[1\]: needs a dict"),
        ({"accumulate": 0}, ValueError, "accumulate=0 is too small"),
    ],
)
def test_what_is_wrong_is_refused_before_the_folder_is_touched(
    world: Any, tmp_path: Path, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        _loop(**{"out": tmp_path / "run", **options})
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_are_taken(world: Any, tmp_path: Path) -> None:
    two: Any = np.int64(2)
    save = Saving(every_steps=two, every_epochs=two, keep_last=two)
    for _ in (loop := _loop(out=tmp_path, epochs=two, batch_size=two, validate_every_steps=two, save=save)):
        loop.record(_loss(loop))
    assert loop.step == 12
    options = json.loads((tmp_path / "config.json").read_text())["options"]
    names = ("epochs", "batch_size", "validate_every_steps", "save_every_steps", "save_every_epochs", "save_keep_last")
    assert [options[name] for name in names] == [2] * 6


def test_a_model_without_parameters_is_refused(world: Any) -> None:
    model = torch.nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        photinus.Loop(model, torch.optim.SGD(model.parameters()), Numbered(4), batch_size=1, epochs=1)
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        photinus.wrap(torch.nn.ReLU())


def test_an_optimizer_of_another_model_is_refused(world: Any) -> None:
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(other.parameters())
    with pytest.raises(ValueError, match=r"steps 2 parameters, of which 2 are not parameters of the model \(Linear\)"):
        photinus.Loop(model, optimizer, Numbered(4), batch_size=1, epochs=1)
    with pytest.raises(ValueError, match="of which 2 are not"):
        photinus.wrap(model, optimizer)


def test_a_scheduler_of_another_optimizer_is_refused(world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer, other = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(other, 1)
    options: dict[str, Any] = {"batch_size": 4, "epochs": 1, "report": QUIET}
    text = r"StepLR\) sets the learning rate of a different SGD.* make the scheduler again"
    with pytest.raises(ValueError, match=text):
        photinus.Loop(model, optimizer, Numbered(8), state={"scheduler": scheduler}, **options)
    photinus.Loop(model, optimizer, Numbered(8), state={"scheduler": scheduler, "other": other}, **options)


def test_wrap_refuses_an_unknown_strategy_and_a_model_that_is_wrapped(world: Any) -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'dpp'.*'ddp'"):
        photinus.wrap(torch.nn.Linear(1, 1), strategy="dpp")
    with pytest.raises(ValueError, match="wrapped already"):
        photinus.wrap(photinus.wrap(torch.nn.Linear(1, 1)))


def test_the_optimizer_keeps_stepping_the_wrapped_model(world: Any) -> None:
    plain = Net()
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=1.0))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert all(changed)


# -- resume -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.seconds
def test_two_interruptions_in_one_epoch_change_no_bit(tmp_path: Path, workers: int) -> None:
    whole = train(None, num_workers=workers)
    for cut in (STEPS_PER_EPOCH + 3, STEPS_PER_EPOCH + 5):
        with pytest.raises(CutOffError):
            train(tmp_path, save_every=1, cut_at_step=cut, num_workers=workers)
    resumed = train(tmp_path, save_every=1, num_workers=workers)
    assert resumed["began_at"] == STEPS_PER_EPOCH + 4
    assert resumed["fingerprint"] == whole["fingerprint"]
    assert resumed["rate"] == whole["rate"]
    assert _rows(resumed) == _rows(whole)


def test_an_interruption_between_checkpoints_changes_no_bit(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=4, cut_at_step=11)
    resumed = train(tmp_path, save_every=4)
    assert resumed["began_at"] == 8
    assert resumed["fingerprint"] == train(None)["fingerprint"]


def test_an_interruption_in_the_last_body_of_an_epoch_repeats_it(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=5, cut_at_step=STEPS_PER_EPOCH)
    resumed = train(tmp_path, save_every=5)
    assert resumed["began_at"] == 5
    assert [row["right"] for row in resumed["history"]] == [row["right"] for row in train(None)["history"]]


def test_a_checkpoint_that_is_old_is_followed_by_another_inside_the_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photinus.trainer.loop, "_SAVE_AFTER_S", 0.0)
    monkeypatch.setattr(photinus.trainer.loop, "_MOST_COST", 1e-9)  # one such save in each start
    run: dict[str, Any] = {"samples": 160, "epochs": 1}
    with pytest.raises(CutOffError):
        train(tmp_path, cut_at_step=19, **run)
    assert _checkpoints(tmp_path) == ["step-00000002"]  # the ranks agreed after the first
    left = [tmp_path / "checkpoints" / ".tmp-step-00000018-0a1b2c3d", tmp_path / ".losses.csv.4711.new"]
    left[0].mkdir()
    left[1].write_text("half")
    with pytest.raises(CutOffError):
        train(tmp_path, cut_at_step=3, **run)  # before anything is saved
    assert not any(each.exists() for each in left)
    resumed = train(tmp_path, **run)
    assert resumed["began_at"] == 2
    assert resumed["fingerprint"] == train(None, **run)["fingerprint"]
    assert train(tmp_path / "none", save_every=999, **run)["step"] == 20
    assert _checkpoints(tmp_path / "none") == ["step-00000020"]


def test_the_numbers_survive_restarts_without_gap_or_repetition(tmp_path: Path) -> None:
    for cut in (4, 9, 11):
        with pytest.raises(CutOffError):
            train(tmp_path, save_every=3, cut_at_step=cut)
    train(tmp_path, save_every=3)
    losses, metrics = read_rows(tmp_path / "losses.csv"), read_rows(tmp_path / "metrics.csv")
    assert [row["step"] for row in losses] == list(range(1, 19))
    assert [row["epoch"] for row in metrics] == [1, 2, 3]
    for row in metrics:
        of_epoch = [loss["loss"] for loss in losses if loss["epoch"] == row["epoch"]]
        assert row["loss"] == pytest.approx(sum(of_epoch) / len(of_epoch), rel=1e-12)
    assert [row["start"] for row in losses] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 9


def test_a_half_written_line_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=3, cut_at_step=5)
    with open(tmp_path / "losses.csv", "a") as file:
        file.write("4,1,0.3")
    train(tmp_path)
    assert [row["step"] for row in read_rows(tmp_path / "losses.csv")] == list(range(1, 19))


def test_a_finished_run_says_so_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path)
    capsys.readouterr()
    again = train(tmp_path)
    told = capsys.readouterr().out
    assert again == {**first, "began_at": 18}
    assert "finished already: 3 of 3 epochs done" in told
    assert "nothing to do; give epochs=N with N above 3 to train more, or resume='never' to start over" in told


def test_what_is_drawn_after_a_finished_run_is_what_was_drawn_after_it_ended(tmp_path: Path) -> None:
    drawn = []
    for _ in range(2):
        with photinus.init("gloo", "cpu", seed=0):
            loop = _loop(epochs=1, out=tmp_path)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in loop:
                    loop.record(_loss(loop))
                    torch.rand(3)
            drawn.append(torch.rand(2).tolist())  # the head of the next model, say
    assert drawn[0] == drawn[1]


def test_a_second_loop_of_a_script_in_one_folder_is_warned_of(tmp_path: Path, world: Any) -> None:
    _train_on(tmp_path, epochs=1)
    with pytest.warns(UserWarning, match="another Loop of this script trained in .* trains nothing. Give each Loop"):
        _train_on(tmp_path, epochs=1)
    _train_on(tmp_path, epochs=2)  # which goes on


def test_layers_that_were_frozen_when_a_checkpoint_was_saved_are_named(
    tmp_path: Path, world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = _loop(epochs=1, out=tmp_path)
    for _ in loop:
        loop.record(_loss(loop))
        loop.model.bias.requires_grad_(False)
    _loop(epochs=2, out=tmp_path)
    assert "requires_grad is no part of a checkpoint, and was another one when it was saved: bias" in (
        capsys.readouterr().out
    )


def test_two_models_with_equal_layers_keep_their_own_momentum(tmp_path: Path, world: Any) -> None:
    def loop(order: str, epochs: int) -> tuple[photinus.Loop, dict[str, Any], Any]:
        critics = {name: torch.nn.Linear(1, 1, bias=False) for name in "ab"}
        both = torch.optim.SGD([critics[name].weight for name in order], lr=0.1, momentum=0.9)
        made = _loop(epochs=epochs, out=tmp_path, state={**critics, "both": both})
        return made, critics, both

    first, critics, both = loop("ab", 1)
    for _ in first:
        first.record(_loss(first))
        for number, name in enumerate("ab"):
            critics[name].weight.grad = torch.full((1, 1), float(number + 1))
        both.step()
    kept = {name: both.state[critics[name].weight]["momentum_buffer"].item() for name in "ab"}
    assert kept["a"] != kept["b"]
    _, critics, both = loop("ba", 2)
    assert {name: both.state[critics[name].weight]["momentum_buffer"].item() for name in "ab"} == kept


def test_a_loop_that_is_over_leaves_no_hook_on_the_optimizer(world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in (loop := photinus.Loop(model, optimizer, Numbered(12), batch_size=4, epochs=1, report=QUIET)):
        assert optimizer._optimizer_step_post_hooks
        loop.record(_loss(loop))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_raised_epochs_go_on_from_the_end(tmp_path: Path) -> None:
    train(tmp_path, epochs=2)
    assert train(tmp_path, epochs=3)["fingerprint"] == train(None, epochs=3)["fingerprint"]


def test_never_moves_the_earlier_run_aside(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    fresh = train(tmp_path, epochs=2, resume="never")
    assert fresh["began_at"] == 0
    assert sorted(path.name for path in (tmp_path / "earlier-1").iterdir()) == [
        "checkpoints", "config.json", "digests.bin", "events.jsonl", "losses.csv", "metrics.csv", "ranks.jsonl",
    ]  # fmt: skip
    assert [row["epoch"] for row in read_rows(tmp_path / "metrics.csv")] == [1, 2]
    train(tmp_path, epochs=1, resume=None)
    assert (tmp_path / "earlier-2").is_dir()


def test_workers_restarted_by_the_launcher_go_on_although_never_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: dict[str, Any] = {"resume": "never", "save_every": 2, "cut_at_step": 5}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "nightly")
    with pytest.raises(CutOffError):
        train(tmp_path, **cut)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(CutOffError):
        train(tmp_path, **{**cut, "cut_at_step": 7})
    assert "earlier-1" not in os.listdir(tmp_path)
    # The next night's first attempt died before it came here.
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(CutOffError):
        train(tmp_path, **cut)
    assert "earlier-1" in os.listdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    with pytest.raises(CutOffError):
        train(tmp_path, **cut)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    resumed = train(tmp_path, resume="never")
    assert resumed["began_at"] == 4
    assert resumed["fingerprint"] == train(None)["fingerprint"]
    assert train(tmp_path, resume=None)["began_at"] == 0


@pytest.mark.parametrize("resume", ["never", "path"])
def test_what_was_suspended_goes_on_and_what_ended_begins_as_it_was_asked(
    tmp_path: Path, resume: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "a", epochs=1)
    first = {"never": 0, "path": 6}[resume]
    options: dict[str, Any] = {"resume": tmp_path / "a" if resume == "path" else resume}
    out = tmp_path / "b"
    for at_step in (8, 11):  # a second requeue in the same folder
        monkeypatch.setenv("PHOTINUS_PREEMPT_AT_STEP", str(at_step))
        with pytest.raises(photinus.Suspended):
            train(out, **options)
    assert "goes on with what resume=" in capsys.readouterr().out
    monkeypatch.delenv("PHOTINUS_PREEMPT_AT_STEP")
    done = train(out, **options)
    assert (done["began_at"], done["fingerprint"]) == (11, train(None)["fingerprint"])
    assert not (out / "earlier-1").exists()
    assert train(out, **options)["began_at"] == first
    with pytest.raises(CutOffError):
        train(out, **options, save_every=2, cut_at_step=11)
    assert train(out, **options)["began_at"] == first  # it raised
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    lines = [event for event in events if event["event"] not in ("end", "stop")]  # as after SIGKILL
    (out / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert train(out, **options)["began_at"] == {"never": 0, "path": 18}[resume]


def test_a_path_in_the_same_folder_moves_what_came_later_aside(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=4, cut_at_step=13)
    checkpoint = tmp_path / "checkpoints" / "step-00000008"
    assert (tmp_path / "checkpoints" / "step-00000012").is_dir()
    resumed = train(tmp_path, resume=checkpoint)
    assert resumed["began_at"] == 8
    assert resumed["fingerprint"] == train(None)["fingerprint"]
    assert (tmp_path / "earlier-1" / "checkpoints" / "step-00000012").is_dir()
    assert [row["step"] for row in read_rows(tmp_path / "losses.csv")] == list(range(1, 19))


def test_a_path_of_another_run_starts_from_its_newest_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "a", epochs=2)
    resumed = train(tmp_path / "b", resume=tmp_path / "a")
    assert resumed["began_at"] == 12
    assert resumed["fingerprint"] == train(None)["fingerprint"]
    assert [row["step"] for row in read_rows(tmp_path / "b" / "losses.csv")] == list(range(1, 19))
    assert train(None, resume=tmp_path / "b" / "checkpoints")["began_at"] == 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 12}, "batch_size was 8 when the checkpoint was saved and is 12 now"),
        ({"seed": 8}, "seed was 7 .* and is 8 now"),
        ({"samples": 40}, "samples was 48 .* and is 40 now"),
    ],
)
def test_a_change_that_matters_is_refused_inside_an_epoch_and_told_between(
    tmp_path: Path, change: dict[str, int], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=4, cut_at_step=5)
    with pytest.raises(ValueError, match=f"cannot go on inside an epoch: {message}.*repeat or skip"):
        train(tmp_path, **change)
    train(tmp_path, epochs=1)
    capsys.readouterr()
    train(tmp_path, epochs=2, **change)
    ((name, value),) = change.items()
    assert f"changed since the checkpoint: {name}={value} (was " in capsys.readouterr().out


def _scheduled(
    out: Path | None,
    epochs: int,
    make: Callable[[torch.optim.Optimizer, int], Any] | None,
    *,
    horizon: int | None = None,
    lr: float = 0.1,
    **settings: Any,
) -> tuple[list[float], torch.optim.Optimizer]:
    """Trains; returns the learning rates of the epochs since this start, and the optimizer."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, **settings)
    scheduler = None if make is None else make(optimizer, horizon or epochs)
    rates = []
    options: dict[str, Any] = {"batch_size": 4, "out": out, "report": QUIET}
    for _ in photinus.Loop(
        model, optimizer, Numbered(4), epochs=epochs, state=scheduler and {"scheduler": scheduler}, **options
    ):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*([1.0] if isinstance(scheduler, schedules.ReduceLROnPlateau) else []))
    return rates, optimizer


SCHEDULERS: dict[str, Callable[[Any, int], Any]] = {
    "cosine": lambda o, n: schedules.CosineAnnealingLR(o, n),
    "polynomial": lambda o, n: schedules.PolynomialLR(o, n),
    "steps": lambda o, n: schedules.StepLR(o, n // 2, gamma=1 / n),
    "milestones": lambda o, n: schedules.MultiStepLR(o, [n // 2, n - 1]),
    "linear": lambda o, n: schedules.LinearLR(o, 1.0, 0.0, total_iters=n),
    "exponential": lambda o, n: schedules.ExponentialLR(o, 0.01 ** (1 / n)),
    "function": lambda o, n: schedules.LambdaLR(o, lambda epoch: max(0.0, 1 - epoch / n)),
    "one cycle": lambda o, n: schedules.OneCycleLR(o, 0.3, total_steps=n + 3),
    "cyclic": lambda o, n: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=n, cycle_momentum=False),
    "restarts": lambda o, n: schedules.CosineAnnealingWarmRestarts(o, n),
    "chained": lambda o, n: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=n), schedules.CosineAnnealingLR(o, n)]
    ),
    "sequential": lambda o, n: schedules.SequentialLR(
        o,
        [
            schedules.LinearLR(o, 0.5, total_iters=1),
            schedules.LambdaLR(o, lambda epoch: 1 - epoch / n),
        ],
        [1],
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_on_with_any_optimizer_of_torch_or_of_ones_own(tmp_path: Path, world: Any, kind: str) -> None:
    def run(epochs: int, out: Path | None) -> tuple[list[Any], list[Any]]:
        torch.manual_seed(0)
        model = Matrices(sparse=kind == "SparseAdam")
        optimizer = KINDS[kind](model.parameters())
        data = TensorDataset(torch.arange(16).reshape(8, 2) % 3)
        loop = photinus.Loop(model, optimizer, data, batch_size=4, epochs=epochs, out=out, report=QUIET)
        for (x,) in loop:

            def backward(x: Tensor = x) -> Tensor:
                loss = model(x).square().sum()
                loop.backward(loss)
                return loss

            make_step(optimizer, backward)
        return [row["loss"] for row in loop.history], [p.tolist() for p in model.parameters()]

    run(1, tmp_path)
    assert run(2, tmp_path) == run(2, None)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_longer_run_goes_on_along_the_schedulers_new_curve(
    tmp_path: Path, world: Any, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, _ = _scheduled(None, 6, SCHEDULERS[name])
    _scheduled(tmp_path, 2, SCHEDULERS[name])
    capsys.readouterr()
    resumed, _ = _scheduled(tmp_path, 6, SCHEDULERS[name])
    assert resumed == straight[2:]
    assert capsys.readouterr().out.count("note: changed since the checkpoint: ") == 1
    again, _ = _scheduled(tmp_path, 8, SCHEDULERS[name], horizon=6)
    assert "note" not in capsys.readouterr().out  # the script says the same as before
    assert again == _scheduled(None, 8, SCHEDULERS[name], horizon=6)[0][6:]


@pytest.mark.parametrize("now", ["sequential", "function", "cyclic"])
def test_a_schedule_of_another_class_goes_on_along_its_curve(tmp_path: Path, world: Any, now: str) -> None:
    _scheduled(tmp_path, 2, SCHEDULERS["cosine"])
    assert _scheduled(tmp_path, 6, SCHEDULERS[now])[0] == _scheduled(None, 6, SCHEDULERS[now])[0][2:]


class Outer(torch.optim.Optimizer):
    """Has an optimizer inside, with the same groups, as SAM does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


PAIRS: dict[str, Callable[[Any, float], list[Any]]] = {  # of which the second argument changes one
    "both multiply": lambda o, x: [schedules.ExponentialLR(o, x), schedules.LinearLR(o, 0.25, total_iters=3)],
    "one sets what the other multiplies": lambda o, x: [
        schedules.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
        schedules.ExponentialLR(o, x),
    ],
    "over the optimizer inside": lambda o, x: [schedules.ExponentialLR(o.inner, x)],
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_changed_schedule_takes_others_of_its_optimizer_with_it(tmp_path: Path, world: Any, name: str) -> None:
    def run(out: Path | None, epochs: int, x: float) -> list[float]:
        model = torch.nn.Linear(1, 1)
        optimizer = Outer(torch.optim.SGD(model.parameters(), lr=0.1))
        first, *more = PAIRS[name](optimizer, x)
        options: dict[str, Any] = {"out": out, "report": QUIET, "batch_size": 4, "epochs": epochs}
        rates = []
        state = {f"scheduler_{place}": scheduler for place, scheduler in enumerate([first, *more])}
        for _ in photinus.Loop(model, optimizer, Numbered(4), state=state, **options):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            for scheduler in [first, *more]:
                scheduler.step()
        return rates

    run(tmp_path, 2, 0.9)
    assert run(tmp_path, 6, 0.8) == pytest.approx(run(None, 6, 0.8)[2:])


def test_the_line_of_a_changed_schedule_has_both_values(
    tmp_path: Path, world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    _scheduled(tmp_path, 2, SCHEDULERS["cosine"])
    capsys.readouterr()
    _scheduled(tmp_path, 6, SCHEDULERS["cosine"])
    assert capsys.readouterr().out.startswith(
        "note: changed since the checkpoint: scheduler T_max=6 (was 2), learning rate 0.075 from here on (was 0)\n"
    )


def test_a_schedule_that_ends_before_the_checkpoint_is_refused(tmp_path: Path, world: Any) -> None:
    _scheduled(tmp_path, 5, SCHEDULERS["one cycle"])
    with pytest.raises(ValueError, match=r"scheduler \(OneCycleLR\) was changed and has no place at step 5"):
        _scheduled(tmp_path, 6, SCHEDULERS["one cycle"], horizon=1)


@pytest.mark.parametrize("name", ["none", "exponential"])
def test_what_the_script_changed_holds_and_what_training_moved_stays(
    tmp_path: Path, world: Any, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def make(optimizer: Any, _: int) -> Any:
        return None if name == "none" else schedules.ExponentialLR(optimizer, 0.5)

    _scheduled(tmp_path, 1, make)
    capsys.readouterr()
    rates, _ = _scheduled(tmp_path, 2, make)
    assert "note" not in capsys.readouterr().out
    rates, optimizer = _scheduled(tmp_path, 3, make, lr=0.2, betas=(0.8, 0.99), weight_decay=0.5)
    told = capsys.readouterr().out
    assert "lr=0.2 (was 0.1)" in told
    assert "betas=[0.8, 0.99] (was [0.9, 0.999]), " in told
    assert "weight_decay=0.5 (was 0.01)" in told
    assert rates == [0.2 if name == "none" else 0.05]  # the third epoch of the new curve
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)


def test_a_rate_that_the_body_moved_stays_where_the_script_is_the_same(tmp_path: Path, world: Any) -> None:
    def run(epochs: int) -> float:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in photinus.Loop(
            model,
            optimizer,
            Numbered(4),
            batch_size=4,
            epochs=epochs,
            out=tmp_path,
            report=LINES,
        ):
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        return float(optimizer.param_groups[0]["lr"])

    assert run(1) == 0.05
    assert run(3) == 0.0125


def test_a_scheduler_that_follows_a_metric_keeps_what_it_saw_and_takes_its_new_settings(
    tmp_path: Path, world: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def plateau(factor: float) -> Callable[[Any, int], Any]:
        return lambda optimizer, _: schedules.ReduceLROnPlateau(optimizer, factor=factor, patience=0)

    assert _scheduled(tmp_path, 3, plateau(0.5))[0] == pytest.approx([0.1, 0.1, 0.05])
    capsys.readouterr()
    assert _scheduled(tmp_path, 5, plateau(0.1))[0] == pytest.approx([0.025, 0.0025])
    assert "scheduler factor=0.1 (was 0.5)\n" in capsys.readouterr().out


def test_a_batch_size_that_divides_what_is_done_goes_on_without_repeating(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=4, cut_at_step=5)
    assert train(tmp_path, batch_size=16, epochs=1)["step"] == 5  # 32 samples in 4 steps, 16 in the fifth


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, world: Any) -> None:
    for _ in _loop(epochs=1, out=tmp_path):
        pass
    model = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"shape \[1, 1\] and the model's \[2, 2\].*another `out`, or resume="):
        photinus.Loop(
            model, torch.optim.SGD(model.parameters()), Numbered(12), batch_size=4, epochs=2, out=tmp_path
        )  # fmt: skip


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path, world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    options: dict[str, Any] = {"batch_size": 4, "out": tmp_path, "report": QUIET}
    descent = torch.optim.SGD(model.parameters())
    for _ in photinus.Loop(model, descent, Numbered(12), epochs=1, **options):
        pass
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="optimizer is AdamW, which may not be able to step with what SGD has"):
        photinus.Loop(model, adam, Numbered(12), epochs=2, **options)
    photinus.save(tmp_path / "state", optimizer=descent)
    adam = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=r"to a different optimizer(.|\n)*Nothing was changed"):
        photinus.load(tmp_path / "state", optimizer=adam)
    assert adam.defaults.keys() <= adam.param_groups[0].keys()


@pytest.mark.parametrize(("kind", "option"), [("AdamW", "amsgrad"), ("RMSprop", "centered"), ("RMSprop", "momentum")])
def test_an_option_that_needs_more_state_than_was_saved_is_refused(
    tmp_path: Path, world: Any, kind: str, option: str
) -> None:
    for value in (False, True):
        model = torch.nn.Linear(1, 1)
        optimizer = getattr(torch.optim, kind)(model.parameters(), **{option: value})
        options: dict[str, Any] = {"out": tmp_path, "epochs": 1 + value, "report": QUIET}
        with pytest.raises(CheckpointError, match=f"{option}=True, which needs state") if value else nullcontext():
            _typed(
                loop := photinus.Loop(model, optimizer, Numbered(4), batch_size=4, **options), optimizer, loop.backward
            )


def test_what_is_logged_after_the_end_belongs_to_the_last_row(tmp_path: Path, world: Any) -> None:
    loop = _loop(epochs=2, out=tmp_path)
    for _ in loop:
        loop.log(error=1.0)
    loop.log(test=0.5)
    assert [row.get("test") for row in loop.history] == [None, 0.5]
    assert [row.get("test") for row in read_rows(tmp_path / "metrics.csv")] == [None, 0.5]
    finished = _loop(epochs=2, out=tmp_path)
    finished.log(test=0.75)  # the same script again
    assert read_rows(tmp_path / "metrics.csv")[-1]["test"] == 0.75
    stopped = _loop(Numbered(400), epochs=1)
    for _ in stopped:
        stopped.stop()
    with pytest.raises(PhotinusError, match=r"loop\.log after the end: the run was stopped inside an epoch"):
        stopped.log(test=0.5)


def test_a_drop_last_that_leaves_no_batch_of_the_epoch_is_told_as_such(tmp_path: Path, world: Any) -> None:
    loop = _loop(Numbered(10), epochs=1, out=tmp_path, drop_last=False, save=Saving(every_steps=2))
    for _ in loop:
        if loop.step == 3:
            break
    message = "drop_last was False .* and is True now, and 8 samples .* its rest would have no batch. Set it back"
    with pytest.raises(ValueError, match=message):
        _loop(Numbered(10), epochs=1, out=tmp_path)


def test_a_missing_scheduler_is_told(tmp_path: Path, world: Any) -> None:
    train(tmp_path, epochs=1)
    plain = Net()
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), momentum=0.9))
    with pytest.raises(CheckpointError, match=r"the states of \['scheduler'\], but the loop was given state=None"):
        photinus.Loop(model, optimizer, points(), batch_size=8, epochs=2, out=tmp_path)


def test_the_users_own_objects_are_saved_and_restored(tmp_path: Path, world: Any) -> None:
    average = torch.nn.Linear(1, 1)
    for _ in _loop(epochs=1, out=tmp_path, state={"average": average}):
        torch.nn.init.constant_(average.weight, 4.0)
    fresh, alone = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    _loop(epochs=2, out=tmp_path, state={"average": fresh})
    photinus.load(tmp_path, average=alone)
    assert fresh.weight.item() == alone.weight.item() == 4.0
    for name in ("model", "a b", "../x"):
        with pytest.raises(ValueError, match="take another name, of letters, digits and _, for its file"):
            _loop(out=tmp_path / "new", state={name: fresh})
    with pytest.raises(CheckpointError, match=r"\['average'\], but the loop was given state=None"):
        _loop(epochs=2, out=tmp_path)


@pytest.mark.parametrize("second_is_known", [True, False])
def test_optimizers_that_take_turns_in_a_body_delay_no_checkpoint(
    tmp_path: Path, world: Any, second_is_known: bool
) -> None:
    model = torch.nn.Linear(1, 1)
    first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    loop = photinus.Loop(
        model, first, Numbered(12), batch_size=4, epochs=1, out=tmp_path, save=Saving(every_steps=1, keep_last=9),
        state={"second": second} if second_is_known else None, report=QUIET,
    )  # fmt: skip
    for _ in loop:
        for optimizer in (first, second):
            loop.backward(_loss(loop))
            optimizer.step()
    assert _checkpoints(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_a_checkpoint_waits_for_no_optimizer_of_those_that_take_turns(tmp_path: Path, world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    often, seldom = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    options: dict[str, Any] = {"save": Saving(every_steps=1, keep_last=9), "report": QUIET, "out": tmp_path}
    loop = photinus.Loop(model, often, Numbered(6), batch_size=1, epochs=1, state={"seldom": seldom}, **options)
    for _ in loop:
        turn = loop.step % 3 == 0
        loop.backward((model.bias if turn else model.weight).sum())
        (seldom if turn else often).step()  # and nothing is ever cleared
    assert len(_checkpoints(tmp_path)) == 6


class TwoSteps(torch.optim.Optimizer):
    """As sharpness-aware minimization is usually written: what steps is an optimizer inside, and no hook runs."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def second_step(self) -> None:
        self.base_optimizer.step()


def test_steps_of_an_optimizer_inside_another_let_checkpoints_be_saved(tmp_path: Path, world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = TwoSteps(model.parameters())
    options: dict[str, Any] = {"save": Saving(every_steps=2, keep_last=9), "report": QUIET}
    loop = photinus.Loop(model, optimizer, Numbered(16), batch_size=4, epochs=1, out=tmp_path, **options)
    for _ in loop:
        loop.backward(_loss(loop))
        optimizer.second_step()
    assert _checkpoints(tmp_path) == ["step-00000002", "step-00000004"]


def test_a_run_whose_optimizer_is_never_seen_to_step_is_saved(tmp_path: Path, world: Any) -> None:
    loop = _loop(Numbered(120), batch_size=1, epochs=2, out=tmp_path, save=Saving(every_steps=100, keep_last=9))
    for _ in loop:
        loop.backward(_loss(loop))  # whose gradients are used in a way of its own
        loop.model.zero_grad(set_to_none=False)
    assert _checkpoints(tmp_path) == [f"step-00000{step}" for step in (100, 120, 200, 240)]


def test_one_epoch_is_one(world: Any) -> None:
    loop = _loop(epochs=1)
    for _ in loop:
        pass
    assert loop.summary().startswith("finished: 1 epoch, 3 steps")


def test_the_best_checkpoint_stays_where_not_every_epoch_would_be_saved(tmp_path: Path, world: Any) -> None:
    loop = _loop(epochs=6, out=tmp_path, save=Saving(keep_last=1, best="right", every_epochs=3))
    for _ in loop:
        if loop.epoch_ended:
            loop.log(right=float(loop.epoch == 2))
    assert _checkpoints(tmp_path) == ["step-00000006", "step-00000018"]


def test_a_best_of_another_name_is_not_compared_with(tmp_path: Path, world: Any) -> None:
    for epochs, best in ((2, "right"), (4, "-error")):
        loop = _loop(epochs=epochs, out=tmp_path, save=Saving(keep_last=1, best=best))
        for _ in loop:
            if loop.epoch_ended:
                loop.log(right=0.5, error=9.0 - loop.epoch if loop.epoch < 4 else 9.0)
    assert _checkpoints(tmp_path) == ["step-00000009", "step-00000012"]


def test_the_time_of_a_row_that_was_cut_off_counts(tmp_path: Path, world: Any) -> None:
    for stop_at in (2, None):
        loop = _loop(epochs=1, out=tmp_path, save=Saving(every_steps=2))
        for _ in loop:
            if loop.step == 3 and stop_at:
                break
            time.sleep(0.2 if stop_at else 0.0)
    assert loop.history[-1]["elapsed_s"] > 0.4


def test_an_extra_state_that_cannot_be_saved_is_refused_before_any_work(tmp_path: Path, world: Any) -> None:
    class Odd(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return object()

    model = Odd(1, 1)
    with pytest.raises(TypeError, match=r"model: the extra state of Odd"):
        photinus.Loop(
            model, torch.optim.SGD(model.parameters(), lr=0.1), Numbered(4), batch_size=2, epochs=1, out=tmp_path
        )


def test_the_best_checkpoint_stays(tmp_path: Path, world: Any) -> None:
    loop = _loop(epochs=5, out=tmp_path, save=Saving(keep_last=1, best="-error"))
    for _ in loop:
        if loop.epoch_ended:
            loop.log(error=abs(loop.epoch - 2))
    assert _checkpoints(tmp_path) == ["step-00000006", "step-00000015"]


def test_best_of_a_metric_that_nobody_logs_is_told(tmp_path: Path, world: Any) -> None:
    with pytest.raises(ValueError, match="best='accuracy': nothing of that name was logged"):
        list(_loop(out=tmp_path, save=Saving(best="accuracy")))


def test_a_best_that_nobody_logs_costs_no_epoch(tmp_path: Path, world: Any) -> None:
    loop = _loop(Numbered(12), out=tmp_path, save=Saving(best="accuracy"))
    with pytest.raises(ValueError, match=r"What was trained is saved in .*step-00000003"):
        list(loop)
    assert _loop(Numbered(12), out=tmp_path, save=Saving(best="loss")).epoch == 2


def test_checkpoints_hold_plain_names(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    with photinus.init("gloo", "cpu"):
        state = photinus.trainer.CheckpointFolder(tmp_path / "checkpoints").newest().load()
    Net().load_state_dict(state["model"])


def test_nothing_is_written_without_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train(None, epochs=1, report=photinus.Reporting(progress=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["add_losses", "flush"])
def test_a_full_disk_ends_the_run_with_its_reason(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    loop = _loop(out=tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")  # as write and fsync raise it

    def train_on() -> None:
        for _ in loop:
            loop.backward(_loss(loop))

    monkeypatch.setattr(f"photinus.runlog.tables.RunFiles.{what}", full)
    with pytest.raises(OSError, match=f"No space left on device: .*{tmp_path.name}"):
        train_on()


class _Stateful:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        return {"held": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (_Stateful(print), r"mine\['held'\] is a builtins.builtin_function_or_method, which cannot be saved"),
        (3, "mine is a int without state_dict and load_state_dict"),
    ],
)
def test_what_could_not_be_saved_or_put_back_is_refused_before_any_work(
    tmp_path: Path, world: Any, item: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        _loop(out=tmp_path, state={"mine": item})
    assert list(_loop(out=tmp_path, state={"mine": _Stateful(3)}))


def test_config_json_says_how_the_run_came_about(tmp_path: Path, world: Any) -> None:
    list(_loop(epochs=1, out=tmp_path, report=photinus.Reporting(config={"lr": 0.1, "path": tmp_path})))
    list(_loop(epochs=2, out=tmp_path, report=photinus.Reporting(config={"lr": 0.1})))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["options"]["batch_size"] == 4
    assert config["user"] == {"lr": 0.1}
    first, second = config["starts"]
    assert (first["resumed_from"], second["resumed_step"]) == (None, 3)
    assert first["world_size"] == 1
    assert first["versions"]["torch"] == torch.__version__


def test_data_sets_of_tensors_are_taken_as_they_are(world: Any) -> None:
    dataset = TensorDataset(torch.arange(12.0), torch.arange(12))
    for x, y in _loop(dataset, epochs=1):
        assert x.tolist() == y.tolist()


# -- events and times -------------------------------------------------------------------------------------------------


def _events(out: Path) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in read_events(out)]


def test_events_tell_what_happened_to_a_run(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, epochs=2, save_every=4, cut_at_step=5)
    train(tmp_path, epochs=2)
    cut_off = [("start", 0), ("checkpoint", 4), ("error", 4)]
    gone_on = [("start", 4), ("epoch", 6), ("checkpoint", 6), ("epoch", 12), ("checkpoint", 12), ("end", 12)]
    assert _events(tmp_path) == cut_off + gone_on
    events = read_events(tmp_path)
    assert events[2].facts["text"] == "CutOffError: rank 0 cut off at step 5"
    first, second = (event.facts for event in events if event.kind == "start")
    assert (first["start"], first["resumed_from"], first["epochs"], first["steps_per_epoch"]) == (1, None, 2, 6)
    assert (second["start"], second["world_size"]) == (2, 1)
    assert second["resumed_from"].endswith("step-00000004")
    train(tmp_path, epochs=2)  # has nothing to do, and says nothing
    assert _events(tmp_path) == cut_off + gone_on


def test_a_run_that_is_left_or_stopped_says_so(tmp_path: Path) -> None:
    for name in ("left", "stopped"):
        with photinus.init("gloo", "cpu"):
            loop = _loop(out=tmp_path / name)
            for _ in loop:
                if loop.epoch_ended:
                    if name == "left":
                        break
                    loop.stop()
        last = read_events(tmp_path / name)[-1]
        assert (last.kind, last.facts["how"]) == ("end", name)


def test_a_loss_that_is_no_number_is_an_event(tmp_path: Path, world: Any) -> None:
    loop = _loop(out=tmp_path, epochs=1)

    def train_on() -> None:
        for _ in loop:
            loop.backward(_loss(loop, math.nan if loop.step == 2 else 1.0))

    with pytest.warns(UserWarning, match="the loss is nan at step 2"):
        train_on()
    assert ("warning", 2) in _events(tmp_path)


def test_what_lay_in_the_folder_is_moved_aside_with_its_events_and_times(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    train(tmp_path, epochs=1, resume="never")
    assert _events(tmp_path)[0] == ("start", 0)
    assert len(_events(tmp_path)) == len(_events(tmp_path / "earlier-1")) == 4
    assert (tmp_path / "earlier-1" / "ranks.jsonl").exists()


@pytest.mark.slow
def test_times_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "samples": 800, "wait_s": 0.03}
    with pytest.raises(CutOffError):
        train(tmp_path, save_every=40, cut_at_step=75, **options)
    before = [window.step for window in _windows(tmp_path)]
    assert before[-1] > 40
    train(tmp_path, **{**options, "wait_s": 0.0})
    windows = _windows(tmp_path)
    assert [window.step for window in windows] == [*[step for step in before if step <= 40], 100]
    assert windows[-1].start == 2
    assert windows[0].phases["other"][0] == pytest.approx(0.03, rel=0.5)


def _windows(out: Path) -> list[Any]:
    return [window for line in (out / "ranks.jsonl").read_text().splitlines() if (window := read_window(line))]


def test_a_logged_loss_is_that_of_its_step_where_its_memory_is_used_again(world: Any) -> None:
    """As a CUDA graph's, whose result lies in the same place after each replay."""
    loop = _loop(Numbered(8), epochs=1)
    for number, _ in enumerate(loop):
        loss = _loss(loop, number + 1.0)
        loop.backward(loss)
        loss.detach().fill_(99.0)
    assert loop.history[0]["loss"] == 1.5


@pytest.mark.parametrize("known", [True, False])  # whether the checkpoint names their parameters
def test_parameter_groups_that_a_run_added_come_back_or_the_error_says_what_to_do(
    tmp_path: Path, world: Any, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not known:
        monkeypatch.setattr("photinus.trainer.record.settings.Settings.parameters", lambda self: {})

    def run(out: Path | None, cut_at: int = 0) -> list[float]:
        torch.manual_seed(0)
        net = Net(0.0)
        optimizer = torch.optim.SGD(net[4].parameters(), lr=0.1, momentum=0.9)
        save = Saving(every_steps=1)
        loop = photinus.Loop(net, optimizer, points(), batch_size=8, epochs=2, out=out, report=QUIET, save=save)
        for inputs, targets in loop:
            if loop.step == 3:
                optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.05})
            loop.backward(torch.nn.functional.cross_entropy(net(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            if loop.step == cut_at:
                break
        return [value for parameter in net.parameters() for value in parameter.flatten().tolist()]

    run(tmp_path, cut_at=6)
    if known:
        run(tmp_path, cut_at=9)
        assert run(tmp_path) == run(None)
    else:
        with pytest.raises(
            CheckpointError, match=r"1 parameter groups here, and 2 in .* Add them before photinus\.Loop"
        ):
            run(tmp_path)


def test_a_last_batch_of_one_sample_and_a_batch_norm_is_warned_of_before_any_work(world: Any) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"last batch of each epoch \(1 samples: 13 by batch_size=4\)"):
        photinus.Loop(model, optimizer, points(13), batch_size=4, epochs=1, report=QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        photinus.Loop(model, optimizer, points(14), batch_size=4, epochs=1, report=QUIET)


def test_the_data_of_a_batch_that_is_done_is_freed_before_the_next_exchange_of_losses(world: Any) -> None:
    data = TensorDataset(torch.rand(160, 1))
    batches: list[weakref.ref[torch.UntypedStorage]] = []
    for (given,) in (loop := _loop(data, epochs=1)):
        assert [each() for each in batches[:-1]] == [None] * len(batches[:-1])  # the last one until the loop goes on
        batches.append(weakref.ref(given.untyped_storage()))
        loop.record(_loss(loop))
        del given
    assert len(batches) == 40


def test_a_loss_that_the_script_changes_later_is_logged_as_it_was(world: Any) -> None:
    seen = []
    for _ in (loop := _loop(epochs=1)):
        loop.record(loss := _loss(loop, value := 1.0 + loop.step))
        seen.append(value)
        loss.data.fill_(100.0)
    assert loop.history[-1]["loss"] == pytest.approx(sum(seen) / len(seen))
