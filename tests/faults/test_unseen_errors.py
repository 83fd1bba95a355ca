"""Errors of asynchronous calls for which nobody waits: the next call, the group's end or the process's end has them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.programs import run_programs
from tests.ranks import run_ranks, values

CALLS = [
    ("message", 3),
    ("coalesced", 3),
    ("collective", 3),
    ("collective", 100_000),
]  # small works are kept for a while


def _fail(kind: str, elems: int, group: Any = None) -> Any:
    """Starts a call that must fail, as the ranks' tensors differ in size."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    tensor = torch.zeros(elems + rank)
    if kind == "message":
        return dist.isend(tensor, 1, group=group) if rank == 0 else dist.irecv(tensor, 0, group=group)
    if kind == "coalesced":
        with dist._coalescing_manager(group=group, async_ops=True) as together:
            for _ in range(2):
                dist.all_reduce(tensor, group=group)
        return together
    return dist.all_reduce(tensor, async_op=True, group=group)


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_errors_that_nobody_waits_for_are_raised_once_by_the_next_call_or_the_groups_end(hosts: str | None) -> None:
    for found in values(run_ranks(f"{__name__}:_later", world_size=2, backend="photinus", hosts=hosts)):
        for case, errors in found.items():
            assert len(errors) in ((1, 2) if "coalesced" in case else (1,)), (case, errors)  # of two calls that fail
            assert len(set(errors)) == len(errors), (case, errors)
            for error in errors:
                assert error.startswith("MismatchError: "), (case, error)
                assert "test_unseen_errors.py:" in error, (case, error)


def _later(rank: int, world_size: int) -> dict[str, list[str]]:
    import torch
    import torch.distributed as dist

    found: dict[str, list[str]] = {}

    def attempt(case: str, call: Any) -> None:
        try:
            call()
        except RuntimeError as error:
            found[case].append(f"{type(error).__name__}: {error}")

    def reduce_one(group: Any, asynchronous: bool) -> None:
        dist.all_reduce(torch.zeros(1), group=group, async_op=asynchronous)

    for kind, elems in CALLS:
        for then in ("call", "asynchronous call", "end"):
            case = f"{kind} of {elems}, {then}"
            found[case] = []
            group = dist.new_group([0, 1])
            _fail(kind, elems, group)
            for _ in range(0 if then == "end" else 5):  # it may take a moment until it has failed
                dist.barrier()
                attempt(case, lambda group=group, then=then: reduce_one(group, then != "call"))
            attempt(case, lambda group=group: dist.destroy_process_group(group))
    return found


def test_an_error_that_was_seen_is_not_raised_again_and_one_that_may_be_asked_for_not_before() -> None:
    run_ranks(f"{__name__}:_seen", world_size=2, backend="photinus")


def _seen(rank: int, world_size: int) -> None:
    import time

    import torch
    import torch.distributed as dist

    for kind, elems in CALLS:
        work = _fail(kind, elems)
        dist.barrier()
        dist.all_reduce(torch.zeros(1))  # the work is held: its error is not lost
        with pytest.raises(RuntimeError, match=r"different collectives|must name the same"):
            work.wait()
        del work
        dist.all_reduce(torch.zeros(1))
    for ask in ("exception", "is_success", "get_future"):
        work = _fail("collective", 3)
        while not work.is_completed():
            time.sleep(0.001)
        answer = getattr(work, ask)()
        if ask == "get_future":
            with pytest.raises(RuntimeError, match="different collectives"):
                answer.wait()
        del work, answer
        dist.all_reduce(torch.zeros(1))


ENDS = ["", "communicator.close()", "del communicator"]


@pytest.mark.parametrize("end", ENDS)
def test_a_process_that_ends_with_an_error_nobody_has_seen_prints_it_and_exits_with_1(end: str) -> None:
    program = f"""
communicator = engine.Communicator(rank, world_size, address, timeout_s=30)
communicator.all_reduce(np.ones(3 + rank, np.float32), asynchronous=True)
{end}
"""
    for ended in run_programs(program, world_size=2, expect={0: 1, 1: 1}):
        said = f"[rank {ended.rank}, group world] nobody has waited for a call that failed: the ranks of group world"
        assert said in ended.err
        assert ("Traceback" in ended.err) == ("close" in end)


def test_such_an_error_does_not_take_the_place_of_what_ends_a_with_block() -> None:
    program = """
with engine.Communicator(rank, world_size, address, timeout_s=30) as communicator:
    communicator.all_reduce(np.ones(3 + rank, np.float32), asynchronous=True)
    time.sleep(0.5)
    sys.exit(7)
"""
    for ended in run_programs(program, world_size=2, expect={0: 7, 1: 7}):
        assert f"photinus: [rank {ended.rank}, group world] nobody has waited for a call that failed: " in ended.err


def test_a_script_that_destroys_no_group_ends_so_too() -> None:
    program = """
import torch, torch.distributed as dist
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
store = dist.FileStore(f"/tmp/photinus-test-{os.getppid()}-unseen", 2)
dist.init_process_group("photinus", store=store, rank=rank, world_size=2)
dist.all_reduce(torch.ones(3 + rank), async_op=True)
"""
    for ended in run_programs(program, world_size=2, expect={0: 1, 1: 1}):
        assert f"photinus: [rank {ended.rank}, group world] nobody has waited for a call that failed: " in ended.err
