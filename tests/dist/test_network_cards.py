"""Ranks of several hosts whose hosts have several network cards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.test_run import script
from tests.netns import NetworkHost, network_hosts

pytestmark = pytest.mark.slow
MIB = 1 << 20
SUM = """
import photinus, torch, torch.distributed as dist
with photinus.init(backend="photinus", timeout_s=40):
    for _ in range(4):
        total = torch.ones(2 << 20)
        dist.all_reduce(total)
        assert (total == 2).all()
    dist.barrier()
"""


def run_on(
    hosts: tuple[NetworkHost, ...], path: Path, cards: tuple[str, ...]
) -> list[subprocess.CompletedProcess[str]]:
    """Exit code and output of one rank on each host, with the cards that PHOTINUS_INTERFACE is to name there."""
    started = []
    for rank, (host, names) in enumerate(zip(hosts, cards, strict=True)):
        place = {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "PHOTINUS_HOST_ID": host.name}
        environ = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PHOTINUS_INTERFACE": names}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(host.start([sys.executable, str(path)], env=environ, **output))
    try:
        said = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, out) for process, out in zip(started, said, strict=True)]


def test_frames_of_a_collective_take_turns_on_two_cards(tmp_path):
    with network_hosts(2, cards=2) as hosts:
        ended = run_on(hosts, script(tmp_path, SUM), ("eth0,eth1", "eth0,eth1"))
        assert [code for code, _ in ended] == [0, 0], ended
        assert "eth0, eth1" in ended[0][1]
        sent = [int(hosts[0].run(["cat", f"/sys/class/net/eth{card}/statistics/tx_bytes"])) for card in range(2)]
    assert sum(sent) > 32 * MIB
    assert min(sent) > 0.45 * sum(sent)


def test_hosts_with_other_numbers_of_cards_are_refused_on_all_ranks(tmp_path):
    with network_hosts(2, cards=2) as hosts:
        ended = run_on(hosts, script(tmp_path, SUM), ("eth0,eth1", "eth0"))
    for code, said in ended:
        assert code == 1
        assert "host-0 has 2 network cards for this job (eth0, eth1) and host-1 has 1 (eth0)" in said
