"""Errors of a backward: raised at its end, or, where code expects it so, at the next forward.

A guard finds out which rank made the first gradient that is not a finite number. When a bucket is complete and hot in
the cache, its elements are added up: a NaN or an infinity shows in the sum. At the end of each round the ranks exchange
what they found. So the guard costs one read of the gradients, and an exchange of one number per rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ...errors import MissingGradientError, NonFiniteGradientError
from ..exchange.collectives import Average, gather_numbers
from .gradient_memory import Bucket, Slot
from .options import ReducerOptions
from .timeline import Timeline

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

    def __init__(self, average: Average) -> None:
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
