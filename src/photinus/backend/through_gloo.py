"""Every collective over gloo, right for every layout of tensors: the group whose ranks sit on several hosts.

gloo computes on the first `numel` elements of the storage whatever the strides are, has no 16-bit integers, no average
of integers, and adds booleans to 2; those are put right here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import options
from .outside_dynamo import outside_dynamo
from .process_group import ProcessGroup
from .tensors import CopyBack, dense, reals
from .work import GlooWork

__all__ = ["ThroughGloo"]

_AVG = hash(dist.ReduceOp.AVG)
_OF_BOOLS = {hash(dist.ReduceOp.SUM): dist.ReduceOp.MAX, hash(dist.ReduceOp.PRODUCT): dist.ReduceOp.MIN}


@outside_dynamo
class ThroughGloo(ProcessGroup):
    """See the module and ProcessGroup."""

    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> dist.Work:
        """Reduces each element over the ranks, in place. Sparse tensors: SUM of float or int ones."""
        given = options.all_reduce(opts if op is None else op, timeout)
        tensor = options.one_tensor(tensors, "all_reduce")
        if tensor.layout is not torch.strided:
            return self._gloo.allreduce([tensor], given)
        copies = CopyBack()
        values = copies.output(reals(tensor, hash(given.reduceOp)), load=True)
        return self._reduce(values, values, given, copies, [tensor], self._gloo_all_reduce)

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int | None = None
    ) -> dist.Work:
        """Copies the root's tensor to all ranks' (opts.rootRank: rank in the group)."""
        given = options.broadcast(opts if root is None else root, timeout)
        tensor = options.one_tensor(tensors, "broadcast")
        copies = CopyBack()
        return self._done([tensor], copies, self._gloo.broadcast([_move(copies.output(tensor, load=True))], given))

    def allgather(
        self, output_tensors: Any, input_tensors: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Every rank's tensor in every rank's list, by rank."""
        given = options.all_gather(opts, timeout)
        outputs = options.tensor_list(output_tensors, "all_gather")
        tensor = options.one_tensor(input_tensors, "all_gather")
        copies = CopyBack()
        stand_ins = [_move(copies.output(t, load=False)) for t in outputs]
        return self._done(outputs, copies, self._gloo.allgather([stand_ins], [_move(dense(tensor))], given))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Every rank's tensor in one tensor, by rank."""
        given = options.all_gather(opts)
        copies = CopyBack()
        stand_in, source = copies.output(output, load=False).view(-1), dense(input).view(-1)  # gloo knows one form
        return self._done([output], copies, self._gloo._allgather_base(_move(stand_in), _move(source), given))

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """Reduces the ranks' lists element by element and leaves rank r with part r."""
        output = options.one_tensor(output_tensors, "reduce_scatter")
        inputs = options.tensor_list(input_tensors, "reduce_scatter")
        flat = torch.cat([dense(tensor).reshape(-1) for tensor in inputs])
        flat = torch.view_as_complex(flat.view(-1, 2)) if output.is_complex() else flat
        return self.reduce_scatter_single(output, flat, options.reduce_scatter(opts if op is None else op, timeout))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        """Reduces the ranks' tensors and leaves rank r with part r of the result."""
        given = options.reduce_scatter(opts)
        copies = CopyBack()
        stand_in = copies.output(reals(output, hash(given.reduceOp)), load=False)
        return self._reduce(dense(input), stand_in, given, copies, [output], self._gloo_reduce_scatter)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Sends part r of the input to rank r; the output's parts come from the ranks. No sizes: equal parts."""
        given = options.all_to_all(opts, timeout)
        copies = CopyBack()
        stand_in = _move(copies.output(output, load=False), keep_rows=True)
        source = _move(dense(input), keep_rows=True)
        work = self._gloo.alltoall_base(stand_in, source, output_split_sizes, input_split_sizes, given)
        return self._done([output], copies, work)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Done when every rank has called it."""
        return self._gloo.barrier(options.barrier(opts, timeout))

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Sends a tensor to a rank of the group."""
        return self._gloo.send([_move(dense(options.one_tensor(tensors, "send")))], dstRank, tag)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receives a tensor from a rank of the group."""
        tensor = options.one_tensor(tensors, "recv")
        copies = CopyBack()
        work = self._gloo.recv([_move(copies.output(tensor, load=False))], srcRank, tag)
        return self._done([tensor], copies, work)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receives a tensor from whichever rank sends first; the work's source_rank() tells which."""
        tensor = options.one_tensor(tensors, "recv")
        copies = CopyBack()
        work = self._gloo.recv_anysource([_move(copies.output(tensor, load=False))], tag)
        return self._done([tensor], copies, work)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Reduces each element over the ranks; only the root's tensor changes."""
        given = options.reduce(opts if root is None else root, op, timeout)
        tensor = options.one_tensor(tensors, "reduce")
        is_root = given.rootRank == self._rank
        # gloo leaves partial sums in the other ranks' tensors: they give away a copy.
        copies = CopyBack()
        tensor = reals(tensor, hash(given.reduceOp))
        values = copies.output(tensor, load=True) if is_root else dense(tensor).clone()
        return self._reduce(values, values, given, copies, [tensor], self._gloo_reduce)

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Every rank's tensor in the root's list, by rank."""
        given = options.gather(opts if root is None else root, timeout)
        tensor = options.one_tensor(input_tensors, "gather")
        copies = CopyBack()
        if given.rootRank != self._rank:
            return self._gloo.gather([], [_move(dense(tensor))], given)
        outputs = options.tensor_list(output_tensors, "gather")
        stand_ins = [_move(copies.output(t, load=False)) for t in outputs]
        return self._done(outputs, copies, self._gloo.gather([stand_ins], [_move(dense(tensor))], given))

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Part r of the root's list in rank r's tensor."""
        given = options.scatter(opts if root is None else root, timeout)
        output = options.one_tensor(output_tensors, "scatter")
        copies = CopyBack()
        stand_in = _move(copies.output(output, load=False))
        if given.rootRank != self._rank:
            return self._done([output], copies, self._gloo.scatter([stand_in], [], given))
        parts = [_move(dense(t)) for t in options.tensor_list(input_tensors, "scatter")]
        return self._done([output], copies, self._gloo.scatter([stand_in], [parts], given))

    def alltoall(
        self, output_tensors: Sequence[Tensor], input_tensors: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Sends tensor r of the inputs to rank r; output r comes from rank r. Sizes may differ."""
        # gloo's own takes equal sizes only; its all_to_all_single takes any.
        copies = CopyBack()
        target = _move(copies.join(output_tensors))
        source = _move(torch.cat([dense(tensor).view(-1) for tensor in input_tensors]))
        outgoing, incoming = ([tensor.nbytes for tensor in tensors] for tensors in (input_tensors, output_tensors))
        item_bytes = source.element_size()
        work = self._gloo.alltoall_base(
            target,
            source,
            [nbytes // item_bytes for nbytes in incoming],
            [nbytes // item_bytes for nbytes in outgoing],
            options.all_to_all(opts),
        )
        return self._done(list(output_tensors), copies, work)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier in which rank 0 names the ranks that did not come (gloo's)."""
        if timeout is None:
            timeout = timedelta(seconds=self._limit.timeout_s)
        self._gloo.monitored_barrier(timeout, wait_all_ranks)

    # Names of torch before 2.13.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _gloo_all_reduce(self, source: Tensor, _: Tensor, given: Any) -> dist.Work:
        return self._gloo.allreduce([source], given)

    def _gloo_reduce(self, source: Tensor, _: Tensor, given: Any) -> dist.Work:
        return self._gloo.reduce([source], given)

    def _gloo_reduce_scatter(self, source: Tensor, target: Tensor, given: Any) -> dist.Work:
        return self._gloo._reduce_scatter_base(target.view(-1), source.view(-1), given)

    # --- how gloo's shortcomings are put right ---------------------------------------------------------------------

    def _done(self, outputs: list[Tensor], copies: CopyBack, work: dist.Work) -> dist.Work:
        return GlooWork(work, outputs, copies) if copies else work

    def _reduce(
        self,
        source: Tensor,
        target: Tensor,
        given: Any,
        copies: CopyBack,
        outputs: list[Tensor],
        run: Callable[[Tensor, Tensor, Any], dist.Work],
    ) -> dist.Work:
        """Runs a reduction of `source` into `target` (dense, real, maybe the same) so that gloo gets it right.

        int16 goes as int32 and is cut down after. Booleans: sum is or, product is and.
        Average of integers: the sum, divided and truncated.
        """
        dtype, reduction = target.dtype, hash(given.reduceOp)
        if dtype is torch.bool and reduction == _AVG:
            raise ValueError("an average of booleans means nothing; convert them to a number type first")
        if dtype is torch.bool and reduction in _OF_BOOLS:
            return self._done(outputs, copies, run(source, target, _with_op(given, _OF_BOOLS[reduction])))
        average = reduction == _AVG and not dtype.is_floating_point
        if not average and dtype is not torch.int16:
            return self._done(outputs, copies, run(source, target, given))
        if average:
            given = _with_op(given, dist.ReduceOp.SUM)
        in_place = source is target
        if dtype is torch.int16:
            wide = source.to(torch.int32)
            result = wide if in_place else torch.empty(target.shape, dtype=torch.int32)
        else:
            wide, result = source, target

        def finish() -> None:
            with torch.inference_mode():
                total = result.to(dtype)  # wraps like a sum in dtype
                target.copy_(total.div_(self._size, rounding_mode="trunc") if average else total)
            copies()

        return GlooWork(run(wide, result, given), outputs, finish)


_GLOO_MOVES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


def _move(tensor: Tensor, *, keep_rows: bool = False) -> Tensor:
    """A dense tensor as gloo can move it: dtypes that it does not know (int16, uint16, float8, ...) as bytes.

    keep_rows: the first dimension counts (all_to_all's split sizes), so a 1-dimensional tensor gets a second one.
    """
    if tensor.dtype in _GLOO_MOVES:
        return tensor
    if keep_rows and tensor.dim() == 1:
        tensor = tensor.unsqueeze(1)
    return tensor.reshape(-1).view(torch.uint8) if not keep_rows else tensor.view(torch.uint8)


def _with_op(given: Any, op: Any) -> Any:
    """A copy of reduction options with another ReduceOp; the caller may use the given ones again."""
    changed = type(given)()
    for name in ("timeout", "asyncOp", "rootRank", "rootTensor"):
        if hasattr(given, name):
            setattr(changed, name, getattr(given, name))
    changed.reduceOp = op
    return changed
