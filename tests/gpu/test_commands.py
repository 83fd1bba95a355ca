"""What users type on a machine with one GPU: run, doctor, bench; and what they see when a rank dies there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import REPOSITORY
from tests.gpu.device import HAS_GPU, NAME, TIMEOUT_S

needs_gpu = pytest.mark.needs_gpu
_CLEAN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PHOTINUS_RANKS_PER_GPU")
SHARED = ("--ranks-per-gpu", "2") if HAS_GPU else ()
"""Two workers on the one GPU; CPU tensors need no leave."""

SCRIPT = """
import os, signal, sys
import torch
import photinus

device, backend, act = sys.argv[1:4]
with photinus.init(backend=backend, device=device) as world:
    plain = torch.nn.Linear(64, 64)
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=1e-3))
    for step in range(40):
        model(torch.ones(8, 64, device=world.device)).square().mean().backward()
        if step == 20 and world.rank == 1 and act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 20 and world.rank == 1 and act == "memory":
            torch.empty(1 << 44, dtype=torch.uint8, device=world.device)
        optimizer.step()
        optimizer.zero_grad()
    if world.rank == 0:
        print("done:", world.device, world.backend, world.world_size)
"""


def photinus(*words: str, timeout_s: float = TIMEOUT_S, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in _CLEAN}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "photinus", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**inherited, **environ},
    )


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_two_workers_share_the_gpu_on_purpose(script: str) -> None:
    ran = photinus("run", *SHARED, "--nproc-per-node", "2", script, NAME, "gloo" if NAME == "cpu" else "auto", "")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"done: {NAME}" in ran.stdout
    assert f"{'photinus' if HAS_GPU else 'gloo'} 2" in ran.stdout


@needs_gpu("photinus run --nproc-per-node 2 would be refused: there is one GPU")
def test_two_workers_on_one_gpu_are_refused_by_the_launcher(script: str) -> None:
    ran = photinus("run", "--nproc-per-node", "2", script, "cuda", "auto", "", CUDA_VISIBLE_DEVICES="0")
    assert ran.returncode != 0
    assert "each worker needs its own" in ran.stderr
    assert "--ranks-per-gpu 2" in ran.stderr


@needs_gpu("two ranks on one GPU over nccl would be refused in our words, before nccl's")
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_nccl_with_two_ranks_on_one_gpu_is_refused_in_words(script: str, device: str) -> None:
    ran = photinus("run", "--max-restarts", "0", *SHARED, "--nproc-per-node", "2", script, device, "nccl", "")
    said = ran.stdout + ran.stderr
    assert ran.returncode != 0
    assert "nccl takes one rank per GPU" in said
    assert "Duplicate GPU" not in said


def test_a_rank_killed_in_mid_step_is_named(script: str) -> None:
    backend = "gloo" if NAME == "cpu" else "auto"
    ran = photinus("run", "--max-restarts", "0", *SHARED, "--nproc-per-node", "2", script, NAME, backend, "kill")
    assert ran.returncode == 137
    assert "rank 1 (pid" in ran.stderr
    assert "was killed by SIGKILL" in ran.stderr
    if HAS_GPU:
        assert "GPU 0" in ran.stderr


def test_a_rank_without_memory_is_named_with_its_gpu(script: str) -> None:
    backend = "gloo" if NAME == "cpu" else "auto"
    ran = photinus("run", "--max-restarts", "0", *SHARED, "--nproc-per-node", "2", script, NAME, backend, "memory")
    assert ran.returncode == 1
    assert "rank 1 (pid" in ran.stderr
    if HAS_GPU:
        assert "raised OutOfMemoryError: CUDA out of memory" in ran.stderr
        assert "GPU 0" in ran.stderr
    else:
        assert "rank 1" in ran.stderr.split("raised", 1)[0].splitlines()[-1]


def test_doctor_lists_the_gpus(record_property: Any) -> None:
    ran = photinus("doctor", "--json", timeout_s=2 * TIMEOUT_S)
    findings = json.loads(ran.stdout)
    gpus = [f for f in findings["findings"] if f["section"] == "GPUs"] if isinstance(findings, dict) else findings
    record_property("GPUs", "; ".join(f"{f['name']}: {f['value']}" for f in gpus if isinstance(f, dict))[:300])
    if HAS_GPU:
        assert any(f["name"] == "GPU 0" and "GiB" in f["value"] for f in gpus)


def test_bench_measures_tensors_on_the_gpu(script: str, tmp_path: Path, record_property: Any) -> None:
    words = ["bench", "--device", NAME, "--nproc-per-node", "2", "--sizes", "64K,4M", "--seconds", "0.1"]
    ran = photinus(*words, "--json", timeout_s=2 * TIMEOUT_S, XDG_CACHE_HOME=str(tmp_path))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads(ran.stdout)
    record_property("seconds", {r["bytes"]: r["seconds"] for r in told["results"]})
    assert all(result["seconds"]["gloo"] > 0 for result in told["results"])
    if HAS_GPU:
        assert "nccl" not in told["results"][0]["seconds"], "two ranks on one GPU"
        assert told["kept"].startswith("Saved in ")
        words = ["run", *SHARED, "--nproc-per-node", "2", script, NAME, "auto", ""]
        ran = photinus(*words, XDG_CACHE_HOME=str(tmp_path))
        assert "as `photinus bench --device cuda` measured here" in ran.stdout, ran.stdout + ran.stderr
        assert f"done: cuda:0 {told['choose']} 2" in ran.stdout
