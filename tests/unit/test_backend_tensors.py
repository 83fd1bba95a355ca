"""What a tensor looks like to an exchange, and the forms in which calls come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from photinus.backend import options
from photinus.backend.alone import Alone
from photinus.backend.process_group import ProcessGroup
from photinus.backend.tensors import DTYPES, CopyBack, allocate, dense, is_dense, reals
from photinus.errors import AbortedError


def test_dense_tensors_are_taken_as_they_lie_and_others_copied_in_logical_order() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert dense(matrix).data_ptr() == matrix.data_ptr()
    assert dense(matrix.t()).flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert dense(torch.zeros(0)).numel() == 0
    number = torch.tensor([1 + 2j, 3 - 4j])
    assert dense(number).tolist() == [[1, 2], [3, -4]]
    assert dense(number).data_ptr() == number.data_ptr()
    assert dense(number.conj()).tolist() == [[1, -2], [3, 4]]
    assert dense(number.conj()[:1].imag).tolist() == [-2]
    assert not is_dense(number.conj()[:1].imag)  # one element, contiguous, but negated lazily
    with pytest.raises(ValueError, match="CPU tensors, got one on meta"):
        dense(torch.zeros(1, device="meta"))


def test_outputs_that_are_not_dense_get_their_values_when_the_operation_is_done() -> None:
    whole = torch.zeros(6, requires_grad=True)
    part = whole[::2]
    copies = CopyBack()
    stand_in = copies.output(part, load=True)
    assert stand_in.tolist() == [0, 0, 0]
    stand_in.fill_(7)
    assert copies
    copies()
    assert whole.tolist() == [7, 0, 7, 0, 7, 0]
    assert not copies
    copies = CopyBack()
    dense_one = torch.zeros(3)
    assert copies.output(dense_one, load=True).data_ptr() == dense_one.data_ptr()
    assert not copies


def test_outputs_that_lie_one_behind_the_other_are_one_output() -> None:
    flat = torch.zeros(12)
    copies = CopyBack()
    assert copies.parts(flat.chunk(3)).data_ptr() == flat.data_ptr()
    assert not copies
    for apart in (list(reversed(flat.chunk(3))), [torch.zeros(4) for _ in range(3)], flat.view(4, 3).unbind(1)):
        copies = CopyBack()
        copies.parts(apart).copy_(torch.arange(12.0))
        copies()
        assert torch.stack(list(apart)).tolist() == torch.arange(12.0).view(3, 4).tolist()
    with pytest.raises(ValueError, match="one size and dtype"):
        CopyBack().parts([torch.zeros(2), torch.zeros(3)])


def test_reductions_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        reals(torch.zeros(1, dtype=torch.complex64), hash(dist.ReduceOp.MAX))
    alone = Alone()
    with pytest.raises(ValueError, match="average of booleans"):
        alone.submit(0, 0, 0, 1, DTYPES[torch.bool], 1)
    alone.close()
    with pytest.raises(AbortedError):
        alone.submit(0, 0, 0, 1, DTYPES[torch.float32])


def test_arena_memory_is_writable_aligned_and_outlives_nothing() -> None:
    tensor = allocate((3, 5), torch.float64)
    assert tensor.shape == (3, 5)
    assert tensor.data_ptr() % 64 == 0
    assert tensor.fill_(2.0).sum() == 30
    assert allocate(7, torch.bool).numel() == 7
    assert allocate((0, 3), torch.float32).shape == (0, 3)


def test_all_call_forms_become_options() -> None:
    given = dist.AllreduceOptions()
    assert options.all_reduce(given) is given
    assert options.all_reduce(dist.ReduceOp.MAX, timedelta(seconds=3)).reduceOp == dist.ReduceOp.MAX
    assert options.all_reduce(None, timedelta(seconds=3)).timeout == timedelta(seconds=3)
    assert options.all_reduce().timeout == options.UNSET
    assert options.broadcast(2).rootRank == 2
    assert options.reduce(1, dist.ReduceOp.MIN).rootRank == 1
    assert options.barrier(timedelta(seconds=4)).timeout == timedelta(seconds=4)
    coalesced = dist.AllreduceCoalescedOptions()
    coalesced.reduceOp, coalesced.asyncOp = dist.ReduceOp.PRODUCT, False
    each = options.each_all_reduce(coalesced)
    assert (each.reduceOp, each.asyncOp) == (dist.ReduceOp.PRODUCT, False)
    with pytest.raises(ValueError, match="one tensor per rank, got 2"):
        options.one_tensor([torch.zeros(1)] * 2, "all_reduce")


def test_every_method_that_cpp_calls_is_overridden() -> None:
    """Without an override torch runs its own method with the GIL held, and deadlocks against gloo's threads."""
    called = """getBackendName getRank getSize setGroupName getGroupName setGroupDesc getGroupDesc abort allreduce
        allreduce_coalesced broadcast allgather all_gather_single_coalesced allgather_into_tensor_coalesced
        reduce_scatter reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced all_to_all_single alltoall_base
        barrier send recv"""
    for name in called.split():
        assert getattr(ProcessGroup, name) is not getattr(dist.ProcessGroup, name, None), name
        assert type(getattr(ProcessGroup, name)).__name__ == "function", name
