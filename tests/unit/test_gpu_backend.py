"""Which backend ranks on GPUs take where none was asked for: what was measured here, else by what they share."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from photinus.backend_choice import BackendChoice, Setting, driver_version, read_choice, write_choice
from photinus.job.world import World
from photinus.trainer.session import placement
from photinus.trainer.session.placement import Gpus, agree_on_backend, choose_among, gather_gpus

NONE = BackendChoice("", "")
FAST = BackendChoice("photinus", "2.0 × as fast as nccl at 16 MiB")
SETTING = Setting(("one", "two"), driver="580.1", torch="2.13.0+cu130", photinus="1.0")


def chosen(
    *by_rank: str,
    verdict: BackendChoice = NONE,
    hosts: int = 1,
    missing: dict[str, str] | None = None,
    apart: tuple[str, ...] = (),
) -> BackendChoice:
    return choose_among(Gpus(by_rank, hosts == 1, missing or {}, apart), verdict)


# ---- the rules


def test_without_a_verdict_nccl_is_taken_and_nothing_advised() -> None:
    assert chosen("one", "two") == BackendChoice("nccl", "the choice for CUDA devices")
    assert chosen("one") == BackendChoice("nccl", "the choice for CUDA devices")


def test_a_verdict_counts_before_anything_else_on_one_host_only() -> None:
    choice = chosen("one", "two", verdict=FAST, apart=("0-1",))
    assert choice.backend == "photinus"
    assert choice.why == f"as `photinus bench --device cuda` measured here: {FAST.why}"
    assert choice.advice == ""
    assert chosen("one", "two", verdict=FAST, hosts=2).backend == "nccl"
    assert chosen("one", "one", verdict=BackendChoice("gloo", "so")).backend == "gloo"


def test_a_verdict_for_what_cannot_be_used_here_does_not_count() -> None:
    assert chosen("one", "two", verdict=FAST, missing={"photinus": "not built"}).backend == "nccl"


def test_ranks_that_share_a_gpu_take_photinus_and_gloo_where_that_is_missing() -> None:
    choice = chosen("one", "two", "one")
    assert (choice.backend, "ranks share one" in choice.why) == ("photinus", True)
    assert chosen("one", "one", hosts=2).backend == "photinus"
    choice = chosen("one", "one", missing={"photinus": "not built"})
    assert (choice.backend, "nor photinus: not built" in choice.why) == ("gloo", True)


def test_ranks_whose_gpus_torch_cannot_tell_apart_do_not_share_one_by_that() -> None:
    assert chosen("", "").backend == "nccl"


def test_a_torch_without_nccl_takes_photinus() -> None:
    choice = chosen("one", "two", missing={"nccl": "this build of torch has none"})
    assert choice == BackendChoice("photinus", "nccl cannot be used: this build of torch has none")


def test_gpus_that_cannot_reach_each_other_are_worth_a_line_with_what_to_run() -> None:
    choice = chosen("one", "two", apart=("0-1",))
    assert choice.backend == "nccl"
    assert choice.advice.startswith("photinus: GPUs 0-1 cannot reach each other")
    assert "`photinus bench --device cuda --nproc-per-node 2`" in choice.advice
    assert "\n" not in choice.advice
    assert chosen("one", "two", apart=("0-1",), hosts=2).advice == ""
    assert chosen("one", "two", apart=("0-1",), missing={"photinus": "ROCm"}).advice == ""


def test_a_stale_verdict_is_not_used_and_the_line_says_why() -> None:
    choice = chosen("one", "two", verdict=BackendChoice("", "that of `x` is of torch 2.11, now 2.13"), apart=("0-1",))
    assert choice.backend == "nccl"
    assert "of torch 2.11, now 2.13: run `photinus bench" in choice.advice


# ---- what is kept


def test_a_verdict_is_found_again_by_the_same_gpus_in_any_order(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = write_choice(SETTING, "photinus", "faster", environ)
    assert path.parent == tmp_path / "photinus"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert read_choice(SETTING, environ) == BackendChoice("photinus", "faster")
    assert read_choice(Setting(("two", "one"), "580.1", SETTING.torch, "1.0"), environ).backend == "photinus"
    assert read_choice(SETTING, {"HOME": str(tmp_path / "elsewhere")}) == NONE


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"gpus": ("one", "three")}, ""),
        ({"gpus": ("one", "two", "one")}, ""),
        ({"driver": "590.2"}, "driver 580.1, now 590.2"),
        ({"torch": "2.14.0"}, "torch 2.13.0+cu130, now 2.14.0"),
        ({"photinus": "1.1"}, "photinus 1.0, now 1.1"),
    ],
)
def test_a_verdict_of_another_setting_does_not_count(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    write_choice(SETTING, "photinus", "faster", environ)
    found = read_choice(Setting(**{**SETTING.__dict__, **changed}), environ)
    assert found.backend == ""
    assert found.why.endswith(told)
    assert bool(found.why) == bool(told)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"driver": "580.1"}'])
def test_a_damaged_verdict_is_said_and_not_used(tmp_path: Path, text: str) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    path = write_choice(SETTING, "photinus", "faster", environ)
    path.write_text(text)
    found = read_choice(SETTING, environ)
    assert found.backend == ""
    assert f"{path} cannot be read" in found.why


def test_a_user_without_a_home_folder_keeps_and_finds_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert read_choice(SETTING, {}) == BackendChoice("", "")
    with pytest.raises(OSError, match="set HOME or XDG_CACHE_HOME"):
        write_choice(SETTING, "photinus", "faster", {})


def test_the_drivers_version_is_the_kernels(tmp_path: Path) -> None:
    assert driver_version(tmp_path) == ""
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia/version").write_text("580.95.05\n")
    assert driver_version(tmp_path) == "580.95.05"


# ---- all ranks choose the same


def test_rank_0_chooses_for_all_by_what_every_rank_computes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"u{device.index}"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def agree(*devices: int) -> list[tuple[str, str]]:
        store = dist.HashStore()  # type: ignore[attr-defined]
        found: dict[int, tuple[str, str]] = {}
        gpus = [placement.Gpu(f"GPU u{index} of host a", f"u{index}") for index in devices]

        def rank(number: int) -> None:
            place = World(number, len(devices), number, len(devices))
            found[number] = agree_on_backend(store, place, gpus, {}, timedelta(seconds=10))

        threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(len(devices)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return [found[number] for number in range(len(devices))]

    assert agree(0, 1) == [("nccl", "the choice for CUDA devices")] * 2
    assert capsys.readouterr().out.count("GPUs 0-1 cannot reach each other") == 1
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    agree(0, 1)
    assert capsys.readouterr().out == ""
    assert [backend for backend, _ in agree(0, 1, 0)] == ["photinus"] * 3
    write_choice(Setting(("u0", "u1"), driver_version(), torch.__version__), "gloo", "words")
    assert {backend for backend, _ in agree(1, 0)} == {"gloo"}
    assert {backend for backend, _ in agree(1, 0, 1)} == {"photinus"}, "a verdict for two ranks"
    assert capsys.readouterr().out == ""


def test_a_rank_that_does_not_come_is_missed_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u", name="H100"))
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank in (0, 1):
        with pytest.raises(dist.DistStoreError):
            gather_gpus(store, rank, 3, torch.device("cuda", 0), timedelta(seconds=0.2))


def test_a_torch_for_rocm_leaves_photinus_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "photinus" not in placement.missing_on_gpus()
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert "ROCm 7.1" in placement.missing_on_gpus()["photinus"]


def test_the_kept_file_says_what_it_is_of(tmp_path: Path) -> None:
    path = write_choice(SETTING, "gloo", "faster", {"HOME": str(tmp_path)})
    assert json.loads(path.read_text()) == {
        "gpus": ["one", "two"],
        "driver": "580.1",
        "torch": "2.13.0+cu130",
        "photinus": "1.0",
        "backend": "gloo",
        "why": "faster",
    }
