"""Digests of what a loop trains, at some of its steps: for `photinus verify`, and to find ranks that differ.

A digest is the sum of the bit patterns of all elements, as whole numbers of 64 bits. So the digests of parts that lie
on several ranks add up to that of the whole, whatever the number of ranks. One flipped bit always changes it.

Steps are multiples of N, a power of two that takes at most 0.5 % of the time, or as the user says. So two runs that
chose another N have steps in common. What every rank holds is compared between the ranks in the same exchange.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...errors import ModelMismatchError
from ...job.world import name_ranks
from ...parallel import is_replicated, strategy_of, unwrap_compiled
from ...parallel.exchange.collectives import gather_numbers, resolve_group
from ...parallel.exchange.verify_models import compare_parameters, ranks_by
from ...parallel.zero.split_states import is_split, own_part
from ..checkpoint.states import unwrap
from ..session.session import Session

_COST = 0.005
_MOST_STEPS = 1 << 16
_MASK = (1 << 64) - 1
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def element_digest(tensor: Any) -> torch.Tensor:
    """The sum of the bit patterns of a tensor's elements that this rank holds: int64, no dimension, on its device."""
    values = own_part(tensor.detach()).resolve_conj().resolve_neg()
    values = torch.view_as_real(values) if values.is_complex() else values
    values = values.to_dense() if values.layout != torch.strided else values
    return values.view(_WORDS[values.dtype.itemsize]).sum(dtype=torch.int64)


def steps_apart(cost_s: float, step_s: float, share: float) -> int:
    """Return the power of two of steps from one such cost to the next that takes at most this share of the time."""
    every = 1
    while every < _MOST_STEPS and cost_s > share * every * step_s:
        every *= 2
    return every


class DigestRecord:
    """The digests of a loop's models and optimizers.

    Args:
        every: steps from one to the next; None: as many as cost 0.5 %; 0: none.

    Attributes:
        names: of the parameters.
    """

    def __init__(
        self,
        session: Session,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        every: int | None,
    ) -> None:
        self._session, self._optimizers = session, optimizers
        self._is_chosen, self._every = every is None, 1 if every is None else every
        found: dict[int, tuple[str, Any, bool]] = {}
        for place, model in enumerate(models):
            prefix = f"model {place + 1}: " if place else ""
            compares = is_replicated(unwrap_compiled(model), session.world_size)
            for name, parameter in unwrap(model).named_parameters():
                found.setdefault(id(parameter), (prefix + name, parameter, compares))
        self.names = [name for name, _, _ in found.values()]
        self._parameters = [parameter for _, parameter, _ in found.values()]
        self._compares = [compares for _, _, compares in found.values()]
        self._last = (0, time.perf_counter())  # step, and moment

    def begin(self, step: int) -> None:
        """Steps begin after this one."""
        self._last = step, time.perf_counter()

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Return whether to `take` digests after this step, perhaps the run's last; equal on all ranks."""
        return self._every > 0 and (step % self._every == 0 or (is_last and step > self._last[0]))

    def take(self, step: int) -> list[int]:
        """Return the digests after a step: of all parameters, then of their states. All ranks call it together.

        Raises:
            ModelMismatchError: ranks hold other values; on all ranks, names ranks and parameter.
        """
        began = time.perf_counter()
        own = self._digests()
        now = time.perf_counter()
        step_s = (began - self._last[1]) / max(1, step - self._last[0])
        self._last = step, now
        rows = [[steps_apart(now - began, step_s, _COST), *map(_signed, own)]]
        if self._session.world_size > 1:
            rows = gather_numbers(rows[0], resolve_group(None))
        if self._is_chosen:
            self._every = max(row[0] for row in rows)
        shared = [each for each in self._optimizers if strategy_of(each).splits(each)]
        # Groups may be added while the run goes on.
        elsewhere = {id(p) for each in shared for group in each.param_groups for p in group["params"]}
        is_whole = [not is_split(each) for each in self._parameters]
        is_whole += [not is_split(each) and id(each) not in elsewhere for each in self._parameters]
        joined = []
        for place, column in enumerate(list(zip(*rows, strict=True))[1:]):
            if is_whole[place] and self._compares[place % len(self.names)] and len(set(column)) > 1:
                self._refuse(step, place, column)
            joined.append((column[0] if is_whole[place] else sum(column)) & _MASK)
        return joined

    def _refuse(self, step: int, place: int, column: Sequence[int]) -> None:
        count = len(self.names)
        if place < count:  # it raises, with the words that all checks of weights have
            pairs = zip(self.names, self._parameters, self._compares, strict=True)
            compared = [(name, parameter.detach()) for name, parameter, compares in pairs if compares]
            compare_parameters(compared, resolve_group(None), f"after step {step} ")
        what = "the optimizer's state of " * (place >= count) + f"parameter {self.names[place % count]}"
        sides = sorted(ranks_by(column).values(), key=len)
        hosts = ", ".join(sorted({self._session.hosts[rank] for rank in sides[0]}))
        is_known = len(sides[0]) < len(sides[-1])
        who = f"{name_ranks(sides[0])} (on {hosts})" if is_known else " and ".join(map(name_ranks, sides))
        raise ModelMismatchError(
            f"after step {step}, {who} {'has' if is_known and len(sides[0]) == 1 else 'have'} other values in {what}"
            f"{' than the other ranks' if is_known else ''}. All made the same steps from the same values: memory or a "
            f"processor went wrong, or something was written on some ranks only"
        )

    def _digests(self) -> list[int]:
        """Those of what this rank holds: of all parameters, then of their states."""
        count = len(self.names)
        own, sums = [0] * (2 * count), [element_digest(each) for each in self._parameters]
        places = [(place, 1) for place in range(count)]
        for place, parameter in enumerate(self._parameters):
            for optimizer in self._optimizers:
                for name, value in (optimizer.state.get(parameter) or {}).items():
                    if is_split(parameter) and not (is_split(value) or self._session.is_main):
                        continue  # a number of steps, which every rank has
                    factor = zlib.crc32(str(name).encode()) | 1
                    if isinstance(value, torch.Tensor):
                        sums.append(element_digest(value))
                        places.append((count + place, factor))
                    else:
                        own[count + place] += factor * zlib.crc32(_text(value))
        # One wait for a GPU, not one for each.
        numbers = torch.stack([each.to(self._session.device) for each in sums]).tolist() if sums else []
        for (place, factor), number in zip(places, numbers, strict=True):
            own[place] += factor * number
        return own


def _text(value: object) -> bytes:
    return repr(value).encode() if isinstance(value, (bool, int, float, str)) else b""


def _signed(number: int) -> int:
    """The number of 64 bits, as int64 has it."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number
