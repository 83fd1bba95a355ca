"""Ranks that are killed or stopped at random moments: the others learn of it quickly and say who it was."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import pytest

from photinus import engine
from tests.fork_server import REPOSITORY

# What is promised on a quiet machine is a tenth of it; the figures are printed.
LONGEST_S = 1.0


def kill_many(kills: int, layouts: tuple[str, ...], timeout_s: float) -> None:
    command = [sys.executable, "-m", "tests.faults.kills", str(kills), "11", *layouts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=REPOSITORY)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == kills
    delays_s: list[float] = []
    for number, run in enumerate(runs):
        shown = f"kill {number}: {json.dumps(run, indent=1)}\n{done.stderr}"
        victim, hosts, world_size = run["victim"], run["hosts"], len(run["hosts"])
        # Only another rank of its host sees a rank's process.
        went = "was killed by SIGKILL" if hosts.count(hosts[victim]) > 1 else "closed its connections without a goodbye"
        assert run["ready"] == world_size, shown
        assert run["codes"] == [-signal.SIGKILL if r == victim else 0 for r in range(world_size)], shown
        assert sorted(report["rank"] for report in run["reports"]) == [r for r in range(world_size) if r != victim], (
            shown
        )
        for report in run["reports"]:
            assert report["kind"] == "PeerLostError", shown
            assert re.match(rf"rank {victim} \(pid \d+ on .*\) {went}", report["message"]), shown
            delays_s.append((report["raised_ns"] - run["killed_ns"]) / 1e9)
    delays_s.sort()
    p50, p99 = delays_s[len(delays_s) // 2], delays_s[min(len(delays_s) - 1, len(delays_s) * 99 // 100)]
    print(
        f"{kills} kills, kill to error: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, max {delays_s[-1] * 1e3:.1f} ms"
    )
    assert p99 <= LONGEST_S


@pytest.mark.timeout(120)
def test_survivors_of_a_dozen_kills_name_the_killed_rank_within_a_second() -> None:
    kill_many(12, ("aa", "aaa", "aaaa"), timeout_s=100)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_survivors_of_two_hundred_kills_name_the_killed_rank_within_a_second() -> None:
    kill_many(200, ("aa", "aaaa", "aaaaaaaa"), timeout_s=580)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_survivors_of_two_hundred_kills_over_several_hosts_name_the_killed_rank_within_a_second() -> None:
    kill_many(200, ("aabb", "abcd", "aaab"), timeout_s=580)


TRAIN = """
import hashlib, sys, time
import numpy as np
from photinus import engine
rank, address, grace_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
communicator = engine.Communicator(rank, 3, address, timeout_s=60, grace_s=grace_s)
weights = np.zeros(20000, np.float32)
for step in range(300):
    gradients = np.sin(weights + rank + step, dtype=np.float32)
    communicator.all_reduce(gradients, "avg")
    weights -= 0.1 * gradients
    if step == 100:
        print("middle", flush=True)
    time.sleep(0.002)
print(hashlib.sha256(weights.tobytes()).hexdigest(), flush=True)
"""


class Watched:
    """A rank as a process; its lines of standard output and error can be waited for."""

    def __init__(self, command: Sequence[str]) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.seen: list[str] = []
        self._lines: queue.Queue[str] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(stream,)) for stream in (self.process.stdout, self.process.stderr)
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self.seen.append(line)
            self._lines.put(line)

    def line(self, wanted: Callable[[str], Any], timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no such line within {timeout_s} s; there were:\n{''.join(self.seen)}") from None
            if wanted(line):
                return line

    def end(self) -> None:
        self.process.kill()  # also ends one that is stopped
        self.process.wait()
        for thread in self._threads:
            thread.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextmanager
def training(grace_s: float) -> Iterator[list[Watched]]:
    address = engine.new_address()
    ranks = [Watched([sys.executable, "-c", TRAIN, str(rank), address, str(grace_s)]) for rank in range(3)]
    try:
        for rank in ranks:
            rank.line(lambda line: line == "middle\n", 30)
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def digest(rank: Watched) -> str:
    found = rank.line(re.compile("[0-9a-f]{64}$").match, 30)
    assert rank.process.wait(timeout=20) == 0, "".join(rank.seen)
    return found


@pytest.mark.timeout(120)
def test_a_stopped_rank_is_suspected_aloud_and_when_continued_the_run_ends_with_the_same_bits() -> None:
    with training(grace_s=60) as undisturbed:
        expected = {digest(rank) for rank in undisturbed}
    with training(grace_s=60) as ranks:
        os.kill(ranks[1].process.pid, signal.SIGSTOP)
        for other in (ranks[0], ranks[2]):
            line = other.line(lambda line: "suspects" in line, 3.0)
            assert f"rank 1 (pid {ranks[1].process.pid}" in line
            assert "all_reduce #" in line
        os.kill(ranks[1].process.pid, signal.SIGCONT)
        assert {digest(rank) for rank in ranks} == expected
        assert len(expected) == 1


@pytest.mark.timeout(60)
def test_a_rank_stopped_longer_than_the_grace_is_given_up_by_name() -> None:
    grace_s = 2.0
    with training(grace_s) as ranks:
        stopped_s = time.monotonic()
        os.kill(ranks[1].process.pid, signal.SIGSTOP)
        for other in (ranks[0], ranks[2]):
            line = other.line(lambda line: "PeerLostError" in line, 20)
            took_s = time.monotonic() - stopped_s
            assert f"rank 1 (pid {ranks[1].process.pid}" in line
            assert "stopped" in line
            assert took_s <= grace_s + 1.5, f"{took_s:.2f} s: {line}"
            assert other.process.wait(timeout=20) == 1
