"""The engine from Python, on numpy arrays: real processes, no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from photinus import engine, errors
from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks, values

DTYPES = ("float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "bool")


def _array(dtype: str, elems: int, in_arena: bool) -> Any:
    kind = np.dtype(dtype)
    if in_arena:
        return np.frombuffer(engine.allocate(max(elems, 1) * kind.itemsize), dtype=kind)[:elems]
    return np.empty(elems, dtype=kind)


def all_collectives(rank: int, world_size: int, address: str) -> int:
    """Compares every collective with numpy on data that each rank makes for all ranks; returns the number of checks."""
    checks = 0
    with engine.Communicator(rank, world_size, address, timeout_s=60) as communicator:
        for dtype in DTYPES:
            for elems in (0, 1, 1000, 70001):
                for in_arena in (False, True):
                    random = np.random.default_rng(elems)
                    below = 2 if dtype == "bool" else 9
                    inputs = [random.integers(0, below, elems).astype(dtype) for _ in range(world_size)]
                    stacked = np.stack(inputs)
                    for reduction, expected in (
                        ("sum", stacked.any(0) if dtype == "bool" else stacked.sum(0, dtype=stacked.dtype)),
                        ("max", stacked.max(0)),
                        ("min", stacked.min(0)),
                    ):
                        array = _array(dtype, elems, in_arena)
                        array[:] = inputs[rank]
                        communicator.all_reduce(array, reduction)
                        np.testing.assert_array_equal(array, expected)
                    for reduction, combine in (
                        ("band", np.bitwise_and),
                        ("bor", np.bitwise_or),
                        ("bxor", np.bitwise_xor),
                    ):
                        if not dtype.startswith("float"):
                            array[:] = inputs[rank]
                            communicator.all_reduce(array, reduction)
                            np.testing.assert_array_equal(array, combine.reduce(stacked, 0))
                    array = _array(dtype, elems, in_arena)
                    array[:] = inputs[rank]
                    communicator.broadcast(array, world_size - 1)
                    np.testing.assert_array_equal(array, inputs[-1])
                    array[:] = inputs[rank]
                    gathered = _array(dtype, elems * world_size, in_arena)
                    communicator.all_gather(gathered, array)
                    np.testing.assert_array_equal(gathered, np.concatenate(inputs))
                    part = _array(dtype, elems, in_arena)
                    communicator.reduce_scatter(part, gathered, "max")
                    np.testing.assert_array_equal(part, inputs[rank])
                    checks += 6
        works = []
        for i in range(50):
            array = np.full(5000, rank + i, np.float32)
            works.append((communicator.all_reduce(array, "avg", asynchronous=True), array, i))
        for work, array, i in works:
            work.wait()
            assert array[0] == (world_size - 1) / 2 + i
            assert work.is_completed()
            assert work.error() is None
            assert work.duration_s() > 0
    return checks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_on_numpy_arrays_equals_numpy(world_size: int) -> None:
    address = engine.new_address()
    results = run_ranks(
        "tests.dist.test_engine:all_collectives", world_size=world_size, arguments={"address": address}, timeout_s=120
    )
    assert all(checks == len(DTYPES) * 4 * 2 * 6 for checks in values(results))


def dropped_buffers(rank: int, world_size: int, address: str) -> bool:
    with engine.Communicator(rank, world_size, address, timeout_s=60) as communicator:
        for i in range(300):
            communicator.all_reduce(np.full(20000, 1.0, np.float32), asynchronous=True)  # the array is dropped at once
            if i % 50 == 49:
                communicator.barrier()
    return True


def test_arrays_dropped_while_in_flight_stay_alive_until_done() -> None:
    run_ranks("tests.dist.test_engine:dropped_buffers", world_size=2, arguments={"address": engine.new_address()})


def exception_in_context(rank: int, world_size: int, address: str) -> str:
    try:
        with engine.Communicator(rank, world_size, address, timeout_s=60) as communicator:
            if rank == 1:
                raise ValueError("learning rate must be positive")
            communicator.barrier()
    except errors.PeerLostError as error:
        return str(error)
    except ValueError:
        return "own"
    return "none"


def test_an_exception_inside_the_context_is_quoted_by_the_peers() -> None:
    results = run_ranks(
        "tests.dist.test_engine:exception_in_context", world_size=2, arguments={"address": engine.new_address()}
    )
    message = values(results)[0]
    assert "rank 1 (pid" in message
    assert "ValueError: learning rate must be positive" in message


def killed_peer(rank: int, world_size: int, address: str) -> str:
    communicator = engine.Communicator(rank, world_size, address, timeout_s=60)
    communicator.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        communicator.barrier()
    except errors.PeerLostError as error:
        return str(error)
    return "none"


def test_a_killed_peer_is_named_with_its_pid_and_signal() -> None:
    results = run_ranks(
        "tests.dist.test_engine:killed_peer",
        world_size=2,
        arguments={"address": engine.new_address()},
        expect={1: -signal.SIGKILL},
    )
    assert f"rank 1 (pid {results[1].pid} on" in results[0].value
    assert "was killed by SIGKILL" in results[0].value


def _start(script: str, *arguments: str) -> subprocess.Popen[str]:
    """A process of its own, which has printed "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; from photinus import engine\n" + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PHOTINUS_WAITING_S": "0.1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _interrupt_its_wait(process: subprocess.Popen[str]) -> str:
    """What it says after Ctrl-C, which comes when it has said that it waits."""
    assert process.stderr is not None
    assert "has been waiting for" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=20)[1]


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_ctrl_c_ends_a_wait_of_the_callers_own_thread() -> None:
    script = (
        "c = engine.Communicator(int(sys.argv[1]), 2, sys.argv[2], timeout_s=60)\n"
        "print('ready', flush=True)\n"
        "c.barrier() if sys.argv[1] == '0' else sys.stdin.read()\n"
    )
    processes: list[subprocess.Popen[str]] = []
    try:
        with ThreadPoolExecutor() as threads:
            processes += threads.map(_start, [script] * 2, "01", [engine.new_address()] * 2)
        assert "KeyboardInterrupt" in _interrupt_its_wait(processes[0])
        processes[1].communicate("", timeout=20)
        assert processes[1].returncode == 0
    finally:
        _end(processes)


@pytest.mark.parametrize("rank", "01")
def test_ctrl_c_ends_the_wait_for_ranks_that_have_not_come(rank: str) -> None:
    script = "print('ready', flush=True); engine.Communicator(int(sys.argv[1]), 2, sys.argv[2], timeout_s=60)"
    process = _start(script, rank, engine.new_address())
    try:
        assert "KeyboardInterrupt" in _interrupt_its_wait(process)
    finally:
        _end([process])


def interrupted(rank: int, world_size: int, address: str) -> str:
    with engine.Communicator(rank, world_size, address, timeout_s=60) as communicator:
        communicator.barrier()
        if rank == 1:
            time.sleep(1)
            try:
                communicator.all_reduce(np.ones(1 << 18, np.float32))
            except errors.PeerLostError as error:
                return str(error)
            return "none"

        def give_up(*_: object) -> None:
            raise TimeoutError("too long")

        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        work = communicator.all_reduce(np.ones(1 << 18, np.float32), asynchronous=True)
        try:
            work.wait()
        except TimeoutError as error:
            return f"{error}, completed: {work.is_completed()}"
    return "none"


def test_what_a_signals_handler_raises_ends_the_call_and_is_told_to_the_peers() -> None:
    results = run_ranks("tests.dist.test_engine:interrupted", world_size=2, arguments={"address": engine.new_address()})
    own, peers = values(results)
    assert own == "too long, completed: True"
    assert "interrupted by a signal while waiting for all_reduce" in peers


def test_arguments_that_do_not_fit_are_refused_with_both_numbers() -> None:
    with engine.Communicator(0, 1, engine.new_address()) as communicator:
        with pytest.raises(ValueError, match="out has 3 elements of float32, needs 4 of float32"):
            communicator.all_gather(np.empty(3, np.float32), np.empty(4, np.float32))
        with pytest.raises(ValueError, match="'mean' is unknown; known are sum, avg"):
            communicator.all_reduce(np.empty(3, np.float32), "mean")
        with pytest.raises(ValueError, match="C-contiguous"):
            communicator.all_reduce(np.empty((4, 4), np.float32)[:, ::2])
        with pytest.raises(TypeError, match="complex64 is not one of"):
            communicator.all_reduce(np.empty(3, np.complex64))
        with pytest.raises(TypeError, match="not list"):
            communicator.all_reduce([1.0])
        frozen = np.zeros(3, np.float32)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            communicator.all_reduce(frozen)
    with pytest.raises(errors.AbortedError, match="closed"):
        communicator.barrier()


def test_an_array_whose_interface_has_a_list_as_shape_is_taken() -> None:
    class Listed:
        values = np.ones((2, 3), np.float32)
        __array_interface__: ClassVar = {**values.__array_interface__, "shape": [2, 3]}

    with engine.Communicator(0, 1, engine.new_address()) as communicator:
        communicator.all_reduce(Listed())


def test_missing_ranks_are_named_when_the_meeting_times_out() -> None:
    with pytest.raises(errors.CollectiveTimeoutError, match=r"ranks \[1, 2\] of 3 did not join within 0.2 s"):
        engine.Communicator(0, 3, engine.new_address(), timeout_s=0.2)


def test_arena_memory_is_given_back_when_the_last_view_is_dropped() -> None:
    from photinus import _native

    before = _native.arena_used_bytes()
    array = np.frombuffer(engine.allocate(1 << 20), np.uint8)
    part = array[100:200]
    del array
    assert _native.arena_used_bytes() == before + (1 << 20)
    del part
    assert _native.arena_used_bytes() == before


def test_the_host_identity_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "from photinus import engine; print(engine.host_id())"]
    assert engine.host_id() == subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip()
    monkeypatch.setenv("PHOTINUS_HOST_ID", "rack-3")
    assert engine.host_id() == "rack-3"


def test_the_instruction_set_can_be_wished_for_and_a_wrong_wish_is_refused_before_ranks_meet() -> None:
    connect = (
        "from photinus import _native, engine; engine.Communicator(0, 1, engine.new_address()).close(); "
        "print(_native.instruction_set())"
    )

    def wishing(wish: str) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "PHOTINUS_INSTRUCTION_SET": wish}
        return subprocess.run([sys.executable, "-c", connect], env=environ, capture_output=True, text=True, timeout=60)

    refused = wishing("abacus").stderr
    assert "ValueError: PHOTINUS_INSTRUCTION_SET=abacus: this processor has no such instruction set" in refused
    choices = refused.partition("the choices are ")[2].split()
    assert choices
    for choice in (choice.rstrip(",") for choice in choices):
        assert wishing(choice).stdout.strip() == choice


def test_the_engine_does_not_import_torch() -> None:
    command = "import sys, photinus.engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], timeout=60).returncode == 0


def test_nothing_appears_in_dev_shm_or_the_file_system() -> None:
    before = set(Path("/dev/shm").iterdir())
    with engine.Communicator(0, 1, engine.new_address()) as communicator:
        communicator.all_reduce(np.frombuffer(engine.allocate(1 << 16), np.float32).copy())
        assert {path for path in set(Path("/dev/shm").iterdir()) - before if "photinus" in path.name} == set()
