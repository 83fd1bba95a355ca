"""`photinus bench --device cuda`: which backend it keeps, and what limits it. No GPU is needed."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from photinus.backend_choice import Setting, driver_version, read_choice
from photinus.cli.main import main
from photinus.tools import bench
from photinus.tools.bench import Measurement, keep_choice, limits, parser
from photinus.tools.doctor.backend_rank import through_host
from photinus.tools.doctor.plan import COPY, Plan

MIB = 1 << 20
FACTS: dict[str, Any] = {
    "version": "2.13.0+cu130",
    "gpus": [{"name": "A10", "uuid": "one"}, {"name": "A10", "uuid": "two"}],
    "available": {"nccl": True, "ucc": False},
}
CUDA = parser().parse(["--device", "cuda"])
ALL = ("photinus", "gloo", "nccl")


def result(size: int = 16 * MIB, operation: str = "all_reduce", ranks: int = 2, **milliseconds: float) -> Measurement:
    return Measurement(operation, size, "float32", ranks, {name: ms * 1e-3 for name, ms in milliseconds.items()})


# ---- what copies are, and what they tell


@pytest.mark.parametrize("elems", [1, 1000, 5 * MIB // 4 + 3])
def test_a_tensor_that_was_copied_through_the_host_is_what_it_was(elems: int) -> None:
    tensor = torch.arange(elems, dtype=torch.float32)
    call = through_host(tensor)
    for _ in range(2):
        call()
    assert torch.equal(tensor, torch.arange(elems, dtype=torch.float32))


def test_limits_of_tensors_on_gpus_are_the_copies_and_nccl_needs_none() -> None:
    results = [
        result(4096, photinus=0.02, gloo=0.5, nccl=0.02, copy=0.01),
        result(64 * MIB, photinus=5.0, gloo=40.0, nccl=2.0, copy=4.0),
    ]
    told = limits(results, "photinus", through_host=True)[1]
    assert told == (
        "photinus: at 64 MiB it runs at 80% of the speed of copies to the host and back: "
        "PCIe or host memory is the limit."
    )
    assert "10% of the speed of copies to the host and back" in limits(results, "gloo", through_host=True)[1]
    assert len(limits(results, "nccl", through_host=True)) == 1


# ---- what is kept


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def kept(ranks: tuple[str, ...] = ("one", "two")) -> str:
    return read_choice(Setting(ranks, driver_version(), FACTS["version"])).backend


def test_the_choice_is_kept_for_these_gpus_and_ranks() -> None:
    line = keep_choice(CUDA, ALL, [result(ranks=4)], FACTS, "photinus", "faster")
    assert line.endswith('on these GPUs, 4 ranks with backend "auto" take photinus from now on.')
    assert kept(("one", "two", "one", "two")) == "photinus"
    assert kept() == ""


@pytest.mark.parametrize(
    ("options", "results", "facts", "told"),
    [
        (parser().parse([]), [result()], FACTS, ""),
        (parser().parse(["--device", "cuda", "--backends", "gloo,photinus"]), [result()], FACTS, "nccl was left out"),
        (CUDA, [result(operation="broadcast")], FACTS, "an all_reduce of 1 MiB or more"),
        (CUDA, [result(4096)], FACTS, "an all_reduce of 1 MiB or more"),
        (CUDA, [result()], {**FACTS, "gpus": [{"uuid": ""}, {"uuid": ""}]}, "reports no UUID of these GPUs"),
    ],
)
def test_what_does_not_tell_is_not_kept_and_says_why(
    cache: Path, options: Namespace, results: list[Measurement], facts: dict[str, Any], told: str
) -> None:
    line = keep_choice(options, ALL, results, facts, "gloo", "faster")
    assert told in line
    assert bool(line) == bool(told)
    assert not list(cache.iterdir())


def test_a_cache_that_cannot_be_written_is_said(cache: Path) -> None:
    (cache / "photinus").write_text("a file where the folder would be")
    assert "cannot save this result" in keep_choice(CUDA, ALL, [result()], FACTS, "gloo", "faster")


# ---- the command


def test_the_command_measures_chooses_and_keeps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(plan: Plan, ranks: int, show: object) -> tuple[list[dict[str, float]], dict[str, str]]:
        assert (plan.contestants, plan.device, ranks) == (("photinus", "gloo", "nccl", COPY), "cuda", 2)
        rates = {"photinus": 10e9, "nccl": 2e9, COPY: 12e9}
        found = [{name: 1e-5 + size / rate for name, rate in rates.items()} for _, size in plan.calls]
        return found, {"gloo": "rank 1 ended"}

    monkeypatch.setattr(bench, "measure", measured)
    monkeypatch.setattr(bench, "ask_torch", lambda timeout_s: (FACTS, ""))
    assert main(["bench", "--device", "cuda"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "gloo: did not take part: rank 1 ended" in shown
    assert "Choose photinus: 5." in shown
    assert 'with backend "auto" take photinus from now on.' in shown
    assert kept() == "photinus"
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert main(["bench", "--device", "cuda", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["choose"] == "photinus"
    assert "cannot save this result" in told["kept"]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "ask_torch", lambda timeout_s: ({**FACTS, "gpus": []}, ""))
    assert main(["bench", "--device", "cuda"]) == 2
    assert "torch sees no GPU here. `photinus doctor` shows the reason." in capsys.readouterr().err
