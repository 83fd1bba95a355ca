"""The facts that ranks compare, so that no rank silently does something different.

A small exchange follows the second exchange of gradients and every 64th from there on (under "zero1" on CPUs every
8th). In it each rank gives four numbers:

    steps      optimizer steps so far: ranks that differ are out of step, and average gradients of different steps
    stale      a digest of which steps began with gradients of the step before
    acts       where ranks split the steps: a digest of what each did around its own (see zero.step_facts)
    weights    a digest of the parameters; not under communication hooks, which may let weights differ on purpose

Over backend photinus each call carries the number of steps besides, and the engine compares it at once.

A *step* is a step of a torch optimizer that holds some of the parameters, after a backward that reached them. Only
this tells: exchanges are as many on all ranks by nature, and forwards or backwards within a step may differ (a rank may
accumulate more micro-batches than others). Digests are those at the first forward after a step: optimizers whose ranks
each step a part of the model, or that change weights for a while (SAM), are done then.

A rank that has run out of input, or whose optimizers do not show their steps, gives zeros, which are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ...errors import MismatchError
from ...job.world import name_ranks
from ...optimizer_steps import StepWatcher, unwatch_steps, watch_steps
from ..exchange.agreement import JSON, check_alike
from ..exchange.collectives import Average, control_device, gather_numbers
from ..exchange.verify_models import compare_parameters, digest_of, ranks_by
from .gradient_memory import Slot

_EXCHANGES_PER_FACTS = 64
_EXCHANGES_PER_ACTS = 8  # on CPUs, where reading the answer lets nobody wait for a device
_MODULUS = 2**62
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


class RankFacts(StepWatcher):
    """Keeps this rank's facts, and compares those of all.

    Args:
        checked: whether anything is compared.

    Attributes:
        acts: what this rank did around its steps; None where all ranks do the whole steps.
    """

    def __init__(self, slots: Sequence[Slot], average: Average, *, checked: bool) -> None:
        self._slots = slots
        self._average = average
        self._checked = checked
        self._ids = {id(slot.parameter) for slot in slots}
        # Each gradient but the first comes after a backward has begun, so one of these two tells what was there before.
        self._witnesses = sorted(slots, key=lambda slot: slot.parameter.numel())[:2]
        self._sees_steps = False
        self.acts: StepDigests | None = None
        self.restart()
        if checked:
            watch_updates: Any = getattr(average.group, "watch_updates", None)  # of backend photinus
            self._count_update = watch_updates() if watch_updates is not None else lambda: None
            watch_steps(self)

    def restart(self) -> None:
        """All ranks are together anew, with the same weights, however many steps each has made."""
        self._steps = 0
        self._reached = False  # a backward reached the parameters since the last step
        self._weights = 0
        self._versions = [-1] * len(self._witnesses)  # of their gradients in the last step
        self._keeps = False  # gradients of the last step, in the backwards since then
        self._stale_in: list[int] = []  # steps
        self._stale = 0
        if self.acts is not None:
            self.acts.restart()

    def stop(self) -> None:
        """Looks at optimizers no more. Idempotent."""
        unwatch_steps(self)

    def begin_backward(self, slot: Slot | None = None) -> None:
        """A backward reaches the parameters, exchanged or not; that of `slot` has its gradient already."""
        if not self._reached and self._sees_steps:
            there = zip(self._witnesses, self._versions, strict=True)
            self._keeps = any(_version(each) == before >= 0 for each, before in there if each is not slot)
        self._reached = True

    def begin_forward(self, rounds: int, *, weights: bool) -> None:
        """Takes the digest of the weights, if this round is followed by an exchange and they are to be equal."""
        if self._is_followed(rounds) and weights and self._sees_steps and not self._reached:
            digests = [digest_of(slot.parameter) for slot in self._slots]
            self._weights = 0
            for digest in torch.stack(digests).tolist():  # one wait for a GPU, not one for each
                self._weights = (31 * self._weights + digest) % _MODULUS

    def compare(self, rounds: int, *, silent: bool = False) -> None:
        """Compares what the ranks did, if this round has such an exchange; every rank calls it.

        Args:
            silent: this rank has no input, and gives zeros.

        Raises:
            MismatchError: ranks are out of step.
            ModelMismatchError: ranks hold different weights; names the first parameter. Or acts differ.
        """
        if not self._is_followed(rounds):
            return
        acts = 0 if self.acts is None or self.acts.is_deferred else self.acts.digest
        own = [1 + self._steps, self._stale, acts, self._weights]
        self._weights = 0
        rows = gather_numbers(own if self._sees_steps and not silent else [0] * len(own), self._average.group)
        steps, stale, acts_of, weights = ({each for each in column if each} for column in zip(*rows, strict=True))
        if len(steps) > 1:
            raise MismatchError(self._out_of_step_text([row[0] - 1 for row in rows]))
        if len(stale) > 1:
            self._compare_stale()
        if len(acts_of) > 1 and self.acts is not None:
            self.acts.explain()
        # A digest names no parameter, so the parameters themselves are compared.
        if len(weights) > 1:
            compare_parameters([(slot.name, slot.parameter) for slot in self._slots], self._average.group)
        if self.acts is not None:
            self.acts.forget()

    def step_ended(self, optimizer: Optimizer) -> None:
        """Counts a step of an optimizer."""
        if not self._reached:
            return  # another part of a step that is counted
        if any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]):
            self._sees_steps, self._reached = True, False
            self._steps += 1
            self._count_update()
            if self._keeps:
                self._stale_in.append(self._steps)
            self._stale = (31 * self._stale + 1 + self._keeps) % _MODULUS
            self._versions = [_version(slot) for slot in self._witnesses]

    def _is_followed(self, rounds: int) -> bool:
        often = self.acts is not None and control_device(self._average.group).type == "cpu"
        every = _EXCHANGES_PER_ACTS if often else _EXCHANGES_PER_FACTS
        return self._checked and rounds % every == 1

    def _compare_stale(self) -> None:
        last: JSON = [*self._stale_in[-_STEPS_NAMED:]]
        text = "some ranks stepped with gradients of the step before"
        try:
            check_alike({"such steps": last}, text, self._average.group)
        except ValueError as error:
            raise MismatchError(
                f"{error} Call optimizer.zero_grad() on all ranks alike. Seen from rank {self._average.group.rank()}, "
                f"after step {self._steps}."
            ) from None

    def _out_of_step_text(self, steps: Sequence[int]) -> str:
        """`steps` has the number of each rank, -1 for those that gave none."""
        counts = sorted((number, ranks) for number, ranks in ranks_by(steps).items() if number >= 0)
        text = "; ".join(f"{name_ranks(ranks)}: {number} optimizer steps" for number, ranks in counts)
        return (
            f"the ranks are out of step, seen from rank {self._average.group.rank()}: the gradients averaged just now "
            f"were computed after {text}. Some rank ran a backward inside no_sync() that others ran outside of it, or "
            f"one backward more or less between two optimizer steps, or it left a step out. Let all ranks decide "
            f"alike; for numbers of batches that differ, see join()."
        )


def _version(slot: Slot) -> int:
    """Return the number of changes in place of the gradient; -1 without one."""
    gradient = slot.parameter.grad
    return -1 if gradient is None or gradient.is_inference() else gradient._version
