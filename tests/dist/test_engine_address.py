"""One printable address brings ranks of several hosts together, without torch and without a store."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

import pytest

RANK = """
import sys
import time
import numpy
from photinus import engine
assert "torch" not in sys.modules
rank, world_size, timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
if rank == 0:
    address = engine.new_address(engine.listen(["127.0.0.1"]))
    print(address, flush=True)
    time.sleep(float(sys.argv[4]) if len(sys.argv) > 4 else 0)
else:
    address = sys.argv[4]
with engine.Communicator(rank, world_size, address, timeout_s=timeout_s) as group:
    array = numpy.full(1000, rank + 1.0, dtype=numpy.float32)
    group.all_reduce(array)
    with engine.Communicator(rank, world_size, address, timeout_s=timeout_s, name="again") as again:
        again.all_reduce(array)
    print(int(array[0]), group.about_hosts, flush=True)
"""


def start(rank: int, world_size: int, host: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), str(world_size), *words],
        env={**os.environ, "PHOTINUS_HOST_ID": host},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def outcomes(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        told = [process.communicate(timeout=30) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *each) for process, each in zip(processes, told, strict=True)]


@pytest.mark.parametrize("hosts", ["abab", "abc", "aa"])
def test_ranks_of_several_hosts_meet_by_an_address_alone(hosts: str) -> None:
    first = start(0, len(hosts), hosts[0], "20")
    address = address_of(first)
    others = [start(rank, len(hosts), host, "20", address) for rank, host in enumerate(hosts) if rank > 0]
    total = len(hosts) * (len(hosts) + 1) // 2 * len(hosts)
    for code, out, err in outcomes([first, *others]):
        assert (code, int(out.split()[0])) == (0, total), err
        told = " between them" in out or "too little came" in out  # on a busy machine
        assert told == ("levels" in out) == (len(set(hosts)) > 1)


@pytest.mark.parametrize("late_s", ["0", "1.5"])
def test_a_rank_that_does_not_come_is_named_on_all_that_have_whoever_came_first(late_s: str) -> None:
    first = start(0, 3, "a", "1.5", late_s)
    other = start(1, 3, "b", "1.5", address_of(first))
    for code, _, err in outcomes([first, other]):
        assert code == 1
        assert re.search(r"CollectiveTimeoutError: of 3 ranks, 1 have not come to rank 0 in 1\.\d s: 2\n", err), err


def test_a_process_with_another_secret_is_let_in_nowhere() -> None:
    first = start(0, 2, "a", "2")
    address = address_of(first)
    name, _, at = address.partition("@")
    wrong = f"{name[:-4]}{'0' * 4 if name[-4:] != '0' * 4 else '1' * 4}@{at}"
    (code, _, err), (other_code, _, other_err) = outcomes([first, start(1, 2, "b", "2", wrong)])
    assert (code, other_code) == (1, 1)
    assert "1 have not come to rank 0 in 2.0 s: 1" in err
    assert "Error: " in other_err
