"""States that lie in parts on several ranks, written side by side into one plain torch file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from photinus.errors import CheckpointError
from photinus.trainer.checkpoint import state_memory
from photinus.trainer.checkpoint.durable import failure_of_first
from photinus.trainer.checkpoint.folder import CheckpointFolder
from photinus.trainer.checkpoint.parts import Parts
from tests.dist.test_run_hosts import ended, free_port, launch
from tests.ranks import run_ranks

TRAINING = """
import os, sys
import torch, photinus
from torch import nn
from photinus.trainer.checkpoint import state_memory
from photinus.trainer.checkpoint.writer import FILE_WRITER, WRITER
out, strategy, fault = sys.argv[1:4]
state_memory.LEAST_BYTES = 0
written = []

def note(order, image, then=None):
    written.append((order.step, image.is_parted, image.host, image.hosts))
    type(WRITER).write(WRITER if order.step else FILE_WRITER, order, image, then)
    if fault == "killed" and image.host and len(written) == 2:
        WRITER._process.kill()

WRITER.write = FILE_WRITER.write = note
if fault == "shared":  # hosts see one folder, but work in different ones
    place = out if os.environ["GROUP_RANK"] == "0" else out + "/elsewhere"
    os.makedirs(place, exist_ok=True)
    os.chdir(place)
    out = "."
if fault == "apart":
    state_memory._leave_probe = lambda folder: "/nowhere/probe-0"
with photinus.init("photinus", "cpu", seed=1):
    x = torch.randn(48, 16)
    model = nn.Sequential(nn.Linear(16, 37), nn.BatchNorm1d(37), nn.Linear(37, 5, dtype=torch.float32), nn.Linear(5, 1))
    model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01), strategy=strategy)
    loop = photinus.Loop(
        model, optimizer, torch.utils.data.TensorDataset(x), batch_size=12, steps=8, out=out + "/run",
        save=photinus.Saving(every_steps=4, snapshot_every=0), report=photinus.Reporting(progress=False, curves=False),
    )
    for (inputs,) in loop:
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loop.backward(loss)
        optimizer.step()
    photinus.save(out + "/waited.pt", model=model, optimizer=optimizer, step=loop.step)
    photinus.save(out + "/beside.pt", wait=False, model=model, optimizer=optimizer, step=loop.step)
    state_memory.LEAST_BYTES = 1 << 60
    photinus.save(out + "/gathered.pt", model=model, optimizer=optimizer, step=loop.step)
    print(loop.summary())
    print("written", os.environ["RANK"], written)
"""


def _train_on_two_hosts(folder: Path, strategy: str, fault: str = "none") -> list[Any]:
    (folder / "train.py").write_text(TRAINING)
    port, words = free_port(), (folder / "train.py", folder, strategy, fault)
    jobs = [
        launch(
            port,
            "--node-rank",
            host,
            "--max-restarts",
            0,
            *words,
            workers=2 - host,
            OMP_NUM_THREADS="1",
            PHOTINUS_JOB_SECRET="s",
        )
        for host in range(2)
    ]
    return ended(*jobs)


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return {*ours} == {*theirs} and all(_same(ours[key], value) for key, value in theirs.items())
    if isinstance(theirs, (list, tuple)):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return bool(ours == theirs)


@pytest.mark.parametrize(
    ("strategy", "folder"),
    [
        ("zero3", "shared"),
        ("zero3", "apart"),
        *(pytest.param(name, "shared", marks=pytest.mark.slow) for name in ("zero1", "zero2")),
    ],
)
def test_ranks_of_two_hosts_write_what_gathering_would(tmp_path: Path, strategy: str, folder: str) -> None:
    ends = _train_on_two_hosts(tmp_path, strategy, folder)
    assert [end.code for end in ends] == [0, 0], ends
    printed = "".join(end.out for end in ends)
    # Of each write by another process: the step of a checkpoint, is it in parts, this host, and how many hosts write.
    steps = {"shared": (4, 8, None, None), "apart": (4, 8, None)}[folder]
    facts = {"shared": [(True, 0, 2), (True, 1, 2)], "apart": [(False, 0, 1)]}[folder]
    first, *rest = ([(step, *each) for step in steps] for each in facts)
    wanted = [first, [], *(rest or [[]])]
    for rank, written in enumerate(wanted):
        assert f"written {rank} {written}" in printed
    newest = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert newest is not None
    assert sorted(path.name for path in newest.path.iterdir()) == [
        "manifest.json", "model.pt", "optimizer.pt", "position.pt", "rng.pt", "run.pt",
    ]  # fmt: skip
    assert [path.name for path in newest.path.parent.iterdir() if path.name.startswith(".tmp")] == []
    whole = torch.load(tmp_path / "gathered.pt", weights_only=True)
    for entry in ("model", "optimizer"):
        path = newest.path / f"{entry}.pt"
        assert _same(torch.load(path, weights_only=True), whole[entry])
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    for name in ("waited", "beside"):
        path = tmp_path / f"{name}.pt"
        assert _same(photinus.load(path), whole)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
    assert not [*tmp_path.glob(".tmp*")]


def save_a_model_that_its_user_split(rank: int, world_size: int, folder: str, rows: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    state_memory.LEAST_BYTES = 0
    mesh = init_device_mesh("cpu", (rows, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(torch.nn.Linear(3, 6), mesh["tensor"], ColwiseParallel())
    if rows > 1:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    photinus.save(f"{folder}/x.pt", model=model, optimizer=optimizer)
    return [model.weight.full_tensor().tolist(), optimizer.state[model.weight]["exp_avg"].full_tensor().tolist()]


@pytest.mark.parametrize("rows", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_model_that_its_user_split_is_saved_whole(tmp_path: Path, rows: int) -> None:
    results = run_ranks(
        f"{__name__}:save_a_model_that_its_user_split",
        world_size=2 * rows,
        backend="gloo",
        timeout_s=120,
        arguments={"folder": str(tmp_path), "rows": rows},
    )
    saved = torch.load(tmp_path / "x.pt", weights_only=True)
    whole = [saved["model"]["weight"].tolist(), saved["optimizer"]["state"][0]["exp_avg"].tolist()]
    assert [each.value for each in results] == [whole] * 2 * rows


def test_a_host_that_cannot_write_its_parts_fails_the_save_on_all(tmp_path: Path) -> None:
    ends = _train_on_two_hosts(tmp_path, "zero3", "killed")
    assert all(end.code for end in ends)
    printed = "".join(end.out + end.err for end in ends)
    assert "the checkpoint of step 8" in printed
    assert "was killed by SIGKILL" in printed
    newest = CheckpointFolder(tmp_path / "run" / "checkpoints").newest()
    assert newest is not None
    assert newest.step == 4


def test_other_hosts_do_not_wait_for_a_first_host_that_failed(tmp_path: Path) -> None:
    (tmp_path / failure_of_first("0a1b")).touch()
    with pytest.raises(CheckpointError, match=r"the first host could not write into .*; see its error"):
        Parts([], {0: ({}, {})}, host=1, hosts=2).join_in(tmp_path, "0a1b")
