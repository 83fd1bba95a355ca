"""The whole training in one call, for those who do not need a loop of their own. It is a `Loop` with the usual body."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from ..parallel import find_strategy, strategy_of, unwrap_compiled
from ..parallel.exchange.agreement import JSON, check_alike
from ..runlog.tables import OWN_COLUMNS, Row
from ..runlog.units import plural
from ..words import hint
from .averages import Average
from .checkpoint.states import unwrap
from .data.arguments import checking, explains_unknown
from .data.loader import Loader, make_loader
from .early_stopping import EarlyStopping
from .evaluation import Metric, check_functions, evaluate
from .forwards import Data
from .loop import Loop, measurements
from .objective import Objective, OutputObjective, StepObjective
from .record.curves import PICTURE
from .record.spec import Reporting, Saving, check_options
from .session.progress import show_metrics
from .session.session import Session, current_session, init
from .session.wrapping import WRAPPED, exchanges_gradients, wrap

LossFunction = Callable[[Tensor, Tensor], Any]
Callback = Callable[[Loop], None] | EarlyStopping | Any
_TAKEN = ("model", "optimizer", "scheduler", "scaler")  # names of what a Trainer saves itself
_PRECISIONS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Result:
    """The results of a training.

    Attributes:
        history: a row of numbers per epoch (or per validation), those before a restart included.
        metrics: of the last row: its training loss and what validation gave.
        model: the trained plain module, on its device. Under "zero2" and "zero3" its parameters are this rank's parts;
            the checkpoint has the whole ones.
        out: folder of the run, None when nothing was written.
        checkpoint: path of the newest checkpoint.
        curves: path of the picture, None when it was not drawn; known on rank 0 only, which draws it.
        rank: of the process that has this result.
    """

    history: list[Row]
    metrics: dict[str, float]
    model: nn.Module = field(repr=False)
    out: Path | None
    checkpoint: Path | None
    curves: Path | None
    rank: int

    def __str__(self) -> str:
        where = "" if self.out is None else f"; results in {self.out}"
        epochs = int(self.history[-1]["epoch"]) if self.history else 0
        return f"{plural(epochs, 'epoch')}: {show_metrics(self.metrics)}{where}"


class Trainer:
    """Train a model on all ranks: `Trainer(model, optimizer, loss_fn, ...).fit(train_set, valid_set)`.

    A step is model(inputs), loss_fn(outputs, targets), backward, optimizer step. At the end of each epoch (or every N
    steps) all ranks validate, each sample exactly once, and the scheduler steps. Loop does the rest: resume,
    checkpoints, reports.

    Args:
        model: a plain module, which `fit` wraps; or one that `photinus.wrap` has wrapped with options of your own.
        optimizer: an optimizer of the model's parameters.
        loss_fn: `loss_fn(outputs, targets)`: the mean over the samples, or (sum, weight) for a mean over tokens or
            class weights. torch's losses with `weight`, `ignore_index` or reduction="sum" need nothing more.
        step: instead, for batches of any structure: `step(model, batch)`, which returns the mean loss or (loss, weight)
            as `Loop.backward` takes them. Without either, it is model(**batch) for a dict, else model(batch), and
            its output has `.loss`, as in Transformers.
        epochs: the run ends after N epochs, counted from its first start.
        steps: instead of epochs: the run ends after N steps of the optimizer, and then validates too.
        batch_size: samples of one batch over ALL ranks, at least one for each. Default: the loader's.
        accumulate: the optimizer steps after N batches, on the mean of their gradients: its batch is batch_size *
            accumulate samples. If fewer batches are left at an epoch's end, they make a step on their mean.
        precision: "float32" (default), "bfloat16" or "float16": forward, loss and validation under torch.autocast,
            parameters and optimizer in float32. With float16 the loss is scaled by a torch.amp.GradScaler, or by the
            one that is given here. All ranks skip a step in which a gradient of any is not finite; rows have the
            columns loss_scale and skipped_steps.
        out, resume, save, report, audit_every: as for `photinus.Loop`.
        metrics: functions (outputs, targets) -> one value per sample, shape [n], by name, measured on the validation
            set. `valid_loss` is always measured.
        strategy: a name in `photinus.parallel.STRATEGIES`; see `photinus.wrap`. Default: "ddp".
        scheduler: learning-rate scheduler of the optimizer. ReduceLROnPlateau gets the validation loss.
        scheduler_every: "epoch" (default), or "step" (of the optimizer): when the scheduler steps. If the run's end
            cuts an epoch short, a longer run ends it, and then steps the scheduler.
        clip_norm: largest norm of the gradients over the whole model; None does not clip.
        validate_every_steps: validate every N steps and at the run's end, instead of at the end of each epoch.
        callbacks: functions called as callback(loop) after each validation, which may call `loop.log(...)` and
            `loop.stop()`. And objects that a Loop uses in `state`: a `photinus.EarlyStopping`, a `photinus.Average`
            (then validation is of the average), or others with state_dict and load_state_dict. They are saved under
            the name of their class: early_stopping, average.
        logical_shards: as for `photinus.init`, for a Trainer without one around it.

    Backend, device and seed are those of `with photinus.init(...):` around `fit`. Without one, they are its defaults:
    the order of the samples is that of seed 0, and dropout differs from run to run. Create the model inside too, if
    its first weights should depend on the seed.

    Raises:
        ValueError, TypeError: an argument that cannot be right; the message says which, and what was needed.
    """

    @explains_unknown
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | None = None,
        *,
        step: Callable[[nn.Module, Any], Any] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | None = None,
        accumulate: int = 1,
        precision: str | torch.amp.GradScaler = "float32",
        out: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = "auto",
        metrics: Mapping[str, Metric] | None = None,
        strategy: str = "ddp",
        scheduler: Any = None,
        scheduler_every: str = "epoch",
        clip_norm: float | None = None,
        validate_every_steps: int | None = None,
        callbacks: Sequence[Callback] = (),
        save: Saving | None = None,
        report: Reporting | None = None,
        logical_shards: int | None = None,
        audit_every: int | Literal["auto"] | None = None,
    ) -> None:
        self._best = save.best if isinstance(save, Saving) else None
        self._loop_options: dict[str, Any] = {
            "epochs": epochs,
            "steps": steps,
            "accumulate": accumulate,
            "out": out,
            "resume": resume,
            "state": {**({} if scheduler is None else {"scheduler": scheduler}), **_by_name(callbacks)},
            "validate_every_steps": validate_every_steps,
            "save": Saving() if save is None else save,
            "report": Reporting() if report is None else report,
            "audit_every": audit_every,
        }
        self._scaler = precision if isinstance(precision, torch.amp.GradScaler) else None
        precision = "float16" if isinstance(precision, torch.amp.GradScaler) else precision
        with checking() as check:
            check.call(check_options, **self._loop_options)
            check.call(_check_kinds, {"loss_fn": loss_fn, "step": step}, metrics, scheduler, callbacks)
            check(None in (loss_fn, step), "give loss_fn or step, not both", TypeError)
            unfit = "metrics take outputs and targets, which only loss_fn gives: call photinus.evaluate in a callback"
            check(loss_fn is not None or not metrics, unfit)
            every = f'scheduler_every={scheduler_every!r}: needs "epoch" or "step"'
            check(scheduler_every in ("epoch", "step"), every)
            width = f"precision={precision!r}: needs {', '.join(map(repr, _PRECISIONS))} or a torch.amp.GradScaler"
            check(precision in _PRECISIONS, width)
            is_norm = clip_norm is None or (hasattr(clip_norm, "__float__") and clip_norm > 0)
            check(is_norm, f"clip_norm={clip_norm!r}: needs a number above 0, or None")
            own = [name for name in (*OWN_COLUMNS, "valid_loss") if isinstance(metrics, Mapping) and name in metrics]
            names = " and ".join(map(repr, own))
            check(not own, f"metrics: {names}: a column of that name is filled anyway; take another name")
            check.call(_check_steps_without_arguments, optimizer, scheduler, scheduler_every, validate_every_steps)
            check.call(find_strategy, strategy)
        self._model, self._optimizer = model, optimizer
        without = StepObjective(step) if step else OutputObjective()
        self._objective = without if loss_fn is None else Objective(loss_fn)
        self._wrapped: tuple[Session, nn.Module, torch.optim.Optimizer] | None = None  # by the last fit
        self._metrics: dict[str, Metric] = {**(metrics or {}), "valid_loss": self._objective}
        self._strategy, self._batch_size, self._logical_shards = strategy, batch_size, logical_shards
        self._clip_norm = None if clip_norm is None else float(clip_norm)  # numpy's are not JSON's
        self._precision = precision
        self._scheduler, self._scheduler_every = scheduler, scheduler_every
        self._body: dict[str, JSON] = {"precision": precision, "clip_norm": self._clip_norm}
        self._body |= {"scheduler_every": scheduler_every}
        self._callbacks = [each for each in callbacks if callable(each) and not isinstance(each, nn.Module)]
        self._averages = [each for each in callbacks if isinstance(each, Average) and each.validate]
        self._stoppings = [each for each in callbacks if isinstance(each, EarlyStopping)]

    def fit(self, train_set: Data, valid_set: Data | None = None) -> Result:
        """Train to the last epoch, or continue an earlier run.

        Args:
            train_set: data set or stream of pairs (input, target), equal on all ranks; or torch's DataLoader over one,
                or a `photinus.loader`.
            valid_set: data set for validation, with a length (default of the batch size: 64 a rank); None does not
                validate.

        Raises:
            ValueError, TypeError, OSError, PhotinusError: before any work; see `init`, `wrap` and `Loop`.
        """
        to_validate: Loader | None = None
        if valid_set is not None:
            # Not only at the end of the first epoch.
            to_validate = make_loader(valid_set, batch_size=1, train=False, place=(0, 1))
            if to_validate.samples == 0:
                kind = type(to_validate.dataset).__name__
                raise ValueError(f"valid_set ({kind}) is empty; None leaves validation out")
        elif isinstance(self._scheduler, ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau follows the validation loss, so fit needs a valid_set")
        self._check_best(valid_set is not None)
        with ExitStack() as stack:
            session = current_session() or stack.enter_context(init(logical_shards=self._logical_shards))
            if self._logical_shards not in (None, session.logical_shards):
                option = f"logical_shards={self._logical_shards}"
                session_has = f"logical_shards={session.logical_shards}" if session.logical_shards else "none"
                advice = f"give it to photinus.init({option}), and not to the Trainer"
                raise ValueError(f"Trainer({option}), but the session of photinus.init has {session_has}: {advice}")
            model, optimizer = self._wrap(session)
            if self._precision == "float16":
                self._scaler = self._scaler or torch.amp.GradScaler(session.device.type)
                self._loop_options["state"] = {**self._loop_options["state"], "scaler": self._scaler}
            batch_size = self._batch_size
            check_alike(
                {"valid_set": None if to_validate is None else to_validate.samples},
                "the ranks were given different data",
            )
            if to_validate is not None:  # not only in the first validation
                to_validate.compare_samples("validation data")
            loop = Loop(model, optimizer, train_set, batch_size=batch_size, **self._loop_options, _body=self._body)
            if not (loop.finished or unwrap(model).training):  # else parts that are in eval mode stay so
                model.train()
            for batch in loop:
                with self._autocast():
                    loss, weight = self._objective(*self._objective.forward(model, batch))
                if self._objective.is_sum:  # of the global batch, of which the loop takes means
                    part = loop._running_batch("the Trainer's step")
                    loss = loss * (part.global_samples / max(1.0, part.samples))
                loop.backward(loss, weight=weight, scaler=self._scaler)
                if loop.step_due:
                    self._step(loop, optimizer)
                measured: dict[str, float] = {}
                if loop.validation_due and valid_set is not None:
                    averaged = next((each for each in self._averages if int(each.n_averaged)), model)
                    with self._autocast():
                        measured = evaluate(averaged, valid_set, self._metrics, forward=self._objective.forward)
                    loop.log(**measured)
                if loop.whole_epoch_ended and self._scheduler is not None and self._scheduler_every == "epoch":
                    follows = isinstance(self._scheduler, ReduceLROnPlateau)
                    self._scheduler.step(*([measured["valid_loss"]] if follows else []))
                if loop.validation_due and self._scaler is not None:
                    loop.log(loss_scale=self._scaler.get_scale())
                if loop.validation_due:
                    for callback in self._callbacks:
                        callback(loop)
            return self._result(loop)

    def _check_best(self, validates: bool) -> None:
        """Refuses a metric, to choose by, that no row will have; what callbacks log is not known."""
        known = ["loss", *self._metrics] if validates else ["loss"]
        metrics = {f"best={self._best!r}": self._best or "loss", **{repr(e): e.metric for e in self._stoppings}}
        for what, metric in metrics.items() if not self._callbacks else ():
            name = metric.removeprefix("-")
            if name not in (*known, *OWN_COLUMNS):
                lacking = " without a valid_set" * (not validates)
                there = f"a row of this training{lacking} has {', '.join(known)}.{hint(name, known, show=repr)}"
                raise ValueError(f"{what}: {there}")

    def _wrap(self, session: Session) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the wrapped model and its optimizer, the same as in an earlier `fit` of this `photinus.init`."""
        if self._wrapped is not None and self._wrapped[0] is not session:
            if any(strategy_of(part).splits(part) for part in self._wrapped[1:]):
                raise ValueError(
                    f"strategy {self._strategy!r} has split the model or its optimizer over the ranks "
                    f"of a session that ended with the last fit. Open one around both calls, `with photinus.init():`, "
                    f"or make model, optimizer and Trainer again: with out=... they go on from the checkpoint."
                )
            self._wrapped = None
        if self._wrapped is None:
            wrapped: Any = self._model, self._optimizer
            by_wrap = vars(unwrap_compiled(self._model)).get(WRAPPED)
            if by_wrap is None and not exchanges_gradients(self._model):
                wrapped = wrap(*wrapped, strategy=self._strategy)
            else:  # by the user, with options that have no place here
                found = by_wrap["strategy"] if by_wrap else strategy_of(self._model).name
                if self._strategy not in ("ddp", found):
                    asked = f"strategy={self._strategy!r}"
                    raise ValueError(f"{asked}, but the model is wrapped already, with strategy={found!r}")
                self._strategy = found
            self._wrapped = (session, *wrapped)
        return self._wrapped[1:]

    def _step(self, loop: Loop, optimizer: torch.optim.Optimizer) -> None:
        scaler, is_skipped = self._scaler, False
        if scaler is not None:
            scaler.unscale_(optimizer)
        if self._clip_norm is not None:
            loop.clip(self._clip_norm)
        if scaler is None:
            optimizer.step()
        else:
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            is_skipped = scaler.get_scale() < scale  # a gradient of some rank was not finite
        if is_skipped:
            loop.log(skipped_steps=loop._position.logged.get("skipped_steps", 0) + 1)
        optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None and self._scheduler_every == "step" and not is_skipped:
            self._scheduler.step()

    def _autocast(self) -> AbstractContextManager[Any]:
        session = current_session()
        if self._precision == "float32" or session is None:
            return nullcontext()
        return torch.autocast(session.device.type, getattr(torch, self._precision))

    def _result(self, loop: Loop) -> Result:
        last = loop.history[-1] if loop.history else {}
        curves = None if loop.out is None else loop.out / PICTURE
        if loop.rank != 0 or curves is None or not curves.exists():
            curves = None
        return Result(
            history=loop.history,
            metrics=measurements(last),
            model=unwrap(loop.model),
            out=loop.out,
            checkpoint=loop.checkpoint,
            curves=curves,
            rank=loop.rank,
        )


def _by_name(callbacks: Any) -> dict[str, Any]:
    """Return those that a checkpoint keeps, by the names of their classes: early_stopping, and early_stopping_2."""
    found: dict[str, Any] = dict.fromkeys(_TAKEN)
    for each in callbacks if isinstance(callbacks, Sequence) else ():
        if hasattr(each, "load_state_dict"):
            name = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", type(each).__name__).lower()
            places = (name, *(f"{name}_{number}" for number in range(2, len(found) + 2)))
            found[next(place for place in places if place not in found)] = each
    return {name: each for name, each in found.items() if name not in _TAKEN}


def _check_kinds(losses: Mapping[str, Any], metrics: Any, scheduler: Any, callbacks: Any) -> None:
    """Refuses what would fail where it is first called, at the end of an epoch perhaps."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f"metrics is a {type(metrics).__name__}, but a dict is needed: functions by name")
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks is a {type(callbacks).__name__}, but a list of functions is needed: [...]")
    unnamed = [name for name in metrics or {} if not isinstance(name, str)]
    if unnamed:
        raise TypeError(f"metrics: {unnamed[0]!r} is a {type(unnamed[0]).__name__}, but names are text")
    functions = {name: each for name, each in losses.items() if each is not None}
    check_functions({**functions, **{f"metrics[{name!r}]": each for name, each in (metrics or {}).items()}})
    for place, callback in enumerate(callbacks):
        if isinstance(callback, AveragedModel) and not isinstance(callback, Average):
            raise TypeError(f"callbacks[{place}] is torch's AveragedModel, which nothing updates: use photinus.Average")
        kind = f"the class {callback.__name__}" if isinstance(callback, type) else f"a {type(callback).__name__}"
        if isinstance(callback, type) or not (callable(callback) or hasattr(callback, "load_state_dict")):
            raise TypeError(
                f"callbacks[{place}] is {kind}, but a function (loop) is needed, or an object with "
                f"state_dict and load_state_dict, such as photinus.EarlyStopping"
            )
    if isinstance(scheduler, type) or not (scheduler is None or callable(getattr(scheduler, "step", None))):
        kind = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else f"a {type(scheduler).__name__}"
        raise TypeError(
            f"scheduler is {kind}, but an object with a step() is needed, such as "
            f"torch.optim.lr_scheduler.StepLR(optimizer, 10)"
        )


def _check_steps_without_arguments(
    optimizer: Any, scheduler: Any, scheduler_every: str, validate_every_steps: int | None
) -> None:
    """Refuses what wants more of a step than the Trainer has to give, before any work."""
    closure = inspect.signature(optimizer.step).parameters.get("closure") if hasattr(optimizer, "step") else None
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes loss and gradients several times in a step, by a closure, which the "
            f"Trainer has not: keep a Loop of your own, with loop.backward(loss) in the closure of optimizer.step"
        )
    if isinstance(scheduler, ReduceLROnPlateau) and (
        scheduler_every == "step" or validate_every_steps is not None or scheduler.mode != "min"
    ):
        raise ValueError(
            f"ReduceLROnPlateau makes a step with the validation loss of each epoch, so it needs "
            f'scheduler_every="epoch", validate_every_steps=None and mode="min"; got {scheduler_every!r}, '
            f"{validate_every_steps} and {scheduler.mode!r}. To follow another number, keep a Loop of your own."
        )
