"""`photinus doctor` on GPUs: what they are, and which of them reach each other. No GPU is needed here."""

from __future__ import annotations

from typing import Any

import pytest

from photinus.tools.doctor import gpus
from photinus.tools.doctor.finding import Finding
from photinus.tools.doctor.gpus import look_at_gpus

TORCH = {"built_for_cuda": True, "hip": None, "gpus": [{"name": "RTX 4090", "bytes": 24 << 30}] * 2}
NO, YES = [[True, False], [False, True]], [[True, True], [True, True]]


def look(monkeypatch: pytest.MonkeyPatch, torch: Any = TORCH, error: str = "", peers: Any = NO) -> dict[str, Finding]:
    """What is found where the program says so."""
    monkeypatch.setattr(gpus, "ask_child", lambda words, timeout_s: (None, error) if error else ({"peers": peers}, ""))
    return {finding.name: finding for finding in look_at_gpus(torch, 10)}


def test_gpus_without_peer_access_are_what_this_backend_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch)
    assert (found["GPU 1"].state, found["GPU 1"].value) == ("good", "RTX 4090, 24 GiB")
    assert (found["links"].state, found["links"].value) == ("note", "no peer access between 0-1")
    assert "`photinus bench --device cuda`" in found["links"].advice


def test_gpus_that_reach_each_other_are_good(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(monkeypatch, peers=YES)["links"].state == "good"


def test_pairs_without_peer_access_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = [[i // 2 == j // 2 for j in range(4)] for i in range(4)]
    found = look(monkeypatch, {**TORCH, "gpus": TORCH["gpus"] * 2}, peers=linked)
    assert found["links"].value == "no peer access between 0-2, 0-3, 1-2, 1-3"


def test_one_gpu_has_no_links_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(look(monkeypatch, {**TORCH, "gpus": TORCH["gpus"][:1]}, peers=[[True]])) == ["GPU 0"]


def test_copies_that_fail_or_hang_are_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    found = look(monkeypatch, error="no answer within 10 s")
    assert found["GPU 0"].value == "RTX 4090, 24 GiB"
    assert found["links"].state == "bad"
    assert "no answer within 10 s" in found["links"].value


def test_gpus_of_amd_are_told_as_what_photinus_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = look(monkeypatch, {**TORCH, "hip": "7.1"})["ROCm"]
    assert finding.state == "note"
    assert "takes CPU tensors there" in finding.advice


@pytest.mark.parametrize(
    ("driver", "facts", "told"),
    [
        ("", None, "no NVIDIA driver here"),
        ("nothing", {}, "the driver is here, but shows no GPU"),
        ("GPU 0: A10", {}, "the driver shows GPUs, but torch sees none"),
        ("GPU 0: A10", {"built_for_cuda": False}, "this torch is built without CUDA"),
        ("GPU 0: A10", {"built_for_cuda": False, "hip": "7.1"}, "this torch is built for ROCm 7.1, AMD's"),
    ],
)
def test_without_a_gpu_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, driver: str, facts: dict[str, Any] | None, told: str
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi" if driver else None)
    monkeypatch.setattr(gpus, "_listed_by_the_driver", lambda timeout_s: driver)
    (finding,) = look_at_gpus(None if facts is None else {**TORCH, "gpus": [], **facts}, 10)
    assert told in finding.value
    assert finding.state == ("bad" if "GPU 0" in driver else "absent")
