"""What a tensor looks like to an exchange, and the forms in which calls come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from photinus import engine
from photinus.backend import arguments
from photinus.backend.arguments import DTYPES, Memory, allocate, is_dense, reals, transfer_type
from photinus.backend.device_map import ByDevice
from photinus.backend.engine_reductions import ThroughEngine, _one_behind_the_other
from photinus.engine import Call
from photinus.errors import AbortedError, MismatchError


def test_dense_tensors_are_taken_as_they_lie_and_others_copied_in_logical_order() -> None:
    dense = Memory().input
    matrix = torch.arange(6.0).view(2, 3)
    assert dense(matrix).data_ptr() == matrix.data_ptr()
    assert dense(matrix.t()).flatten().tolist() == [0, 3, 1, 4, 2, 5]
    assert Memory().input(torch.zeros(0)).numel() == 0
    number = torch.tensor([1 + 2j, 3 - 4j])
    assert dense(number).tolist() == [[1, 2], [3, -4]]
    assert dense(number).data_ptr() == number.data_ptr()
    assert dense(number.conj()).tolist() == [[1, -2], [3, 4]]
    assert dense(number.conj()[:1].imag).tolist() == [-2]
    assert not is_dense(number.conj()[:1].imag)  # one element, contiguous, but negated lazily
    with pytest.raises(ValueError, match="CPU and CUDA tensors, got one on meta"):
        Memory().input(torch.zeros(1, device="meta"))


def test_outputs_that_are_not_dense_get_their_values_when_the_operation_is_done() -> None:
    whole = torch.zeros(6, requires_grad=True)
    part = whole[::2]
    copies = Memory()
    stand_in = copies.output(part, load=True)
    assert stand_in.tolist() == [0, 0, 0]
    stand_in.fill_(7)
    assert copies
    copies()
    assert whole.tolist() == [7, 0, 7, 0, 7, 0]
    assert not copies
    copies = Memory()
    dense_one = torch.zeros(3)
    assert copies.output(dense_one, load=True).data_ptr() == dense_one.data_ptr()
    assert not copies


def test_inputs_that_lie_one_behind_the_other_are_taken_as_one() -> None:
    flat = torch.arange(12.0)
    assert _one_behind_the_other(flat.chunk(3), Memory()).data_ptr() == flat.data_ptr()
    for apart in (list(reversed(flat.chunk(3))), [torch.ones(4) for _ in range(3)], flat.view(4, 3).unbind(1)):
        joined = _one_behind_the_other(apart, Memory())
        assert joined.tolist() == torch.cat(list(apart)).tolist()
        assert joined.data_ptr() != apart[0].data_ptr()


def test_elements_of_any_type_can_be_moved_and_are_told_apart() -> None:
    assert transfer_type(torch.float32) == (DTYPES[torch.float32], "")
    assert transfer_type(torch.uint16) == (DTYPES[torch.int16], "uint16")
    assert transfer_type(torch.float8_e5m2) == (DTYPES[torch.uint8], "float8_e5m2")
    assert transfer_type(torch.complex64) == (DTYPES[torch.float32], "complex64")
    with pytest.raises(TypeError, match="qint8"):
        transfer_type(torch.qint8)
    with pytest.raises(TypeError, match=r"dense tensors.*sparse_coo"):
        Memory().input(torch.zeros(2).to_sparse())


def test_reductions_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="complex"):
        reals(torch.zeros(1, dtype=torch.complex64), hash(dist.ReduceOp.MAX))


def test_a_rank_alone_does_and_refuses_what_several_do() -> None:
    all_reduce, reductions = engine.OPERATIONS["all_reduce"], engine.REDUCTIONS
    refused = {"avg": torch.bool, "band": torch.float32, "bxor": torch.bfloat16, "premul_sum": torch.int32}
    with engine.Communicator(0, 1, engine.new_address()) as alone:
        for reduction, dtype in refused.items():
            with pytest.raises(ValueError, match="this reduction means nothing on this element type"):
                alone.submit(Call(all_reduce, 8, 8, 1, DTYPES[dtype], reductions[reduction]))
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for operation in ("all_reduce", "reduce", "reduce_scatter"):
                values, result = torch.tensor([2.0, -4.0], dtype=dtype), torch.zeros(2, dtype=dtype)
                given, wanted, kind = values.data_ptr(), result.data_ptr(), reductions["premul_sum"]
                operation_code = engine.OPERATIONS[operation]
                alone.run(Call(operation_code, given, wanted, 2, DTYPES[dtype], kind, factor=0.25))
                assert result.tolist() == [0.5, -1.0]
                assert values.tolist() == [2.0, -4.0]
        one, two = torch.tensor([1.0, 2.0]), torch.zeros(2)
        for operation in ("all_gather", "reduce_scatter", "all_reduce"):
            work = alone.submit(Call(engine.OPERATIONS[operation], one.data_ptr(), two.data_ptr(), 2))
            assert work.is_completed()  # it waits for nobody
            assert two.tolist() == [1.0, 2.0]
            two.zero_()
        part = (one.data_ptr(), 2)
        exchanged = alone.submit(Call(engine.OPERATIONS["all_to_all"], sends=[part], recvs=[(two.data_ptr(), 1)]))
        with pytest.raises(MismatchError, match=r"rank 0 sends 2 elements to rank 0.*expects 1"):
            exchanged.wait()
        with pytest.raises(ValueError, match="exchange messages with itself"):
            alone.message(engine.OPERATIONS["send"], 8, 1, DTYPES[torch.float32], 0)
    with pytest.raises(AbortedError):
        alone.submit(Call(all_reduce, 8, 8, 1, DTYPES[torch.float32]))


def test_the_factor_of_a_premultiplied_sum_is_found_in_its_reduce_op() -> None:
    assert arguments.factor(dist._make_nccl_premul_sum(2.5)) == 2.5
    assert arguments.factor(dist._make_nccl_premul_sum(torch.ones(1) * 3)) == 3.0


def test_arena_memory_is_writable_aligned_and_outlives_nothing() -> None:
    tensor = allocate((3, 5), torch.float64)
    assert tensor.shape == (3, 5)
    assert tensor.data_ptr() % 64 == 0
    assert tensor.fill_(2.0).sum() == 30
    assert allocate(7, torch.bool).numel() == 7
    assert allocate((0, 3), torch.float32).shape == (0, 3)


def test_all_call_forms_become_options() -> None:
    given = dist.AllreduceOptions()
    as_options, three = arguments.as_options, timedelta(seconds=3)
    assert as_options(dist.AllreduceOptions, given, reduceOp=given) is given
    made = as_options(dist.AllreduceOptions, dist.ReduceOp.MAX, three, reduceOp=dist.ReduceOp.MAX)
    assert (made.reduceOp, made.timeout) == (dist.ReduceOp.MAX, three)
    made = as_options(dist.AllreduceOptions, None)
    assert (made.reduceOp, made.timeout) == (dist.ReduceOp.SUM, arguments.UNSET)
    assert as_options(dist.BroadcastOptions, 2, rootRank=2).rootRank == 2
    assert as_options(dist.BarrierOptions, three).timeout == three
    coalesced = dist.AllreduceCoalescedOptions()
    coalesced.reduceOp, coalesced.asyncOp = dist.ReduceOp.PRODUCT, False
    each = arguments.each_all_reduce(coalesced)
    assert (each.reduceOp, each.asyncOp) == (dist.ReduceOp.PRODUCT, False)
    with pytest.raises(ValueError, match="one tensor per rank, got 2"):
        arguments.one_tensor([torch.zeros(1)] * 2, "all_reduce")


@pytest.mark.parametrize("group", [ThroughEngine, ByDevice])
def test_every_method_that_cpp_calls_is_overridden(group: type) -> None:
    """Without an override torch runs its own method with the GIL held, and deadlocks against gloo's threads."""
    called = """getBackendName getRank getSize setGroupName getGroupName setGroupDesc getGroupDesc abort allreduce
        allreduce_coalesced broadcast allgather all_gather_single_coalesced allgather_into_tensor_coalesced
        reduce_scatter reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced all_to_all_single alltoall_base
        barrier send recv"""
    for name in called.split():
        assert getattr(group, name) is not getattr(dist.ProcessGroup, name, None), name
        assert type(getattr(group, name)).__name__ == "function", name
