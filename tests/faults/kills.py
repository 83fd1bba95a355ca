"""Kills ranks at random moments and says how the survivors took it; run by test_engine_kills.

    python -m tests.faults.kills KILLS SEED WORLD_SIZE...

One JSON line for each kill. Ranks are forked from this process, which has imported everything and met nobody, so that
starting them costs milliseconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import select
import signal
import sys
import time
import traceback
from typing import Any

import numpy as np

from photinus import engine

LARGEST_ELEMS = 300_000
READY = b"ready\n"
_PR_SET_PDEATHSIG = 1


def rank_main(rank: int, world_size: int, address: str, seed: int, reports: int) -> None:
    """Calls (most of them all_reduce) of random sizes and places, the same on all ranks, until one fails."""
    communicator = engine.Communicator(rank, world_size, address, timeout_s=30)
    chance = random.Random(seed)
    shared = [np.frombuffer(engine.allocate(4 * LARGEST_ELEMS), np.float32) for _ in range(4)]
    ordinary = [np.ones(LARGEST_ELEMS, np.float32) for _ in range(4)]
    communicator.barrier()
    os.write(reports, READY)
    report: dict[str, Any] = {"rank": rank}
    try:
        while True:
            elems = chance.choice([1, 100, 5000, chance.randrange(1, LARGEST_ELEMS)])
            arrays = [array[:elems] for array in chance.choice([shared, ordinary])]
            way = chance.choice(["waits", "waits", "later", "later", "ring", "others"])
            if way == "waits":
                communicator.all_reduce(arrays[0], "avg")
                continue
            if way == "later":
                works = [communicator.all_reduce(array, "max", asynchronous=True) for array in arrays]
            elif way == "ring":
                works = [communicator.send(arrays[0], (rank + 1) % world_size, asynchronous=True)]
                works += [communicator.recv(arrays[1], (rank - 1) % world_size, asynchronous=True)]
            else:
                root = chance.randrange(world_size)
                works = [communicator.broadcast(arrays[0], root, asynchronous=True)]
                works += [communicator.reduce(arrays[1], root, "max", asynchronous=True)]
            for work in works:
                work.wait()
    except Exception as error:  # noqa: BLE001 - it is the result
        report.update(raised_ns=time.monotonic_ns(), kind=type(error).__name__, message=str(error))
    communicator.close()
    os.write(reports, json.dumps(report).encode() + b"\n")


def fork_rank(*arguments: Any) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            rank_main(*arguments)
            code = 0
    except BaseException:  # noqa: BLE001 - shown, and the exit code tells
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def read_lines(pipe: int, wanted: int, timeout_s: float) -> list[bytes]:
    deadline, text = time.monotonic() + timeout_s, b""
    while text.count(b"\n") < wanted:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            break
        text += os.read(pipe, 1 << 16)
    return text.splitlines()


def kill_one(world_size: int, chance: random.Random) -> dict[str, Any]:
    reading, writing = os.pipe()
    address, seed = engine.new_address(), chance.randrange(1 << 30)
    pids = [fork_rank(rank, world_size, address, seed, writing) for rank in range(world_size)]
    try:
        ready = len(read_lines(reading, world_size, 30))
        time.sleep(chance.random() * 0.08)
        victim = chance.randrange(world_size)
        killed_ns = time.monotonic_ns()
        os.kill(pids[victim], signal.SIGKILL)
        reports = [json.loads(line) for line in read_lines(reading, world_size - 1, 20)]
        codes = []
        for pid in pids:
            deadline = time.monotonic() + 5
            while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.001)
            codes.append(os.waitstatus_to_exitcode(ended[1]) if ended[0] else None)
        pids = [pid for pid, code in zip(pids, codes, strict=True) if code is None]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)
    return {
        "world_size": world_size,
        "ready": ready,
        "victim": victim,
        "killed_ns": killed_ns,
        "codes": codes,
        "reports": reports,
    }


def main(kills: str, seed: str, *world_sizes: str) -> None:
    chance = random.Random(int(seed))
    for number in range(int(kills)):
        print(json.dumps(kill_one(int(world_sizes[number % len(world_sizes)]), chance)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
