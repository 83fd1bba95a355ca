"""The exchange of gradients of logical shards: the same bits on any number of ranks.

A step's batch is cut into V shards, and a rank computes the gradients of its shards one after the other. Each sum is
made as the tree of `shard_tree` says. Before the last shard's backward, the earlier ones' gradients are put aside, as
roots of subtrees. In that backward, each bucket takes what it adds up with its own, and leaves:

- where every rank has one shard, or one whole subtree, and the engine's tree over the ranks is the tree above these: by
  an all-reduce. Whether it is depends on the placement of ranks on hosts, and is found out by adding numbers whose sum
  depends on the order.
- else each rank gets a piece of all roots (all_to_all), finishes the tree, and gives its piece to all (all_gather).

Gradients in 16 bits are added in float32, as in the engine, and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from ...errors import PhotinusError
from ..exchange.collectives import GroupAverage, Pending, backend_name
from ..exchange.shard_tree import TreeSum, own_shards, ranks_are_leaves, roots_of, tree_sum
from ..exchange.tensors import dense_strides
from .autograd import keep_until_read
from .buckets import Bucket, Slot

Gradients = list["torch.Tensor | None"]  # by index of the parameter's slot


class ShardSums:
    """The gradients of one model's shards in one step, as a `BucketExchange`.

    Args:
        shards: number of logical shards, at least one for each rank of the group.

    Attributes:
        divisor: of the sum over all shards; V for means over shards of one size.
        before_exchange: called with each bucket of the last shard's backward, before it leaves.
    """

    averages = True

    def __init__(self, average: GroupAverage, shards: int) -> None:
        self._average, self._shards = average, shards
        self._rank, self._ranks = average.group.rank(), average.world_size
        self.own = own_shards(self._rank, self._ranks, shards)
        self.divisor: float = shards
        self.before_exchange: Callable[[Bucket], None] | None = None
        self._aside: TreeSum[Gradients] = TreeSum(shards, _add)
        self._to_come: set[int] | None = None  # buckets of the last shard's backward that have left; None: not yet
        self._fits: dict[torch.dtype, bool] = {}

    def begin_step(self) -> None:
        """Forget the step before."""
        self._aside.roots.clear()
        self._to_come, self.divisor = None, self._shards

    def put_aside(self, shard: int, slots: Sequence[Slot]) -> None:
        """Take the gradients of a shard that is not this rank's last one; the parameters have none afterwards."""
        gradients: Gradients = []
        for slot in slots:
            gradient = slot.parameter.grad
            if gradient is not None:
                _check(slot, gradient)
                is_in_bucket = slot.view is not None and gradient.data_ptr() == slot.view.data_ptr()
                gradient = gradient.detach().to(_wide(gradient.dtype), copy=is_in_bucket)
            gradients.append(gradient)
            slot.parameter.grad = None
        with torch.no_grad():
            self._aside.push(shard, shard + 1, gradients)

    @property
    def is_exchanged(self) -> bool:
        """Return whether the last shard's gradients have left in this step."""
        return bool(self._to_come)

    def await_last(self) -> None:
        """The backward of this rank's last shard comes next, whose gradients are exchanged."""
        self._to_come = set()

    @torch.no_grad()
    def start(self, bucket: Bucket) -> Pending:
        """See `BucketExchange`.

        Raises:
            PhotinusError: the backward is not that of a step's last shard.
        """
        if self._to_come is None:
            raise PhotinusError(
                "with logical_shards, gradients are exchanged in the body of a photinus.Loop or by a photinus.Trainer "
                "only, which cut each batch into shards: this backward ran outside of one"
            )
        if bucket.index in self._to_come:
            raise PhotinusError(
                "a second backward in the body of a step's last shard: with logical_shards, add up the losses of a "
                "model, and call loop.backward once in each body. For the generator's loss of a GAN, freeze the "
                "discriminator: discriminator.requires_grad_(False), and True after the backward"
            )
        self._to_come.add(bucket.index)
        if self.before_exchange is not None:
            self.before_exchange(bucket)
        if self._shards == self._ranks == self.divisor and self._is_tree_of_backend(bucket.flat.dtype):
            return self._average.start(bucket.flat)
        for slot in bucket.slots:
            if slot.parameter.grad is not None:
                _check(slot, slot.parameter.grad)
        roots = self._roots(bucket)
        if bucket.is_last:  # they would stay until the next step
            self._aside.roots.clear()
        divisor = torch.tensor(self.divisor, dtype=roots[0].dtype, device=roots[0].device)
        if self._ranks == 1:
            bucket.flat.copy_(roots[0].div_(divisor))
            return _Done()
        if ranks_are_leaves(self._shards, self._ranks) and self._is_tree_of_backend(roots[0].dtype):
            work = cast(Pending, dist.all_reduce(roots[0], group=self._average.group, async_op=True))
            return _Finish(work, roots, lambda: bucket.flat.copy_(roots[0].div_(divisor)))
        return self._finish_in_pieces(bucket, roots, divisor)

    def _roots(self, bucket: Bucket) -> list[torch.Tensor]:
        """The roots of this rank's subtrees, each as flat as the bucket. One may be the bucket's own memory."""
        flat = bucket.flat.to(_wide(bucket.flat.dtype))

        def add(left: torch.Tensor | Gradients, right: torch.Tensor | Gradients) -> torch.Tensor:
            assert isinstance(right, torch.Tensor)
            assert not isinstance(left, torch.Tensor)
            torch._foreach_add_(places_in(bucket, right), _of_bucket(bucket, left))
            return right

        sums: TreeSum[torch.Tensor | Gradients] = TreeSum(self._shards, add)
        sums.roots += self._aside.roots
        sums.push(self.own[-1], self.own[-1] + 1, flat)
        roots = []
        for _, _, value in sums.roots:
            if not isinstance(value, torch.Tensor):
                root = torch.zeros_like(flat)
                torch._foreach_copy_(places_in(bucket, root), _of_bucket(bucket, value))
                value = root
            roots.append(value)
        return roots

    def _finish_in_pieces(self, bucket: Bucket, roots: list[torch.Tensor], divisor: torch.Tensor) -> Pending:
        group, ranks, own = self._average.group, self._ranks, len(roots)
        elems = bucket.flat.numel()
        piece = -(-elems // ranks)
        subtrees = [each for of_rank in roots_of(self._shards, ranks) for each in of_rank]
        counts = [len(of_rank) for of_rank in roots_of(self._shards, ranks)]
        pieces = roots[0].new_zeros(ranks, own, piece)
        for place, root in enumerate(roots):
            for rank in range(ranks):
                part = root[rank * piece : (rank + 1) * piece]
                pieces[rank, place, : part.numel()] = part
        came = roots[0].new_empty(len(subtrees), piece)
        work: Any = dist.all_to_all_single(
            came.view(-1), pieces.view(-1), [count * piece for count in counts], [own * piece] * ranks, group=group,
            async_op=True,
        )  # fmt: skip

        def finish() -> None:
            total = TreeSum(self._shards, torch.Tensor.add_)
            for (first, end), row in zip(subtrees, came, strict=True):
                total.push(first, end, row)
            whole = came.new_empty(ranks * piece)
            parts = list(whole.view(ranks, piece).unbind())
            dist.all_gather(parts, total.complete().div_(divisor), group=group)
            bucket.flat.copy_(whole[:elems])

        return _Finish(cast(Pending, work), [came, pieces, divisor], finish)

    def _is_tree_of_backend(self, dtype: torch.dtype) -> bool:
        """Return whether the backend's tree over the ranks is that over their roots. All ranks ask together."""
        if dtype not in self._fits:
            self._fits[dtype] = False
            if backend_name(self._average.group, self._average.device) == "photinus":
                generator = torch.Generator(device="cpu").manual_seed(0)
                values = torch.randn(self._ranks, 4096, generator=generator, device="cpu").to(_wide(dtype)).exp()
                values = values.to(dtype).to(self._average.device)
                own = values[self._rank].clone()
                dist.all_reduce(own, group=self._average.group)
                expected = tree_sum(values.to(_wide(dtype)).unbind(), torch.Tensor.add).to(dtype)
                self._fits[dtype] = torch.equal(own, expected)
        return self._fits[dtype]


class _Done:
    """A work that is over."""

    def wait(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        return True


class _Finish:
    """A work that is followed by another part, which reads these tensors."""

    def __init__(self, work: Pending, reads: Sequence[torch.Tensor], finish: Callable[[], object]) -> None:
        self._work, self._reads, self._finish = work, reads, finish

    @torch.no_grad()
    def wait(self) -> object:
        self._work.wait()
        for tensor in self._reads:
            keep_until_read(tensor)  # made in a hook, on the stream of the gradients
        return self._finish()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of this type are added."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _check(slot: Slot, gradient: torch.Tensor) -> None:
    if gradient.is_sparse or gradient.requires_grad:
        kind = "is sparse" if gradient.is_sparse else "carries a graph (create_graph=True)"
        raise PhotinusError(f"the gradient of {slot.name} {kind}, which logical_shards cannot add up")


def _add(left: Gradients, right: Gradients) -> Gradients:
    """Add two lists of gradients, in place. Where one has none it counts as zeros, which turn -0.0 into 0.0."""
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [_alone(b if a is None else a) if a is None or b is None else a for a, b in zip(left, right, strict=True)]


def _alone(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.add_(0.0)


def places_in(bucket: Bucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """The places of a bucket's gradients, in other memory of its layout."""
    return [
        flat.as_strided(slot.parameter.shape, dense_strides(slot.parameter), flat.storage_offset() + offset)
        for slot, offset in zip(bucket.slots, bucket.plan.offsets, strict=True)
    ]


def _of_bucket(bucket: Bucket, gradients: Gradients) -> list[torch.Tensor]:
    """A bucket's part of the gradients; zeros where there is none."""
    found = [(slot, gradients[slot.index]) for slot in bucket.slots]
    return [slot.parameter.new_zeros(slot.parameter.shape) if each is None else each for slot, each in found]
