"""Checkpoints that another process writes from memory, while the loop trains on."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from photinus import Saving
from photinus.errors import CheckpointError
from photinus.runlog.events import read_events
from photinus.trainer.checkpoint import image, state_memory, writer
from photinus.trainer.checkpoint.folder import CheckpointFolder
from photinus.trainer.checkpoint.image import Content, MemoryFile
from photinus.trainer.checkpoint.writer import FILE_WRITER, WRITER, Order
from photinus.trainer.checkpoint.writer_process import carry_out
from tests.small_run import QUIET, CutOffError, Numbered, train


@pytest.fixture
def world() -> Iterator[Any]:
    with photinus.init("gloo", "cpu", seed=0) as session:
        yield session


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    WRITER.close()
    FILE_WRITER.close()


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every state is large enough."""
    monkeypatch.setattr(state_memory, "LEAST_BYTES", 0)


def _loop(out: Path, **options: Any) -> photinus.Loop:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return photinus.Loop(
        model, optimizer, Numbered(12), **{"batch_size": 4, "epochs": 2, "out": out, "report": QUIET, **options}
    )


def _train(loop: photinus.Loop, kill_at: int = 0) -> None:
    for batch in loop:
        loop.backward(loop.model(batch.float().reshape(-1, 1)).square().mean())
        loop._optimizer.step()
        loop._optimizer.zero_grad()
        if kill_at and loop.step in (kill_at - 1, kill_at):
            assert WRITER._process is not None
            while loop.step < kill_at and WRITER.is_busy and not WRITER.has_answered:
                time.sleep(0.01)
            # Stopped, it has not yet written what is saved after this body.
            WRITER._process.send_signal(signal.SIGSTOP if loop.step < kill_at else signal.SIGKILL)


def test_it_is_written_where_a_data_set_holds_a_thousand_files_open(tmp_path: Path, world: Any, beside: None) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2048:
        pytest.skip("needs 2048 open files")
    WRITER.close()  # it starts again, behind the files
    with contextlib.ExitStack() as ends:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2048, before[1]))
        ends.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            ends.enter_context(open(os.devnull))
        loop = _loop(tmp_path / "run")
        _train(loop)
        WRITER.close()
    assert loop.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000006"


def test_it_is_the_checkpoint_that_would_have_been_written_at_once(
    tmp_path: Path, world: Any, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "beside", epochs=2)
    monkeypatch.setattr(state_memory, "LEAST_BYTES", 1 << 60)
    train(tmp_path / "at once", epochs=2)
    ours, theirs = (CheckpointFolder(tmp_path / name / "checkpoints").newest() for name in ("beside", "at once"))
    assert ours is not None
    assert theirs is not None
    assert (ours.step, ours.description["place"]) == (12, theirs.description["place"])
    assert {*ours.entries} == {*theirs.entries}
    for entry in ("model", "optimizer", "rng"):
        assert str(ours.load()[entry]) == str(theirs.load()[entry])


def test_a_limit_on_memory_lets_the_loop_save_at_once(
    tmp_path: Path, world: Any, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:  # as with `ulimit -v`
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as limited:
        limited.setattr(image.mmap, "mmap", refuse)
        WRITER.memory.close()
        _train(_loop(tmp_path))
    newest = CheckpointFolder(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.step == 6
    _train(_loop(tmp_path, epochs=3))  # the limit is gone
    assert photinus.load(tmp_path)["position"]["step"] == 9


def test_what_was_being_written_when_the_script_failed_is_resumed(tmp_path: Path, beside: None) -> None:
    with pytest.raises(CutOffError):
        train(tmp_path, epochs=2, cut_at_step=8, save_every=7)
    newest = CheckpointFolder(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.step == 7
    assert [event.step for event in read_events(tmp_path) if event.kind == "checkpoint"] == [6, 7]


def test_two_loops_that_take_turns_save_each_its_own(tmp_path: Path, world: Any, beside: None) -> None:
    loops = [_loop(tmp_path / name, epochs=6, save=Saving(every_steps=1)) for name in "ab"]
    for batches in zip(*loops, strict=False):
        for loop, batch in zip(loops, batches, strict=True):
            loop.backward(loop.model(batch.float().reshape(-1, 1)).square().mean())
            loop._optimizer.step()
            loop._optimizer.zero_grad()
    for loop in loops:
        newest = CheckpointFolder(loop._checkpointer.folder).newest()
        assert newest is not None
        assert newest.load()["optimizer"]["state"][0]["step"] == newest.step > 15


def test_a_failed_write_is_raised_in_the_loop_and_older_checkpoints_stay(
    tmp_path: Path, world: Any, beside: None
) -> None:
    _train(_loop(tmp_path))
    loop = _loop(tmp_path, epochs=4, save=Saving(every_steps=1))
    with pytest.raises(CheckpointError, match=r"checkpoint of step 7 in .*checkpoints was not written: .*SIGKILL"):
        _train(loop, kill_at=8)
    newest = CheckpointFolder(tmp_path / "checkpoints").newest()
    assert newest is not None
    assert newest.step == 6


def test_a_writer_that_was_stopped_is_made_to_go_on(
    tmp_path: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LOOK_EVERY_S", 0.1)
    photinus.save(tmp_path / "x.pt", wait=False, step=1)
    assert FILE_WRITER._process is not None
    FILE_WRITER._process.send_signal(signal.SIGSTOP)
    photinus.save(tmp_path / "y.pt", wait=False, step=2)
    assert [photinus.load(tmp_path / name)["step"] for name in ("x.pt", "y.pt")] == [1, 2]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_request_to_suspend_that_comes_to_all_processes_ends_no_writer(
    tmp_path: Path, world: Any, number: signal.Signals
) -> None:
    for step in (1, 2):
        photinus.save(tmp_path / "x.pt", wait=False, step=step)
        assert photinus.load(tmp_path / "x.pt")["step"] == step
        assert FILE_WRITER._process is not None
        FILE_WRITER._process.send_signal(number)


def test_what_is_wrong_with_the_folder_is_raised_as_if_written_at_once(
    tmp_path: Path, world: Any, beside: None
) -> None:
    loop = _loop(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointError, match="checkpoints is a file; checkpoints need a folder"):
        _train(loop)


def test_the_event_of_a_checkpoint_comes_when_it_is_on_the_disk(tmp_path: Path, world: Any, beside: None) -> None:
    _train(_loop(tmp_path, save=Saving(every_steps=2)))
    told = [event.step for event in read_events(tmp_path) if event.kind == "checkpoint"]
    assert told == [2, 3, 4, 6]


def test_a_host_without_room_for_a_copy_writes_at_once(
    tmp_path: Path, world: Any, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_memory, "_MOST_OF_MEMORY", -1.0)  # its memory is there from tests before
    monkeypatch.setattr(WRITER, "write", None)
    _train(_loop(tmp_path))
    assert CheckpointFolder(tmp_path / "checkpoints").newest() is not None


def test_memory_that_is_overwritten_while_it_is_read_gives_no_checkpoint(tmp_path: Path) -> None:
    """As by the ranks of the next attempt, where the process that writes outlives the last one."""
    memory = state_memory.StateMemory()
    copy = memory.plan(Content({"x": torch.ones(3)}, {}), 1, alone=True)
    file = memory.take(copy)
    image = memory.share(copy, file, tmp_path, alone=True)
    assert image is not None
    assert isinstance(file, MemoryFile)
    places = [f"/proc/self/fd/{descriptor}" for descriptor in image.files]
    for step in (1, 2):
        order = {"order": asdict(Order(str(tmp_path), step)), **asdict(image)}
        if step == 1:
            assert carry_out(order, places, lambda: True) == str(tmp_path / "step-00000001")
            file.unseal()
        else:
            with pytest.raises(CheckpointError, match="was overwritten while it was being written"):
                carry_out(order, places, lambda: True)
    memory.close()
    assert sorted(os.listdir(tmp_path)) == [".writer.lock", "step-00000001"]


# -- photinus.save(wait=False) ---------------------------------------------------------------------------------------


def test_save_without_waiting_is_there_for_the_next_load(tmp_path: Path, world: Any, beside: None) -> None:
    weight = torch.arange(5.0)
    photinus.save(tmp_path / "x.pt", wait=False, weight=weight)
    weight.zero_()
    assert photinus.load(tmp_path / "x.pt")["weight"].tolist() == [0, 1, 2, 3, 4]


def test_empty_bytes_and_sets_of_tensors_are_the_same_after_a_save_without_waiting(
    tmp_path: Path, world: Any, beside: None
) -> None:
    photinus.save(tmp_path / "x.pt", wait=False, empty=b"", tensors={torch.tensor(1.0), torch.tensor(2.0)})
    loaded = photinus.load(tmp_path / "x.pt")
    assert loaded["empty"] == b""
    assert {tensor.item() for tensor in loaded["tensors"]} == {1, 2}


def test_what_went_wrong_is_raised_by_the_next_save_or_at_the_end(tmp_path: Path, beside: None) -> None:
    (tmp_path / "file").write_text("in the way")
    with photinus.init("gloo", "cpu"):
        photinus.save(tmp_path / "file" / "x.pt", wait=False, step=1)
        with pytest.raises(CheckpointError, match=r"x\.pt could not be written"):
            photinus.save(tmp_path / "y.pt", step=2)
    with pytest.raises(CheckpointError, match=r"x\.pt could not be written"), photinus.init("gloo", "cpu"):
        photinus.save(tmp_path / "file" / "x.pt", wait=False, step=1)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path, world: Any, beside: None) -> None:
    with pytest.raises(TypeError, match="cannot be saved"):
        photinus.save(tmp_path / "x.pt", wait=False, thing=os)


@pytest.mark.parametrize("folder", ["here", "file"])
def test_a_script_that_ends_without_the_end_of_a_session_waits_for_its_file(tmp_path: Path, folder: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / folder / "x.pt"
    text = f"import photinus; photinus.init(device='cpu'); photinus.save({str(path)!r}, wait=False, step=1)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (0 if folder == "here" else 1), done.stderr
    assert path.exists() == (folder == "here")
    assert ("x.pt could not be written" in done.stderr) == (folder == "file")


def test_a_script_ends_while_a_child_that_it_forked_still_runs(tmp_path: Path) -> None:
    text = f"""
import os, photinus
photinus.init(device="cpu")
photinus.save({str(tmp_path / "x.pt")!r}, wait=False, step=1)
reads, writes = os.pipe()
if os.fork() == 0:
    os.close(writes)
    os.read(reads, 1)  # until its parent has ended
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", text], timeout=30, check=True)
    assert photinus.load(tmp_path / "x.pt")["step"] == 1
