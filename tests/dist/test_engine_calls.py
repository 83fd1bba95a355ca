"""What the engine says about calls: of whom it waits for, where calls stand, and what is wrong with them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from photinus import engine, errors
from tests.programs import run_programs
from tests.ranks import run_ranks, values

HERE = "tests.dist.test_engine_calls"
ALL_REDUCE = engine.OPERATIONS["all_reduce"]
# A place as messages show it: this file with its folder, and a line.
PLACE = r"dist/test_engine_calls\.py:(\d+)"


def run(function: Any, world_size: int, **options: Any) -> list[Any]:
    """Runs a function of this file, which gets an address; the ranks' values."""
    name = f"{HERE}:{function.__name__}"
    return values(run_ranks(name, world_size=world_size, arguments={"address": engine.new_address()}, **options))


def joined(rank: int, world_size: int, address: str, **options: Any) -> engine.Communicator:
    return engine.Communicator(rank, world_size, address, timeout_s=20, **options)


def further(communicator: engine.Communicator, name: str, **options: Any) -> engine.Communicator:
    """Another communicator of the same ranks."""
    text = np.zeros(200, np.uint8)
    if communicator.rank == 0:
        address = np.frombuffer(engine.new_address().encode(), np.uint8)
        text[: address.size] = address
    communicator.broadcast(text)
    address = text.tobytes().rstrip(b"\0").decode()
    return joined(communicator.rank, communicator.world_size, address, name=name, **options)


def error_of(call: Any) -> str:
    """The class and text of what a call raises; empty when it raises nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at what it is
        return f"{type(error).__name__}: {error}"
    return ""


# --- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_ranks_that_wait_for_a_late_one_say_so_in_one_line_with_the_place_of_the_call() -> None:
    program = (
        "communicator = engine.Communicator(rank, world_size, address, timeout_s=30)\n"
        "array = np.ones(10, np.float32)\n"
        "communicator.all_reduce(array)\n"
        "if rank == 2: time.sleep(2.2)\n"
        "communicator.all_reduce(array)\n"
        "assert array[0] == 9\n"
    )
    ended = run_programs(program, world_size=3, environ={"PHOTINUS_WAITING_S": "0.5"})
    assert ended[2].err == ""
    for one in ended[:2]:
        (line,) = one.err.splitlines()
        assert f"rank {one.rank} of 3 has been waiting" in line
        assert "ranks [2] in all_reduce #2 of float32[10]" in line
        assert "called at <string>:6" in line


@pytest.mark.timeout(60)
def test_no_line_is_written_when_all_ranks_come_in_time() -> None:
    program = (
        "communicator = engine.Communicator(rank, world_size, address, timeout_s=30)\n"
        "array = np.ones(10, np.float32)\n"
        "for step in range(20):\n"
        "    communicator.all_reduce(array)\n"
        "    time.sleep(0.1 if step % world_size == rank else 0)\n"
    )
    ended = run_programs(program, world_size=3, environ={"PHOTINUS_WAITING_S": "0.5"})
    assert [one.err for one in ended] == ["", "", ""]


def late_rank(rank: int, world_size: int, address: str) -> list[str]:
    with joined(rank, world_size, address) as communicator:
        array = np.ones(100_000, np.float32)
        communicator.barrier()
        if rank == 1:
            time.sleep(2)
            return [error_of(lambda: communicator.all_reduce(array))]
        at = array.ctypes.data
        work = communicator.submit(engine.Call(ALL_REDUCE, at, at, array.size, timeout_s=0.5))
        found = [error_of(work.wait), error_of(lambda: communicator.all_reduce(array))]
        time.sleep(3)  # does not leave before the other has come
        return found


@pytest.mark.timeout(60)
def test_a_deadline_that_passes_names_the_missing_rank_and_the_late_one_learns_of_it() -> None:
    (timed_out, again), (late,) = run(late_rank, 2)
    assert timed_out.startswith("CollectiveTimeoutError: all_reduce #2")
    assert re.search(PLACE, timed_out)
    assert "rank 1, which is alive but has not come" in timed_out
    assert again == timed_out
    assert late.startswith("PeerLostError: rank 0 (pid")
    assert "gave up: all_reduce #2" in late


def late_writer(rank: int, world_size: int, address: str) -> int:
    options = {"timeout_s": 0.5} if rank == 0 else {"timeout_s": 20}
    communicator = engine.Communicator(rank, world_size, address, **options)
    array = np.frombuffer(engine.allocate(4 << 20), np.float32)
    array[:] = 1
    communicator.barrier()
    if rank == 1:
        time.sleep(1.5)
    error = error_of(lambda: communicator.all_reduce(array))
    array[:] = 7
    if rank == 0:
        assert error.startswith("CollectiveTimeoutError")
        time.sleep(3)
    return int((array != 7).sum())


@pytest.mark.timeout(60)
def test_nobody_writes_into_an_array_any_more_after_its_rank_got_an_error() -> None:
    assert run(late_writer, 2)[0] == 0


def other_chunks(rank: int, world_size: int, address: str) -> str:
    deadline_s = 1.0 if rank == 0 else 10.0
    chunk_bytes = 4096 * (1 + rank)
    return error_of(
        lambda: engine.Communicator(rank, world_size, address, timeout_s=deadline_s, chunk_bytes=chunk_bytes)
    )


@pytest.mark.timeout(60)
def test_a_rank_with_another_chunk_size_is_told_so() -> None:
    _, message = run(other_chunks, 2)
    assert re.match(r"ValueError: rank 1 \(pid \d+ on .*\) came with other slot sizes than rank 0", message), message


def missing_rank(rank: int, world_size: int, address: str) -> str:
    if rank == 2:
        return ""
    deadline_s = 1.0 if rank == 0 else 10.0
    return error_of(lambda: engine.Communicator(rank, world_size, address, timeout_s=deadline_s))


@pytest.mark.timeout(60)
def test_all_ranks_that_came_to_a_meeting_get_a_timeout_error_that_names_the_missing_one() -> None:
    for message in run(missing_rank, 3)[:2]:
        assert "ranks [2] of 3 did not join within 1.0 s" in message
        assert message.startswith("CollectiveTimeoutError: "), message


# --- calls that do not match ------------------------------------------------------------------------------------------


def reduce_all(communicator: engine.Communicator, array: Any, asynchronous: bool) -> None:
    communicator.all_reduce(array, asynchronous=asynchronous).wait()


def reduce_other(communicator: engine.Communicator, array: Any, asynchronous: bool) -> None:
    communicator.all_reduce(array, asynchronous=asynchronous).wait()


def different_sizes(rank: int, world_size: int, address: str) -> list[str]:
    with joined(rank, world_size, address) as communicator:
        found = []
        for place in ("arena", "ordinary"):
            for asynchronous in (False, True):
                memory = engine.allocate(4000) if place == "arena" else bytearray(4000)
                array = np.frombuffer(memory, np.float32)
                array[:] = rank
                if rank == 0:
                    found.append(error_of(partial(reduce_all, communicator, array, asynchronous)))
                else:
                    found.append(error_of(partial(reduce_other, communicator, array[:-1], asynchronous)))
                assert (array == rank).all()
                communicator.all_reduce(array)
                assert (array == sum(range(world_size))).all()
        return found


@pytest.mark.timeout(60)
def test_calls_of_different_sizes_are_refused_everywhere_with_the_places_of_both_sides() -> None:
    ranks = run(different_sizes, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    for message in ranks[0]:
        assert message.startswith("MismatchError: the ranks of group world called different collectives as #")
        first = re.search(rf"rank 0 called all_reduce of float32\[1000\] \(sum\) at {PLACE};", message)
        second = re.search(rf"ranks 1, 2 called all_reduce of float32\[999\] \(sum\) at {PLACE};", message)
        assert first, message
        assert second, message
        assert first[1] != second[1]
        assert "no output was written" in message


def other_mismatches(rank: int, world_size: int, address: str) -> list[str]:
    with joined(rank, world_size, address) as communicator:
        array, whole = np.full(6, rank, np.float32), np.full(6, rank, np.int32)

        def labelled(name: str) -> None:
            with engine.label(name):
                communicator.all_reduce(array, label="complex64")

        pairs: list[tuple[Any, Any]] = [
            (lambda: communicator.all_reduce(array), lambda: communicator.broadcast(array)),
            (lambda: communicator.all_reduce(array), lambda: communicator.barrier()),
            (lambda: communicator.all_reduce(array), lambda: communicator.all_reduce(whole)),
            (lambda: communicator.all_reduce(array), lambda: communicator.all_reduce(array, "max")),
            (lambda: communicator.broadcast(array, 0), lambda: communicator.broadcast(array, 1)),
            (lambda: communicator.reduce(array, 0), lambda: communicator.reduce(array, 1)),
            (
                lambda: communicator.all_reduce(array, label="layers.0.weight"),
                lambda: communicator.all_reduce(array, label="layers.1.weight"),
            ),
            (lambda: communicator.all_reduce(array, label="loss"), lambda: communicator.all_reduce(array)),
            # A backend's own label says what it sends; the user's around it still counts.
            (lambda: labelled("first"), lambda: labelled("second")),
        ]
        found = []
        for one, other in pairs:
            found.append(error_of(one if rank == 0 else other))
            assert (array == rank).all()
            assert (whole == rank).all()
        total = np.ones(3)
        communicator.all_reduce(total, label="total")
        assert total[0] == world_size
        return found


@pytest.mark.timeout(60)
def test_every_kind_of_disagreement_is_refused_and_the_group_stays_usable() -> None:
    first, second = run(other_mismatches, 2)
    assert first == second
    for message in first:
        assert message.startswith("MismatchError: "), message
        assert len(re.findall(PLACE, message)) == 2, message
    assert "labelled 'layers.0.weight' at" in first[6]
    assert "labelled 'layers.1.weight' at" in first[6]
    assert "labelled 'loss'" in first[7]
    assert "labelled 'complex64, first'" in first[8]
    assert "labelled 'complex64, second'" in first[8]


def swapped_lines(rank: int, world_size: int, address: str) -> list[str]:
    with joined(rank, world_size, address) as communicator:
        arrays = [np.full(1000, float(rank), np.float32), np.full(1000, rank + 10.0, np.float32)]

        def reduce_first() -> None:
            communicator.all_reduce(arrays[0])

        def reduce_second() -> None:
            communicator.all_reduce(arrays[1])

        reduce_first()
        reduce_second()
        for array, start in zip(arrays, (0, 10), strict=True):
            array[:] = rank + start
        found = []
        # The second rank swaps them; then it skips one.
        for call in (reduce_second, reduce_first) if rank == 1 else (reduce_first, reduce_second):
            found.append(error_of(call))
        for array, start in zip(arrays, (0, 10), strict=True):
            assert (array == rank + start).all()
        reduce_first()
        assert (arrays[0] == sum(range(world_size))).all()
        found.append(error_of(reduce_first if rank == 1 else reduce_second))
        reduce_second()
        assert (arrays[1] == sum(r + 10 for r in range(world_size))).all()
        return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [2, 3])
def test_two_calls_of_equal_size_that_one_rank_swaps_are_refused_and_no_array_changes(world_size: int) -> None:
    ranks = run(swapped_lines, world_size, environ={"PHOTINUS_STRICT_SITES": "1"})
    assert all(found == ranks[0] for found in ranks)
    for message in ranks[0]:
        assert message.startswith("MismatchError: "), message
        assert "out of step" in message
        assert len(set(re.findall(PLACE, message))) == 2, message


def line_of_its_own(rank: int, world_size: int, address: str) -> float:
    with joined(rank, world_size, address) as communicator:
        array = np.zeros(100, np.float32)
        for step in range(300):
            array[:] = 1
            if rank == 0:
                communicator.all_reduce(array)
            else:
                communicator.all_reduce(array)
            assert array[0] == world_size
            if step % 10 == 0:  # a place where all come together, between
                communicator.all_reduce(array)
        # The others come to a helper by way of different lines.
        for line in (0, 1):
            if (rank + line) % 2:
                first = summed(communicator, array)
            else:
                other = summed(communicator, array)
        assert first == other
        return first


def summed(communicator: engine.Communicator, array: Any) -> float:
    array[:] = 1
    communicator.all_reduce(array)
    return float(array[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_with_a_line_of_its_own_is_never_refused(world_size: int) -> None:
    assert run(line_of_its_own, world_size) == [world_size] * world_size


# --- several communicators --------------------------------------------------------------------------------------------


def several_groups(rank: int, world_size: int, address: str) -> bool:
    with joined(rank, world_size, address) as first:
        groups = [first, further(first, "second", chunk_bytes=4096), further(first, "third")]
        for step in range(60):
            arrays = [np.full(size, rank + step, np.float64) for size in (10, 3000, 100_000)]
            order = np.random.default_rng(step * 10 + rank).permutation(3)
            works = [groups[i].all_reduce(arrays[i], asynchronous=True) for i in order]
            for i in np.random.default_rng(step * 10 + rank + 5).permutation(3):
                works[i].wait()
            want = sum(range(world_size)) + step * world_size
            assert all((array == want).all() for array in arrays)
        for group in groups[1:]:
            group.close()
    return True


@pytest.mark.timeout(90)
def test_asynchronous_calls_of_several_groups_may_come_in_another_order_on_each_rank() -> None:
    assert all(run(several_groups, 3))


# --- array methods ----------------------------------------------------------------------------------------------------


def uneven(rank: int, world_size: int, address: str) -> bool:
    with joined(rank, world_size, address) as communicator:
        ranks = range(world_size)
        for in_arena in (False, True):

            def make(many: int, value: float, in_arena: bool = in_arena) -> Any:
                array = np.frombuffer(engine.allocate(8 * many), np.float64) if in_arena else np.empty(many)
                array[:] = value
                return array

            for unit in (0, 1, 5000):
                outs = [make((r + 1) * unit + rank, -1) for r in ranks]
                communicator.all_to_all(outs, [make((rank + 1) * unit + r, 100 * rank + r) for r in ranks])
                assert all((outs[r] == 100 * r + rank).all() for r in ranks)
                for root in ranks:
                    mine = make(rank * unit, rank)
                    outs = [make(r * unit, -1) for r in ranks]
                    communicator.gather(outs if rank == root else None, mine, root)
                    assert all((outs[r] == (r if rank == root else -1)).all() for r in ranks)
                    given = [make(r * unit, r + 7) for r in ranks] if rank == root else None
                    communicator.scatter(mine, given, root)
                    assert (mine == rank + 7).all()
                outs = [make(r * unit, -1) for r in ranks]
                communicator.all_gather_list(outs, make(rank * unit, rank))
                assert all((outs[r] == r).all() for r in ranks)
        table = np.full((2, 3, 4), rank, np.int16)
        communicator.all_reduce(table)
        assert (table == sum(ranks)).all()
        value = np.float32(rank + 1) * np.ones((), np.float32)
        communicator.all_reduce(np.asarray(value), "premul_sum", factor=0.5)
    return True


@pytest.mark.timeout(90)
@pytest.mark.parametrize("world_size", [1, 3])
def test_exchanges_of_parts_of_different_sizes_bring_each_part_to_its_place(world_size: int) -> None:
    assert all(run(uneven, world_size))


def factors(rank: int, world_size: int, address: str) -> list[float]:
    with joined(rank, world_size, address) as communicator:
        array = np.full(3, 2, np.float32)
        communicator.all_reduce(array, "premul_sum", factor=10.0**rank)
        own = np.full(3, 2, np.float64)
        communicator.reduce(own, 1, "premul_sum", factor=10.0**rank)
        assert own[0] == (222 if rank == 1 else 2)
        return array.tolist()


@pytest.mark.timeout(60)
def test_each_ranks_factor_multiplies_its_own_values_before_they_are_summed() -> None:
    assert run(factors, 3) == [[222.0] * 3] * 3


def in_place(rank: int, world_size: int, address: str) -> bool:
    with joined(rank, world_size, address) as communicator:
        for elems in (10, 1000, 50_000, 400_000):
            mine = slice(rank * elems, (rank + 1) * elems)
            for memory in (engine.allocate(4 * elems * world_size), bytearray(4 * elems * world_size)):
                whole = np.frombuffer(memory, np.float32)
                whole[:] = -1
                whole[mine] = rank
                communicator.all_gather(whole, whole[mine])
                assert (whole == np.repeat(np.arange(world_size), elems)).all()
                whole[:] = rank + 1
                communicator.reduce_scatter(whole[mine], whole)
                assert (whole[mine] == world_size * (world_size + 1) / 2).all()
    return True


@pytest.mark.timeout(60)
def test_gathering_and_scattering_may_take_place_within_one_array() -> None:
    assert all(run(in_place, 3))


def many_threads(rank: int, world_size: int, address: str) -> bool:
    with joined(rank, world_size, address) as communicator:
        wrong: list[float] = []

        def average(number: int) -> None:
            array = np.frombuffer(engine.allocate(2000), np.float32) if number % 2 else np.empty(500, np.float32)
            array[:] = 1
            for _ in range(100):
                communicator.all_reduce(array, "avg")
                wrong.extend(array[array != 1])

        threads = [threading.Thread(target=average, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return not wrong


@pytest.mark.timeout(60)
def test_several_threads_may_call_one_communicator() -> None:
    assert run(many_threads, 2) == [True, True]


def threads_that_begin_later(rank: int, world_size: int, address: str) -> bool:
    with joined(rank, world_size, address) as communicator:
        other = further(communicator, "other")
        first, second = (communicator, other) if rank == 0 else (other, communicator)

        def call_later() -> None:
            time.sleep(0.5)
            second.all_reduce(np.ones(4, np.float32))

        thread = threading.Thread(target=call_later)
        thread.start()
        first.all_reduce(np.ones(4, np.float32))
        thread.join()
    return True


@pytest.mark.timeout(60)
def test_ranks_whose_other_threads_make_their_first_calls_later_are_not_deadlocked() -> None:
    assert run(threads_that_begin_later, 2) == [True, True]


def one_thread_begins_later(rank: int, world_size: int, address: str) -> bool:
    with joined(rank, world_size, address) as communicator:
        other = further(communicator, "other")
        if rank == 1:
            other.all_reduce(np.ones(4, np.float32))
            communicator.all_reduce(np.ones(4, np.float32))
            return True

        def call_later() -> None:
            time.sleep(13)
            other.all_reduce(np.ones(4, np.float32))

        thread = threading.Thread(target=call_later)
        thread.start()
        communicator.all_reduce(np.ones(4, np.float32))
        thread.join()
    return True


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_thread_that_makes_its_first_call_after_13_seconds_is_waited_for_and_spoken_of() -> None:
    arguments = {"address": engine.new_address()}
    results = run_ranks(f"{HERE}:one_thread_begins_later", world_size=2, arguments=arguments)
    assert values(results) == [True, True]
    for result in results:
        assert result.output.count("ranks wait for each other, perhaps for ever: ") == 1, result.output
        assert "Unless a thread that has called nothing yet frees them" in result.output


def stopped_after_its_wait_is_over(rank: int, world_size: int, address: str, folder: str) -> bool:
    """Rank 1 is stopped in a barrier for which rank 0 comes, and which it so cannot leave; rank 0 waits elsewhere."""
    note = Path(folder, "pid")
    with joined(rank, world_size, address) as communicator:
        other = further(communicator, "other")
        if rank == 1:
            note.write_text(str(os.getpid()))
            communicator.barrier()
        else:
            while not (note.exists() and note.read_text()):
                time.sleep(0.01)
            time.sleep(0.5)
            os.kill(int(note.read_text()), signal.SIGSTOP)
            later = subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {note.read_text()}"])
            communicator.barrier()
        other.barrier()
        if rank == 0:
            later.wait()
    return True


@pytest.mark.timeout(60)
def test_a_process_that_is_stopped_is_not_taken_for_one_that_waits(tmp_path: Path) -> None:
    arguments = {"address": engine.new_address(), "folder": str(tmp_path)}
    for result in run_ranks(f"{HERE}:stopped_after_its_wait_is_over", world_size=2, arguments=arguments):
        assert result.value is True
        assert "ranks wait for each other" not in result.output, result.output


def unequal_parts(rank: int, world_size: int, address: str) -> str:
    with joined(rank, world_size, address) as communicator:
        outs = [np.full(4, -1.0) for _ in range(world_size)]
        given = [np.zeros(5 if rank == 1 and r == 0 else 4) for r in range(world_size)]
        found = error_of(lambda: communicator.all_to_all(outs, given))
        assert all((out == -1).all() for out in outs)
        communicator.all_to_all(outs, [np.zeros(4)] * world_size)
        assert all((out == 0).all() for out in outs)
        return found


@pytest.mark.timeout(60)
def test_parts_whose_sizes_differ_between_the_sides_are_refused_before_anything_is_written() -> None:
    for message in run(unequal_parts, 3):
        assert message.startswith("MismatchError: all_to_all #")
        assert "5" in message
        assert "4" in message
        assert re.search(PLACE, message)


# --- messages ---------------------------------------------------------------------------------------------------------


def from_anyone(rank: int, world_size: int, address: str) -> list[int]:
    with joined(rank, world_size, address) as communicator:
        array = np.zeros(50_000, np.float32)
        if rank > 0:
            for number in range(5):
                array[:] = 10 * rank + number
                communicator.send(array, 0, tag=3)
            return []
        came = []
        for _ in range(5 * (world_size - 1)):
            work = communicator.recv(array, tag=3)
            assert (array == array[0]).all()
            assert array[0] // 10 == work.source_rank
            came.append(int(array[0]))
        return came


@pytest.mark.timeout(60)
def test_a_receive_from_any_rank_takes_whoever_sends_and_tells_who_it_was() -> None:
    came = run(from_anyone, 3)[0]
    assert sorted(came) == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]
    for rank in (1, 2):  # in order for each sender
        assert [c for c in came if c // 10 == rank] == [10 * rank + number for number in range(5)]


def unequal_messages(rank: int, world_size: int, address: str) -> list[str]:
    with joined(rank, world_size, address) as communicator:
        array = np.full(4, rank, np.float32)
        if rank == 0:
            found = [error_of(lambda: communicator.send(array, 1)), error_of(lambda: communicator.send(array, 1))]
            communicator.send(array, 1, 2)
            return found
        small, whole = np.ones(3, np.float32), np.ones(4, np.int32)
        found = [error_of(lambda: communicator.recv(small, 0)), error_of(lambda: communicator.recv(whole, 0))]
        assert (small == 1).all()
        assert (whole == 1).all()
        communicator.recv(array, 0, 2)
        assert (array == 0).all()
        return found


@pytest.mark.timeout(60)
def test_messages_that_do_not_fit_are_refused_on_both_sides_with_both_places() -> None:
    sender, receiver = run(unequal_messages, 2)
    assert sender == receiver
    for message, received in zip(sender, ("recv of float32[3]", "recv of int32[4]"), strict=True):
        assert message.startswith("MismatchError: rank 0 (pid ")
        assert "send of float32[4]" in message
        assert received in message
        assert len(set(re.findall(PLACE, message))) == 2, message


def backwards(rank: int, world_size: int, address: str) -> bool:
    with joined(rank, world_size, address) as communicator:
        arrays = [np.full(20_000, 100 * rank + tag, np.float32) for tag in range(8)]
        if rank == 0:
            works = [communicator.send(arrays[tag], 1, tag, asynchronous=True) for tag in range(8)]
        else:
            works = [communicator.recv(arrays[tag], 0, tag, asynchronous=True) for tag in reversed(range(8))]
        total = np.ones(1000)
        communicator.all_reduce(total)
        for work in works:
            work.wait()
        return total[0] == world_size and all((arrays[tag] == tag).all() for tag in range(8))


@pytest.mark.timeout(60)
def test_messages_with_different_tags_pass_each_other_and_collectives() -> None:
    assert run(backwards, 2) == [True, True]


# --- wrong arguments --------------------------------------------------------------------------------------------------


def f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


def frozen() -> Any:
    array = f32(3)
    array.flags.writeable = False
    return array


def test_a_call_is_a_record_that_serves_many_times_with_or_without_a_handle() -> None:
    array, out = np.zeros(2, np.float32), np.zeros(2, np.float32)
    send, recv = array.ctypes.data, out.ctypes.data
    premul_sum = engine.REDUCTIONS["premul_sum"]
    call = engine.Call(ALL_REDUCE, send, recv, 2, reduction=premul_sum, factor=0.5, timeout_s=9.0, label="loss")
    with engine.Communicator(0, 1, engine.new_address()) as communicator:
        for turn in range(3):
            array[:] = [turn, 4]
            work = communicator.submit(call, array)
            work.wait()
            assert "(premul_sum) labelled 'loss'" in work.description
            assert out.tolist() == [turn / 2, 2]
            array[0] = 10
            communicator.run(call)  # waits, though the call says that it is asynchronous
            assert out.tolist() == [5, 2]
        parts = engine.Call(engine.OPERATIONS["all_to_all"], sends=[(send, 2)], recvs=((recv, 2),), asynchronous=False)
        assert communicator.submit(parts).is_completed()
        assert out.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda c: c.all_reduce(f32(4, 4)[:, ::2]), ValueError, "C-contiguous array; make one with numpy.ascontig"),
        (lambda c: c.all_reduce(f32(4, 3).T), ValueError, "C-contiguous"),
        (lambda c: c.all_reduce(frozen()), ValueError, "the array is read-only, but the result goes into it"),
        (lambda c: c.all_gather(frozen(), f32(3)), ValueError, "read-only"),
        (lambda c: c.recv(frozen(), 0), ValueError, "read-only"),
        (lambda c: c.all_reduce([1.0]), TypeError, "needs a numpy array .* not list"),
        (lambda c: c.all_reduce(1.0), TypeError, "not float"),
        (lambda c: c.all_reduce(np.zeros(3, np.complex64)), TypeError, "complex64 is not one of float32, float64"),
        (lambda c: c.all_reduce(np.zeros(3, np.uint32)), TypeError, "uint32 is not one of"),
        (lambda c: c.all_reduce(np.zeros(3, ">f4")), TypeError, ">f4 is not one of"),
        (lambda c: c.all_reduce(np.zeros(3, "f4,f4")), TypeError, "is not one of"),
        (lambda c: c.all_reduce(np.array(["a"])), TypeError, "is not one of"),
        (lambda c: c.all_reduce(f32(3), "mean"), ValueError, "'mean' is unknown; known are sum, avg, min"),
        (lambda c: c.all_reduce(f32(3), "band"), ValueError, r"all_reduce of float32\[3\] \(band\): .*means nothing"),
        (lambda c: c.all_reduce(np.zeros(3, bool), "avg"), ValueError, "means nothing on this element type"),
        (lambda c: c.all_reduce(np.zeros(3, int), "premul_sum"), ValueError, "means nothing on this element type"),
        (lambda c: c.broadcast(f32(3), 1), ValueError, "root 1 is not a rank of this group of 1"),
        (lambda c: c.reduce(f32(3), 7), ValueError, "root 7 is not a rank"),
        (lambda c: c.gather([f32(3)], f32(3), 2), ValueError, "root 2 is not a rank"),
        (lambda c: c.scatter(f32(3), [f32(3)], -1), ValueError, "root -1 is not a rank"),
        (lambda c: c.all_gather(f32(4), f32(3)), ValueError, "out has 4 elements of float32, needs 3 of float32"),
        (lambda c: c.all_gather(np.zeros(3), f32(3)), ValueError, "out has 3 elements of float64, needs 3 of float32"),
        (lambda c: c.reduce_scatter(f32(2), f32(3)), ValueError, "array has 3 elements of float32, needs 2"),
        (lambda c: c.all_to_all([f32(1)] * 2, [f32(1)]), ValueError, "outs has 2 arrays, needs one for each of 1"),
        (lambda c: c.all_to_all([f32(1)], [np.zeros(1)]), ValueError, "arrays of several types, float32, float64"),
        (lambda c: c.send(f32(1), 0), ValueError, "rank 0 can't exchange messages with itself"),
        (lambda c: c.send(f32(1), 5), ValueError, "5 is not a rank of this group of 1"),
        (lambda c: c.recv(f32(1)), ValueError, "there is no other rank to receive from"),
        (lambda c: c.submit(engine.Call(99)), ValueError, "unknown operation"),
        (lambda c: c.run(engine.Call(99)), ValueError, "unknown operation"),
        (lambda c: c.submit(engine.Call(ALL_REDUCE, elems=5)), ValueError, "a buffer is missing"),
        (lambda c: c.submit(engine.Call(ALL_REDUCE, sends=[(0, 0)], recvs=[(0, 0)])), ValueError, "takes no parts"),
        (lambda c: engine.allocate(-1), ValueError, "needs a number of bytes of at least 0"),
        (lambda c: engine.allocate(1 << 62), OSError, f"has no gap of {1 << 62} bytes"),
        (lambda c: engine.allocate((1 << 64) - 1), OSError, f"has no gap of {(1 << 64) - 1} bytes"),
        (lambda c: engine.Communicator(3, 2, "x"), ValueError, "rank 3 of 2: needs 0 <= rank < world_size"),
        (lambda c: engine.Communicator(0, 2, "x"), ValueError, "'x' is no address of a group"),
        (
            lambda c: engine.Communicator(0, 1, engine.new_address(), chunk_bytes=1000),
            ValueError,
            "whole cache lines of 64 bytes",
        ),
    ],
)
def test_a_wrong_argument_is_refused_with_what_was_given_and_what_is_needed(call: Any, kind: Any, says: str) -> None:
    with engine.Communicator(0, 1, engine.new_address()) as communicator:
        with pytest.raises(kind, match=says):
            call(communicator)
        array = f32(3)
        communicator.all_reduce(array)  # goes on


def test_a_negative_root_or_peer_is_a_value_error_that_names_it() -> None:
    calls: list[Callable[[engine.Communicator], Any]] = [
        lambda c: c.broadcast(f32(3), -1),
        lambda c: c.reduce(f32(3), -1),
        lambda c: c.send(f32(3), -1),
        lambda c: c.send(f32(3), -2),
        lambda c: c.recv(f32(3), -2),
    ]
    with engine.Communicator(0, 1, engine.new_address()) as communicator:
        for call in calls:
            with pytest.raises(ValueError, match=r"-[12] is not a rank of this group of 1"):
                call(communicator)


def test_a_closed_communicator_says_so() -> None:
    communicator = engine.Communicator(0, 1, engine.new_address(), name="workers")
    communicator.close()
    communicator.close()
    with pytest.raises(errors.AbortedError, match=r"all_reduce of float32\[3\] \(sum\) in group workers: .* is closed"):
        communicator.all_reduce(f32(3))


# --- what was compared too little ------------------------------------------------------------------------------------


def two_labels(rank: int, world_size: int, address: str) -> str:
    with joined(rank, world_size, address) as communicator:
        array = np.ones(4, np.float32)
        found = error_of(lambda: communicator.all_reduce(array, label=["costarring", "liquid"][rank]))
        communicator.all_reduce(array, label="altarage")
        return found


@pytest.mark.timeout(60)
def test_labels_of_one_hash_of_32_bits_are_told_apart() -> None:
    for message in run(two_labels, 2):
        assert message.startswith("MismatchError")
        assert "labelled 'costarring'" in message
        assert "labelled 'liquid'" in message


def strict_on_one(rank: int, world_size: int, store: str) -> str:
    import torch
    import torch.distributed as dist

    if rank == 1:
        os.environ["PHOTINUS_STRICT_SITES"] = "1"
    made = dist.FileStore(store, world_size)
    found = error_of(lambda: dist.init_process_group("photinus", store=made, rank=rank, world_size=world_size))
    return found or error_of(lambda: dist.all_reduce(torch.ones(300_000)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hosts", [None, "ab"])
def test_strict_sites_on_one_rank_only_is_an_error_on_all(hosts: str | None, tmp_path: Path) -> None:
    arguments = {"store": str(tmp_path / "store")}
    for message in values(run_ranks(f"{HERE}:strict_on_one", world_size=2, arguments=arguments, hosts=hosts)):
        assert message.startswith("MismatchError"), message
        assert "with PHOTINUS_STRICT_SITES=1" in message


def kinds_of_messages(rank: int, world_size: int, store: str) -> list[str]:
    import torch
    import torch.distributed as dist

    made = dist.FileStore(store, world_size)
    dist.init_process_group("photinus", store=made, rank=rank, world_size=world_size)
    found = []
    sent = [torch.full((3,), 65535, dtype=torch.uint16), torch.ones(4, dtype=torch.float8_e5m2), torch.zeros(3)]
    wanted = [torch.zeros(3, dtype=torch.int16), torch.zeros(4, dtype=torch.uint8), torch.zeros(3)]
    for there, here in zip(sent, wanted, strict=True):
        found.append(error_of(lambda t=there: dist.send(t, 1) if rank == 0 else None))
        found[-1] += error_of(lambda t=here: dist.recv(t, 0) if rank == 1 else None)
    assert not any(tensor.any() for tensor in wanted)
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hosts", [None, "ab"])
def test_messages_of_other_types_but_equal_size_are_refused_by_name(hosts: str | None, tmp_path: Path) -> None:
    arguments = {"store": str(tmp_path / "store")}
    for found in values(run_ranks(f"{HERE}:kinds_of_messages", world_size=2, arguments=arguments, hosts=hosts)):
        assert "called send of int16[3] that are uint16 at" in found[0], found
        assert "called recv of int16[3] at" in found[0]
        assert "called send of uint8[4] that are float8_e5m2 at" in found[1]
        assert "called recv of uint8[4] at" in found[1]
        assert found[2] == ""


def overlapping(rank: int, world_size: int, address: str) -> None:
    with joined(rank, world_size, address) as communicator:
        both, half = np.arange(8, dtype=np.float32), slice(4 * rank, 4 * rank + 4)
        other = slice(4 - 4 * rank, 8 - 4 * rank)
        one, parts = np.arange(4, dtype=np.float32), [both[:4], both[4:]]
        wrong: list[Callable[[], Any]] = [
            lambda: communicator.all_gather(both, both[other]),
            lambda: communicator.all_gather(both, both[2:6]),
            lambda: communicator.reduce_scatter(both[other], both),
            lambda: communicator.reduce_scatter(both[half.start + 1 - 2 * rank :][:4], both),
            lambda: communicator.all_gather_list(parts, both[other]),
            lambda: communicator.all_gather_list([one, one], both[half]),
            lambda: communicator.all_to_all(parts, parts[::-1]),
            lambda: communicator.all_to_all(parts, parts),
        ]
        if rank == 0:
            wrong.append(lambda: communicator.gather([one, one], both[:4]))
            wrong.append(lambda: communicator.scatter(both[4:], parts))
        for call in wrong:
            with pytest.raises(ValueError, match=r"overlap.* buffer of its own"):
                call()
        assert both.tolist() == list(range(8))
        communicator.all_gather(both, both[half])
        communicator.all_gather_list(parts, both[half])
        assert both.tolist() == list(range(8))
        communicator.all_reduce(both)
        communicator.reduce_scatter(both[half], both)
        assert both[half].tolist() == [4.0 * each for each in range(8)][half]
        if rank == 0:
            communicator.gather([both[:4], one], both[:4])
            communicator.scatter(both[:4], [both[:4], one])
        else:
            communicator.gather(None, one)
            communicator.scatter(one, None)
        communicator.all_gather_list([both[:2], both[2:4]], both[2 * rank :][:2])


@pytest.mark.timeout(60)
def test_results_that_overlap_what_a_call_reads_are_refused_but_in_place() -> None:
    run(overlapping, 2)
