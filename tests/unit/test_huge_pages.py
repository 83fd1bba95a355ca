"""Huge pages for torch's CPU tensors, in processes of their own: torch reads its switch once in each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.process_memory import huge_pages, use_huge_pages

SCRIPT = """
import sys
import torch, photinus
import torch.distributed as dist

how = sys.argv[1]
if how == "late":
    torch.ones(1)
if how == "group":
    dist.init_process_group("photinus", store=dist.HashStore(), rank=0, world_size=1)
elif how != "worker":
    photinus.init()
torch.manual_seed(0)
model = torch.nn.Linear(2048, 2048)  # 16 MiB
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(512, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
with open("/proc/self/smaps") as file:
    huge = sum(int(line.split()[1]) for line in file if line.startswith("AnonHugePages"))
print(huge >> 10, model.weight.sum(dtype=torch.float64).item().hex())
"""
MODEL_MIB = 16
GLIBC = tuple(map(int, (os.confstr("CS_GNU_LIBC_VERSION") or "glibc 0").split()[1].split(".")))


def run(folder: Path, how: str, *launcher: str, **environ: str) -> tuple[int, str, str]:
    """MiB on huge pages, the digest of the trained weights, and what was printed on standard error."""
    script = folder / "steps.py"
    script.write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"} | environ
    command = [sys.executable, *launcher, str(script), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env=clean)
    assert ended.returncode == 0, ended.stderr
    mib, digest = ended.stdout.split()[-2:]
    return int(mib), digest, ended.stderr


LAUNCHER = ("-m", "photinus", "run", "--cpu", "--nproc-per-node", "1")


@pytest.mark.skipif(huge_pages() != "madvise", reason="this kernel gives huge pages never, or to all programs")
@pytest.mark.seconds
def test_large_tensors_lie_on_huge_pages_with_the_same_bits(tmp_path: Path) -> None:
    without, bits, _ = run(tmp_path, "init", THP_MEM_ALLOC_ENABLE="0")  # the user's own value
    assert without == 0
    for how, launcher in (("init", ()), ("group", ()), ("worker", LAUNCHER)):
        mib, same, _ = run(tmp_path, how, *launcher)
        assert mib > MODEL_MIB, how
        assert same == bits, how
    assert run(tmp_path, "worker", *LAUNCHER, THP_MEM_ALLOC_ENABLE="0")[0] == 0


@pytest.mark.skipif(huge_pages() != "madvise", reason="this kernel gives huge pages never, or to all programs")
@pytest.mark.skipif(GLIBC < (2, 35), reason="needs glibc 2.35")
@pytest.mark.seconds
def test_smaller_tensors_of_a_worker_lie_on_huge_pages_unless_the_user_set_mallocs_options(tmp_path: Path) -> None:
    mib, bits, _ = run(tmp_path, "worker", *LAUNCHER)
    without, same, _ = run(tmp_path, "worker", *LAUNCHER, GLIBC_TUNABLES="glibc.malloc.hugetlb=0")
    assert mib > without + MODEL_MIB
    assert same == bits


@pytest.mark.skipif(huge_pages() != "madvise", reason="this kernel gives huge pages never, or to all programs")
@pytest.mark.seconds
def test_a_process_that_allocated_before_init_gets_none_and_no_message(tmp_path: Path) -> None:
    mib, _, printed = run(tmp_path, "late")
    assert mib == 0
    assert "huge" not in printed.lower()
    assert "thp" not in printed.lower()


@pytest.mark.parametrize(("setting", "set_to"), [("always", "1"), ("madvise", "1"), ("never", None), ("", None)])
def test_the_switch_is_set_where_the_kernel_gives_huge_pages(
    setting: str, set_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photinus.process_memory.huge_pages", lambda: setting)
    environ: dict[str, str] = {}
    use_huge_pages(environ)
    assert environ.get("THP_MEM_ALLOC_ENABLE") == set_to
    of_user = {"THP_MEM_ALLOC_ENABLE": "0"}
    use_huge_pages(of_user)
    assert of_user == {"THP_MEM_ALLOC_ENABLE": "0"}


def test_the_kernels_setting_is_read(tmp_path: Path) -> None:
    file = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    assert huge_pages(tmp_path) == ""
    file.parent.mkdir(parents=True)
    file.write_text("always [madvise] never\n")
    assert huge_pages(tmp_path) == "madvise"
