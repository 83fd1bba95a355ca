"""The facts that ranks compare with each exchange of gradients, so that no rank silently does something different.

Each rank has some elements behind the last bucket's gradients, zero on all others, so that their average tells every
rank what each one said, at no exchange more:

    status          not zero where this rank's backward went wrong
    steps           optimizer steps so far: ranks that differ are out of step, and average gradients of different steps
    digest (three)  of some of the parameters: ranks that differ hold other weights
    past (three)    a digest of which steps began with gradients of the step before, and, where the ranks split the
                    steps, of what each did around its own (see zero.step_facts)

A *step* is a step of a torch optimizer that holds some of the parameters, after a backward that reached them. Only
this tells: exchanges are as many on all ranks by nature, and forwards or backwards within a step may differ (a rank may
accumulate more micro-batches than others). Digests are those at the first forward after a step: optimizers whose ranks
each step a part of the model, or that change weights for a while (SAM), are done then. A digest reads 1/32 of the
parameters in every fourth step: 0.31 % of the steps of a GPT of 18 M parameters that gets 1 x 16 tokens a rank, 0.03 %
where it gets 4 x 64 (2 ranks on 2 busy cores).

Where nothing can lie behind gradients (under communication hooks, or where buckets may be skipped), or reading it would
make the host wait for the device each time (GPUs), every 64th exchange is followed by a small one of the facts. Hooks
may let weights differ on purpose, so steps alone are compared then.

Numbers below 62 survive the averaging in any floating dtype, half precision included. Zero says nothing: a rank that
has run out of input, or whose optimizers tell nothing of their steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import MismatchError
from ...job.world import name_ranks
from ...optimizer_steps import StepWatcher, unwatch_steps, watch_steps
from ..exchange.agreement import JSON, check_alike
from ..exchange.collectives import Average, control_device
from ..exchange.verify_models import ParameterPieces, compare_parameters
from .gradient_memory import Slot

ELEMS_PER_RANK = 8
# Numbers up to 61 survive the averaging (see above), and 0 says nothing.
_BASE = 61
_STEPS_PER_DIGEST = 4
_EXCHANGES_PER_OWN = 64
_STEPS_NAMED = 4


class StepDigests(Protocol):
    """A record of what each rank did around its steps."""

    digest: int
    is_deferred: bool

    def note_averaged(self) -> None:
        """All gradients are averages now."""

    def forget(self) -> None:
        """All ranks have done the same up to now."""

    def explain(self) -> None:
        """The digests differ. Raises ModelMismatchError on all ranks, which all call this, unless that is right."""

    def restart(self) -> None:
        """All ranks are together again."""


def status_of(tail: torch.Tensor | None) -> torch.Tensor | None:
    """Of all the ranks' elements, those that say whose backward went wrong: one per rank."""
    return None if tail is None else tail.view(-1, ELEMS_PER_RANK)[:, 0]


class RankFacts(StepWatcher):
    """Keeps this rank's facts, says them, and compares those of all.

    Args:
        checked: whether anything is said and compared. If not, only the status is left.

    Attributes:
        steps: what this rank did around its steps; None where all ranks do the whole steps.
    """

    def __init__(self, slots: Sequence[Slot], average: Average, *, checked: bool) -> None:
        self._slots = slots
        self._average = average
        self._ids = {id(slot.parameter) for slot in slots}
        self._pieces = ParameterPieces([slot.parameter for slot in slots]) if checked else None
        # Each gradient but the first comes after a backward has begun, so one of these two tells what was there before.
        self._witnesses = sorted(slots, key=lambda slot: slot.parameter.numel())[:2]
        self._sees_steps = False
        self.steps: StepDigests | None = None
        self.restart()
        if checked:
            watch_steps(self)

    def restart(self) -> None:
        """All ranks are together anew, with the same weights, however many steps each has made."""
        self._steps = 0
        self._reached = False  # a backward reached the parameters since the last step
        self._digest_due = False
        self._digest: int | None = None
        self._versions = [-1] * len(self._witnesses)  # of their gradients in the last step
        self._keeps = False  # gradients of the last step, in the backwards since then
        self._kept_in: list[int] = []  # steps
        self._past = 0
        if self.steps is not None:
            self.steps.restart()

    def stop(self) -> None:
        """Looks at optimizers no more. Idempotent."""
        unwatch_steps(self)

    def begin_backward(self, slot: Slot | None = None) -> None:
        """A backward reaches the parameters, exchanged or not; that of `slot` has its gradient already."""
        if not self._reached and self._sees_steps:
            there = zip(self._witnesses, self._versions, strict=True)
            self._keeps = any(_version(each) == before >= 0 for each, before in there if each is not slot)
        self._reached = True

    def begin_forward(self, rounds: int, *, ride: bool, weights: bool) -> None:
        """Takes the digest that is due.

        Args:
            rounds: exchanged so far.
            ride: whether facts travel behind gradients.
            weights: whether these are to be equal.
        """
        if self._pieces is None or self._reached or not weights:
            return
        if ride and self._digest_due:
            self._digest_due = False
            self._digest = self._pieces.digest(self._steps // _STEPS_PER_DIGEST)
        elif not ride and self._sees_steps and _is_followed(rounds):
            # Of all parameters, as it is taken so seldom.
            self._digest = self._pieces.digest_of_all()

    def exchange(self, rounds: int, *, silent: bool = False) -> torch.Tensor | None:
        """Exchange the ranks' elements separately where facts do not travel with a bucket, if this round has one.

        With `silent`, this rank has no input, and says nothing.
        """
        if self._pieces is None or not _is_followed(rounds):
            return None
        device = control_device(self._average.group)
        # float64 is exact here, and the tensor is too small to matter.
        own = torch.zeros(ELEMS_PER_RANK * self._average.world_size, dtype=torch.float64, device=device)
        if not silent:
            self.say(own)
        dist.all_reduce(own, group=self._average.group)
        return own / self._average.contributors

    def say(self, tail: torch.Tensor | None) -> None:
        """Writes this rank's facts into its elements."""
        if tail is None or not self._sees_steps:
            return
        begin = self._average.group.rank() * ELEMS_PER_RANK
        past = self._past if self.steps is None else self._past + self.steps.digest
        is_told = self.steps is None or not self.steps.is_deferred
        # From 1 on, since 0 says nothing.
        words = [1 + self._steps % _BASE, *_digits(self._digest), *_digits(past if is_told else None)]
        self._digest = None
        if tail.device.type == "cpu" and tail.dtype != torch.bfloat16:  # numpy, which does not know that, is faster
            tail.numpy()[begin + 1 : begin + ELEMS_PER_RANK] = words
        else:
            tail[begin + 1 : begin + ELEMS_PER_RANK] = torch.tensor(words, dtype=tail.dtype, device=tail.device)

    def check(self, tail: torch.Tensor | None) -> None:
        """Compares what the ranks said; every rank calls it, ranks without input too.

        Args:
            tail: the ranks' elements after the exchange; None where they did not travel.

        Raises:
            MismatchError: ranks are out of step.
            ModelMismatchError: ranks hold different weights; names the first parameter.
        """
        if tail is None:
            return
        words: list[float] = tail.tolist()
        rows = [words[begin + 1 : begin + ELEMS_PER_RANK] for begin in range(0, len(words), ELEMS_PER_RANK)]
        # The usual case. Averages of equal numbers are equal to the bit, so nothing has to be decoded.
        if all(row == rows[0] for row in rows):
            if self.steps is not None:
                self.steps.forget()
            return
        # One rank wrote each element and the others zero, so the sum is what it wrote.
        reports = [[round(word * self._average.contributors) for word in row] for row in rows]
        if len({row[0] for row in reports if row[0]}) > 1:
            raise MismatchError(self._out_of_step_text([row[0] for row in reports]))
        if len({tuple(row[4:]) for row in reports if row[4]}) > 1:
            self._compare_kept()
            if self.steps is not None:
                self.steps.explain()
        # A digest names no parameter, so the parameters themselves are compared.
        if len({tuple(row[1:4]) for row in reports if row[1]}) > 1:
            compare_parameters([(slot.name, slot.parameter) for slot in self._slots], self._average.group)

    def step_ended(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer."""
        if not self._reached:
            return  # another part of a step that is counted
        if any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]):
            self._sees_steps, self._reached = True, False
            self._steps += 1
            if self._keeps:
                self._kept_in.append(self._steps)
            self._past = (31 * self._past + self._keeps) % _BASE**3
            self._versions = [_version(slot) for slot in self._witnesses]
            self._digest_due = self._steps % _STEPS_PER_DIGEST == 1

    def _compare_kept(self) -> None:
        last: JSON = [*self._kept_in[-_STEPS_NAMED:]]
        text = "some ranks stepped with gradients of the step before"
        try:
            check_alike({"such steps": last}, text, self._average.group)
        except ValueError as error:
            raise MismatchError(
                f"{error} Call optimizer.zero_grad() on all ranks alike. Seen from rank {self._average.group.rank()}, "
                f"after step {self._steps}."
            ) from None

    def _out_of_step_text(self, reports: Sequence[int]) -> str:
        """`reports` has 1 + steps modulo _BASE of each rank, 0 for those that said nothing."""
        own = self._average.group.rank()
        ranks: dict[int, list[int]] = {}
        for rank, word in enumerate(reports):
            if word:
                # Only the remainder travels, so the nearest number of steps is meant.
                behind = (self._steps - (word - 1) + _BASE // 2) % _BASE - _BASE // 2
                ranks.setdefault(self._steps - behind, []).append(rank)
        counts = "; ".join(f"{name_ranks(those)}: {steps} optimizer steps" for steps, those in sorted(ranks.items()))
        return (
            f"the ranks are out of step, seen from rank {own}: the gradients averaged just now were computed after "
            f"{counts}. Some rank ran a backward inside no_sync() that others ran outside of it, or one backward more "
            f"or less between two optimizer steps, or it left a step out. Let all ranks decide alike; for numbers of "
            f"batches that differ, see join()."
        )


def _version(slot: Slot) -> int:
    """Return the number of changes in place of the gradient; -1 without one."""
    gradient = slot.parameter.grad
    return -1 if gradient is None or gradient.is_inference() else gradient._version


def _digits(digest: int | None) -> list[int]:
    """Three digits in base 61, as one element holds no larger number; zeros say nothing."""
    return [0, 0, 0] if digest is None else [1 + digest // _BASE**index % _BASE for index in range(3)]


def _is_followed(rounds: int) -> bool:
    return rounds % _EXCHANGES_PER_OWN == _EXCHANGES_PER_OWN - 1
