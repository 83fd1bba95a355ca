"""Snapshots of a loop in memory files, as `photinus run` holds them: taken, found after a restart, and freed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import photinus
from photinus.job.worker_files import WorkerFiles, read_head
from photinus.trainer import snapshots
from photinus.trainer.checkpoint import image, state_memory, writer
from photinus.trainer.checkpoint.writer import WRITER
from photinus.trainer.record.run_folder import RunFolder


class EndedError(Exception):
    """Ends an attempt."""


class Table(nn.Module):
    """Counts in a state that it keeps by reference, as torch's HistogramObserver does; one tensor has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.counts = torch.zeros(100_000), torch.zeros(3)
        self.seen = self.counts

    def get_extra_state(self) -> Any:
        return {"table": self.table, "counts": [self.counts], "seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.table, (self.counts,), self.seen = state["table"], state["counts"], state["seen"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.counts += 1
            self.table[int(self.counts[0]) * 1000] = x.sum()
        return x


class Launcher:
    """The memory files and variables of a job of one worker."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.descriptors = [os.memfd_create(f"test-snapshots-{side}") for side in "ab"]
        self.paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self.descriptors]
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        files = WorkerFiles(images=(tuple(self.paths),))
        for name, value in {**place, **files.environ(), "TORCHELASTIC_RUN_ID": "test"}.items():
            patch.setenv(name, value)
        self.attempt(0)

    def attempt(self, number: int) -> None:
        self.patch.setenv("PHOTINUS_ATTEMPT", str(number))

    def steps(self) -> list[int]:
        for thread in threading.enumerate():
            if thread.name == "photinus-snapshot":  # of an attempt that has ended
                thread.join(30)
        heads = [read_head(path) for path in self.paths]
        return sorted(head.step for head in heads if head is not None)

    def damage(self, step: int) -> None:
        """Flips a bit of a snapshot."""
        for path, descriptor in zip(self.paths, self.descriptors, strict=True):
            head = read_head(path)
            if head is not None and head.step == step:
                at = head.bytes - 70
                os.pwrite(descriptor, bytes([os.pread(descriptor, 1, at)[0] ^ 4]), at)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setattr(snapshots.Snapshots, "_holder", None)
    made = Launcher(monkeypatch)
    yield made
    for descriptor in made.descriptors:
        os.close(descriptor)


def train(
    out: Path | None,
    *,
    fail_at: int = 0,
    loops: int = 1,
    every: int | None = 1,
    best: str | None = None,
    **options: Any,
) -> Any:
    """Trains; returns the last loop, and a copy of what it trained."""
    RunFolder._begun = 0  # as in a new process
    with photinus.init("gloo", device="cpu", seed=3):
        for number in range(loops):
            torch.manual_seed(0)
            x = torch.randn(48, 6)
            table = Table()
            model = nn.Sequential(table, nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            model, optimizer = photinus.wrap(model, optimizer)
            save = photinus.Saving(snapshot_every=every, every_epochs=2, best=best)
            loop = photinus.Loop(
                model, optimizer, torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8,
                out=None if out is None else out / str(number), save=save,
                report=photinus.Reporting(progress=False, curves=False), **{"epochs": 2, **options},
            )  # fmt: skip
            for inputs, targets in loop:
                if fail_at and number == loops - 1 and loop.step == fail_at:
                    raise EndedError
                loop.backward((model(inputs) - targets).square().mean())
                if loop.step_due:
                    optimizer.step()
                    optimizer.zero_grad()
        state = {**photinus.unwrap(model).state_dict(), "m": [s["exp_avg"] for s in optimizer.state.values()]}
        state |= {"table": table.table, "counts": table.counts, "seen": table.seen}
        return loop, {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def test_a_snapshot_costs_what_the_next_step_takes_longer_and_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    costs = snapshots._Costs()

    def step(seconds: float) -> None:
        now[0] += seconds
        costs.step_ended()

    for _ in range(8):
        step(0.010)
    for excess_s in (0.5, 0.5, 0.004, 0.012):  # the first two take new memory
        assert costs.usual_s in (-1.0, pytest.approx(0.006))
        costs.taken(0.001)
        step(0.010 + excess_s)
        costs.sealed(beside_s=0.002)
        step(0.010)
    assert costs.usual_s == pytest.approx((0.006 + 0.014) / 2)


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_next_attempt_continues_from_memory_with_the_same_bits(launcher, tmp_path):
    _, wanted = train(tmp_path / "quiet")
    with pytest.raises(EndedError):
        train(tmp_path / "killed", fail_at=8)
    launcher.attempt(1)
    loop, state = train(tmp_path / "killed")
    assert loop.resumed_from == Path("memory")
    assert_same(state, wanted)
    rows = [(tmp_path / name / "0" / "losses.csv").read_text().splitlines() for name in ("quiet", "killed")]
    assert [row.split(",")[:3] for row in rows[0]] == [row.split(",")[:3] for row in rows[1]]


@pytest.mark.parametrize(("fail_at", "lost"), [(9, 6), (15, 12)])
def test_a_best_checkpoint_that_was_not_written_is_trained_again(launcher, tmp_path, capsys, fail_at, lost):
    options = {"best": "-loss", "epochs": 4}
    _, wanted = train(tmp_path / "quiet", **options)
    with pytest.raises(EndedError):
        train(tmp_path / "killed", fail_at=fail_at, **options)
    shutil.rmtree(tmp_path / "killed" / "0" / "checkpoints" / f"step-{lost:08}")  # killed while it was written
    launcher.attempt(1)
    loop, state = train(tmp_path / "killed", **options)
    assert loop.resumed_from == (None if lost == 6 else tmp_path / "killed" / "0" / "checkpoints" / "step-00000006")
    why = f"the checkpoint of step {lost} was not written, and best='-loss' needs its weights"
    assert f"note: the snapshot of step {fail_at - 1} is not used: {why}\n" in capsys.readouterr().out
    assert_same(state, wanted)
    for place in ("quiet", "killed"):
        best = photinus.load(tmp_path / place / "0", best=True)
        assert best["position"]["history"][-1]["step"] == best["position"]["step"]
    assert_same(best["model"], photinus.load(tmp_path / "quiet" / "0", best=True)["model"])


def test_a_checkpoint_that_was_not_written_is_saved_after_the_next_step(launcher, tmp_path):
    with pytest.raises(EndedError):
        train(tmp_path, fail_at=15, epochs=4)
    shutil.rmtree(tmp_path / "0" / "checkpoints" / "step-00000012")
    launcher.attempt(1)
    with pytest.raises(EndedError):
        train(tmp_path, fail_at=17, epochs=4)
    assert [path.name for path in (tmp_path / "0" / "checkpoints").glob("step-*")] == ["step-00000015"]


def test_resumed_run_says_how_many_steps_were_lost(launcher, tmp_path, capsys):
    with pytest.raises(EndedError):
        train(tmp_path, fail_at=9, every=5)
    launcher.attempt(1)
    train(tmp_path, every=5)
    assert (
        "resumed from memory: step 5 (3 steps lost), epoch 1 of 2, 5 batches done, step 5\n" in capsys.readouterr().out
    )


def test_damaged_snapshot_is_reported_and_the_one_before_is_used(launcher, tmp_path):
    _, wanted = train(tmp_path / "quiet")
    with pytest.raises(EndedError):
        train(tmp_path / "killed", fail_at=8)
    older, newer = launcher.steps()
    launcher.damage(newer)
    launcher.attempt(1)
    with pytest.warns(
        RuntimeWarning, match=f"the snapshot of step {newer} is not used: .* is damaged: digest expected"
    ):
        loop, state = train(tmp_path / "killed")
    assert loop.resumed_from == Path("memory")
    assert (older, newer) == (6, 7)
    assert_same(state, wanted)


def test_without_a_good_snapshot_the_run_continues_from_the_disk(launcher, tmp_path):
    _, wanted = train(tmp_path / "quiet", epochs=4)
    with pytest.raises(EndedError):
        train(tmp_path / "killed", fail_at=16, epochs=4)
    for step in launcher.steps():
        launcher.damage(step)
    launcher.attempt(1)
    with pytest.warns(RuntimeWarning, match="is not used"):
        loop, state = train(tmp_path / "killed", epochs=4)
    assert loop.resumed_from is not None
    assert loop.resumed_from.name == "step-00000012"
    assert_same(state, wanted)


@pytest.mark.slow
def test_newer_checkpoint_on_disk_is_taken_instead_of_a_snapshot(launcher, tmp_path):
    with pytest.raises(EndedError):
        train(tmp_path, fail_at=13, epochs=4)
    assert launcher.steps() == [10, 11]  # the checkpoint of step 12 needs none
    launcher.attempt(1)
    loop, _ = train(tmp_path, epochs=4)
    assert loop.resumed_from is not None
    assert loop.resumed_from.name == "step-00000012"


@pytest.mark.slow
def test_second_loop_of_a_script_continues_from_memory_and_the_first_one_stays_finished(launcher, tmp_path):
    _, wanted = train(tmp_path / "quiet", loops=2)
    with pytest.raises(EndedError):
        train(tmp_path / "killed", loops=2, fail_at=5)
    launcher.attempt(1)
    loop, state = train(tmp_path / "killed", loops=2)
    assert loop.resumed_from == Path("memory")
    assert_same(state, wanted)


@pytest.mark.parametrize("resume", ["never", pytest.param("auto", marks=pytest.mark.slow)])
def test_snapshot_counts_like_a_checkpoint_of_the_folder(launcher, tmp_path, resume):
    with pytest.raises(EndedError):
        train(tmp_path, fail_at=4, resume=resume)
    launcher.attempt(1)
    loop, _ = train(tmp_path, resume=resume)
    assert loop.resumed_from == Path("memory")


@pytest.mark.slow
def test_steps_of_several_batches_are_kept_whole(launcher, tmp_path):
    _, wanted = train(tmp_path / "quiet", accumulate=2)
    with pytest.raises(EndedError):
        train(tmp_path / "killed", accumulate=2, fail_at=5)
    launcher.attempt(1)
    loop, state = train(tmp_path / "killed", accumulate=2)
    assert loop.resumed_from == Path("memory")
    assert_same(state, wanted)


def test_finished_run_gives_its_memory_back(launcher, tmp_path):
    loop, _ = train(tmp_path)
    assert [os.fstat(descriptor).st_size for descriptor in launcher.descriptors] == [0, 0]
    assert loop.summary().splitlines()[1:] == [
        f"results in {loop.out}: metrics.csv, losses.csv, config.json, checkpoints/"
    ]


def test_a_loop_in_the_body_of_another_leaves_its_snapshots_alone(launcher, tmp_path, capsys):
    data = torch.utils.data.TensorDataset(torch.randn(24, 2))
    report = photinus.Reporting(progress=False, curves=False)

    def loop(name: str, every: int | None) -> photinus.Loop:
        model = nn.Linear(2, 1)
        model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
        save = photinus.Saving(snapshot_every=every)
        made = photinus.Loop(
            model, optimizer, data, batch_size=8, steps=9, out=tmp_path / name, save=save, report=report
        )
        made.step_of_it = lambda x: (made.backward(model(x).mean()), optimizer.step(), optimizer.zero_grad())
        return made

    RunFolder._begun = 0
    with photinus.init("gloo", device="cpu"):
        outer = loop("outer", 1)
        for (inputs,) in outer:
            if outer.step in (3, 4):
                inner = loop(f"inner-{outer.step}", 1 if outer.step == 3 else None)
                for (others,) in inner:
                    inner.step_of_it(others)
            if outer.step == 6:
                break
            outer.step_of_it(inputs)
        assert launcher.steps() == [4, 5]
        after = loop("after", 1)
        for (inputs,) in after:
            after.step_of_it(inputs)
            if after.step == 4:
                break
        for (inputs,) in outer:
            outer.step_of_it(inputs)
    note = "note: no snapshots in memory: the loop whose body runs this one has them"
    assert capsys.readouterr().out.count(note) == 1
    assert [each._checkpointer.snapshots._count for each in (outer, inner, after)] == [5, 0, 2]


@pytest.mark.parametrize("every", [1, None])
def test_two_loops_that_take_turns_are_refused(launcher, tmp_path, every):
    data = torch.utils.data.TensorDataset(torch.randn(24, 2))

    def loop(name: str, every: int | None, folder: Path | None = tmp_path) -> photinus.Loop:
        model = nn.Linear(2, 1)
        options = {"save": photinus.Saving(snapshot_every=every), "report": photinus.Reporting(progress=False)}
        out = None if folder is None else folder / name
        return photinus.Loop(
            model, torch.optim.SGD(model.parameters()), data, batch_size=8, steps=9, out=out, **options
        )

    RunFolder._begun = 0
    with photinus.init("gloo", device="cpu"):
        for other in (every, 0):
            with pytest.raises(photinus.PhotinusError, match="two loops with out="):
                list(zip(loop(f"{other}-1", every), loop(f"{other}-2", other), strict=True))
        for pair in ([loop("c", 0), loop("d", 0)], [loop("e", every), loop("f", every, None)]):
            assert len(list(zip(*pair, strict=True))) == 9


def test_a_loop_that_trains_first_after_a_restart_changes_no_bit_of_the_one_that_comes_from_memory(launcher, tmp_path):
    data = torch.utils.data.TensorDataset(torch.randn(24, 2))

    def run(folder: Path, fail_at: int = 0) -> Any:
        RunFolder._begun = 0
        with photinus.init("gloo", device="cpu", seed=2):
            parts = []
            for name in ("long", "first"):
                torch.manual_seed(1)
                model = nn.Sequential(nn.Dropout(0.4), nn.Linear(2, 7))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                loop = photinus.Loop(
                    model, optimizer, data, batch_size=4, steps=9, out=folder / name,
                    save=photinus.Saving(snapshot_every=1), report=photinus.Reporting(progress=False, curves=False),
                )  # fmt: skip
                parts.append((model, optimizer, loop))
            for (model, optimizer, loop), until in zip(parts[::-1], (4, fail_at), strict=True):
                for (inputs,) in loop:
                    if loop.step == until:
                        if until == fail_at:
                            raise EndedError
                        break
                    loop.backward(model(inputs).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            return [model.state_dict() for model, _, _ in parts]

    wanted = run(tmp_path / "quiet")
    with pytest.raises(EndedError):
        run(tmp_path / "killed", fail_at=6)
    assert launcher.steps() == [4, 5]
    launcher.attempt(1)
    assert_same(run(tmp_path / "killed"), wanted)


def test_too_little_memory_gives_one_note_and_training_goes_on(launcher, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(snapshots, "free_memory", lambda: 1000)
    loop, _ = train(tmp_path)
    assert loop.finished
    assert capsys.readouterr().out.count("note: no snapshots in memory: two copies need ") == 1
    assert launcher.steps() == []


@pytest.mark.parametrize(("free", "count"), [(1.9, 0), (2.4, 11)])
def test_memory_has_to_hold_two_copies(launcher, tmp_path, monkeypatch, free, count):
    one = train(tmp_path / "a")[0]._checkpointer.snapshots._bytes
    monkeypatch.setattr(snapshots, "free_memory", lambda: int(free * one))
    assert train(tmp_path / "b")[0]._checkpointer.snapshots._count == count


def test_a_snapshot_that_another_rank_did_not_seal_does_not_count(launcher, tmp_path, monkeypatch):
    most, calls = snapshots.Snapshots._most, []

    def most_of_two(self: Any, values: tuple[float, ...]) -> list[float]:
        calls.append(values)
        return [1.0 if len(calls) > 4 else values[0], *most(self, values[1:])]

    monkeypatch.setattr(snapshots.Snapshots, "_most", most_of_two)
    with pytest.raises(EndedError):
        train(tmp_path, fail_at=9)
    assert launcher.steps() == [3, 8]


def test_a_snapshot_that_is_being_written_to_the_disk_is_left_alone(launcher, tmp_path, monkeypatch):
    train(tmp_path / "quiet", epochs=4)
    monkeypatch.setattr(state_memory, "LEAST_BYTES", 0)
    monkeypatch.setattr(writer, "_LOOK_EVERY_S", 0.1)
    write = WRITER.write

    def stop(*arguments: Any) -> None:
        write(*arguments)
        assert WRITER._process is not None
        WRITER._process.send_signal(signal.SIGSTOP)  # until it is waited for

    monkeypatch.setattr(WRITER, "write", stop)
    loop, _ = train(tmp_path / "slow", epochs=4)
    WRITER.close()
    assert loop._checkpointer.snapshots._count == 23
    for step in (12, 24):
        found, wanted = (photinus.load(tmp_path / name / "0", step=step) for name in ("slow", "quiet"))
        assert_same(found["model"], wanted["model"])


def test_a_state_that_outgrows_the_memory_gives_one_note_and_training_goes_on(launcher, tmp_path, monkeypatch, capsys):
    class Growing:
        seen = torch.zeros(0)

        def state_dict(self) -> Any:
            self.seen = torch.zeros(len(self.seen) + 50_000)
            return {"seen": self.seen}

        def load_state_dict(self, state: Any) -> None:
            self.seen = state["seen"]

    def free() -> int:
        return 4_000_000 - sum(os.fstat(each).st_blocks * 512 for each in launcher.descriptors)

    monkeypatch.setattr(snapshots, "free_memory", free)
    loop, _ = train(tmp_path, epochs=4, state={"growing": Growing()})
    assert loop.finished
    note = "note: no snapshots in memory: rank 0: the state grew from "
    assert capsys.readouterr().out.count(note) == 1
    assert loop._checkpointer.snapshots._count > 2


@pytest.mark.parametrize(("every", "lines"), [(1, 1), (None, 0)])
def test_without_our_launcher_there_are_no_snapshots_and_one_line_if_they_were_asked_for(
    launcher, tmp_path, monkeypatch, capsys, every, lines
):
    monkeypatch.delenv("PHOTINUS_WORKER_FILES")
    assert train(tmp_path, every=every)[0].finished
    notes = capsys.readouterr().out.count("note: no snapshots in memory: only `photinus run` keeps them")
    assert notes == lines


@pytest.mark.parametrize(("out", "every"), [(False, 1), (True, 0)])
def test_loops_without_a_folder_and_those_that_want_none_leave_the_memory_alone(launcher, tmp_path, out, every):
    with pytest.raises(EndedError):
        train(tmp_path if out else None, every=every, fail_at=5)
    assert [os.fstat(descriptor).st_size for descriptor in launcher.descriptors] == [0, 0]


@pytest.mark.slow
def test_failed_copy_turns_snapshots_off_and_training_goes_on(launcher, tmp_path, monkeypatch, capsys):
    def refuse(self: Any, head: Any) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(image.MemoryFile, "seal", refuse)
    assert train(tmp_path)[0].finished
    assert capsys.readouterr().out.count("note: no snapshots in memory: rank 0: no memory") == 1


@pytest.mark.slow
def test_default_takes_few_snapshots_where_steps_are_short(launcher, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with pytest.raises(EndedError):
            train(tmp_path, every=None, epochs=10, fail_at=40)
    assert 1 <= len(launcher.steps()) <= 2


@pytest.mark.parametrize("every", [-1, 1.5, True])
def test_number_of_steps_is_checked(every):
    with pytest.raises((TypeError, ValueError), match="snapshot_every"):
        photinus.Saving(snapshot_every=every)
