from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.optim import lr_scheduler as schedules
from torch.utils.data import DataLoader

import photinus
from photinus import Saving
from photinus.errors import CheckpointError
from photinus.runlog.tables import read_rows
from tests.small_run import FEATURES, QUIET, Net, fingerprint, points, right

LINES = photinus.Reporting(curves=False)
LOGGED = photinus.Reporting(loggers=[photinus.TensorBoard()])


def _trainer(out: Path | None = None, *, epochs: int = 3, lr: float = 0.05, **options: Any) -> photinus.Trainer:
    torch.manual_seed(2)
    model = Net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    options = {
        "metrics": {"right": right},
        "report": photinus.Reporting(progress=False),
        **options,
    }
    return photinus.Trainer(model, optimizer, cross_entropy, epochs=epochs, batch_size=8, out=out, **options)


def test_fit_trains_validates_and_leaves_everything_in_out(tmp_path: Path) -> None:
    result = _trainer(tmp_path, epochs=8).fit(points(), points(31))
    assert not dist.is_initialized()
    assert result.metrics["right"] > 0.8
    assert set(result.metrics) == {"loss", "right", "valid_loss"}
    assert [row["epoch"] for row in result.history] == list(range(1, 9))
    assert result.checkpoint is not None
    assert result.checkpoint.is_dir()
    assert result.curves == tmp_path / "curves.png"
    assert {path.name for path in tmp_path.iterdir()} == {
        ".run.lock", "checkpoints", "config.json", "curves.png", "digests.bin",
        "events.jsonl", "losses.csv", "metrics.csv", "ranks.jsonl",
    }  # fmt: skip
    assert f"right {result.metrics['right']:.4f}" in str(result)


def test_the_trainer_is_the_loop_with_the_usual_body(tmp_path: Path) -> None:
    result = _trainer().fit(points())
    torch.manual_seed(2)
    plain = Net(dropout=0.0)
    with photinus.init("gloo", "cpu"):
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))
        loop = photinus.Loop(model, optimizer, points(), batch_size=8, epochs=3, report=QUIET)
        for inputs, targets in loop:
            loop.backward(cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    assert fingerprint(result.model) == fingerprint(model)
    assert [row["loss"] for row in result.history] == [row["loss"] for row in loop.history]


@pytest.mark.parametrize("strategy", ["torch-ddp", "dp", "zero1", "zero2", "zero3"])
@pytest.mark.seconds
def test_every_strategy_gives_the_same_curve_and_goes_on_with_any_others_checkpoint(
    tmp_path: Path, strategy: str
) -> None:
    whole = _trainer(clip_norm=1.0).fit(points(), points(31))
    out = tmp_path / "run"
    _trainer(out, epochs=2, strategy=strategy, clip_norm=1.0).fit(points(), points(31))
    result = _trainer(out, epochs=3, clip_norm=1.0).fit(points(), points(31))
    for name in ("loss", "right", "valid_loss"):
        assert [r[name] for r in result.history] == pytest.approx([r[name] for r in whole.history], rel=1e-5), name


def test_clipping_changes_what_is_trained_and_a_wrong_norm_is_refused_before_work() -> None:
    trainer = _trainer(epochs=1, clip_norm=numpy.float32(0.01))
    assert json.loads(json.dumps(trainer._body))["clip_norm"] == pytest.approx(0.01)  # as ranks compare it
    clipped = trainer.fit(points())
    assert fingerprint(clipped.model) != fingerprint(_trainer(epochs=1).fit(points()).model)
    for wrong in (0.0, -1.0, float("nan"), [1]):
        with pytest.raises(ValueError, match=r"clip_norm=.*needs a number above 0"):
            _trainer(clip_norm=wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scheduler": "cosine"}, r"scheduler is a str, but an object with a step\(\)"),
        ({"scheduler": torch.optim.lr_scheduler.StepLR}, "scheduler is the class StepLR, but an object"),
        ({"metrics": [right]}, "metrics is a list, but a dict"),
        ({"metrics": {"right": "right"}}, r"metrics\['right'\] is a str, but a function"),
        ({"callbacks": print}, r"callbacks is a builtin_function_or_method, but a list of functions .*\[\.\.\.\]"),
        ({"callbacks": [None]}, r"callbacks\[0\] is a NoneType"),
    ],
)
def test_what_could_not_be_called_is_refused_before_any_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        _trainer(**options)
    model = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError, match=r"loss_fn is the class MSELoss; give an object of it: MSELoss\(\)"):
        photinus.Trainer(model, torch.optim.SGD(model.parameters()), torch.nn.MSELoss, epochs=1)


@pytest.mark.parametrize(
    ("collate_fn", "kind"),
    [
        (lambda items: torch.stack([item[0] for item in items]), "a Tensor"),
        (lambda items: {"x": 1, "y": 2}, "a dict"),
        (lambda items: (1, 2, 3), "a tuple of 3 parts"),
    ],
)
def test_batches_that_are_no_pairs_are_refused(collate_fn: Any, kind: str) -> None:
    model = torch.nn.Linear(6, 3)
    trainer = photinus.Trainer(model, torch.optim.SGD(model.parameters()), cross_entropy, epochs=1, report=QUIET)
    with pytest.raises(TypeError, match=rf"needs batches \(inputs, targets\), but got {kind}: give step=f"):
        trainer.fit(photinus.loader(points(), batch_size=2, collate_fn=collate_fn))


def test_an_empty_validation_set_is_refused_before_any_work() -> None:
    with pytest.raises(ValueError, match=r"valid_set \(TensorDataset\) is empty"):
        _trainer().fit(points(), points(0))


@pytest.mark.parametrize("named", [True, False])
def test_targets_may_have_several_parts(named: bool) -> None:
    class Parts(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 31

        def __getitem__(self, index: int) -> Any:
            inputs, target = points(31)[index]
            return inputs, {0: target, 1: 1.0} if named else (target, 1.0)

    torch.manual_seed(2)
    model = torch.nn.Linear(6, 3)
    trainer = photinus.Trainer(
        model, torch.optim.SGD(model.parameters()), lambda scores, parts: cross_entropy(scores, parts[0]),
        steps=1, batch_size=8, report=QUIET,
    )  # fmt: skip
    result = trainer.fit(Parts(), DataLoader(Parts(), 7))
    inputs, targets = points(31).tensors
    assert result.metrics["valid_loss"] == pytest.approx(cross_entropy(result.model(inputs), targets).item(), rel=1e-5)


def test_the_validation_loss_is_that_of_all_samples() -> None:
    result = _trainer().fit(points(), photinus.loader(points(31), batch_size=7, train=False))
    result.model.eval()
    inputs, targets = points(31).tensors
    with torch.no_grad():
        expected = cross_entropy(result.model(inputs), targets).item()
    assert result.metrics["valid_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_session_that_is_open_is_used_and_left_open() -> None:
    with photinus.init("gloo", "cpu", seed=4) as world:
        _trainer().fit(points())
        assert dist.is_initialized()
        assert world.backend == "gloo"


def test_a_rows_learning_rate_is_that_of_its_last_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trainer = photinus.Trainer(
        model, optimizer, torch.nn.functional.cross_entropy, epochs=3, batch_size=8, scheduler=scheduler, report=LINES
    )
    assert [row["learning_rate"] for row in trainer.fit(points()).history] == [0.1, 0.05, 0.025]


def test_a_resumed_row_whose_steps_a_scaler_leaves_out_has_the_rate_of_the_last_step(tmp_path: Path) -> None:
    def rates(out: Path, epochs: int) -> list[float]:
        with photinus.init("gloo", "cpu", seed=1):
            model = torch.nn.Linear(6, 3)
            model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            state = {"scaler": scaler, "scheduler": scheduler}
            loop = photinus.Loop(
                model, optimizer, points(16), batch_size=8, epochs=epochs, out=out, state=state, report=QUIET
            )
            for inputs, targets in loop:
                loss = cross_entropy(model(inputs), targets) * (1e35 if loop.epoch == 2 else 1.0)
                loop.backward(loss, scaler=scaler)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if loop.epoch_ended:
                    scheduler.step()
            return [row["learning_rate"] for row in loop.history]

    straight = rates(tmp_path / "straight", 3)
    rates(tmp_path / "cut", 1)
    assert rates(tmp_path / "cut", 3) == straight == [0.1, 0.1, 0.025]


def test_a_compiled_model_is_known_by_the_strategy_that_it_was_wrapped_with() -> None:
    with photinus.init("gloo", "cpu"):
        plain = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        model, optimizer = photinus.wrap(torch.compile(plain, backend="eager"), optimizer, strategy="zero2")
        trainer = photinus.Trainer(
            model, optimizer, cross_entropy, epochs=1, batch_size=8, strategy="zero2", report=QUIET
        )
        assert len(trainer.fit(points(16)).history) == 1


@pytest.mark.parametrize(("every", "rate"), [("epoch", 0.05 * 0.1**1), ("step", 0.05 * 0.1**6)])
def test_the_scheduler_steps_once_an_epoch_or_once_a_step(every: str, rate: float) -> None:
    trainer = _trainer(epochs=1)
    optimizer = trainer._optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    model = trainer._model
    photinus.Trainer(
        model, optimizer, cross_entropy, epochs=1, batch_size=8, scheduler=scheduler, scheduler_every=every,
        report=QUIET,
    ).fit(points())  # fmt: skip
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_a_scheduler_of_epochs_does_not_count_an_epoch_that_the_end_of_the_run_cut_short(tmp_path: Path) -> None:
    def rate(out: Path, steps: int) -> float:
        model = Net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        photinus.Trainer(
            model, optimizer, cross_entropy, steps=steps, batch_size=8, out=out,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, step_size=1), report=QUIET,
        ).fit(points(48))  # fmt: skip
        return float(optimizer.param_groups[0]["lr"])

    whole = rate(tmp_path / "whole", 15)
    rate(tmp_path / "in two", 8)
    assert rate(tmp_path / "in two", 15) == whole == pytest.approx(0.01)


def _on_plateau(trainer: photinus.Trainer, **options: Any) -> photinus.Trainer:
    model, optimizer = trainer._model, trainer._optimizer
    # Nothing is ever better by 100: each epoch after the first is one too many.
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=options.pop("mode", "min"), patience=0, threshold=100.0, threshold_mode="abs"
    )
    return photinus.Trainer(
        model, optimizer, cross_entropy, epochs=3, batch_size=8, scheduler=scheduler, report=QUIET, **options
    )


def test_reduce_on_plateau_follows_the_validation_loss() -> None:
    trainer = _on_plateau(_trainer(lr=0.05))
    result = trainer.fit(points(), points(31))
    assert trainer._scheduler.best == result.history[0]["valid_loss"]
    assert trainer._optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**2)


@pytest.mark.parametrize("options", [{"scheduler_every": "step"}, {"validate_every_steps": 2}, {"mode": "max"}])
def test_reduce_on_plateau_without_a_loss_to_follow_is_refused_before_any_work(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau makes a step with the validation loss of each epoch"):
        _on_plateau(_trainer(), **options)
    with pytest.raises(ValueError, match="fit needs a valid_set"):
        _on_plateau(_trainer()).fit(points())


def test_an_optimizer_that_wants_a_closure_is_refused_before_any_work() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"LBFGS computes loss .* keep a Loop of your own"):
        photinus.Trainer(model, torch.optim.LBFGS(model.parameters()), cross_entropy, epochs=1, batch_size=8)


def test_callbacks_log_and_stop(tmp_path: Path) -> None:
    def stop_early(loop: photinus.Loop) -> None:
        loop.log(twice=2 * loop.epoch)
        if loop.epoch == 2:
            loop.stop()

    result = _trainer(tmp_path, epochs=9, callbacks=[stop_early]).fit(points())
    assert [row["twice"] for row in read_rows(tmp_path / "metrics.csv")] == [2, 4]
    assert len(result.history) == 2


def test_a_part_of_the_model_that_is_in_eval_mode_stays_so() -> None:
    trainer = _trainer(epochs=1)
    norm = trainer._model.add_module("norm", torch.nn.BatchNorm1d(3)) or trainer._model.norm.eval()
    assert [trainer.fit(points(), points(31)).model.training, norm.training] == [True, False]
    trainer._model.eval()
    assert [trainer.fit(points()).model.training, norm.training] == [True, True]


def test_objects_whose_classes_have_one_name_are_all_saved(tmp_path: Path) -> None:
    class Counter:
        def state_dict(self) -> dict[str, int]:
            return {"count": 3}

        def load_state_dict(self, state: dict[str, int]) -> None: ...

    kinds = [type(name, (Counter,), {}) for name in ("Scheduler", "EarlyStopping", "EarlyStopping", "Model")]
    trainer = _trainer(tmp_path, epochs=1, callbacks=[each() for each in kinds])
    saved = photinus.load(trainer.fit(points()).checkpoint)
    names = ("scheduler_2", "early_stopping", "early_stopping_2", "model_2")
    assert [saved[name] for name in names] == [{"count": 3}] * 4


def test_a_second_fit_of_a_finished_run_gives_the_same_result(tmp_path: Path) -> None:
    first = _trainer(tmp_path).fit(points(), points(31))
    again = _trainer(tmp_path).fit(points(), points(31))
    assert again.history == first.history
    assert fingerprint(again.model) == fingerprint(first.model)


def test_a_best_that_no_row_will_have_is_refused_before_any_work(tmp_path: Path) -> None:
    for best, valid, words in (
        (
            "-valid_los",
            points(8),
            r"best='-valid_los': a row of this training has loss, right, valid_loss. Did you",
        ),
        ("right", None, r"best='right': a row of this training without a valid_set has loss\."),
    ):
        with pytest.raises(ValueError, match=words):
            _trainer(tmp_path, save=Saving(best=best)).fit(points(), valid)
    assert list(tmp_path.iterdir()) == []

    def log(loop: photinus.Loop) -> None:
        loop.log(mine=1.0)

    for best, callbacks in (("mine", [log]), ("-loss", [])):
        _trainer(tmp_path / best, epochs=1, save=Saving(best=best), callbacks=callbacks).fit(points())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_fit_may_be_called_twice_in_a_session(strategy: str) -> None:
    trainer = _trainer(epochs=1, strategy=strategy)
    with photinus.init("gloo", "cpu"):
        first = trainer.fit(points()).metrics["loss"]
        assert trainer.fit(points()).metrics["loss"] < first
    if strategy == "ddp":
        assert trainer.fit(points()).metrics["loss"] < first
    else:
        with pytest.raises(ValueError, match=f"strategy '{strategy}' has split .* a session that ended"):
            trainer.fit(points())


def test_a_missing_picture_of_a_finished_run_is_drawn_later(tmp_path: Path) -> None:
    assert _trainer(tmp_path, report=LINES).fit(points()).curves is None
    again = _trainer(tmp_path).fit(points())
    assert again.curves == tmp_path / "curves.png"
    assert again.curves.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "dpp"}, "unknown strategy 'dpp'"),
        ({"scheduler_every": "batch"}, "scheduler_every='batch'"),
        ({"metrics": {"valid_loss": right, "loss": right}}, "metrics: 'loss' and 'valid_loss': a column of that name"),
        ({"metrics": {"epoch": right}}, "metrics: 'epoch': a column of that name is filled anyway"),
        ({"metrics": {1: right}}, "metrics: 1 is a int, but names are text"),
        ({"keep": 3}, "keep"),
    ],
)
def test_wrong_options_are_refused_before_any_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        _trainer(**options).fit(points())
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_epochs": 3, "logger": "wandb", "num_workers": 2}, [
            "Trainer has no option 'max_epochs'. Did you mean 'epochs'?", "Trainer has no option 'logger'.",
            "Trainer has no option 'num_workers'.",
        ]),
        ({"strategy": "zero4", "save": 3, "precision": "fp16", "metrics": [right], "epochs": None}, [
            "unknown strategy 'zero4'", "save=3", "precision='fp16'", "metrics is a list", "epochs=None and steps=None",
        ]),
        ({"resume": 3, "report": LOGGED}, ["resume=3", "give out=..., too"]),
        ({"accumulate": 0, "clip_norm": -1, "scheduler": "cosine"}, [
            "accumulate=0", "clip_norm=-1", "scheduler is a str",
        ]),
    ],
)  # fmt: skip
def test_everything_that_is_wrong_is_told_at_once_when_the_trainer_is_made(
    options: dict[str, Any], told: list[str]
) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        _trainer(**{"epochs": 3, **options})
    assert [each for each in told if each not in str(caught.value)] == []


def test_a_validation_set_that_is_none_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'absent' is a path, not a dataset \(and it does not exist"):
        _trainer(tmp_path).fit(points(), "absent")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_wrapped_already_keeps_its_options() -> None:
    model = Net(dropout=0.0)
    with photinus.init("gloo", "cpu"):
        wrapped, optimizer = photinus.wrap(
            model, torch.optim.SGD(model.parameters(), lr=0.05), strategy="zero1", sync_batch_norm=False
        )
        options: dict[str, Any] = {"epochs": 1, "batch_size": 8, "report": QUIET}
        assert photinus.Trainer(wrapped, optimizer, cross_entropy, **options).fit(points()).model is model
        with pytest.raises(ValueError, match=r"strategy='zero2', but the model is wrapped already, with .*'zero1'"):
            photinus.Trainer(wrapped, optimizer, cross_entropy, strategy="zero2", **options).fit(points())
    assert any(type(layer) is torch.nn.BatchNorm1d for layer in model.modules())


class Branches(torch.nn.Module):
    """Its layers are registered in one order or the other, and are the same."""

    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        for name in order:
            setattr(self, name, torch.nn.Linear(FEATURES, FEATURES, bias=False))
        with torch.no_grad():
            self.a.weight.fill_(0.1)  # type: ignore[union-attr, operator]
            self.b.weight.copy_(torch.eye(FEATURES))  # type: ignore[union-attr, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.b(self.a(x)))[:, :3]  # type: ignore[operator]


def _changed(
    out: Path | None, *, order: str = "ab", optimizer: Any = None, scheduler: Any = None, **options: Any
) -> dict[str, torch.Tensor]:
    model = Branches(order)
    made = (optimizer or torch.optim.AdamW)(model.parameters(), lr=0.01)
    options = {"epochs": 2, "scheduler": scheduler and scheduler(made), "out": out, **options}
    drop_last = options.pop("drop_last", True)
    trainer = photinus.Trainer(model, made, cross_entropy, report=QUIET, **options)
    with photinus.init(seed=1):
        return dict(trainer.fit(photinus.loader(points(48), batch_size=8, drop_last=drop_last)).model.state_dict())


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"accumulate": 2, "clip_norm": 0.5}, "accumulate=2 (was 1), clip_norm=0.5 (was None)"),
        ({"precision": "bfloat16"}, "precision=bfloat16 (was float32)"),
        ({"strategy": "zero2"}, "strategy=zero2 (was ddp)"),
        ({"drop_last": False}, "drop_last=False (was True)"),
        ({"optimizer": partial(torch.optim.Adam, weight_decay=0.01)}, "optimizer=Adam (was AdamW), decoupled_"),
        ({"scheduler": lambda o: schedules.ExponentialLR(o, 0.5)}, "scheduler=ExponentialLR (was StepLR), learning ra"),
        ({"scheduler": lambda o: schedules.OneCycleLR(o, 0.1, 9)}, "scheduler=OneCycleLR (was StepLR), betas=[0.95,"),
    ],
)
def test_what_changed_since_the_checkpoint_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], line: str
) -> None:
    first: dict[str, Any] = {"scheduler": lambda o: schedules.StepLR(o, 1)}
    _changed(tmp_path, **first, save=Saving(every_steps=2), steps=8, epochs=None)
    capsys.readouterr()
    _changed(tmp_path, **{**first, **change})
    told = [each for each in capsys.readouterr().out.splitlines() if each.startswith("note: ")]
    assert len(told) == 1
    assert told[0].startswith(f"note: changed since the checkpoint: {line}")
    options = json.loads((tmp_path / "config.json").read_text())["options"]
    assert options["strategy"] == change.get("strategy", "ddp")


def test_an_optimizer_of_another_kind_is_refused_and_layers_are_known_by_their_names(tmp_path: Path) -> None:
    _changed(tmp_path, epochs=1)
    with pytest.raises(CheckpointError, match="optimizer is RAdam, which may not be able to step with what AdamW has"):
        _changed(tmp_path, optimizer=torch.optim.RAdam)
    swapped, straight = _changed(tmp_path, order="ba"), _changed(None)
    assert torch.equal(swapped["a.weight"], straight["a.weight"])
    assert torch.equal(swapped["b.weight"], straight["b.weight"])


def test_a_run_that_was_stopped_goes_on_where_its_length_is_counted_otherwise(tmp_path: Path) -> None:
    _changed(tmp_path, epochs=None, steps=100, callbacks=[lambda loop: loop.stop()])
    assert torch.equal(_changed(tmp_path, epochs=3)["a.weight"], _changed(None, epochs=3)["a.weight"])
