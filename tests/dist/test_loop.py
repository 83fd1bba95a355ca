"""What the ranks of a loop do together. Few tests with much in them: each start of a process costs seconds."""

from __future__ import annotations

import itertools
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import photinus
from photinus.errors import WorldSizeError
from photinus.runlog.tables import read_rows
from photinus.trainer.data import rng
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, Net, Numbered, train

SAMPLES, BATCH_SIZE = 65, 13  # 5 steps an epoch; 2 and 3 ranks get parts that differ by a sample


def _loop(dataset: Any = None, **options: Any) -> photinus.Loop:
    plain = torch.nn.Linear(1, 1)
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    options = {"batch_size": BATCH_SIZE, "epochs": 2, "report": QUIET, **options}
    return photinus.Loop(model, optimizer, dataset or Numbered(SAMPLES), **options)


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test reads it
        return f"{type(error).__name__}: {error}"
    return "no error"


# -- another world size ---------------------------------------------------------------------------------------


def read_samples(rank: int, world_size: int, out: str, from_step: int, to_step: int) -> tuple[list[list[int]], str]:
    """This rank's samples in each step, of a run that is cut off in the body after `to_step`, and what dropout drew."""
    seen: list[list[int]] = []
    torch.manual_seed(1)  # all ranks alike, as scripts do
    with photinus.init("gloo", "cpu"):
        loop = _loop(out=out, save=photinus.Saving(every_steps=1))
        assert loop.step == from_step
        for batch in loop:
            if not seen:
                drawn = str(torch.nn.Dropout(0.5)(torch.ones(64)).tolist())
            if loop.step > to_step:
                break
            seen.append(batch.tolist())
    return seen, drawn


def test_a_run_at_other_world_sizes_repeats_no_sample_and_each_rank_drops_out_in_its_own_way(tmp_path: Path) -> None:
    steps: list[list[int]] = []
    for world_size, from_step, to_step in ((3, 0, 2), (1, 2, 4), (2, 4, 7), (1, 7, 10)):
        where: dict[str, Any] = {"out": str(tmp_path), "from_step": from_step, "to_step": to_step}
        if world_size == 1:
            parts = [read_samples(0, 1, **where)[0]]
        else:
            function = "tests.dist.test_loop:read_samples"
            results = values(run_ranks(function, world_size=world_size, backend="gloo", arguments=where))
            parts = [samples for samples, _ in results]
            assert len({drawn for _, drawn in results}) == world_size
        steps += [sorted(sample for part in step for sample in part) for step in zip(*parts, strict=True)]
    with photinus.init("gloo", "cpu"):
        assert steps == [sorted(batch.tolist()) for batch in _loop()]
    for epoch in (steps[:5], steps[5:]):
        assert sorted(sample for step in epoch for sample in step) == list(range(SAMPLES))


# -- agreement ---------------------------------------------------------------------------------------


def agree(rank: int, world_size: int, out: str) -> dict[str, Any]:
    """Everything that two ranks have to do together, in one world."""
    found: dict[str, Any] = {"another world": _world_of_three()}
    with photinus.init("auto", "cpu", seed=1) as world:
        with photinus.init("auto", "cpu"):
            pass  # an inner session ends alone
        found["hosts"] = len(world.hosts)

        torch.manual_seed(rank)
        plain = Net()
        found["model before"] = plain[0].weight[0].tolist()
        photinus.wrap(plain)
        found["model after"] = plain[0].weight[0].tolist()

        loop = _loop(epochs=9)
        for _ in loop:
            if rank == 1 and loop.step == 5:
                loop.stop()  # one rank alone
        found["stopped at"] = loop.step

        torch.seed()  # it is the loop's own seed that counts
        found["drawn"] = [next(torch.rand(()).item() for _ in _loop(epochs=1)) for _ in range(2)]
        found["different loops"] = _error(lambda: _loop(epochs=2 + rank))
        found["one wrong rank"] = _error(lambda: _loop(batch_size=0 if rank == 1 else BATCH_SIZE))
        found["too few"] = _error(lambda: _loop(batch_size=1))
        plain = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(plain.parameters())
        found["not wrapped"] = _error(lambda: photinus.Loop(plain, optimizer, Numbered(8), batch_size=2, epochs=1))
        found["no resume"] = _error(lambda: _loop(resume="nowhere"))
        Path(out, "file").touch()
        found["no folder"] = _error(lambda: _loop(out=Path(out, "file", "run")))

        loop = _loop(epochs=1, out=Path(out, "full"))
        if rank == 0:
            loop._folder._writers[0].add_losses = _full  # type: ignore[method-assign]
        found["full disk"] = _error(lambda: _run(loop))
    found["run"] = train(Path(out, "run"), batch_size=12, samples=60, save_every=2)
    return found


def _world_of_three() -> str:
    """What init says when the launcher means another world than the group is."""
    os.environ["WORLD_SIZE"] = "3"
    try:
        photinus.init("auto", "cpu")
    except WorldSizeError as error:
        return str(error)
    finally:
        os.environ["WORLD_SIZE"] = "2"
    return "no error"


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def _run(loop: photinus.Loop) -> None:
    for batch in loop:
        loop.backward(loop.model(batch.float()[:, None]).mean())
        loop.model.zero_grad()


def test_ranks_agree_on_stopping_on_errors_and_on_what_they_run(tmp_path: Path) -> None:
    arguments = {"out": str(tmp_path)}
    results = run_ranks("tests.dist.test_loop:agree", world_size=2, backend="photinus", arguments=arguments)
    first, second = values(results)
    assert first["stopped at"] == second["stopped at"] == 5
    for found in (first, second):
        assert found["hosts"] == 2
        assert "of 3 processes" in found["another world"]
        told = "ValueError: the ranks were given different loops: epochs=2 on rank 0, 3 on rank 1"
        assert found["different loops"].startswith(told)
        assert found["one wrong rank"].startswith("ValueError")
        assert "batch_size=0" in found["one wrong rank"]
        assert "batch_size=1 is fewer samples than world_size=2 ranks" in found["too few"]
        assert "is not wrapped, so 2 ranks would train 2 different models" in found["not wrapped"]
        assert "resume='nowhere': nothing is there" in found["no resume"]
        assert "file" in found["no folder"]
        assert "No space left on device" in found["full disk"]
    assert "rank 1 (" in first["one wrong rank"]
    assert len({*first["drawn"], *second["drawn"]}) == 4  # each rank and each loop its own
    with torch.random.fork_rng():
        rng.seed_everything(rng.derive_seed(1, "loop", 2), rank=1)
        assert second["drawn"][0] == torch.rand(()).item()
    assert first["model before"] != second["model before"]
    assert first["model after"] == second["model after"]
    # Numbers are equal on all ranks, written once and by rank 0 only, which alone speaks.
    assert first["run"]["fingerprint"] == second["run"]["fingerprint"]
    same = ("epoch", "step", "loss", "right")
    rows = [[[row[n] for n in same] for row in found["run"]["history"]] for found in (first, second)]
    assert rows[0] == rows[1]
    assert [row["step"] for row in read_rows(tmp_path / "run" / "losses.csv")] == list(range(1, 16))
    assert "photinus: 2 ranks on 1 host" in results[0].output
    assert "photinus: 2 ranks" not in results[1].output


# -- a rank that fails ---------------------------------------------------------------------------------------


def raise_in_body(rank: int, world_size: int) -> str:
    def work() -> None:
        with photinus.init("photinus", "cpu", timeout_s=30):
            for _ in _loop():
                if rank == 1:
                    raise KeyError("my own mistake")
                dist.all_reduce(torch.ones(4))

    return _error(work)


def test_a_rank_that_raises_tells_its_peers_why() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    first, second = values(run_ranks("tests.dist.test_loop:raise_in_body", world_size=2, environ=environ))
    assert second == "KeyError: 'my own mistake'"
    assert first.startswith("PeerLostError")
    assert "rank 1" in first
    assert "KeyError: 'my own mistake'" in first


def leave_alone(rank: int, world_size: int, how: str) -> str:
    """Rank 1 does 12 steps and leaves, rank 0 would do more; what rank 0 raises."""

    def work() -> None:
        with photinus.init("photinus", "cpu", seed=0, timeout_s=30):
            if how == "own loop":
                batches = photinus.loader(Numbered(90), batch_size=6)
                for _ in batches if rank == 0 else itertools.islice(batches, 12):
                    dist.all_reduce(torch.ones(4))
                return
            plain = torch.nn.Linear(1, 1)
            model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1), strategy=how)
            loop = photinus.Loop(model, optimizer, Numbered(90), batch_size=6, epochs=1, report=QUIET)
            for batch in loop:
                loop.backward(model(batch.float()[:, None]).mean())
                optimizer.step()
                optimizer.zero_grad()
                if rank == 1 and loop.step == 12:
                    break

    return _error(work)


@pytest.mark.parametrize("how", ["ddp", "zero3", "own loop"])
def test_a_rank_that_leaves_its_loop_before_the_others_is_named_with_its_place(how: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    where = "tests.dist.test_loop:leave_alone"
    first, second = values(run_ranks(where, world_size=2, environ=environ, arguments={"how": how}))
    assert second == "no error"
    place = "12 of 15 batches of an epoch of its loader" if how == "own loop" else "step 12 of 15 of its loop"
    assert re.match(
        rf"PeerLostError: rank 1 \(.*\) has left the group \(.*\) after: {place}\. Rank 0 of 2 waited", first
    )
    assert first.endswith("give each the same number of batches, and let all leave a loop in the same one.")
