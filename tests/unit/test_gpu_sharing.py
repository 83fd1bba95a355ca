"""Which ranks may share a GPU: none by themselves, several on purpose, never over nccl."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from photinus.errors import DeviceError
from photinus.job.world import World
from photinus.parallel.exchange.verify_models import gpu_identity, refuse_shared_gpus
from photinus.trainer.session import placement
from photinus.trainer.session.placement import check_gpus, choose_device

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


def test_ranks_tell_each_other_by_the_store_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("photinus/gpu/1/1", ONE)  # rank 1 has said so
    monkeypatch.setattr(placement, "_checks", 0)
    monkeypatch.setattr(placement, "gpu_identity", lambda device: ONE)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(DeviceError, match="ranks 0, 1 all compute on GPU one"):
        check_gpus(torch.device("cuda", 0), "nccl")
    assert store.get("photinus/gpu/1/0") == ONE.encode()
