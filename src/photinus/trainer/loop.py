"""The loop: one iterator over epochs and batches that owns sampler, random numbers, position, checkpoint and resume.

When the next batch is asked for, the body of the last one is done: only then is a step counted, an epoch closed and a
checkpoint saved, so a checkpoint holds what the body logged and stepped, and a run that goes on from it computes what
it would have computed. What one step costs beside the body: every 16 steps (fewer, where those last longer than a
second) and at each epoch's end one all-reduce of a few float64 values, which carries the losses, the wish to stop, and
where each rank's time went; and some readings of the clock.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .. import env
from ..errors import PhotinusError
from ..job import status
from ..parallel import strategy_of, unwrap_compiled
from ..parallel.exchange.agreement import JSON, check_alike, together
from ..parallel.tracing.spans import span
from ..runlog.tables import OWN_COLUMNS, Row
from ..runlog.units import plural
from .audit import Audit
from .averages import Average
from .checkpoint.position import Length
from .checkpointer import Checkpointer, wait_for_writer
from .data import rng
from .data.arguments import explains_unknown
from .data.loader import Batch, Loader, note_place, train_batches
from .early_stopping import EarlyStopping, reason_to_stop
from .logical_shards import ShardMeans, ShardSteps
from .optimizer_modes import OptimizerModes
from .record.digests import DigestRecord
from .record.loggers import check_packages
from .record.run_folder import RunFolder
from .record.run_numbers import MOST_STEPS, RunNumbers
from .record.spec import Reporting, RunSpec, Saving, check_options
from .record.step_clock import StepClock
from .record.step_losses import ShardLosses, StepLosses
from .session import preemption
from .session.progress import Progress, say, show_metrics
from .session.replicas import Replicas, describe_replicas
from .session.session import require_session
from .session.wrapping import (
    WRAPPED,
    check_exchanges_gradients,
    check_optimizer,
    check_schedulers,
    check_second_models,
    exchanges_gradients,
)
from .state import LoopState
from .step_ledger import StepLedger, parameters_with_gradients
from .weighted_means import WeightedMeans, values_of

_SAVE_AFTER_S = 600.0  # where Saving.every_steps is None
_MOST_COST = 0.02  # of the time, that such saves take
_trained_in: set[str] = set()  # folders of the loops of this process that trained


class Loop:
    """An iterator over all batches of all epochs; each is this rank's part of a global batch, on its device.

    Args:
        model: wrapped by `photinus.wrap` (or by torch's DDP or FSDP2); plain where there is one process.
        optimizer: over the model's parameters.
        train_set: data set, equal on all ranks: map-style or a stream; or torch's DataLoader over one, or a
            `photinus.loader`, which say how it is shuffled, collated, cut and loaded.
        batch_size: samples of one batch over ALL ranks, at least one for each. Parts may differ by one sample. Default:
            the loader's.
        accumulate: the gradients of N batches (micro-batches) make one step of the optimizer, on their mean. The body
            steps where `step_due` is true, and needs neither `no_sync` nor `share`. At an epoch's end the batches that
            are left make a step.
        epochs: the run ends after N epochs, counted from its first start.
        steps: instead of epochs: the run ends after N steps of the optimizer. If that is inside an epoch, the epoch
            ends there too.
        out: folder of the run: checkpoints, metrics.csv, losses.csv, ranks.jsonl, events.jsonl, config.json,
            curves.png; `photinus top` and `photinus report` show it. None writes nothing.
        resume: "auto" continues from the newest complete checkpoint in `out`; "never" (or None) starts over and moves
            what is in `out` aside; a path is a checkpoint, or a run's folder. "never" and a path start over, except
            after a suspension or a restart by the launcher: then the run continues. Options and schedules that the
            script changed since replace the checkpoint's, and a line shows both: a cosine over more epochs continues
            along the new curve. All else is the checkpoint's.
        state: more objects with state_dict and load_state_dict to save and restore, by name (a learning-rate scheduler,
            a GradScaler, a second optimizer, a second model that is wrapped). You still call `scheduler.step()` and the
            like in the body. Must be equal on all ranks. Each is a file of the checkpoint, under its name. The loop
            itself uses a `photinus.Average`, a `photinus.EarlyStopping`, and objects with `after_row(row)`: rank 0
            calls it after each whole row of metrics.csv, and a text that it returns ends the run.
        validate_every_steps: `validation_due` is true, and a row of metrics.csv ends, every N steps (counted over the
            whole run) and at the run's end; None: at the end of each epoch.
        save: a `photinus.Saving`: when to save, and which checkpoints to keep. Default: at each epoch's end and every
            ten minutes; the newest two.
        report: a `photinus.Reporting`: what rank 0 shows, and the script's own options. Default: progress and
            `curves.png`.
        audit_every: with logical shards, every N steps each rank computes a batch of another rank again, and gradients
            are compared; "auto": as often as costs 1 % of the time. To the body it is one more batch, with
            `micro_batch` 0, of which no loss is logged. A rank whose hardware computes wrong is named, and the loop
            ends. None (the default): no audits.

    All ranks check that they hold the same parameters, before each checkpoint and as often as costs at most 0.5 % of
    the time. If they should differ for a while (local SGD): `photinus.wrap(..., check_ranks=False)`.

    Raises:
        ValueError, TypeError: an argument that cannot be right; the message says which, and what was needed.
        NotInitializedError: a launcher started several processes and `photinus.init()` was not called.
        PhotinusError: the package of a logger is not installed.
        CheckpointError: the checkpoint to resume from is absent, or does not fit the model.

    Every rank raises when one does.

    Attributes:
        model: as it was given.
        out: the run's folder, or None.
        rank: of this process.
        epochs, steps, steps_per_epoch: how long the run is; steps are the optimizer's. None: not known of a stream.
        resumed_from: path of the checkpoint that the run goes on from, None for a fresh start; Path("memory") for a
            snapshot (see `Saving.snapshot_every`).
    """

    @explains_unknown
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train_set: Dataset[Any] | DataLoader[Any] | Loader,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
        epochs: int | None = None,
        steps: int | None = None,
        out: str | os.PathLike[str] | None = None,
        resume: str | os.PathLike[str] | None = "auto",
        state: Mapping[str, Any] | None = None,
        validate_every_steps: int | None = None,
        save: Saving | None = None,
        report: Reporting | None = None,
        audit_every: int | Literal["auto"] | None = None,
        _body: Mapping[str, JSON] | None = None,
    ) -> None:
        self._session = session = require_session("photinus.Loop")
        session.loops += 1
        self._number = session.loops
        self.model, self.rank = model, session.rank
        self._optimizer = optimizer
        save = Saving() if save is None else save
        report = Reporting() if report is None else report
        # Nothing is exchanged or written yet: an error of one rank becomes one of all, and leaves no half-made run.
        with together("setting up the loop"):
            # They need neither model nor data, and one error lists all that is wrong with them.
            check_options(
                epochs=epochs, steps=steps, out=out, resume=resume, state=state, save=save, report=report,
                validate_every_steps=validate_every_steps, accumulate=accumulate, audit_every=audit_every,
            )  # fmt: skip
            if audit_every is not None and not session.logical_shards:
                raise ValueError(
                    f"audit_every={audit_every!r} compares what two ranks compute of one batch. That has the same bits "
                    f"with logical shards only: give photinus.init(logical_shards=...), too"
                )
            if session.is_main:
                check_packages(report.loggers)
            places = session.logical_shards or session.world_size
            check_exchanges_gradients(model, places)
            check_optimizer(model, optimizer)
            others = dict(state or {})
            models = [model, *(each for each in others.values() if isinstance(each, nn.Module))]
            optimizers = [optimizer, *(each for each in others.values() if isinstance(each, torch.optim.Optimizer))]
            check_schedulers(others, optimizers)
            check_second_models(model, others, places)
            averages = {f"state[{name!r}]": each for name, each in others.items() if isinstance(each, Average)}
            for name, average in averages.items():
                average.begin(optimizers, name)
            self._strategy = strategy_of(model)
            self._wrapped = unwrap_compiled(model)  # what the strategy's verbs know
            self._accumulate = int(accumulate)
            wrapping: Mapping[str, JSON] = vars(self._wrapped).get(WRAPPED, {"strategy": self._strategy.name})
            training = {**wrapping, "accumulate": self._accumulate, **(_body or {})}
            for name, each in others.items():
                if isinstance(each, EarlyStopping):
                    each.begin()
                    training[str(name)] = repr(each)
            self._judges = [each for each in others.values() if callable(getattr(each, "after_row", None))]
            self._stopped_by = ""  # text: why it ended before its last epoch
            self._loader = train_batches(train_set, batch_size, (session.rank, session.world_size), session.device)
            self._shards = None
            if session.logical_shards:
                seed = self._loader.seed if self._number == 1 else rng.derive_seed(self._loader.seed, self._number)
                wrapped = [each for each in models[1:] if exchanges_gradients(each)]
                scalers = [each for each in others.values() if isinstance(each, torch.amp.GradScaler)]
                parts = [model, *wrapped], optimizers, scalers
                self._shards = ShardSteps(session, *parts, seed, self._loader.batch_size, audit_every)
                self._loader.cut_into_shards(self._shards.own, self._shards.shards, self._accumulate)
                training |= {"logical_shards": session.logical_shards}
            batches, shares = self._loader, self._loader.shares
            order = (batches.batch_size, batches.order_seed, batches.samples, shares.shuffle, shares.drop_last)
            training |= {"random_seed": batches.seed} if batches.seed != batches.order_seed else {}
            every = None if validate_every_steps is None else int(validate_every_steps)  # numpy's are not JSON's
            self._spec = spec = RunSpec(*order, Length(epochs, steps), every, save, training)
        # A rank with other options would train on in silence. Here the error has both values.
        alike: dict[str, JSON] = {**spec.to_dict(), "resume": str(resume), "out": str(out)}
        alike |= {f"state[{name!r}]": type(each).__qualname__ for name, each in others.items()}
        alike |= {"shards": self._loader.shards, "audit_every": str(audit_every)}
        check_alike({**alike, **describe_replicas(models, optimizers)}, "the ranks were given different loops")
        self._loader.compare_samples("training data")
        if session.is_main:
            self._loader.warn_of_single_samples(models)
        self._replicas = Replicas(session, models, optimizers)
        wrapped = [unwrap_compiled(each) for each in models if exchanges_gradients(each)]
        self._no_sync = [partial(strategy_of(each).no_sync, each) for each in wrapped]
        self._clock = StepClock(session)
        means: WeightedMeans | ShardMeans
        losses: StepLosses | ShardLosses
        if self._shards is None:
            means = WeightedMeans(session, models, partial(parameters_with_gradients, models, optimizers))
            losses = StepLosses()
        else:
            means, losses = self._shards.means, ShardLosses(self._shards.own, self._shards.shards)
        self._numbers = RunNumbers(session, self._clock, self._replicas, losses)
        self._ledger = StepLedger(optimizers, [*averages.values()], losses, self._clock, self._replicas, means)
        self._modes = OptimizerModes([optimizer, *others.values()], session.switching)
        state_of_run = LoopState(session, model, optimizer, others, spec, self._loader)
        # What cannot be saved is an error now, and not when the first epoch is done.
        if out is not None:
            with together("looking at what to save"):
                state_of_run.check()
        # Last, because it locks the folder and moves away what lies there: all that can be wrong was looked at before.
        least_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        trained = [model, *(each for each in models[1:] if exchanges_gradients(each))]
        self._digests = DigestRecord(session, trained, optimizers, report.digest_every if out is not None else 0)
        self._folder = RunFolder(session, out, resume, spec, report, least_bytes, self._digests.names)
        self.out = self._folder.path
        self._checkpointer = Checkpointer(session, state_of_run, self._folder, spec)
        self._begin_at_the_checkpoint(report, resume)

    def _begin_at_the_checkpoint(self, report: Reporting, resume: str | os.PathLike[str] | None) -> None:
        """Puts the loop where the run is: at its start, or at the checkpoint that it goes on from."""
        self._saved_s, self._save_pause_s = time.monotonic(), _SAVE_AFTER_S
        is_stream = self._loader.shards > 0
        self._parts = 1 if self._shards is None else len(self._shards.own)  # of each global batch on this rank
        self._batches_per_epoch = sys.maxsize if is_stream else len(self._loader)
        self.steps_per_epoch = None if is_stream else -(-self._batches_per_epoch // self._accumulate)
        restored = self._checkpointer.restore(resume, self._batches_per_epoch)
        self._position, self._rng, self.resumed_from = restored.position, restored.numbers, restored.path
        self._ledger.rate = restored.position.rate
        if restored.path is not None:
            self._modes.loaded()
            self._judge_again()
        length = self._spec.length
        of_epoch = self._position, self._batches_per_epoch, self._accumulate
        self.epochs = length.epochs if is_stream else length.epochs_of(*of_epoch)
        self.steps = length.steps if is_stream else length.steps_of(*of_epoch)
        self._batch: Batch | None = None  # the one whose body runs
        self._is_again = False  # the running batch, which is another rank's
        self._batches_done = 0  # of the running step
        self._validated_s = self._session.aside_s
        self._save_wanted = restored.is_unsaved
        self._save_is_due = False  # by rank 0's clock
        self._stop_wanted = False
        self._suspending = False  # all ranks have agreed to leave when this step's checkpoint is saved
        is_visible = report.progress and self._session.is_main
        self._progress = Progress(is_visible, length, None if is_stream else self._batches_per_epoch, self._accumulate)
        whole = {name: getattr(self, name) for name in ("epochs", "steps", "steps_per_epoch")}
        whole["batch_size"] = self._loader.batch_size * self._accumulate
        self._folder.begin(self._position, whole, self.resumed_from, restored.point)
        if not self._session.is_main:
            return
        if self.finished:
            done, advice = length.describe_nothing_to_do(self._position)
            if self._stopped_by:
                advice = "give more patience to continue, or resume='never' to start over"
            say(f"finished already: {done} ({self.resumed_from}), nothing to do; {advice}")
            if self.out is not None and str(self.out) in _trained_in:
                warnings.warn(
                    f"another Loop of this script trained in {self.out}. This one takes its weights and trains "
                    f"nothing. Give each Loop an `out` of its own (as out='{self.out}/fold-2')",
                    stacklevel=4,
                )
            self._folder.draw(if_missing=True)
            say(self.summary())
        elif restored.steps_lost >= 0:
            steps = plural(restored.steps_lost, "step")
            say(f"resumed from memory: step {self._position.step} ({steps} lost), {length.describe(self._position)}")
        elif self.resumed_from is not None:
            say(f"resumed from {self.resumed_from}: {length.describe(self._position)}")

    def _judge_again(self) -> None:
        """End a run that early stopping ended, however long it may be now; unless there is more patience."""
        own = [each for each in self._judges if isinstance(each, EarlyStopping)]
        self._stopped_by = next((each.stopped for each in own if each.stopped), "")
        if self._stopped_by:
            self._position.stopped_of = self._spec.length.wanted
        elif any(each.goes_on for each in own):
            self._position.stopped_of = 0

    # -- what the body reads -----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Return the number of the running epoch, from 1; after the end, the number of finished epochs."""
        return self._position.epochs_done + (0 if self._batch is None and self.finished else 1)

    @property
    def step(self) -> int:
        """Return the optimizer's running step, from 1, over the whole run; between bodies, the number of done steps."""
        return self._position.step + (self._batch is not None)

    @property
    def micro_batch(self) -> int:
        """Return the number of the running batch in its step, from 1; between bodies, of those done. The last one has
        the number `accumulate`, times the number of this rank's logical shards. 0 for another rank's batch
        (`audit_every`)."""
        return 0 if self._is_again else self._batches_done + (self._batch is not None)

    @property
    def step_due(self) -> bool:
        """Return whether the optimizer steps in this body: it has the last batch of a step."""
        if self._batch is None or self._is_again:
            return False
        return self._batches_done + 1 == self._batches_of_step * self._parts

    @property
    def _batches_of_step(self) -> int:
        """Return the number of global batches in the current step; an epoch's last may have less than `accumulate`."""
        if self._accumulate == 1:
            return 1
        return min(self._accumulate, self._batches_per_epoch - self._position.batches_done)

    @property
    def epoch_ended(self) -> bool:
        """Return whether this is the last batch of the epoch, or of the run."""
        return self.whole_epoch_ended or (self.step_due and self.step == self._spec.length.steps)

    @property
    def whole_epoch_ended(self) -> bool:
        """Return whether this is the last batch of a whole epoch. There, step a scheduler that counts epochs."""
        return self._position.batches_done + self._batches_of_step == self._batches_per_epoch and self.step_due

    @property
    def validation_due(self) -> bool:
        """Return whether to validate in this body. After it, a row of metrics.csv ends.

        It is true when `epoch_ended` is; with validate_every_steps=N, every N steps and in the run's last body.
        """
        every = self._spec.validate_every_steps
        if every is None:
            return self.epoch_ended
        return self.step_due and (self.step % every == 0 or self.step == self.steps)

    @property
    def finished(self) -> bool:
        """Return whether all epochs (or steps) are done, or the run was stopped."""
        return self._spec.length.reached(self._position)

    @property
    def checkpoint(self) -> Path | None:
        """Return the path of the newest checkpoint of this run, None before the first."""
        return self._checkpointer.newest

    @property
    def history(self) -> list[Row]:
        """Return a row of numbers per finished epoch (or validation), as in metrics.csv, also from before a restart."""
        return list(self._position.history)

    # -- what the body calls -----------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, weight: Any = None, share: float = 1.0, scaler: Any = None) -> None:
        """Run backward of this batch's loss, and log the loss. The logged loss is the mean over the global batch.

        If you call plain `loss.backward()` instead, the optimizer's next step raises an error.

        Args:
            loss: mean over this rank's samples, shape [] or [1].
            weight: number of things that the loss is a mean over on this rank, if these are not samples: tokens without
                padding, or the sum of class weights. A number, or a tensor with one. Gradients and log are those of the
                mean over all ranks and all batches of the step. Every rank gives it, and waits for the others to add it
                up. On a rank with 0 the loss may be nan. If all have 0, gradients are 0 and no loss is logged.
            share: weight of this loss in the batch: 1/4 for each of four parts of it. `accumulate` needs none. Several
                calls in one body add up in the log, each by its share. In a closure, its first evaluation is logged, or
                the backward before it (SAM).
            scaler: a `torch.amp.GradScaler` that scales the loss. You call its `step` and `update`.

        Raises:
            ValueError: the loss is not a scalar, or nothing in it requires a gradient; the weight is not a number >= 0.
            PhotinusError: called outside the body of the loop; or gradients of a step before are there that no step of
                the optimizer has used: only `accumulate` adds up gradients of several batches.
        """
        self._running_batch("loop.backward(loss)")
        self._ledger.backward(loss, weight, share, scaler)

    @property
    def weight(self) -> float:
        """Return the weight of this rank's mean loss in the step: 1.0 if all ranks have the same number of samples, and
        a step has one batch."""
        self._running_batch("loop.weight")
        return self._ledger.weight

    def record(self, loss: Tensor, *, share: float = 1.0) -> None:
        """Log the loss of a backward that you run yourself, such as `(loss * loop.weight).backward()`.

        Args:
            loss: mean over this rank's samples, without weight and share, shape [] or [1].
            share: factor by which you multiplied it, as in `backward`.

        Raises:
            ValueError: the loss is not a scalar, or nothing in it requires a gradient.
            PhotinusError: called outside the body of the loop.
        """
        self._running_batch("loop.backward(loss)")
        self._ledger.record(loss, share)

    def _running_batch(self, what: str) -> Batch:
        if self._batch is None:
            raise PhotinusError(f"{what} belongs inside `for ... in loop:`; no batch is being worked on")
        return self._batch

    def no_sync(self) -> NoReturn:
        """Raise PhotinusError: `accumulate` decides when gradients are exchanged."""
        raise PhotinusError(
            "a Loop has no no_sync(). To make one step of N batches, write photinus.Loop(..., accumulate=N), and "
            "`if loop.step_due:` before optimizer.step(). Several backwards of one batch need nothing around them: "
            "give each its part, loop.backward(loss, share=1 / 4)"
        )

    @overload
    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor: ...
    @overload
    def clip(self, *, value: float) -> None: ...
    def clip(
        self, max_norm: float | None = None, norm_type: float = 2.0, *, value: float | None = None
    ) -> Tensor | None:
        """Scale the gradients down so that their norm over the whole model is at most `max_norm`, on all ranks.

        With `value=` instead, clip each element to the range from -value to value. The result is the same for every
        world size and strategy, to float precision. All ranks call it, after the last backward before the optimizer's
        step (with a GradScaler, after its `unscale_`).

        Returns:
            The norm before, shape [], equal on all ranks; None with `value`.

        Raises:
            ValueError: both are given, or none, or the one is not above 0.
            PhotinusError: called before the last batch of a step.
        """
        limit = [each for each in (max_norm, value) if each is not None]
        if len(limit) != 1 or not limit[0] > 0:
            raise ValueError(f"loop.clip: max_norm={max_norm}, value={value}: needs one of both, a number above 0")
        if self._batch is not None and not self.step_due:
            raise PhotinusError(
                f"loop.clip before the last batch of step {self.step}: with accumulate=... the ranks' gradients are "
                f"averaged in the last one. Write it under `if loop.step_due`."
            )
        how = {"max_norm": max_norm, "norm_type": norm_type, "value": value}
        self._replicas.note(f"loop.clip in step {self.step}", how)
        self._clock.optimizing_began()
        norm = None if max_norm is None else self._strategy.clip(self._wrapped, max_norm, norm_type)
        if value is not None:
            for parameter in parameters_with_gradients([self.model], [self._optimizer]):
                values_of(parameter.grad).clamp_(-value, value)
        self._clock.optimizing_ended()
        return norm

    def log(self, **metrics: float | Tensor) -> None:
        """Add numbers to the running row of metrics.csv (the epoch's). If a name comes twice, the last value counts.

        They should be equal on all ranks, like those of `photinus.evaluate`; rank 0's are written. After the end they
        belong to the last row; a checkpoint that is resumed with more epochs does not have them.

        Raises:
            ValueError: the loop itself writes a column of this name, or a value is not one number.
            PhotinusError: the run was stopped since the last row, so there is no row to add to.
        """
        row, history = self._position.logged, self._position.history
        ended = self._batch is None and self.finished
        if ended and not (history and history[-1]["step"] == self._position.step):
            raise PhotinusError("loop.log after the end: the run was stopped inside an epoch. Log before loop.stop()")
        if ended:
            row = history[-1]
        for name, value in metrics.items():
            if name in OWN_COLUMNS:
                raise ValueError(f"loop.log: {name!r} is a column that the loop fills itself; take another name")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"loop.log: {name!r} has shape {list(value.shape)}, but one number is needed")
            try:
                row[name] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError):
                raise ValueError(f"loop.log: {name!r} is {value!r}, but one number is needed") from None
        if ended:
            self._folder.rewrite_metrics(history)

    def stop(self) -> None:
        """End the run early, on all ranks at the same step, even if only one rank calls it.

        In the last body of an epoch it ends there, otherwise within 16 steps. If you start it again with the same
        number of epochs, it prints that it is finished; with more epochs it continues.
        """
        self._stop_wanted = True

    # -- the iterator ------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from the present position to the end of the last epoch.

        If you leave the body early (break, an exception), its batch does not count as done.
        """
        if self.finished:
            # What the script draws after a run that had ended before, it draws as after one that ends now.
            self._restore_random_numbers()
            return iter(())
        _trained_in.add(str(self.out))
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        self._restore_random_numbers()
        position, clock = self._position, self._clock
        clock.start()
        self._ledger.begin()
        if self._shards is not None:
            self._shards.begin(position.step)
            if self._batches_done:  # a body was left: what earlier ones computed is computed again
                self._batches_done = 0
                self._ledger.drop_step()
        self._modes.begin()
        self._checkpointer.snapshots.begin(position.step)
        self._digests.begin(position.step)
        position.begin(time.perf_counter() - self._session.aside_s)
        # Without a folder there would be nothing to resume from.
        self._signals = preemption.Watch(self._session.suspends and self.out is not None)
        note_place("")
        has_ended = False
        try:
            while not self.finished:
                self._progress.start_epoch(self.epoch, position.batches_done, position.step, self._loader.batch_size)
                start = position.batches_done * self._parts + self._batches_done
                batches = self._loader.epoch(position.epochs_done, start, look_ahead=self._accumulate)
                while (batch := self._next(batches)) is not None:
                    if self._loader.shards:  # as many are read ahead as can be in a step
                        self._batches_per_epoch = batch.index + 1 + batch.to_come
                    of_step = self._batches_of_step
                    if self._shards is not None:
                        others = self._shards.audited(position.step + 1, self._batches_done, of_step, batch)
                        if others is not None:
                            yield from self._computed_again(*others, is_first=self._batches_done == 0)
                        self._shards.body_began(position.step + 1, self._batches_done, of_step)
                        if self._batches_done % of_step == 0:
                            self._ledger.gradients_taken()
                    self._batch = batch
                    step_ended = self.step_due
                    yield from self._body(batch, is_first=self._batches_done == 0, may_step=step_ended)
                    # The caller asks for the next batch: only now the body is done and counts, not if it was left.
                    epoch_ended = step_ended and self.epoch_ended
                    row_ended = epoch_ended if self._spec.validate_every_steps is None else self.validation_due
                    self._batch = None
                    self._ledger.body_ended()
                    if self._shards is not None:
                        self._shards.body_ended()
                        if self._shards.audit is not None and self._shards.audit.doubts:
                            yield from self._decided(self._shards.audit)
                    samples = batch.global_samples if self._batches_done < of_step else 0  # once, and not in each part
                    position.samples_in_part += samples
                    self._batches_done += 1
                    if not step_ended:
                        self._clock.other_ended()
                        self._progress.step(samples, position.newest)
                        continue
                    self._batches_done = 0
                    position.batches_done += of_step
                    position.step += 1
                    position.rate = self._ledger.rate
                    keeps = self._checkpointer.step_ended(position.step)
                    status.update(steps=position.step)
                    self._after_step(samples, row_ended=row_ended, epoch_ended=epoch_ended, keeps=keeps)
                    # In its last step a run finishes instead: there would be nothing left to resume.
                    if self._suspending and not self.finished:
                        self._leave_suspended()
                    if self._spec.length.reached(position):
                        break
            self._finish()
            has_ended = True
        finally:
            clock.stop()
            self._ledger.end()
            if self._shards is not None:
                self._shards.end(position.step)
            self._modes.end(is_finished=has_ended)
            self._checkpointer.snapshots.end()
            note_place(f"step {self.step} of {self.steps or 'a stream'} of its loop")
            if self._batch is not None:  # the body was left early
                self._batch = None
                self._ledger.body_ended(is_left=True)
            self._progress.close()
            self._signals.close()
            wait_for_writer()  # left early

    def _body(self, batch: Batch, *, is_first: bool, may_step: bool) -> Iterator[Any]:
        """Hand a batch out to its body."""
        step, batches = self._position.step + 1, self._batches_of_step
        self._ledger.body_began(batch, step, self.epoch, batches=batches, is_first=is_first, may_step=may_step)
        if may_step:
            yield batch.data
            return
        with ExitStack() as stack:  # the gradients of the step's bodies add up on each rank, without an average
            for no_sync in self._no_sync:
                stack.enter_context(no_sync())
            yield batch.data

    def _computed_again(self, rank: int, batch: Batch, *, is_first: bool) -> Iterator[Any]:
        """Have the body compute another rank's batch, which does not count."""
        assert self._shards is not None
        self._batch, self._is_again = batch, True
        self._shards.again_began(self._position.step + 1, rank)
        self._ledger.gradients_taken()
        try:
            yield from self._body(batch, is_first=is_first, may_step=False)
        finally:
            self._is_again = False
        self._batch = None
        self._ledger.body_ended(is_left=True)
        self._shards.again_ended()

    def _decided(self, audit: Audit) -> Iterator[Any]:
        """Have third ranks compute the batches of which two ranks computed other gradients. Always raises in the end.

        Raises:
            FaultyHardwareError, PeerLostError: see `Audit.fail`.
        """
        for doubt in audit.doubts:
            if batch := audit.ask_third(doubt):
                yield from self._computed_again(doubt.owner, batch, is_first=True)
            audit.decide(doubt)
        audit.fail()

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """The epoch's next batch; None after the last."""
        self._clock.other_ended()
        with span("data"):
            batch = next(batches, None)
        self._clock.data_came()
        return batch

    def _restore_random_numbers(self) -> None:
        rng.set_ranks_apart(self._session.rank, is_done=True)
        # Not before: making models and data sets draws numbers, and a resumed script makes them again.
        if self._rng is not None:
            rng.restore(self._rng)
            self._rng = None
        elif self._position.step == 0 and self._session.rank > 0:
            # Up to here all ranks may have drawn the same numbers (equal splits of the data, equal models); dropout
            # must differ. Rank 0 goes on as a process that is alone would. A second loop of the session does not draw
            # the first one's numbers again, whether that one has anything left to do or not.
            seed = self._loader.seed if self._number == 1 else rng.derive_seed(self._loader.seed, "loop", self._number)
            rng.seed_everything(seed, rank=self._session.rank)

    def _after_step(self, samples: int, *, row_ended: bool, epoch_ended: bool, keeps: bool) -> None:
        """Do what is due between two steps, in this order: losses, the row, the checkpoint."""
        position, saving = self._position, self._spec.saving
        self._save_wanted |= saving.every_steps is not None and position.step % saving.every_steps == 0
        self._save_wanted |= row_ended and saving.best is not None
        if self._digests.is_due(position.step):
            self._folder.append_digests(position.step, self._digests.take(position.step))
        # First the numbers: a checkpoint relies on all rows up to it.
        wants_to_leave = self._signals.wants(position.step)
        is_alone = wants_to_leave and self._session.world_size == 1  # nobody else has to exchange
        # When numbers are due depends on the clock, so runs over shards end at steps that do not.
        may_stop = self._shards is None or row_ended or epoch_ended or position.step % MOST_STEPS == 0
        is_due = self._numbers.due or (may_stop and self._shards is not None)
        if row_ended or epoch_ended or self._save_wanted or keeps or is_due or is_alone:
            self._exchange(epoch_ended, wants_to_leave, may_stop=may_stop)
            if self._suspending and not self._save_wanted:
                self._save_wanted = True
                # Compares the ranks before the checkpoint.
                self._exchange(epoch_ended, wants_to_leave, may_stop=may_stop)
        self._progress.step(samples, position.newest)
        if row_ended:
            self._end_row(epoch_ended)
        if epoch_ended:
            if position.batches_done == self._batches_per_epoch:
                position.end_epoch()
            self._save_wanted |= self.finished or position.epochs_done % saving.every_epochs == 0
        if self._save_wanted:
            self._clock.other_ended()
            began = time.perf_counter()
            self._save()
            took_s = time.perf_counter() - began
            # A save is no training: it would show as slow steps, and cost a rank the blame for them.
            position.leave_out(took_s)
            self._saved_s, self._save_pause_s = time.monotonic(), max(_SAVE_AFTER_S, took_s / _MOST_COST)
            self._clock.skip()
            keeps = False  # what is on its way to the disk is in memory, too, or needs no snapshot
        if keeps and not self.finished:
            self._checkpointer.take(position)
        self._save_wanted |= self._save_is_due  # after the next step

    def _exchange(self, epoch_ended: bool, wants_to_leave: bool, *, may_stop: bool) -> None:
        """Brings the numbers of all ranks together, and agrees on stopping, saving and suspending."""
        position = self._position
        self._clock.other_ended()
        saves = self.out is not None and (epoch_ended or self._save_wanted)
        # Rank 0's clock decides for all: the others' clocks differ, and all must save at the same step.
        due = self._folder.writes and time.monotonic() - self._saved_s >= self._save_pause_s
        due = due and not saves and self._spec.saving.every_steps is None
        wishes = self._stop_wanted and may_stop, due, self._checkpointer.is_written, wants_to_leave
        stops, self._save_is_due, is_written, self._suspending = self._numbers.exchange(
            position, self._folder, wishes, epoch=self.epoch, saves=saves
        )
        if is_written:
            self._checkpointer.wait()
        if self._suspending:
            status.update(letter="s")
        if stops:
            position.stopped_of = self._spec.length.wanted
            self._folder.record_event("stop", position.step, epoch=self.epoch)

    def _end_row(self, epoch_ended: bool) -> None:
        position, every = self._position, self._spec.validate_every_steps
        rate = self._ledger.rate
        if rate is None:  # no step was seen, or the optimizer finds its rates itself
            rate = next((group.get("lr") for group in self._optimizer.param_groups), None)
        whole = position.batches_done == self._batches_per_epoch if every is None else position.step % every == 0
        rate = math.nan if rate is None else float(rate)
        row = position.end_row(time.perf_counter() - self._session.aside_s, rate, whole=whole)
        kind = "epoch" if every is None else "validation"
        self._folder.end_row(kind, position.history, self._session.aside_s - self._validated_s)
        self._validated_s = self._session.aside_s
        self._progress.end_row(row, measurements(row), epoch_ended=epoch_ended)
        if whole and (reason := reason_to_stop(self._judges, row, is_main=self._session.is_main)):
            self._stopped_by, position.stopped_of = reason, self._spec.length.wanted
            self._folder.record_event("stop", position.step, epoch=int(row["epoch"]), text=reason)

    def _save(self) -> None:
        self._save_wanted = False
        with self._modes.saving() if self.out is not None else nullcontext():
            self._checkpointer.persist(self._position)

    def _leave_suspended(self) -> None:
        self._checkpointer.wait()
        words = f"step {self._position.step}, saved in {self.checkpoint}"
        self._progress.close()
        if self._session.is_main and env.WORKER_FILES.get() is None:  # else the launcher says it
            say(f"suspended at {words}; {status.RESUMES}")
        self._folder.record_end(preemption.Suspended(words))  # its script may have no `with photinus.init()`
        preemption.suspend(words)

    def _finish(self) -> None:
        if self._digests.is_due(self._position.step, is_last=True):
            self._folder.append_digests(self._position.step, self._digests.take(self._position.step))
        if self._checkpointer.saved_step != self._position.step:
            self._save()
        self._checkpointer.wait()
        self._numbers.write_times(self._position, self._folder, epoch=self.epoch, at_once=True)
        self._folder.finish("stopped" if self._position.stopped_of else "finished", self._stopped_by)
        self._checkpointer.snapshots.free()
        if self._progress.shown:
            say(self.summary())

    def summary(self) -> str:
        """Return how far the run is, its last numbers, and (on rank 0) where the results are: one or two lines."""
        position = self._position
        how = self._spec.length.describe_end(position) + f" ({self._stopped_by})" * bool(self._stopped_by)
        shown = show_metrics(measurements(position.history[-1])) if position.history else ""
        how = f"{how}, {shown}" if shown else how
        return "\n".join(filter(None, (how, self._folder.describe())))


def measurements(row: Row) -> Row:
    """Of an epoch's row the loss and what was logged."""
    return {name: value for name, value in row.items() if name == "loss" or name not in OWN_COLUMNS}
