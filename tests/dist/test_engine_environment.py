"""The engine in the environments that jobs run in: containers, limits, forks, and every way in which scripts end."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from photinus import _native
from tests.programs import run_programs
from tests.rank_pool import RankPool

JOIN = "communicator = engine.Communicator(rank, world_size, address, timeout_s=30)\n"
# Every path: in the arena and out of it, small and large.
USE = """
for elems in (1, 3000, 1 << 20):
    shared = np.frombuffer(engine.allocate(4 * elems), np.float32)
    ordinary = np.empty(elems, np.float32)
    for array in (shared, ordinary):
        array[:] = rank + 1
        communicator.all_reduce(array)
        assert array[0] == array[-1] == world_size * (world_size + 1) / 2
"""


def limited(option: str, value: int) -> list[str]:
    """A command wrapper with a limit of the shell's ulimit."""
    return ["sh", "-c", f'ulimit {option} {value} && exec "$@"', "sh"]


def unshare(*options: str) -> list[str]:
    """A command wrapper with namespaces of its own, or a skipped test where that is not allowed."""
    command = ["unshare", *options]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip(f"{' '.join(command)} is not allowed here")
    return command


# --- containers ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
def test_ranks_in_containers_of_their_own_work_together() -> None:
    separate = unshare("--pid", "--fork", "--mount-proc", "--kill-child")
    ended = run_programs(JOIN + USE + "print(os.getpid())", world_size=3, wrap=separate)
    assert [end.out for end in ended] == ["1\n"] * 3


@pytest.mark.timeout(90)
def test_a_rank_killed_in_another_container_is_named_by_rank() -> None:
    separate = unshare("--pid", "--fork", "--mount-proc", "--kill-child")
    program = JOIN + (
        "print('joined', flush=True)\n"
        "array = np.ones(1000, np.float32)\n"
        "try:\n"
        "    while True: communicator.all_reduce(array, 'avg')\n"
        "except errors.PeerLostError as error:\n"
        "    print(time.monotonic(), error)\n"
    )
    killed_s = 0.0

    def kill_second(processes: list[subprocess.Popen[bytes]]) -> None:
        nonlocal killed_s
        outer = processes[1].pid
        time.sleep(3)
        (inner,) = map(int, Path(f"/proc/{outer}/task/{outer}/children").read_text().split())
        killed_s = time.monotonic()
        os.kill(inner, signal.SIGKILL)

    # How unshare itself ends when its child is killed is its own affair.
    ended = run_programs(program, world_size=3, wrap=separate, meanwhile=kill_second, expect={1: None}, timeout_s=40)
    for survivor in (ended[0], ended[2]):
        raised_s, message = survivor.out.split("\n")[1].split(" ", 1)
        assert message.startswith("rank 1 (in another container on ")
        assert float(raised_s) - killed_s < 1


@pytest.mark.timeout(60)
def test_a_dev_shm_of_64_kib_does_not_matter() -> None:
    tiny = [*unshare("-m"), "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*tiny, "true"], capture_output=True).returncode != 0:
        pytest.skip("nothing can be mounted here")
    small = "at = os.statvfs('/dev/shm'); assert at.f_blocks * at.f_frsize == 65536\n"
    run_programs(small + JOIN + USE, world_size=2, wrap=tiny)


# --- limits ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def memory_limit(megabytes: int, *, nested: bool = False) -> Iterator[list[str]]:
    """A command wrapper whose control group may use so much memory; `nested` puts it into a group below that one."""
    group = None
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            group, file = Path("/sys/fs/cgroup/memory" + path), "memory.limit_in_bytes"
        elif not controllers and group is None:
            group, file = Path("/sys/fs/cgroup" + path), "memory.max"
    if group is None or not group.is_dir():
        pytest.skip("this process's control group is not mounted")
    limited = group / f"photinus-test-{os.getpid()}"
    inner = limited / "step" if nested else limited
    try:
        try:
            inner.mkdir(parents=True)
            (limited / file).write_text(str(megabytes << 20))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        yield ["sh", "-c", f'echo $$ > {inner}/cgroup.procs && exec "$@"', "sh"]
    finally:
        for folder in dict.fromkeys([inner, limited]):
            if folder.is_dir():
                folder.rmdir()


ASK_TOO_MUCH = """
array = np.frombuffer(engine.allocate(32 << 20), np.uint8)
array[:] = 1
try:
    engine.allocate(1 << 30)
except OSError as error:
    print(error)
array = np.frombuffer(engine.allocate(64 << 20), np.uint8)
array[:] = 1
"""


@pytest.mark.timeout(60)
def test_an_allocation_beyond_the_control_groups_memory_says_what_is_wanted_allowed_and_used() -> None:
    with memory_limit(300) as wrap:
        (ended,) = run_programs(ASK_TOO_MUCH, world_size=1, wrap=wrap)
    assert f"{1 << 30} bytes of shared memory are wanted" in ended.out
    assert f"may use {300 << 20} bytes" in ended.out
    assert f"({32 << 20} of them in this arena)" in ended.out
    assert "photinus-test" in ended.out


@pytest.mark.timeout(60)
def test_a_memory_limit_of_an_outer_control_group_counts_too() -> None:
    with memory_limit(300, nested=True) as wrap:
        (ended,) = run_programs(ASK_TOO_MUCH, world_size=1, wrap=wrap)
    assert f"may use {300 << 20} bytes" in ended.out


@pytest.mark.timeout(60)
def test_the_engine_works_where_address_space_is_limited() -> None:
    refused = (
        "\ntry: engine.allocate(1 << 30)\n"
        "except OSError as error: print(error)\n"  # a ValueError or a crash would be wrong
    )
    ended = run_programs(JOIN + USE + refused, world_size=3, wrap=limited("-v", 2 << 20))
    assert all("no gap of 1073741824 bytes" in end.out for end in ended)


@pytest.mark.timeout(60)
def test_files_that_the_group_keeps_cached_count_as_free_memory(tmp_path: Path) -> None:
    """Also those that were read twice, which the kernel keeps on its list of active pages."""
    with open(tmp_path / "data", "wb") as file:
        file.write(bytes(200 << 20))
        os.fsync(file.fileno())  # only clean pages leave the cache, to be read into it by the group
    with memory_limit(300) as wrap:
        run_programs(
            f"descriptor = os.open({str(tmp_path / 'data')!r}, os.O_RDONLY)\n"
            "os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)\n"
            "for at in [*range(0, 200 << 20, 1 << 20)] * 3: os.pread(descriptor, 1 << 20, at)\n"
            "engine.allocate(150 << 20)\n",
            world_size=1,
            wrap=wrap,
        )


@pytest.mark.timeout(60)
def test_a_thread_that_cannot_start_leaves_the_tensors_to_their_caller() -> None:
    program = JOIN + (
        "import resource, signal\n"
        "with open('/proc/self/statm') as file: used = int(file.read().split()[0]) * 4096\n"
        "array = np.full(1000, rank + 1, np.float32)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), -1))\n"
        "try: communicator.all_reduce(array, asynchronous=True)\n"
        "except OSError as error: text = str(error)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n"
        "assert 'cannot start the thread photinus-run' in text and 'ulimit -v' in text, text\n"
        "assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()\n"
        "communicator.barrier()\n"
        "assert array[0] == array[-1] == rank + 1\n"
        "work = communicator.all_reduce(array, asynchronous=True)\n"
        "work.wait()\n"
        "assert array[0] == array[-1] == 3\n"
    )
    run_programs(program, world_size=2)


@pytest.mark.timeout(90)
def test_code_of_a_notebooks_cells_is_let_go() -> None:
    """Call sites are looked up by code objects, of which each cell makes a new one."""
    program = JOIN + (
        "import weakref\n"
        "array, alive = np.ones(1, np.float32), []\n"
        "for cell in range(2000):\n"
        "    code = compile('communicator.all_reduce(array)', f'<cell {cell}>', 'exec')\n"
        "    exec(code)\n"
        "    alive.append(weakref.ref(code))\n"
        "    del code\n"
        "assert sum(each() is not None for each in alive) <= 520, 'kept'\n"
        "try: exec(compile('communicator.all_reduce(array, label=str(rank))', '<cell last>', 'exec'))\n"
        "except errors.MismatchError as error: assert '<cell last>:1' in str(error), error\n"
        "else: raise AssertionError\n"
    )
    run_programs(program, world_size=2)


@pytest.mark.timeout(60)
def test_a_handful_of_ranks_needs_few_file_descriptors() -> None:
    run_programs(JOIN + USE, world_size=6, wrap=limited("-n", 64), timeout_s=50)


@pytest.mark.timeout(60)
def test_too_few_file_descriptors_end_all_ranks_before_the_deadline_and_one_says_why() -> None:
    program = (
        "try:\n"
        "    engine.Communicator(rank, world_size, address, timeout_s=30)\n"
        "except (OSError, errors.CollectiveError) as error:\n"
        "    print(error)\n"
    )
    ended = run_programs(program, world_size=16, wrap=limited("-n", 56), timeout_s=25)
    assert "are there enough file descriptors, ulimit -n?" in ended[0].out
    assert all(end.out for end in ended)


MANY = """
import ctypes, os, signal, sys, time, traceback
import numpy as np
from photinus import engine
ranks, rounds = int(sys.argv[1]), 100
address, pids = engine.new_address(), []
started_s = time.monotonic()
for rank in range(ranks):
    pid = os.fork()
    if pid:
        pids.append(pid)
        continue
    code = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
        communicator = engine.Communicator(rank, ranks, address, timeout_s=100)
        communicator.barrier()
        met_s = time.monotonic()
        array = np.empty(16384, np.float32)
        for step in range(rounds):
            array[:] = rank + step
            communicator.all_reduce(array)
            assert array[0] == array[-1] == ranks * (ranks - 1) / 2 + ranks * step
        if rank == 0:
            print(f"{ranks} ranks: {met_s - started_s:.2f} s to start and meet, "
                  f"{time.monotonic() - met_s:.2f} s for {rounds} all_reduces of 64 KiB", flush=True)
        communicator.barrier()
        communicator.close()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
sys.exit(codes != [0] * ranks)
"""


def many(ranks: int, wrap: list[str], timeout_s: float) -> None:
    done = subprocess.run(
        [*wrap, sys.executable, "-c", MANY, str(ranks)], capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr[-5000:]
    print(done.stdout)


@pytest.mark.timeout(120)
def test_forty_ranks_meet_and_reduce_with_the_usual_limit_of_descriptors() -> None:
    many(40, limited("-n", 1024), timeout_s=100)


@pytest.mark.timeout(120)
def test_a_hundred_ranks_meet_and_reduce_with_the_usual_limit_of_descriptors() -> None:
    many(100, limited("-n", 1024), timeout_s=100)


@pytest.mark.timeout(240)
def test_a_hundred_and_twenty_eight_ranks_meet_and_reduce() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 8192:
        pytest.skip("needs a hard limit of 8192 file descriptors")
    many(128, limited("-n", 8192), timeout_s=200)


# --- instruction sets ------------------------------------------------------------------------------------------------


def instruction_sets() -> list[str]:
    program = "from photinus import engine; engine.Communicator(0, 1, engine.new_address())"
    environ = {**os.environ, "PHOTINUS_INSTRUCTION_SET": "?"}
    refused = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60)
    return re.findall(r"\w+", refused.stderr.partition("the choices are ")[2])


@pytest.mark.timeout(120)
def test_every_instruction_set_gives_the_same_bits() -> None:
    sets = instruction_sets()
    assert _native.instruction_set() in sets
    assert sets[0] in ("baseline", "neon")
    calls = [
        {
            "operation": operation,
            "dtype": dtype,
            "reduction": reduction,
            "elems": 5003,
            "pattern": "near",
            "seed": 3,
            "root": 0,
            "places": ["arena", "unaligned", "ordinary"],
        }
        for operation in ("all_reduce", "reduce", "reduce_scatter")
        for dtype in ("float32", "float64", "float16", "bfloat16", "int8", "int64", "bool")
        for reduction in ("sum", "avg", "product", "max")
        if (dtype, reduction) != ("bool", "avg")
    ]
    command = {"chunk_bytes": 4096, "asynchronous": False, "sleeps": 0, "calls": calls}
    digests = set()
    for name in sets:
        answers = "tests.parity.engine_cases:Answers"
        with RankPool(answers, world_size=3, environ={"PHOTINUS_INSTRUCTION_SET": name}) as pool:
            digests.update(pool.ask(command))  # each rank also compares with numpy
    assert len(digests) == 1


# --- forks -----------------------------------------------------------------------------------------------------------

# From Python 3.12 on each fork of a process with threads is warned of.
AFTER_FORK = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
shared = np.frombuffer(engine.allocate(8 << 20), np.float32)
shared[:] = 1
small = np.frombuffer(engine.allocate(64), np.float32)
small[:] = 1
communicator.all_reduce(shared)
in_flight = [communicator.all_reduce(np.ones(100000, np.float32), asynchronous=True) for _ in range(5)]
{fork}
for work in in_flight:
    work.wait()
assert shared.min() == shared.max() == world_size
assert small.min() == small.max() == 1
communicator.all_reduce(shared)
assert shared.min() == shared.max() == world_size ** 2
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    "end", ["os._exit(5)", "sys.exit(5)", "del shared, small, communicator, in_flight; sys.exit(5)"]
)
def test_a_forked_child_ends_without_harm_to_the_group(end: str) -> None:
    fork = f"pid = os.fork()\nif pid == 0: {end}\nassert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5"
    ended = run_programs(JOIN + AFTER_FORK.format(fork=fork), world_size=2)
    assert [end.err for end in ended] == ["", ""]


@pytest.mark.timeout(90)
def test_a_forked_child_that_drops_an_array_leaves_the_parents_memory_as_it_is() -> None:
    fork = "pid = os.fork()\nif pid == 0: del shared, small; os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0"
    run_programs(JOIN + AFTER_FORK.format(fork=fork), world_size=2)


@pytest.mark.timeout(60)
def test_what_a_forked_child_writes_to_shared_arrays_stays_its_own() -> None:
    program = JOIN + (
        "import warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "array = np.frombuffer(engine.allocate(4 << 20), np.float32)\n"
        "array[:] = rank + 1\n"
        "pid = os.fork()\n"
        "if pid == 0: array[:] = 0; os._exit(0 if array[5] == 0 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "communicator.all_reduce(array)\n"
        "assert array[0] == array[-1] == 3\n"
    )
    run_programs(program, world_size=2)


@pytest.mark.timeout(90)
def test_forked_workers_of_multiprocessing_read_shared_arrays_and_end_without_harm() -> None:
    fork = (
        "import multiprocessing\n"
        "def work(number): return number + float(shared[number])\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    assert pool.map(work, range(100)) == [number + world_size for number in range(100)]\n"
        "    pool.close(); pool.join()\n"
    )
    ended = run_programs(JOIN + AFTER_FORK.format(fork=fork), world_size=2)
    assert [end.err for end in ended] == ["", ""]


@pytest.mark.timeout(90)
def test_a_forked_child_is_told_that_the_group_is_its_parents_and_makes_one_of_its_own() -> None:
    fork = (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: communicator.all_reduce(shared)\n"
        "    except errors.AbortedError as error: print(error)\n"
        "    with engine.Communicator(0, 1, engine.new_address()) as own:\n"
        "        array = np.frombuffer(engine.allocate(1 << 20), np.float32)\n"
        "        array[:] = 3\n"
        "        own.all_reduce(array)\n"
        "    assert array[-1] == 3\n"
        "    sys.exit(5)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5\n"
    )
    ended = run_programs(JOIN + AFTER_FORK.format(fork=fork), world_size=2)
    assert all("belongs to the process that forked this one" in end.out for end in ended)


@pytest.mark.timeout(120)
def test_children_forked_at_any_moment_of_a_busy_group_end() -> None:
    program = JOIN + (
        "import threading\n"
        "busy = True\n"
        "def keep_busy():\n"
        "    while busy: # rank 0 says when it ends\n"
        "        go_on = np.array([busy or rank], np.uint8)\n"
        "        communicator.broadcast(go_on)\n"
        "        if not go_on[0]: return\n"
        "        for _ in range(5): communicator.all_reduce(np.frombuffer(engine.allocate(4096), np.float32),\n"
        "                                                   asynchronous=True)\n"
        "thread = threading.Thread(target=keep_busy); thread.start()\n"
        "for _ in range(40):\n"
        "    pid = os.fork()\n"
        "    if pid == 0: sys.exit(5)\n"
        "    deadline = time.monotonic() + 20\n"
        "    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline: time.sleep(0.001)\n"
        "    if not ended[0]: os.kill(pid, 9); os.waitpid(pid, 0)\n"
        "    assert ended[0] and os.waitstatus_to_exitcode(ended[1]) == 5, ended\n"
        "os._exit(0)\n"
    )
    run_programs(program, world_size=1, timeout_s=100)


# --- ends ------------------------------------------------------------------------------------------------------------

IN_FLIGHT = "works = [communicator.all_reduce(np.ones(100000, np.float32), asynchronous=True) for _ in range(50)]\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("in_flight", ["", IN_FLIGHT, "if rank == 0: " + IN_FLIGHT], ids=["idle", "busy", "unanswered"])
@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("os._exit(3)", 3), ("sys.exit(7)", 7), ("raise ValueError('the learning rate')", 1)],
    ids=["end", "os._exit", "sys.exit", "exception"],
)
def test_a_script_that_closes_nothing_ends_with_its_own_code_and_says_nothing_but_its_own_traceback(
    in_flight: str, end: str, code: int
) -> None:
    # Whom nobody answers has calls that fail while nobody waits for them: no good end.
    is_alone = in_flight.startswith("if") and end in ("", "sys.exit(7)")
    expect = {0: code or int(is_alone), 1: code}
    ended = run_programs(JOIN + in_flight + end, world_size=2, expect=expect, timeout_s=30)
    for one in ended:
        if "ValueError" in end:
            assert re.fullmatch(r"Traceback .*:\n(  .*\n)+ValueError: the learning rate\n", one.err), one.err
        elif is_alone and one.rank == 0:
            assert "photinus: [rank 0, group world] nobody has waited for a call that failed: " in one.err
            assert "rank 1 (pid " in one.err
        else:
            assert one.err == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("wait", ["barrier()", "recv(np.empty(3, np.float32), 1)"])
def test_a_script_ends_in_silence_while_a_daemon_thread_waits_for_a_peer(wait: str, tmp_path: Path) -> None:
    program = JOIN + (
        "import contextlib, pathlib, threading\n"
        f"there = pathlib.Path({str(tmp_path)!r})\n"
        "if rank == 0:\n"
        f"    threading.Thread(target=lambda: communicator.{wait}, daemon=True).start()\n"
        "    time.sleep(0.3)\n"
        "    (there / 'pid').write_text(str(os.getpid()))\n"
        "    (there / 'pid').rename(there / 'done')\n"
        "else:\n"
        "    while not (there / 'done').exists(): time.sleep(0.01)\n"
        "    with contextlib.suppress(ProcessLookupError):\n"
        "        while True: os.kill(int((there / 'done').read_text()), 0), time.sleep(0.01)\n"
        "sys.exit(7)\n"
    )
    for ended in run_programs(program, world_size=2, expect={0: 7, 1: 7}, timeout_s=30):
        assert ended.err == ""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_script_ends_while_daemon_threads_reduce_again_and_again(world_size: int) -> None:
    program = JOIN + (
        "import threading\n"
        "def again():\n"
        "    array = np.zeros(3000, np.float32)\n"
        "    while True:\n"
        "        try: communicator.all_reduce(array)\n"
        "        except errors.CollectiveError: pass\n"
        "for _ in range(4): threading.Thread(target=again, daemon=True).start()\n"
        "time.sleep(0.3 + 0.05 * rank)\n"
        "sys.exit(7)\n"
    )
    for _ in range(3):
        ended = run_programs(program, world_size=world_size, expect={0: 7, 1: 7}, timeout_s=18)
        assert [end.err for end in ended] == [""] * world_size
