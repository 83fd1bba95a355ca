"""The life of a process group of backend photinus: making, naming, ending, making again; futures; torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks, values


def test_groups_are_made_used_ended_and_made_again(tmp_path: Path) -> None:
    results = run_ranks(f"{__name__}:_life", world_size=3, timeout_s=120, arguments={"store": str(tmp_path / "store")})
    for value in values(results):
        assert value["sums"] == [6.0] * 6
        assert value["sub_groups"] == [[1.0, 3.0], [2.0, 3.0], [1.0, 2.0]]
        assert "destroyed" in value["after_destroy"]
        assert value["threads_left"] == []
        assert value["descriptors_grown_by"] <= 0
        # Without a timeout: PHOTINUS_TIMEOUT_S, 300 s by default; half an hour only where a caller asked for it.
        assert value["timeouts"] == [300.0, 1800.0, 1800.0, 12.5, 40.0, 300.0, 300.0]
    assert all("Traceback" not in result.output for result in results)


def _life(rank: int, world_size: int, store: str) -> dict[str, Any]:
    import gc
    import threading
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    shared = dist.FileStore(store, world_size)
    sums, sub_groups, after_destroy, before, timeouts = [], [], "", 0, []
    given = {1: {"timeout": timedelta(minutes=30)}, 3: {"timeout": timedelta(seconds=40)}}
    for turn in range(6):
        os.environ["PHOTINUS_TIMEOUT_S"] = "12.5" if turn in (2, 3) else ""
        # The same store each time, with all the keys of the turns before.
        dist.init_process_group("photinus", store=shared, rank=rank, world_size=world_size, **given.get(turn, {}))
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        group = dist.group.WORLD
        timeouts.append(group.timeout_s)
        if turn == 1:
            timeouts.append(dist.new_group([0, 1, 2]).timeout_s)
        if turn == 0:
            for ranks in ([0, 2], [1, 2], [0, 1]):
                part = dist.new_group(ranks, timeout=timedelta(seconds=30))
                mine = [torch.zeros(1) for _ in ranks]
                if rank in ranks:
                    dist.all_gather(mine, torch.tensor([rank + 1.0]), group=part)
                whole = torch.cat(mine)
                dist.broadcast(whole, ranks[0])
                sub_groups.append(whole.tolist())
            dist.destroy_process_group(part) if rank in (0, 1) else None
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        try:
            group.allreduce([tensor])
        except RuntimeError as error:
            after_destroy = str(error)
        del group
        if turn == 2:
            before = descriptors()
    return {
        "sums": sums,
        "sub_groups": sub_groups,
        "timeouts": timeouts,
        "after_destroy": after_destroy,
        "threads_left": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
        "descriptors_grown_by": descriptors() - before,
    }


def test_futures_callbacks_and_timeouts_of_works() -> None:
    results = run_ranks(f"{__name__}:_works", world_size=2, backend="photinus", timeout_s=120)
    for value in values(results):
        assert value["nested"] == [2.0, 4.0, 8.0, 16.0, 32.0]
        assert value["many"] == [2.0] * 300
        assert value["dropped_half"] == 2.0
        assert value["after_wait"] == [2.0, True]
        assert value["memory_kept"] <= 1
        assert value["sparse_kept"] <= 1, "with the values that the ranks have gathered"
        assert value["limits"] == [7.0, 9.0]
        if torch.__version__ >= (2, 13):  # others leave out what ends on another thread
            assert value["profiled"] == ["photinus:all_reduce", "photinus:barrier", "photinus:broadcast"]
        assert value["inside"] is None, "a call that was refused has ended"
        assert value["done"] == [[None, None], [2.0, 1.0, 2.0, 1.0]]  # no work for what ended in the call
        assert "AbortedError" in value["future_error"]
        assert value["waits"] == ["AbortedError", "AbortedError"]


def _works(rank: int, world_size: int) -> dict[str, Any]:
    import gc
    import time
    import weakref
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from photinus.backend.arguments import Memory
    from photinus.errors import CollectiveError

    group = dist.group.WORLD
    nested: list[float] = []

    def deeper(future: Any) -> None:
        """Waits for a further collective inside the callback of the one before; gloo hangs at depth 3."""
        nested.append(future.value()[0].item())
        if len(nested) < 5:
            work = dist.all_reduce(torch.tensor([nested[-1]]), async_op=True)
            work.get_future().then(deeper).wait()

    dist.all_reduce(torch.tensor([1.0]), async_op=True).get_future().then(deeper).wait()
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(300)]
    many = [future.wait()[0][0].item() for future in [work.get_future() for work in works]]

    # A callback may wait for what was queued behind it; and who has waited for a work finds its future done.
    if rank == 1:
        time.sleep(0.2)
    first, second = (dist.all_reduce(torch.ones(1), async_op=True) for _ in range(2))
    before, behind = first.get_future(), second.get_future()
    after_wait = [before.then(lambda _: behind.wait()[0].item()).wait()]
    ended = []
    for _ in range(50):
        work = dist.all_reduce(torch.ones(1000), async_op=True)
        future = work.get_future()
        work.wait()
        ended.append(future.done())
    after_wait.append(all(ended))

    # C++ keeps only its half of a work (DDP's join does): the Python half must survive.
    tensor = torch.ones(1)
    boxed = dist.all_reduce(tensor, async_op=True).boxed()
    gc.collect()
    dist.Work.unbox(boxed).wait()

    # But what was large is not kept for that, nor for a work of several that was made before.
    group._start_coalescing()
    dist.all_reduce(torch.ones(1), async_op=True)
    group._end_coalescing().wait()
    alive = []
    for _ in range(5):
        large = torch.ones(100_000)
        dist.all_reduce(large, async_op=True).wait()
        alive.append(weakref.ref(large))
        del large
    gc.collect()
    memory_kept = sum(reference() is not None for reference in alive)
    gc.disable()
    alive.clear()
    before = sum(isinstance(each, Memory) for each in gc.get_objects())
    for turn in range(6):
        sparse = torch.ones(1000, 8).to_sparse(1)
        work = dist.all_reduce(sparse, async_op=turn % 2 == 0)
        if work is not None:
            work.wait()
        alive.append(weakref.ref(sparse))
        del work, sparse
    sparse_kept = sum(reference() is not None for reference in alive)
    sparse_kept += sum(isinstance(each, Memory) for each in gc.get_objects()) - before
    gc.enable()

    limits = []
    group.set_timeout(timedelta(seconds=7))
    limits.append(group._limit.timeout_s)
    _set_pg_timeout(timedelta(seconds=9))
    limits.append(group._limit.timeout_s)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
        dist.barrier()
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG, async_op=True)
        except ValueError:  # averages of booleans are refused
            with torch.profiler.record_function("after"):
                torch.ones(3)
    (after,) = (event for event in profile.events() if event.name == "after")
    profiled = sorted({event.name for event in profile.events() if event.name.startswith("photinus:")})

    waited = dist.AllreduceOptions()
    waited_barrier = dist.BarrierOptions()
    waited.asyncOp = waited_barrier.asyncOp = False
    every_second = torch.ones(4)
    done = [group.allreduce([every_second[::2]], waited), group.barrier(waited_barrier)]

    dist.barrier()
    waits: list[str] = []
    if rank == 0:  # rank 1 never comes to these
        work, other = (dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2))
        future = other.get_future()
        group.abort()
        for pending in (work, other):
            try:
                pending.wait()
            except CollectiveError as error:
                waits.append(type(error).__name__)
        try:
            future.wait()
            future_error = "none"
        except RuntimeError as error:
            future_error = str(error)
        dist.distributed_c10d._get_default_store().set("aborted", "yes")
    else:
        waits, future_error = ["AbortedError"] * 2, "AbortedError"
        dist.distributed_c10d._get_default_store().wait(["aborted"])  # a rank that leaves would be what is told
    return {
        "nested": nested,
        "many": many,
        "dropped_half": tensor.item(),
        "after_wait": after_wait,
        "memory_kept": memory_kept,
        "sparse_kept": sparse_kept,
        "limits": limits,
        "profiled": profiled,
        "inside": after.cpu_parent and after.cpu_parent.name,
        "done": [done, every_second.tolist()],
        "waits": waits,
        "future_error": future_error,
    }


SCRIPT = """
import sys
import torch
import torch.distributed as dist

assert "photinus._native" not in sys.modules, "the engine must not be loaded by import torch"
dist.init_process_group("photinus")
tensor = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
assert tensor.tolist() == [3.0, 3.0, 3.0], tensor
sys.stdout.write(f"backend {dist.get_backend()}\\n")  # one piece: the ranks share the pipe
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))  # without destroy_process_group
dist.destroy_process_group()
"""


def _torchrun(tmp_path: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--log-dir", str(tmp_path / "logs"), str(path)]  # else it leaves a folder in TMPDIR
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120, env=environ)


def test_torchrun_of_a_script_that_never_imports_photinus(tmp_path: Path) -> None:
    run = _torchrun(tmp_path, SCRIPT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("backend photinus") == 2


WAITS_IN_A_THREAD = """
import threading, time
if dist.get_rank() == 0:
    threading.Thread(target=dist.all_reduce, args=[tensor], daemon=True).start()
    time.sleep(0.2)
else:
    sys.stdin.read()  # until the other has ended
"""


@pytest.mark.parametrize("before_the_end", ["", WAITS_IN_A_THREAD], ids=["idle", "a daemon thread waits"])
def test_exit_without_destroy_is_silent_and_keeps_the_exit_code(before_the_end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    made = f'"photinus", init_method="file://{tmp_path}/store", rank=int(sys.argv[2]), world_size=2'
    text = SCRIPT.replace('init_process_group("photinus")', f"init_process_group({made})")
    script.write_text(text.replace("if len(sys.argv)", f"{before_the_end}\nif len(sys.argv)"))
    codes = (0, 7)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(code), str(rank)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, code in enumerate(codes)
    ]
    for rank, code in zip(ranks, codes, strict=True):
        output, errors = rank.communicate(timeout=90)
        assert (rank.returncode, output, errors) == (code, "backend photinus\n", "")


def test_keys_of_a_dead_attempt_in_the_store_do_no_harm(tmp_path: Path) -> None:
    results = run_ranks(
        f"{__name__}:_after_dead_attempts",
        world_size=2,
        timeout_s=90,
        arguments={"folder": str(tmp_path)},
    )
    assert values(results) == [[2.0, 2.0], [2.0, 2.0]]


def _after_dead_attempts(rank: int, world_size: int, folder: str) -> list[float]:
    return [_after_a_dead_attempt(rank, world_size, kind, folder) for kind in ("file", "tcp")]


def _after_a_dead_attempt(rank: int, world_size: int, kind: str, folder: str) -> float:
    import time

    import torch
    import torch.distributed as dist

    if kind == "file":
        store: Any = dist.FileStore(f"{folder}/store", world_size)
    else:
        port = Path(folder, "port")
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
            Path(folder, "new").write_text(str(store.port))
            Path(folder, "new").rename(port)
        else:
            while not port.exists():
                time.sleep(0.01)
            store = dist.TCPStore("127.0.0.1", int(port.read_text()), 2, False)
    # What rank 0 and 1 of an attempt that was killed while it met may have left there.
    left = dist.PrefixStore("default_pg/0//cpu//photinus", store)
    for key, value in {"hello/0": "aa", "hello/1": "bb", "welcome/bb": "aa", "session/aa/1": "{}"}.items():
        left.set(key, value)
    store.add("ready", 1)
    while store.add("ready", 0) < 2:
        time.sleep(0.01)
    dist.init_process_group("photinus", store=store, rank=rank, world_size=world_size)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.barrier()
    dist.destroy_process_group()
    return tensor.item()
