"""The samples of a batch, and a rank's share of them: pure functions of (seed, epoch, batch, rank).

The batch size is that of the whole job. The order of an epoch is drawn from (seed, epoch) alone and cut into global
batches; rank r of W then takes each W-th sample of a batch, from the r-th on. So a job on 1, 2 or 8 ranks sees the same
samples in the same steps, a run can go on at any batch of any epoch without looking at those before, also at another
world size, and nobody has to remember `set_epoch`.

    order of epoch e     | 7 2 9 4 | 0 5 1 8 | 3 6        batch_size=4, samples=10
    rank 0 of 2          | 7   9   | 0   1   | 3          the short batch: split, or dropped
    rank 1 of 2          |   2   4 |   5   8 |   6
    rank 0 of 3          | 7     4 | 0     8 | 3          uneven parts: each mean is weighted by its size. Where the
    rank 1 of 3          |   2     |   5     |   6        short batch has too few samples for all ranks, the others
    rank 2 of 3          |     9   |     1   | (3 6)      take all of it, with a weight of 0

Order and parts are those of `torch.utils.data.DistributedSampler` with the same seed: `torch.randperm` on the CPU, by a
generator seeded with seed + epoch. So a script that is ported has the same batches as before. torch does not promise
the same permutation in every version, but has kept it for years; a test pins known orders, so that a change would be
noticed before a release, and checkpoints record torch's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ORDER = 2  # the version of the order of samples; in version 1, parts were contiguous, and seeds came from SHA-256


@dataclass(frozen=True)
class LocalBatch:
    """One rank's part of one global batch.

    Attributes:
        indices: of the samples that this rank takes.
        weight: by which this rank's mean loss has to be multiplied so that the mean over ranks is the mean over all
            samples of the global batch: samples * world_size / global_samples. 1.0 for even batches.
        global_samples: number of samples of the global batch, over all ranks.
        samples: those that count: all indices, or none where other ranks have them.
    """

    indices: list[int]
    weight: float
    global_samples: int
    samples: int


class GlobalBatches:
    """The samples of global batch k of epoch e, and this rank's share of them, for training.

    Args:
        batch_size: samples per global batch, over all ranks; at least `world_size`. Each batch is split as evenly as
            possible: parts differ by at most one sample, hence the weights.
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
        drop_last: bool = False,
    ) -> None:
        self.samples, self.batch_size, self.rank, self.world_size = samples, batch_size, rank, world_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        # Said apart, for the sizes below would blame the batch size.
        if self.samples == 0:
            raise ValueError("the dataset is empty (0 samples): is its path or split right?")
        if self.batch_size < self.world_size:
            raise ValueError(
                f"batch_size={self.batch_size} is fewer samples than world_size={self.world_size} ranks, and each rank "
                f"needs one in every batch. batch_size counts the samples of one step over all ranks: give "
                f"batch_size={self.world_size} or more, or start at most {self.batch_size} of them."
            )
        # With drop_last the epoch would have no batch, and a loop would never end it.
        if self.drop_last and self.batch_size > self.samples:
            raise ValueError(
                f"batch_size={self.batch_size} is more than the {self.samples} samples of the dataset: not one batch "
                f"would be full; use at most {self.samples}, or drop_last=False."
            )
        self._full, self._rest = divmod(self.samples, self.batch_size)
        # Drawn once an epoch and kept: to draw it for each batch would take longer than many steps.
        self._known: tuple[int, torch.Tensor] | None = None  # the order of the epoch asked for last: 8 bytes a sample

    def __len__(self) -> int:
        """Global batches per epoch, the same number on every rank."""
        return self._full + (0 if self.drop_last or not self._rest else 1)

    @property
    def parts(self) -> int:
        """Batches of this rank per epoch."""
        return len(self)

    @property
    def fewest_samples(self) -> int:
        """Samples of the smallest part that is not empty, on any rank."""
        return max(1, (self.samples - (len(self) - 1) * self.batch_size) // self._cut_into)

    @property
    def _cut_into(self) -> int:
        """Parts of a batch."""
        return self.world_size

    def batch(self, epoch: int, index: int) -> LocalBatch:
        """This rank's part of global batch `index` (0 <= index < len) of `epoch` (0, 1, ...)."""
        return self.part(epoch, index, self.rank, self.world_size)

    def part(self, epoch: int, index: int, place: int, places: int) -> LocalBatch:
        """One of `places` parts of a global batch."""
        begin = index * self.batch_size
        size = min(self.batch_size, self.samples - begin)
        is_filled = place >= size  # a part without a sample would have no loss, and not take part in the exchange
        where = slice(begin + (0 if is_filled else place), begin + size, 1 if is_filled else places)
        indices = self._order(epoch)[where].tolist() if self.shuffle else [*range(self.samples)[where]]
        samples = 0 if is_filled else len(indices)
        return LocalBatch(indices, samples * places / size, size, samples)

    def _order(self, epoch: int) -> torch.Tensor:
        if self._known is None or self._known[0] != epoch:
            # Not torch's global one, which is the model's (dropout); nor a GPU's, which draws another order.
            generator = torch.Generator(device="cpu").manual_seed(self.seed + epoch)
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
        if self.batch_size < shards:
            raise ValueError(
                f"a batch has {self.batch_size} samples, and each of logical_shards={shards} needs one: use a larger "
                f"batch_size, or fewer shards"
            )

    @property
    def _cut_into(self) -> int:
        return self._shards

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
        return LocalBatch(indices, len(indices) * self.world_size / step_samples, step_samples, len(indices))


def part_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """[begin, end) of rank's contiguous part of `size` things; the first `size % world_size` ranks have one more."""
    # The longer parts come first, so that where a part begins follows from its rank alone.
    base, extra = divmod(size, world_size)
    begin = rank * base + min(rank, extra)
    return begin, begin + base + (rank < extra)
