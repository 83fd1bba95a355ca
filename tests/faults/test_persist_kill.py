"""kill -9 at any call of `Checkpointer.persist`: the run goes on from memory or disk, and not one bit differs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import photinus
from photinus.job.worker_files import path_of
from photinus.trainer.checkpoint import state_memory
from photinus.trainer.checkpoint.folder import CheckpointFolder
from photinus.trainer.checkpointer import Checkpointer
from photinus.trainer.record.run_folder import RunFolder
from tests.faults.test_checkpoint_kill import in_child, killed_at_call
from tests.ranks import run_ranks

KILLED_STEP = 4


def train(out: Path, images: str, attempt: int, kill_at: int) -> None:
    """An attempt of a job of one worker, killed before the Nth call of its second save; notes what it has trained."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "test"}
    os.environ.update({**place, "PHOTINUS_WORKER_FILES": f",,:{images}", "PHOTINUS_ATTEMPT": str(attempt)})
    state_memory.LEAST_BYTES, RunFolder._begun = 0, 0
    persist = Checkpointer.persist

    def killed(self: Checkpointer, position: Any) -> None:
        if not kill_at or position.step != KILLED_STEP:
            persist(self, position)
            return
        self.wait()  # so that the rounds do not differ
        with killed_at_call(kill_at, more=[(os, "memfd_create"), (os, "stat"), (socket, "send_fds")]):
            persist(self, position)
            self.snapshots._copy.wait()  # type: ignore[union-attr]

    with mock.patch.object(Checkpointer, "persist", killed), photinus.init("gloo", "cpu", seed=3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.2), nn.Linear(50, 1))
        model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        x = torch.randn(48, 6)
        loop = photinus.Loop(
            model, optimizer, torch.utils.data.TensorDataset(x), batch_size=8, steps=6, out=out,
            save=photinus.Saving(every_steps=2 if kill_at or attempt else 1, keep_last=9, snapshot_every=1),
            report=photinus.Reporting(progress=False, curves=False),
        )  # fmt: skip
        began = str(loop.resumed_from and loop.resumed_from.name), loop.step
        for (inputs,) in loop:
            loop.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    (out / "began").write_text(json.dumps(began))


def digests(out: Path) -> dict[int, Any]:
    """Of each checkpoint, by step, what identifies weights, optimizer and random numbers."""
    found = {}
    for path in sorted((out / "checkpoints").glob("step-*")):
        files = json.loads((path / "manifest.json").read_text())["files"]
        found[int(path.name.split("-")[1])] = {name: files[name] for name in ("model", "optimizer", "rng")}
    return found


def killed_at_every_call(rank: int, world_size: int, folder: str) -> Any:
    torch.set_num_threads(1)  # a forked process must not need its parent's threads
    wanted, rounds, began = None, 0, set()
    while True:
        out = Path(folder, f"round-{rounds}")
        descriptors = [os.memfd_create(f"photinus-test-{side}") for side in "ab"]  # as the launcher's, which outlive it
        images = ",".join(map(path_of, descriptors))
        status = in_child(lambda o=out, i=images, n=rounds: train(o, i, 0, n))  # type: ignore[misc]
        if wanted is None:
            assert status == 0
            wanted = digests(out)
            assert sorted(wanted) == [1, 2, 3, 4, 5, 6]
        elif status:
            assert os.WIFSIGNALED(status), f"the save itself failed, status {status}"
            assert in_child(lambda o=out, i=images: train(o, i, 1, 0)) == 0  # type: ignore[misc]
            began.add(tuple(json.loads((out / "began").read_text())))
            found = digests(out)
            assert found == {step: wanted[step] for step in found}
            assert {2, 6} <= {*found}
            assert CheckpointFolder(out / "checkpoints").newest() is not None
            assert not [*out.glob("checkpoints/.tmp-*")]
        else:
            return [rounds - 1, sorted(began)]
        for descriptor in descriptors:
            os.close(descriptor)
        rounds += 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_every_call_of_persist_the_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    (result,) = run_ranks(
        f"{__name__}:killed_at_every_call", world_size=1, arguments={"folder": str(tmp_path)}, timeout_s=850
    )
    calls, began = result.value
    assert calls >= 6  # of memory, of the file with the order, of the socket
    assert [name for name, _ in began].count("memory") >= 1
    assert {step for _, step in began} <= {KILLED_STEP - 1, KILLED_STEP}
