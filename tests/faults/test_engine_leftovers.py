"""After kills at any moment nothing of the engine is left: no process, shared memory, socket or file."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from photinus import engine

JOBS = 50
SCRIPT = """
import sys
import numpy as np
from photinus import engine
# A rank that is killed before the meeting is missed at its deadline only.
communicator = engine.Communicator(int(sys.argv[1]), 2, sys.argv[2], timeout_s=2)
shared = np.frombuffer(engine.allocate(4 << 20), np.float32)
ordinary = np.ones(1 << 18, np.float32)
while True:
    communicator.all_reduce(shared)
    communicator.all_reduce(ordinary)
"""


@pytest.mark.slow
def test_fifty_jobs_killed_at_any_moment_leave_nothing(tmp_path: Path) -> None:
    chance = random.Random(5)
    shared_before = set(os.listdir("/dev/shm"))
    for job in range(JOBS):
        address = engine.new_address()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, str(rank), address],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "TMPDIR": str(tmp_path)},
            )
            for rank in range(2)
        ]
        time.sleep(0.02 + 0.012 * job)  # from before the imports to long after the first collectives
        victims = [ranks[chance.randrange(2)]] if job % 3 else ranks
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        for rank in ranks:
            _, stderr = rank.communicate(timeout=60)
            if rank not in victims:
                assert rank.returncode == 1, f"a survivor died of {rank.returncode}:\n{stderr}"
                assert "Error" in stderr
        assert f"photinus-{address.split(':')[1]}" not in Path("/proc/net/unix").read_text()
    assert list(tmp_path.iterdir()) == []
    assert {name for name in set(os.listdir("/dev/shm")) - shared_before if "photinus" in name} == set()
