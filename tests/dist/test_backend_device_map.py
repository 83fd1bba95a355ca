"""Device maps: "cpu:photinus,cuda:nccl" gives a group that serves CPU tensors by us and others by their own backends.

No GPU is needed: tensors on torch's meta device stand for a GPU's, and torch's fake backend for NCCL.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from tests.ranks import run_ranks, values


@pytest.mark.parametrize(
    ("backend", "others"),
    [
        ("meta:fake,cpu:photinus,cuda:gloo", {"meta": "fake", "cuda": "gloo"}),
        pytest.param("cpu:photinus,cuda:gloo", {"cuda": "gloo"}, marks=pytest.mark.slow),
        pytest.param("cpu:photinus", {}, marks=pytest.mark.slow),
    ],
)
def test_a_device_map_serves_each_device_by_its_own_backend(
    backend: str, others: dict[str, str], tmp_path: Path
) -> None:
    arguments = {"store": str(tmp_path / "store"), "backend": backend}
    devices = sorted(["cpu", *others])
    for value in values(
        run_ranks(f"{__name__}:_mixed", world_size=2, backend=backend, timeout_s=60, arguments=arguments)
    ):
        assert value["engine"] is True
        assert value["sums"] == [3.0] * 6
        assert value["objects"] == [{"rank": 0}, {"rank": 1}]
        assert value["devices"] == devices
        assert value["backends"] == others
        assert value["shapes"] == ([[8], [4], [4]] if "meta" in others else [])
        assert "destroyed" in value["ended"]
        assert value["split_into"] == [[3.0, devices], [value["rank"] + 1.0, devices], [3.0, ["cpu"]]]
        assert value["threads_left"] == []


def _mixed(rank: int, world_size: int, store: str, backend: str) -> dict[str, Any]:
    import threading

    group: Any = dist.group.WORLD
    sums = []

    def add(group: Any = None) -> None:
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        sums.append(tensor.item())

    add()
    pair = torch.full((2,), rank + 1.0)
    mine = torch.empty(1)
    dist.reduce_scatter_tensor(mine, pair)
    sums.append(mine.item())
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank})
    sub_group: Any = dist.new_group([0, 1])
    add(sub_group)
    dist.barrier()
    # C++ reaches the group's methods too: DDP's reducer averages the gradients.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.full((1, 1), 2.0 * (rank + 1))).sum().backward()
    sums.append(model.module.weight.grad.item())
    del model

    shapes = []
    if "meta" in backend:
        there = torch.empty(4, device="meta")
        whole = torch.empty(8, device="meta")
        dist.all_gather_into_tensor(whole, there)
        shapes.append(list(whole.shape))
        for each in (group, sub_group):
            dist.all_reduce(there, group=each)
            shapes.append(list(there.shape))
    devices = [device.type for device in group._device_types]
    backends = {name: group._get_backend(torch.device(name)).name() for name in devices if name != "cpu"}
    engine = None not in (group.communicator, sub_group.communicator)
    group.set_timeout(timedelta(seconds=50))
    only_cpu = [torch.device("cpu")]
    parts = [group.split_group([0, 1]), group.split_group([rank]), group.split_group([0, 1], device_types=only_cpu)]
    split_into = []
    for part in parts:
        part.allreduce([tensor := torch.tensor([rank + 1.0])]).wait()
        split_into.append([tensor.item(), sorted(device.type for device in part._device_types)])
        part.shutdown()

    dist.destroy_process_group()
    try:
        group.allreduce([torch.ones(1)])
        ended = "it still works"
    except RuntimeError as error:
        ended = str(error)
    dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    add()
    add()
    return {
        "rank": rank,
        "engine": engine,
        "sums": sums,
        "objects": objects,
        "devices": sorted(devices),
        "backends": backends,
        "shapes": shapes,
        "ended": ended,
        "split_into": split_into,
        "threads_left": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    }


@pytest.mark.skipif(dist.is_nccl_available(), reason="this PyTorch has NCCL")
def test_a_missing_nccl_is_refused_when_it_is_used_and_not_before() -> None:
    """The map is the usual one, with the CPU's part ours; meta tensors stand for tensors on a GPU."""
    for value in values(
        run_ranks(f"{__name__}:_without_nccl", world_size=2, backend="cpu:photinus,meta:nccl", timeout_s=60)
    ):
        assert value["sum"] == 3.0
        assert value["devices"] == ["cpu"]
        for error in value["errors"]:
            assert "cannot take tensors on meta: this PyTorch is built without NCCL" in error


def _without_nccl(rank: int, world_size: int) -> dict[str, Any]:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    there = torch.ones(2, device="meta")
    errors = []
    for call in (
        lambda: dist.all_reduce(there),
        lambda: dist.all_gather([there, there], there),
        lambda: dist.send(there, 1 - rank),
        lambda: dist.group.WORLD._get_backend(torch.device("meta")),
    ):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) == 4
    dist.barrier()
    return {"sum": tensor.item(), "devices": [d.type for d in dist.group.WORLD._device_types], "errors": errors}


def test_a_backend_that_cannot_share_a_group_is_refused_by_name() -> None:
    for value in values(run_ranks(f"{__name__}:_unknown", world_size=1, timeout_s=60)):
        if torch.__version__ >= (
            2,
            14,
        ):  # any backend can; torch says that this one is not built in
            assert "UCC" in value
            continue
        assert "backend 'ucc' cannot share a process group with 'photinus'" in value
        assert "new_group(backend='ucc')" in value


def _unknown(rank: int, world_size: int) -> str:
    try:
        dist.init_process_group("cpu:photinus,cuda:ucc", store=dist.HashStore(), rank=rank, world_size=world_size)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "it was made"
