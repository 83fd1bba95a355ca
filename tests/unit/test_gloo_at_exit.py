"""A script that ends right behind a collective of torch's gloo ends well."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from photinus import backend
from tests.dist.test_run import run_job, script

_SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(10):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    dist.barrier()
    dist.all_reduce(torch.zeros(5000))
dist.destroy_process_group()
"""


def test_the_end_waits_until_no_thread_of_gloos_has_anything_to_do(monkeypatch):
    looks = iter([{"R"}, {"S"}, {"S", "R"}, {"S"}, {"D"}, {"S"}, {"S"}, {"R"}])
    monkeypatch.setattr(backend, "_gloo_states", lambda: next(looks))
    backend._let_gloo_finish()
    assert next(looks) == {"R"}


def test_a_thread_that_never_rests_is_waited_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(backend, "_gloo_states", lambda: {"R"})
    began_s = time.monotonic()
    backend._let_gloo_finish(0.05)
    assert time.monotonic() - began_s < 5


def test_gloos_threads_are_known_by_their_names():
    # A thread gives itself its name when it first runs, which on a busy machine comes after the group is there.
    program = """
import time, torch, torch.distributed as dist
from photinus.backend import _gloo_states
assert _gloo_states() == set()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.zeros(1))
deadline_s = time.monotonic() + 30
while not _gloo_states():
    assert time.monotonic() < deadline_s, "gloo's threads have other names"
    time.sleep(0.01)
assert _gloo_states() <= {"S", "R", "D"}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_scripts_that_end_behind_a_collective_end_well(tmp_path):
    path = script(tmp_path, _SCRIPT)
    for _ in range(10):  # half of them failed
        ended = run_job("--nproc-per-node", "2", "--max-restarts", "0", path)
        assert ended.code == 0, ended.err
