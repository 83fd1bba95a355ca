"""The runner of PyTorch's suite: it sees faults, ends what hangs, and its disguises are what they say."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.conformance import baseline, cuda_on_cpu, faulty
from tests.conformance.apart import measure
from tests.conformance.disguise import TwoNames
from tests.conformance.plan import Plan

FAULTY = Plan("gloo", 2, ddp="tests.conformance.faulty:DistributedDataParallel")
HANGING = "test_accumulate_gradients_no_sync"
WRONG = "test_DistributedDataParallelCPU"


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the faulty class notes pids; the folder "files" beside it holds all temporary files of the test."""
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "files"))
    monkeypatch.setenv(faulty.PIDS, str(tmp_path / "pids"))
    return tmp_path / "pids"


def assert_nothing_is_left(pids: Path) -> None:
    noted = [int(pid) for pid in pids.read_text().split()]
    assert len(noted) == 4
    assert [pid for pid in noted if is_running(pid)] == []
    assert list((pids.parent / "files").iterdir()) == []


@pytest.mark.timeout(90)
def test_a_wrong_ddp_fails_and_a_hanging_one_is_ended_with_all_that_it_started(pids: Path) -> None:
    outcomes = measure(FAULTY, [HANGING, WRONG, "test_all_gather_cuda"], timeout_s=4, deadline_s=75)
    assert outcomes[WRONG]["status"] == "fail"
    assert outcomes[WRONG]["ddp"]
    assert "rank 1, exit code" in outcomes[WRONG]["why"]
    assert outcomes["test_all_gather_cuda"]["status"] == "skip"
    assert outcomes[HANGING]["status"] == "timeout"
    assert_nothing_is_left(pids)


def is_running(pid: int) -> bool:
    """Whether the process is there and has not ended; one that waits for its parent to look has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(90)
def test_a_run_past_its_deadline_is_ended_and_says_so(pids: Path) -> None:
    with pytest.raises(AssertionError, match=r"gloo, .* 2 ranks: not over after 1 s"):
        measure(FAULTY, [HANGING], timeout_s=60, deadline_s=1)
    assert list((pids.parent / "files").iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_ranks_end_with_a_runner_that_is_killed(pids: Path) -> None:
    with pytest.raises(AssertionError, match="not over"):
        measure(FAULTY, [HANGING], timeout_s=60, deadline_s=25)
    ranks = [int(line.split()[0]) for line in pids.read_text().splitlines()]
    started = [int(line.split()[1]) for line in pids.read_text().splitlines()]
    for pid in started:  # by their own: nobody was left to end them
        os.kill(pid, signal.SIGKILL)
    assert len(ranks) == 2
    deadline = time.monotonic() + 10  # the kernel ends them; nobody waits for them
    while any(is_running(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in ranks if is_running(pid)] == []
    assert list((pids.parent / "files").iterdir()) == []


def test_a_name_with_two_faces_is_found_under_both_and_stays_itself() -> None:
    name = TwoNames("photinus", "gloo")
    assert name == "gloo"
    assert name == "photinus"
    assert (name != "gloo") is False
    assert name in {"nccl", "gloo"}
    assert name not in {"nccl", "mpi"}
    assert name != "mpi"
    assert str.upper(name) == "PHOTINUS"


@pytest.mark.parametrize("device", [0, "1", "cuda", "cuda:1", torch.device("cuda", 1)])
def test_what_means_cuda_becomes_the_cpu(device: object) -> None:
    assert cuda_on_cpu.means_cuda(device)
    with cuda_on_cpu.OnCpu():
        assert torch.ones(2, device=device).device.type == "cpu"  # type: ignore[call-overload]
        assert torch.ones(2).to(device).device.type == "cpu"  # type: ignore[call-overload]


@pytest.mark.parametrize("device", [None, True, "cpu", "meta", torch.device("cpu"), 1.0])
def test_other_devices_stay(device: object) -> None:
    assert not cuda_on_cpu.means_cuda(device)


def test_a_baseline_of_another_torch_says_so_and_how_to_make_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert baseline.version() in torch.__version__
    other = tmp_path / "baseline.json"
    other.write_text('{"torch": "1.0.0"}')
    monkeypatch.setattr(baseline, "FILE", other)
    said = baseline.unknown_because()
    assert said is not None
    assert "torch 1.0.0" in said
    assert torch.__version__.partition("+")[0] in said
    assert "python -m tests.conformance.baseline" in said


def test_outcomes_are_condensed_by_status_and_reason() -> None:
    def ended(status: str, why: str = "", ddp: bool = False) -> dict[str, object]:
        return {"status": status, "why": why, "ddp": ddp, "seconds": 1.0, "group": True}

    output = "exit codes by rank: [10, 0]\n----- rank 0:\nTraceback\nValueError: only gloo\nmore"
    outcomes = {
        "b": ended("pass"),
        "a": ended("pass", ddp=True),
        "c": ended("skip", "CUDA is not available."),
        "d": ended("fail", output),
        "e": ended("timeout"),
    }
    assert baseline.condensed(outcomes) == {
        "pass": ["a", "b"],
        "ddp": ["a"],
        "fail": {"d": "ValueError: only gloo"},
        "timeout": ["e"],
        "skip": {"CUDA is not available.": ["c"]},
    }
