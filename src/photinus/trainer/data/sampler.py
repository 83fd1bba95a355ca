"""The samples of a batch, and a rank's share of them: pure functions of (seed, epoch, batch, rank).

The batch size is that of the whole job. The order of an epoch is drawn from (seed, epoch) alone and cut into global
batches; rank r then takes the r-th of W contiguous parts of each, whose sizes differ by at most one. So a job on 1, 2
or 8 ranks sees the same samples in the same steps, a run can go on at any batch of any epoch without looking at those
before, also at another world size, and nobody has to remember `set_epoch`.

    order of epoch e     | 7 2 9 4 | 0 5 1 8 | 3 6        batch_size=4, samples=10
    rank 0 of 2          | 7 2     | 0 5     | 3          the short batch: dropped, or split
    rank 1 of 2          |     9 4 |     1 8 |   6
    rank 0 of 3          | 7 2     | 0 5     |            uneven parts: each mean is weighted by its size. The short
    rank 1 of 3          |     9   |     1   |            batch has too few samples for 3 ranks, and must be dropped
    rank 2 of 3          |       4 |       8 |

The order is `torch.randperm` on the CPU with a generator seeded by SHA-256 of (seed, epoch). torch does not promise
the same permutation in every version, but has kept it for years; a test pins known orders, so that a change would be
noticed before a release, and checkpoints record torch's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .rng import derive_seed


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of one global batch.

    Attributes:
        indices: of the samples that this rank takes.
        weight: by which this rank's mean loss has to be multiplied so that the mean over ranks is the mean over all
            samples of the global batch: len(indices) * world_size / global_samples. 1.0 for even batches.
        global_samples: number of samples of the global batch, over all ranks.
    """

    indices: list[int]
    weight: float
    global_samples: int


class GlobalBatches:
    """The samples of global batch k of epoch e, and this rank's share of them, for training.

    Args:
        batch_size: samples per global batch, over all ranks; at least `world_size`, at most `samples`. Each batch is
            split as evenly as possible: parts differ by at most one sample, hence the weights.
        shuffle: a new order each epoch; False takes the dataset's own.
        seed: of the orders; 0 <= seed < 2**63.
        drop_last: leave out the last, short batch of each epoch (when shuffled, other samples each time).

    Raises:
        ValueError: the numbers do not fit each other; the message says which would.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = True,
    ) -> None:
        self.samples, self.batch_size, self.rank, self.world_size = samples, batch_size, rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        # Said apart, for the sizes below would blame the batch size.
        if self.samples == 0:
            raise ValueError("the dataset is empty (0 samples): is its path or split right?")
        # A rank without a sample has no loss, and its backward would not take part in the exchange.
        if self.batch_size < self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size} is fewer samples than world_size={self.world_size} ranks, and each rank "
                f"needs one in every batch. batch_size counts the samples of one step over all ranks: use at least "
                f"{self.world_size}, or at most {self.batch_size} ranks."
            )
        # With drop_last the epoch would have no batch, and a loop would never end it.
        if self.batch_size > self.samples:
            raise ValueError(
                f"batch_size={self.batch_size} is more than the {self.samples} samples of the dataset: not one batch "
                f"would be full; use at most {self.samples}."
            )
        self._full, self._rest = divmod(self.samples, self.batch_size)
        # The same for the short batch at the end of an epoch.
        if not self.drop_last and 0 < self._rest < self.world_size:
            raise ValueError(
                f"the last batch of each epoch would have {self._rest} samples ({self.samples} samples, "
                f"batch_size={self.batch_size}), too few for world_size={self.world_size} ranks: use drop_last=True, "
                f"or a batch_size that leaves 0 or at least {self.world_size} samples over."
            )
        # Drawn once an epoch and kept: to draw it for each batch would take longer than many steps.
        self._known: tuple[int, torch.Tensor] | None = None  # the order of the epoch asked for last: 8 bytes a sample

    def __len__(self) -> int:
        """Global batches per epoch, the same number on every rank."""
        return self._full + (0 if self.drop_last or not self._rest else 1)

    @property
    def parts(self) -> int:
        """Batches of this rank per epoch."""
        return len(self)

    def batch(self, epoch: int, index: int) -> LocalBatch:
        """This rank's part of global batch `index` (0 <= index < len) of `epoch` (0, 1, ...)."""
        return self.part(epoch, index, self.rank, self.world_size)

    def part(self, epoch: int, index: int, place: int, places: int) -> LocalBatch:
        """One of `places` parts of a global batch."""
        # Contiguous parts, in the order of ranks: together they are the batch that one process would have.
        begin = index * self.batch_size
        size = min(self.batch_size, self.samples - begin)
        first, end = part_of(size, place, places)
        if self.shuffle:
            indices: list[int] = self._order(epoch)[begin + first : begin + end].tolist()
        else:
            indices = list(range(begin + first, begin + end))
        return LocalBatch(indices, len(indices) * places / size, size)

    def _order(self, epoch: int) -> torch.Tensor:
        if self._known is None or self._known[0] != epoch:
            # Not torch's global one, which is the model's (dropout); nor a GPU's, which draws another order.
            generator = torch.Generator(device="cpu").manual_seed(derive_seed(self.seed, "order", epoch))
            order = torch.randperm(self.samples, generator=generator, dtype=torch.int64, device="cpu")
            self._known = (epoch, order)
        return self._known[1]


class ShardBatches(GlobalBatches):
    """The batches of a rank's logical shards: of each step those of its first shard, then those of its next one.

    Args:
        batches: the global ones.
        own: this rank's shards, of `shards` into which each global batch is cut.
        accumulate: global batches of a step; the last step of an epoch may have fewer.

    Raises:
        ValueError: a batch has fewer samples than shards.
    """

    def __init__(self, batches: GlobalBatches, own: range, shards: int, accumulate: int) -> None:
        vars(self).update(vars(batches))  # checked, and with the order that it has drawn
        self._own, self._shards, self._accumulate = own, shards, accumulate
        has_rest = self._rest and not self.drop_last
        for what, size in (("a batch", self.batch_size), ("an epoch's last batch", self._rest))[: 1 + bool(has_rest)]:
            if size < shards:
                raise ValueError(
                    f"{what} has {size} samples (of {self.samples}, batch_size={self.batch_size}), and each of "
                    f"logical_shards={shards} needs one: use a larger batch_size, fewer shards, or drop_last=True"
                )

    @property
    def parts(self) -> int:
        """Batches of this rank per epoch, over all its shards."""
        return len(self) * len(self._own)

    def batch(self, epoch: int, index: int) -> LocalBatch:
        """The rank's batch `index` of an epoch."""
        step, place = divmod(index, len(self._own) * self._accumulate)
        first = step * self._accumulate
        of_step = min(self._accumulate, len(self) - first)
        shard, micro = divmod(place, of_step)
        return self.part(epoch, first + micro, self._own[shard], self._shards)


class ShardedOnce:
    """For validation: every sample exactly once over all ranks, without padding, in the dataset's order.

    Rank r takes the r-th of W contiguous parts whose sizes differ by at most one; with fewer samples than ranks some
    have none. Ranks may so differ by one in their number of batches: exchange nothing between ranks per batch, only
    once at the end.

    Args:
        samples: size of the dataset; 0 is allowed.
        batch_size: samples of one step over all ranks; a rank's batch has batch_size / world_size, rounded up.
    """

    shuffle = drop_last = False

    def __init__(self, samples: int, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        self.samples, self.rank, self.world_size = samples, rank, world_size
        self.indices: Sequence[int] = range(*part_of(samples, rank, world_size))
        # Rounded up, so that no rank needs more batches than one process would.
        self._share = -(-batch_size // world_size)

    def __len__(self) -> int:
        """Batches of this rank."""
        return -(-len(self.indices) // self._share)

    @property
    def parts(self) -> int:
        """Batches of this rank."""
        return len(self)

    def batch(self, epoch: int, index: int) -> LocalBatch:
        """This rank's batch `index` (0 <= index < len), the same in every epoch."""
        share = self._share
        indices = list(self.indices[index * share : (index + 1) * share])
        # Samples of this step on all ranks, reckoned without asking them: ranks may have different numbers of batches.
        base, extra = divmod(self.samples, self.world_size)
        longer, shorter = (min(max(size - index * share, 0), share) for size in (base + 1, base))
        step_samples = extra * longer + (self.world_size - extra) * shorter
        return LocalBatch(indices, len(indices) * self.world_size / step_samples, step_samples)


def part_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """[begin, end) of rank's contiguous part of `size` things; the first `size % world_size` ranks have one more."""
    # The longer parts come first, so that where a part begins follows from its rank alone.
    base, extra = divmod(size, world_size)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)
