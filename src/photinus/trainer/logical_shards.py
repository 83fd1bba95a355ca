"""The steps of a loop whose batches are cut into logical shards: the same bits on any number of ranks.

A step's batch is cut into V shards, of which each rank has consecutive ones. Each is fetched, collated and computed
alone, since the bits of a kernel depend on the shapes that it is given. To a body they look like the batches of
`accumulate`. What a shard computes depends on the weights and buffers with which the step began, on its samples, and on
random numbers that are those of (seed, step, shard). What all shards compute is put together in the order of the tree,
or of the shards: gradients (`parallel.reducer.shard_sums`), statistics of batch norms (`shard_statistics`), weights of
means (here) and losses (`record.run_numbers`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from ..errors import PhotinusError
from ..parallel import DistributedDataParallel, unwrap_compiled
from ..parallel.exchange.shard_tree import own_shards
from ..parallel.reducer.shard_sums import ShardSums
from .audit import Audit
from .data import rng
from .data.loader import Batch
from .session.progress import say
from .session.session import Session
from .shard_checks import ShardChecks
from .shard_statistics import ShardStatistics
from .weighted_means import number_of

_FEW_SAMPLES = 8


class ShardSteps:
    """This rank's shards in the steps of a loop.

    Args:
        models, optimizers: that the loop trains.
        seed: of the run, and of the loop in its session.
        scalers: of losses.
        batch_size: samples of a global batch.
        audit_every: see `Loop`.

    Attributes:
        shards: into how many each batch is cut.
        own: those of this rank.
        audit: of other ranks' batches; None for none.

    Raises:
        ValueError: a model was not wrapped for shards.
    """

    def __init__(
        self,
        session: Session,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scalers: Sequence[torch.amp.GradScaler],
        seed: int,
        batch_size: int,
        audit_every: int | Literal["auto"] | None,
    ) -> None:
        self.shards = session.logical_shards
        self.own = own_shards(session.rank, session.world_size, self.shards)
        self._session, self._seed = session, seed
        self._wrapped: list[DistributedDataParallel] = []
        for model in map(unwrap_compiled, models):
            if not isinstance(model, DistributedDataParallel) or model.shard_sums is None:
                raise ValueError(
                    f"logical_shards={self.shards}, but the model ({type(model).__name__}) was not wrapped for them: "
                    f"call photinus.wrap after photinus.init(logical_shards=...), and give what it returns"
                )
            self._wrapped.append(model)
        self._statistics = ShardStatistics(session, self._wrapped, self.shards)
        if session.is_main and self._statistics.norms:
            samples = batch_size // self.shards
            say(f"note: batch norms take the statistics of each of a batch's {self.shards} shards, not of the batch")
            if samples < _FEW_SAMPLES:
                warnings.warn(
                    f"batch norms take the statistics of {samples} samples (batch_size={batch_size}, "
                    f"logical_shards={self.shards}), which are few: use fewer shards, a larger batch, or GroupNorm",
                    stacklevel=4,
                )
        self._checks = ShardChecks(self._wrapped, optimizers)
        self.audit = Audit(session, self._wrapped, audit_every, self.shards, scalers) if audit_every else None
        self._batches = 1  # of the running step
        self._body = 0  # in the running step
        self._is_audited = False  # the running body

    @property
    def means(self) -> ShardMeans:
        """Return what the loop's ledger asks for the factors of losses."""
        acts = self._before_step, self._checks.gradients_came
        return ShardMeans(self._session, self._sums, self.own, self.shards, *acts)

    @property
    def _sums(self) -> list[ShardSums]:
        return [each.shard_sums for each in self._wrapped if each.shard_sums is not None]

    def begin(self, step: int) -> None:
        """Bodies begin, after this step."""
        if self.audit is not None:
            self.audit.begin(step)
        self._statistics.begin()
        self._session.before_evaluation.append(self._prepare_evaluation)

    def end(self, step: int) -> None:
        """No more bodies, after this step. What is drawn from now on is the same on all numbers of ranks."""
        self._statistics.end()
        if self.audit is not None:
            self.audit.watch(leaving=False)
        callbacks = self._session.before_evaluation
        callbacks[:] = [each for each in callbacks if each != self._prepare_evaluation]
        rng.seed_all_streams(rng.derive_seed(self._seed, "after step", step))

    def _prepare_evaluation(self) -> None:
        if not (self._is_last and any(sums.is_exchanged for sums in self._sums)):
            raise PhotinusError(
                "an evaluation before the gradients of the step are averaged: with logical_shards, evaluate under "
                "`if loop.step_due` or `if loop.validation_due`, after loop.backward"
            )
        self._statistics.exchange()

    def _before_step(self) -> None:
        """Do what all ranks do once in a step, when its gradients are there."""
        if self.audit is not None:
            self.audit.compare()
        self._statistics.exchange()

    def audited(self, step: int, body: int, batches: int, batch: Batch) -> tuple[int, Batch] | None:
        """Return another rank, and its batch, which the body has to compute before this one; None for none."""
        place, micro = divmod(body, batches)
        if self.audit is not None:
            self.audit.check(batch)
        self._is_audited = self.audit is not None and micro == 0 and place == self.audit.place_due(step)
        return self.audit.exchange(step, place, batch) if self._is_audited and self.audit is not None else None

    def again_began(self, step: int, rank: int) -> None:
        """The body of another rank's batch begins."""
        assert self.audit is not None
        self._forget_forwards()
        self._begin_shard(self.audit.place)
        self._checks.body_began(is_first=False, is_last=False)
        shard = own_shards(rank, self._session.world_size, self.shards)[self.audit.place]
        rng.seed_all_streams(rng.derive_seed(self._seed, "shard", step, shard, 0))

    def again_ended(self) -> None:
        """The body of another rank's batch is done."""
        assert self.audit is not None
        self._statistics.check()
        self._checks.body_ended()
        self.audit.computed_again()

    def body_began(self, step: int, body: int, batches: int) -> None:
        """The body of a batch begins.

        Args:
            step: of the loop.
            body: of this rank in the step, from 0.
            batches: global batches of the step.
        """
        self._batches, self._body = batches, body
        place, micro = divmod(body, batches)
        if body == 0:
            self._statistics.begin_step()
            self._forget_forwards()
            for sums in self._sums:
                sums.begin_step()
        if micro == 0:
            self._begin_shard(place)
        if self.audit is not None:
            self.audit.watch(leaving=self._is_audited and self._is_last)
        if self._is_last:
            for sums in self._sums:
                sums.await_last()
        self._checks.body_began(is_first=body == 0, is_last=self._is_last)
        rng.seed_all_streams(rng.derive_seed(self._seed, "shard", step, self.own[place], micro))

    def _forget_forwards(self) -> None:
        """Let forwards of the step before, or of a body that was left, cause no exchange in the next backward."""
        for model in self._wrapped:
            model.reducer.is_due = False

    def _begin_shard(self, place: int) -> None:
        self._statistics.begin_shard(place)
        for model in self._wrapped:  # those of the step before are no part of this one's
            for slot in model.reducer.slots:
                slot.parameter.grad = None

    @property
    def _is_last(self) -> bool:
        return self._body == len(self.own) * self._batches - 1

    def body_ended(self) -> None:
        """The body is done, and was not left."""
        place, micro = divmod(self._body, self._batches)
        self._statistics.check()
        if not self._is_last:
            self._checks.body_ended()
            if self._is_audited and self.audit is not None:
                self.audit.computed_own()
        if micro == self._batches - 1:
            self._checks.shard_ended(is_last=self._is_last)
        if self._is_last:
            self._before_step()
        elif micro == self._batches - 1:
            for model, sums in zip(self._wrapped, self._sums, strict=True):
                sums.put_aside(self.own[place], model.reducer.slots)


class ShardMeans:
    """The weighted losses of a loop whose batches are cut into shards, with the methods of `WeightedMeans`.

    A shard's loss is multiplied by its weight, and the sum over all shards is divided by that of the weights.

    Args:
        sums: of the loop's models.
        own: this rank's shards, of `shards`.
        before_step: called before each step of an optimizer in a body.
        gradients_came: called after each backward.
    """

    steps_last = True

    def __init__(
        self,
        session: Session,
        sums: Sequence[ShardSums],
        own: range,
        shards: int,
        before_step: Callable[[], None],
        gradients_came: Callable[[], None],
    ) -> None:
        self._session, self._sums, self._own, self._shards = session, sums, own, shards
        self.before_step, self.gradients_came = before_step, gradients_came
        self._batches, self._body, self._is_last = 1, 0, False
        self._weight = 0.0  # of the running body
        self._weights: list[float] = []  # of this rank's shards in the running step, but for the running body
        self._is_weighted: bool | None = None  # the running step; None before its first loss

    def body_began(self, *, batches: int, is_first: bool, is_last: bool) -> None:
        """See `WeightedMeans`."""
        self._batches, self._is_last, self._weight = batches, is_last, 0.0
        if is_first:
            self._weights, self._is_weighted, self._body = [0.0] * len(self._own), None, 0

    def part(self, weight: Any, share: float) -> tuple[float, float, Callable[[], float]]:
        """Take a loss of the running body. All ranks call it, and those of a step's last bodies wait for each other.

        Returns:
            The weight, the factor of the loss before backward, and a function that returns the weight.

        Raises:
            ValueError: it is a part of a batch's loss, or some losses of a step have a weight and others none.
        """
        if share != 1.0:
            raise ValueError(
                f"loop.backward: share={share}, but with logical_shards a body has one backward: add up the losses. "
                f"For smaller parts of a batch, use more logical_shards"
            )
        if self._is_weighted is (weight is None):
            raise ValueError("loop.backward: with logical_shards either all losses of a step have a weight, or none")
        self._is_weighted = weight is not None
        if weight is None:
            return 1.0, 1.0, lambda: 1.0
        if len(self._sums) > 1:
            raise ValueError(
                "loop.backward(weight=...) with logical_shards and several models: their gradients have one divisor. "
                "Divide the losses by what you count, over a number that is the same for all batches"
            )
        number = self._weight = number_of(weight)
        if self._is_last:
            total = sum(self._of_all_shards())
            for sums in self._sums:
                sums.divisor = total or 1.0
        return number, number, lambda: number

    def _of_all_shards(self) -> list[float]:
        """The weights of all shards, in their order."""
        row = torch.zeros(self._shards, dtype=torch.float64, device=self._session.exchange_device)
        row[self._own.start : self._own.stop] = row.new_tensor(self._weights)
        row[self._own[self._body // self._batches]] += self._weight
        if self._session.world_size > 1:
            dist.all_reduce(row)  # one rank's number each, and zeros of the others
        return cast("list[float]", row.tolist())

    def backward_began(self) -> None:
        """See `WeightedMeans`."""

    def backward_ended(self) -> None:
        """See `WeightedMeans`."""

    def body_ended(self) -> None:
        """See `WeightedMeans`."""
        self._weights[self._body // self._batches] += self._weight
        self._body += 1
