"""Ranks on two hosts (network namespaces) that are stopped, or cut off from each other: suspected aloud, then given up;
or, when it is over in time, gone on with as if nothing had been."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from photinus import engine
from tests.faults.test_engine_kills import Watched, digest
from tests.netns import NetworkHost, network_hosts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SUSPECTED_S = 3.0
ON_AGAIN_S = 5.0
FLAP_S = 10.0
PLACES = (0, 0, 1)  # of each rank, its host
TRAIN = """
import hashlib, os, pathlib, sys, time
import numpy as np
from photinus import engine
rank, address, grace_s, folder = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), pathlib.Path(sys.argv[4])
own, hosts = sys.argv[5], sys.argv[6]
(folder / f"{rank}.new").write_text(f"{os.getpid()} {engine.listen([own])[0]}")
(folder / f"{rank}.new").rename(folder / str(rank))
while not all((folder / str(other)).exists() for other in range(len(hosts))):
    time.sleep(0.01)
told = [(folder / str(other)).read_text().split() for other in range(len(hosts))]
places = [engine.Place(host, f"host-{host}", int(pid), [at]) for host, (pid, at) in zip(hosts, told)]
communicator = engine.Communicator(rank, len(hosts), address, timeout_s=60, grace_s=grace_s, places=places)
weights = np.zeros(20000, np.float32)
for step in range(300):
    began_s = time.monotonic()
    gradients = np.sin(weights + rank + step, dtype=np.float32)
    communicator.all_reduce(gradients, "avg")
    weights -= 0.1 * gradients
    if step == 100:
        print("middle", flush=True)
    if time.monotonic() - began_s > 5:
        print("on again", flush=True)
    time.sleep(0.002)
print(hashlib.sha256(weights.tobytes()).hexdigest(), flush=True)
"""


@contextmanager
def training(hosts: tuple[NetworkHost, ...], folder: Path, grace_s: float) -> Iterator[list[Watched]]:
    """The ranks, in the middle of their training."""
    folder.mkdir()
    common = [engine.new_address(), str(grace_s), folder]
    ranks = [
        Watched(
            hosts[place].command(
                [sys.executable, "-c", TRAIN, str(rank), *common, hosts[place].address, "".join(map(str, PLACES))]
            )
        )
        for rank, place in enumerate(PLACES)
    ]
    try:
        for rank in ranks:
            rank.line(lambda line: line == "middle\n", 30)
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[NetworkHost, ...]]:
    with network_hosts(2) as made:
        for host in made:  # the kernel would give connections up within such a fault; how long is the group's to say
            host.run(["sysctl", "-qw", "net.ipv4.tcp_retries2=6"])
        yield made


@pytest.fixture(scope="module")
def expected(hosts: tuple[NetworkHost, ...], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights after an undisturbed run."""
    with training(hosts, tmp_path_factory.mktemp("undisturbed") / "ranks", grace_s=60) as ranks:
        (found,) = {digest(rank) for rank in ranks}
    return found


Fault = tuple[Callable[[], None], Callable[[], None]]


def fault_of(kind: str, hosts: tuple[NetworkHost, ...], ranks: list[Watched]) -> Fault:
    """What makes the fault, and what ends it."""
    if kind == "stopped":
        pid = ranks[2].process.pid
        return lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT)
    if kind == "cut both ways":
        return hosts[1].cut_off, hosts[1].connect
    return lambda: hosts[0].lose_what_goes_to(hosts[1]), lambda: hosts[0].deliver_to(hosts[1])


KINDS = ("stopped", "cut both ways", "cut one way")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_ends_in_time_is_told_and_changes_no_bit(
    hosts: tuple[NetworkHost, ...], tmp_path: Path, expected: str, kind: str
) -> None:
    with training(hosts, tmp_path / "ranks", grace_s=60) as ranks:
        begin, end = fault_of(kind, hosts, ranks)
        watching = ranks[:2] if kind == "stopped" else ranks
        begun_s = time.monotonic()
        begin()
        try:
            for rank in watching:
                line = rank.line(lambda line: "suspects" in line, SUSPECTED_S + 1)
                assert "all_reduce #" in line
            suspected_s = time.monotonic() - begun_s
            time.sleep(FLAP_S - suspected_s)
        finally:
            end()
            ended_s = time.monotonic()
        for rank in ranks[:2]:
            rank.line(lambda line: line == "on again\n", ON_AGAIN_S + 5)
        again_s = time.monotonic() - ended_s
        print(f"{kind}: suspected after {suspected_s:.2f} s, on again after {again_s:.2f} s")
        assert {digest(rank) for rank in ranks} == {expected}
    assert suspected_s <= SUSPECTED_S
    assert again_s <= ON_AGAIN_S


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_outlasts_the_grace_ends_the_run_and_the_rank_is_named(
    hosts: tuple[NetworkHost, ...], tmp_path: Path, kind: str
) -> None:
    grace_s = 6.0
    with training(hosts, tmp_path / "ranks", grace_s) as ranks:
        begin, end = fault_of(kind, hosts, ranks)
        begun_s = time.monotonic()
        begin()
        try:
            lines, took_s = [], []
            for rank in ranks[:2] if kind == "stopped" else ranks:
                lines.append(rank.line(lambda line: "PeerLostError" in line, grace_s + 10))
                took_s.append(time.monotonic() - begun_s)
            print(f"{kind}: given up after {', '.join(f'{each:.2f}' for each in took_s)} s")
            for number, line in enumerate(lines):
                lost = [other for other in range(3) if PLACES[other] != PLACES[number]]
                named = [f"rank {other} (pid {ranks[other].process.pid} on host-{PLACES[other]})" for other in lost]
                assert any(name in line for name in named), line
                assert ranks[number].process.wait(timeout=20) == 1
            assert grace_s - 1 <= min(took_s)
            assert max(took_s) <= grace_s + 1.5
        finally:
            end()
