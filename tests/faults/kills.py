"""Kills ranks at random moments and says how the survivors took it; run by test_engine_kills.

    python -m tests.faults.kills KILLS SEED HOSTS...

One JSON line for each kill. HOSTS has a letter for each rank, equal for those of one host, as in aaa or aabb; they take
turns. Ranks are forked from this process, which has imported everything and met nobody, so that starting them costs
milliseconds. Each has a child, as a data loader's worker is one, which outlives it for half a second.
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


def join(rank: int, hosts: str, address: str) -> engine.Communicator:
    """The group; where there are several hosts, its ranks tell each other in another one where they listen."""
    if len(set(hosts)) == 1:
        return engine.Communicator(rank, len(hosts), address, timeout_s=30)
    where = np.zeros(64, np.uint8)
    text = f"{os.getpid()} {engine.listen(['127.0.0.1'])[0]}".encode()
    where[: len(text)] = list(text)
    of_all = np.zeros(64 * len(hosts), np.uint8)
    with engine.Communicator(rank, len(hosts), address, timeout_s=30) as meeting:
        meeting.all_gather(of_all, where)
    told = [bytes(row).rstrip(b"\0").decode().split() for row in of_all.reshape(len(hosts), 64)]
    places = [engine.Place(host, f"host-{host}", int(pid), [at]) for host, (pid, at) in zip(hosts, told, strict=True)]
    return engine.Communicator(rank, len(hosts), address, timeout_s=30, places=places)


def fork_loader() -> None:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.05)
        time.sleep(0.5)
        os._exit(0)


def rank_main(rank: int, hosts: str, address: str, seed: int, reports: int) -> None:
    """Calls (most of them all_reduce) of random sizes and places, the same on all ranks, until one fails."""
    world_size = len(hosts)
    communicator = join(rank, hosts, address)
    fork_loader()
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


def kill_one(hosts: str, chance: random.Random) -> dict[str, Any]:
    world_size = len(hosts)
    reading, writing = os.pipe()
    address, seed = engine.new_address(), chance.randrange(1 << 30)
    pids = [fork_rank(rank, hosts, address, seed, writing) for rank in range(world_size)]
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
        "hosts": hosts,
        "ready": ready,
        "victim": victim,
        "killed_ns": killed_ns,
        "codes": codes,
        "reports": reports,
    }


def main(kills: str, seed: str, *layouts: str) -> None:
    chance = random.Random(int(seed))
    for number in range(int(kills)):
        print(json.dumps(kill_one(layouts[number % len(layouts)], chance)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
