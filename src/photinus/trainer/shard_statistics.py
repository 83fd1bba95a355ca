"""The buffers of models in a step of logical shards: each shard begins with the step's, and batch norms take all.

A batch norm normalises a shard by the shard's own statistics. What it would do to its running statistics is kept, and
done for all shards in their order, on every rank, before the optimizer's step.
Other buffers must not change in a forward: nobody knows how the changes of several shards make one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from ..errors import PhotinusError
from ..parallel import DistributedDataParallel
from ..parallel.exchange.collectives import gather_numbers, resolve_group
from ..parallel.exchange.shard_tree import own_shards
from .session.session import Session

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
_CHECKED_BODIES = 64  # in which values are compared: writes by `.data` are not counted


class ShardStatistics:
    """The statistics that batch norms have taken of this rank's shards since the last step, and the exchange of all.

    Args:
        wrapped: the models.
        shards: of the job.

    Attributes:
        norms: the batch norms.
    """

    def __init__(self, session: Session, wrapped: Sequence[DistributedDataParallel], shards: int) -> None:
        self._session, self._shards = session, shards
        modules = [(name, each) for model in wrapped for name, each in model.module.named_modules()]
        self.norms = [each for _, each in modules if isinstance(each, _NormBase) and each.running_mean is not None]
        own = {(id(each), name) for each in self.norms for name in _RUNNING}
        self._others = [  # modules may replace their buffers, so they are looked up each time
            (f"{name}.{key}" if name else key, each, key)
            for name, each in modules
            for key in each._buffers
            if (id(each), key) not in own
        ]
        self._before: list[tuple[torch.Tensor | None, int, torch.Tensor | None]] = []  # each, its version, its value
        self._bodies_checked = 0
        self._is_exchanged = True  # those of the running step
        self._statistics: list[list[tuple[int, torch.Tensor]]] = []  # by shard: place of the norm, [2, channels]
        self._lent: dict[int, list[torch.Tensor | None]] = {}  # the real buffers of norms whose forward runs
        self._hooks: list[Any] = []

    def begin(self) -> None:
        """Look at forwards from now on."""
        for place, norm in enumerate(self.norms):
            self._hooks.append(norm.register_forward_pre_hook(lambda norm, _, place=place: self._lend(place, norm)))
            self._hooks.append(
                norm.register_forward_hook(lambda norm, *_, place=place: self._take(place, norm), always_call=True)
            )

    def end(self) -> None:
        """Look at no more forwards. May be called again."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin_step(self) -> None:
        """The first shard of a step comes next."""
        self._statistics, self._is_exchanged = [], False

    def begin_shard(self, place: int) -> None:
        """The first batch comes of this rank's shard `place`, perhaps again, if its body was left."""
        self._statistics[place:] = [[]]
        self._before = []
        for _, module, key in self._others:
            buffer, copies = module._buffers[key], self._bodies_checked < _CHECKED_BODIES
            version = -1 if buffer is None else buffer._version
            self._before.append((buffer, version, buffer.clone() if copies and buffer is not None else None))

    def _lend(self, place: int, norm: Any) -> None:
        """Let a forward in training write into buffers of its own."""
        if norm.training and self._statistics:
            self._lent[place] = [norm._buffers[name] for name in _RUNNING]
            for name in _RUNNING:
                buffer = norm._buffers[name]
                norm._buffers[name] = None if buffer is None else torch.zeros_like(buffer)

    def _take(self, place: int, norm: Any) -> None:
        buffers = self._lent.pop(place, None)
        if buffers is not None:
            self._statistics[-1].append((place, torch.stack([norm._buffers[name] for name in _RUNNING[:2]])))
            norm._buffers.update(zip(_RUNNING, buffers, strict=True))

    def check(self) -> None:
        """A body has ended. Raises PhotinusError if its forward changed a buffer that is no statistic."""
        self._bodies_checked += 1
        for (name, module, key), (buffer, version, value) in zip(self._others, self._before, strict=True):
            now = module._buffers.get(key)
            is_written = now is not None and (now._version != version or not (value is None or torch.equal(now, value)))
            if now is not buffer or is_written:
                raise PhotinusError(
                    f"the buffer {name} changed in the body of a loop with logical_shards, in which "
                    f"each shard has to begin with the same. Only of the running statistics of batch norms it is known "
                    f"how those of several shards make one: keep other values out of the model's buffers"
                )

    @torch.no_grad()
    def exchange(self) -> None:
        """Bring the statistics of all shards into the running ones, once in each step, when its forwards are done.

        All ranks call it together, in the step's last body: before an optimizer's step, before an evaluation, and at
        the end.

        Raises:
            PhotinusError: batch norms did not run alike in all shards.
        """
        if self._is_exchanged or not self.norms:
            return
        self._is_exchanged = True
        for shard in self._of_all(self._statistics):
            for place, statistics in shard:
                norm: Any = self.norms[place]
                is_counted = isinstance(norm, _BatchNorm)  # instance norms count nothing, and have a momentum of 0
                if is_counted and norm.num_batches_tracked is not None:
                    norm.num_batches_tracked.add_(1)
                # Without a momentum, the first statistic of a buffer is taken whole.
                mean_of_all = 1.0 / float(norm.num_batches_tracked) if is_counted and norm.momentum is None else 0.0
                factor = mean_of_all if norm.momentum is None else norm.momentum
                if norm.momentum is None:
                    statistics = statistics * factor
                for running, new in zip((norm.running_mean, norm.running_var), statistics, strict=True):
                    running.mul_(1.0 - factor).add_(new)

    def _of_all(self, taken: list[list[tuple[int, torch.Tensor]]]) -> list[list[tuple[int, torch.Tensor]]]:
        ranks, group = self._session.world_size, resolve_group(None)
        places = [place for place, _ in taken[0]]
        is_regular = all([place for place, _ in shard] == places for shard in taken)
        rows = [own := [is_regular, len(places), hash(tuple(places)) % 2**31]]
        if ranks > 1:
            rows = gather_numbers(own, group)
        if any(row != [1, len(places), rows[0][2]] for row in rows):
            raise PhotinusError(
                "the batch norms of the model ran in another order, or another number of times, in some shards of a "
                "step: with logical_shards their running statistics need the same in each"
            )
        if not places or ranks == 1:
            return taken
        most = max(len(own_shards(rank, ranks, self._shards)) for rank in range(ranks))
        flat = torch.stack([torch.cat([each.flatten() for _, each in shard]) for shard in taken])
        padded = flat.new_zeros(most, flat.shape[1])
        padded[: len(flat)] = flat
        came = flat.new_empty(ranks * most, flat.shape[1])
        dist.all_gather(list(came.view(ranks, most, -1).unbind()), padded, group=group)
        sizes = [each.numel() for _, each in taken[0]]
        found = []
        for rank in range(ranks):
            for row in came[rank * most :][: len(own_shards(rank, ranks, self._shards))]:
                parts = row.split(sizes)
                found.append([(place, part.view(2, -1)) for place, part in zip(places, parts, strict=True)])
        return found
