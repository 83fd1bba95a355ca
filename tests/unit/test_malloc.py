"""What the heap keeps between steps, in processes of their own: the setting is a process's for good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_forked

CODE = """
import resource, sys, torch
from photinus import process_memory as process

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    gradients = [torch.ones(128 << 18 >> shift) for _ in range(1 << shift)]   # 128 MiB in all
    del gradients
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def wrap_in_torchs_ddp():
    import torch.distributed as dist
    dist.init_process_group("photinus", store=dist.HashStore(), rank=0, world_size=1)
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4096, 4096, bias=False))  # 64 MiB
    return process.reuse_memory.cache_info().currsize == 1 and process.reuse_memory()

shift = int(sys.argv[2])
kept = {"leave": bool, "keep": process.reuse_memory, "ddp": wrap_in_torchs_ddp}[sys.argv[1]]()
for _ in range(3):
    faults()
print(kept, min(faults() for _ in range(3)))
"""
PAGES = (128 << 20) // os.sysconf("SC_PAGESIZE")


def steps(folder: Path, how: str, pieces: int = 6, **environ: str) -> tuple[bool, int]:
    """Return whether the memory is kept, and how many new pages a step of 2 ** pieces tensors touches."""
    script = folder / "steps.py"
    script.write_text(CODE)
    clean = {name: "" for name in os.environ if name.startswith("MALLOC_")} | environ
    if how == "leave":  # malloc itself reads its variables, when a process starts
        command = [sys.executable, str(script), how, str(pieces)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **clean})
    else:
        ended = run_forked(script, how, str(pieces), environ=clean)
    assert ended.returncode == 0, ended.stderr
    kept, count = ended.stdout.split()
    return kept == "True", int(count)


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc"
)
@pytest.mark.seconds
def test_pages_that_a_step_has_freed_are_the_next_steps(tmp_path: Path) -> None:
    kept, count = steps(tmp_path, "keep")
    assert kept
    assert count < PAGES / 20
    # By itself malloc gives the pages back or not, as something small happens to lie above them or not: it is told to.
    _, without = steps(tmp_path, "leave", MALLOC_MMAP_THRESHOLD_=str(1 << 20))
    assert without > PAGES / 2  # else the test shows nothing


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc"
)
@pytest.mark.seconds
def test_the_backend_keeps_them_for_torchs_ddp_too(tmp_path: Path) -> None:
    kept, count = steps(tmp_path, "ddp")
    assert kept
    assert count < PAGES / 20


@pytest.mark.skipif(
    not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc"
)
@pytest.mark.seconds
def test_the_next_step_reuses_the_pages_of_large_tensors_too(tmp_path: Path) -> None:
    asks = "import ctypes; print(ctypes.CDLL(None).mallopt(-3, 1 << 30))"
    if subprocess.run([sys.executable, "-c", asks], capture_output=True, timeout=60).stdout.strip() == b"0":
        pytest.skip("this glibc maps each tensor above 32 MiB")
    kept, count = steps(tmp_path, "keep", pieces=1)  # 64 MiB each
    assert kept
    assert count < PAGES / 20


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
@pytest.mark.seconds
def test_a_users_own_setting_stands(name: str, tmp_path: Path) -> None:
    kept, _ = steps(tmp_path, "keep", **{name: "100000"})
    assert not kept
