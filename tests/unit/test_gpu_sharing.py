"""Which ranks may share a GPU: none by themselves, several on purpose, never over nccl."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from photinus.errors import DeviceError
from photinus.job.world import World
from photinus.parallel.exchange.verify_models import gpu_identity, refuse_shared_gpus
from photinus.trainer.session import placement
from photinus.trainer.session.placement import choose_device, gather_gpus

ONE, OTHER = "GPU one (H100) of host a", "GPU other (H100) of host a"


def test_each_rank_with_a_gpu_of_its_own_is_welcome() -> None:
    refuse_shared_gpus([ONE, OTHER], "nccl", 1)
    refuse_shared_gpus([ONE, OTHER, ONE, OTHER], "gloo", 2)


def test_two_ranks_on_one_gpu_are_refused_with_ranks_gpu_and_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"ranks 0, 2 all compute on GPU one .* host a.*--ranks-per-gpu 2"):
        refuse_shared_gpus([ONE, OTHER, ONE], "nccl", 1)
    with pytest.raises(DeviceError, match=r"ranks 0, 1, 2 .*PHOTINUS_RANKS_PER_GPU=3"):
        refuse_shared_gpus([ONE, ONE, ONE], "gloo", 2)


def test_nccl_is_refused_where_gpus_are_shared_on_purpose() -> None:
    with pytest.raises(DeviceError, match=r"nccl takes one rank per GPU\. Use backend 'photinus' or 'gloo'"):
        refuse_shared_gpus([ONE, ONE], "cpu:photinus,cuda:nccl", 2)
    refuse_shared_gpus([ONE, ONE], "gloo", 2)


def test_ranks_that_share_take_their_gpu_by_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTINUS_RANKS_PER_GPU", "2")
    chosen = [choose_device("auto", World(r, 3, r, 3), cuda_devices=2)[0].index for r in range(3)]
    assert chosen == [0, 0, 1]
    with pytest.raises(DeviceError, match="local rank 0 of 5 ranks"):
        choose_device("auto", World(0, 5, 0, 5), cuda_devices=2)


def test_the_same_gpu_is_known_by_its_uuid_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="GPU-12", name="H100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert gpu_identity(torch.device("cuda", 0)) == gpu_identity(torch.device("cuda", 3))


def test_ranks_know_each_others_gpus_by_the_store_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("photinus/gpu/1/1", json.dumps([ONE, "one"]))  # rank 1 wrote it
    monkeypatch.setattr(placement, "_sessions", 0)
    monkeypatch.setattr(placement, "gpu_identity", lambda device: OTHER)
    monkeypatch.setattr(placement, "_uuid", lambda device: "other")
    gpus = gather_gpus(store, 0, 2, torch.device("cuda", 0), timedelta(seconds=10))
    assert gpus == [(OTHER, "other"), (ONE, "one")]
    assert json.loads(store.get("photinus/gpu/1/0")) == [OTHER, "other"]
