"""The checks of a backward: do all ranks do the same, has each parameter a gradient, is each gradient finite?

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

A guard finds out which rank made the first gradient that is not a finite number. When a bucket is complete and hot in
the cache, its elements are added up: a NaN or an infinity shows in the sum. At the end of each round the ranks exchange
what they found. So the guard costs one read of the gradients, and an exchange of one number per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import DebugLevel, get_debug_level
from torch.optim import Optimizer

from ...errors import MismatchError, MissingGradientError, NonFiniteGradientError
from ...job.world import name_ranks
from ...optimizer_steps import StepWatcher, unwatch_steps, watch_steps
from ..exchange.agreement import JSON, check_alike
from ..exchange.collectives import GroupAverage, control_device, gather_numbers
from ..exchange.verify_models import compare_parameters, digest_of, ranks_by
from .buckets import Bucket, Slot
from .options import ReducerOptions
from .timeline import Timeline

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

    def __init__(self, slots: Sequence[Slot], average: GroupAverage, *, checked: bool) -> None:
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
        """Start over: all ranks have the same weights now, whatever number of steps each has made."""
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


# ---- missing gradients, and such as are not finite


# A large model has thousands, and the names of the modules tell the rest.
_NAMES_SHOWN = 40


class RoundErrors:
    """Makes and raises the errors of a reducer's rounds."""

    def __init__(self, rank: int, total: int, options: ReducerOptions, timeline: Timeline) -> None:
        self._rank = rank
        self._total = total
        self._options = options
        self._timeline = timeline
        self._late_error: MissingGradientError | None = None

    def missing(self, slots: Sequence[Slot]) -> MissingGradientError:
        """These parameters got no gradient."""
        static = self._options.static_graph
        return self._error(missing_text(self._rank, slots, self._total, self._options.path, static_graph=static))

    def raise_or_keep(self, error: MissingGradientError) -> None:
        """Raises it now, at the end of backward, unless the options say: at the next forward."""
        if not self._options.late_errors:
            raise error
        # Where torch's class raises it, and code written for that class expects it.
        self._late_error = error

    def raise_kept(self) -> None:
        """A forward begins."""
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error

    def _error(self, text: str) -> MissingGradientError:
        self._timeline.error = text
        return MissingGradientError(text)


def missing_text(rank: int, missing: Sequence[Slot], total: int, path: str, *, static_graph: bool = False) -> str:
    """Names the parameters and says what to do.

    The sentences that torch's class has for this are part of it: people search for them.
    """
    lines = [
        f"  {slot.name} {list(slot.parameter.shape)}" + ("" if slot.parameter.requires_grad else " (frozen since)")
        for slot in missing[:_NAMES_SHOWN]
    ]
    if len(missing) > _NAMES_SHOWN:
        lines.append(f"  and {len(missing) - _NAMES_SHOWN} more")
    names = "\n".join(lines)
    # A list of parameters is long; that they are all in `decoder.head` is what helps.
    modules = sorted({slot.name.rpartition(".")[0] or "the model itself" for slot in missing})[:5]
    static = (
        "before starting a new one. This error indicates that your training graph has changed in this iteration, "
        "e.g., one parameter is used in first iteration, but then got unused in the second iteration. this is not "
        "compatible with static_graph set to True.\n"
        if static_graph
        else "before starting a new one.\n"
    )
    # torch's class names indices only, and old advice on the web refers to them.
    indices = " ".join(str(slot.index) for slot in missing)
    level = get_debug_level()
    debug = (
        "The parameters are named above; to have torch say more, set the environment variable TORCH_DISTRIBUTED_DEBUG "
        "to either INFO or DETAIL."
        if level == DebugLevel.OFF
        else f"Parameters which did not receive grad for rank {rank}: {', '.join(s.name for s in missing)}"
    )
    return (
        f"rank {rank}: {len(missing)} of {total} parameters of {path} got no gradient in this backward:\n"
        f"{names}\n"
        f"They belong to {', '.join(modules)}. All parameters of a wrapped model are averaged over the ranks, so each "
        f"needs a gradient. What to do: see that all `forward` function outputs participate in calculating loss, and "
        f"call backward once per forward (earlier ones inside no_sync()); freeze them (requires_grad_(False)) before "
        f"wrapping if they are not trained; or, if it changes from step to step which ones are used, enable that by "
        f"passing the keyword argument `find_unused_parameters=True`.\n"
        f"In the words of torch's class: Expected to have finished reduction in the prior iteration {static}"
        f"Parameter indices which did not receive grad for rank {rank}: {indices}\n{debug}"
    )


class NanGuard:
    """Looks at the gradients of each round before they are averaged."""

    def __init__(self, average: GroupAverage) -> None:
        self._average = average
        self._found: Slot | None = None

    def watch(self, bucket: Bucket) -> None:
        """A bucket is complete, and leaves."""
        if self._found is None and (bucket.flat.is_floating_point() or bucket.flat.is_complex()):
            self._found = _first_not_finite(bucket)

    def watch_sparse(self, slots: Sequence[Slot]) -> None:
        """Looks at this rank's own sparse gradients, which travel when all buckets have left."""
        for slot in slots:
            gradient = slot.parameter.grad
            if self._found is None and gradient is not None:
                # They lie in no bucket, whose sum would show it.
                values = gradient._values() if gradient.is_sparse else gradient
                if not bool(torch.isfinite(values).all()):
                    self._found = slot

    def check(self, slots: Sequence[Slot]) -> None:
        """Ends a round. Every rank calls it, ranks without input too.

        Args:
            slots: all parameters.

        Raises:
            NonFiniteGradientError: on every rank, when one rank found something.
        """
        found, self._found = self._found, None
        everyone = gather_numbers([-1 if found is None else found.index], self._average.group)
        for rank, (index,) in enumerate(everyone):
            # Every rank names the same one: the first in the order of ranks.
            if index >= 0:
                raise NonFiniteGradientError(
                    f"rank {rank} made a gradient that is not finite: parameter {slots[index].name} "
                    f"{list(slots[index].parameter.shape)} (the first one in the order of backward; others may follow "
                    f"from it). Seen from rank {self._average.group.rank()}, before the optimizer's step: the "
                    f"parameters are still good. Look at that rank's batch, lower the learning rate or scale, or clip."
                )


def _first_not_finite(bucket: Bucket) -> Slot | None:
    # Half precision is added up in float32, which its sum cannot leave.
    dtype = torch.float32 if bucket.flat.dtype.itemsize < 4 else None
    # A sum is one pass; isfinite would write a mask as large as the bucket.
    total = bucket.flat.sum(dtype=dtype).abs().item()
    if math.isfinite(total):
        return None
    for slot in bucket.slots:
        if slot.view is not None and not bool(torch.isfinite(slot.view).all()):
            return slot
    return None  # finite elements whose sum is not
