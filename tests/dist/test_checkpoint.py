"""Checkpoints of several ranks: one writes, all load the same, and an error of one is an error of all."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import photinus
from photinus.errors import CheckpointError, PhotinusError
from photinus.parallel.exchange.agreement import from_rank_0, gather_per_rank, together
from photinus.trainer.checkpoint import folder as checkpoints
from photinus.trainer.checkpoint import statefile
from photinus.trainer.checkpoint.folder import CheckpointFolder, find_checkpoint, on_all_ranks
from photinus.trainer.checkpoint.statefile import load, save
from photinus.trainer.checkpoint.states import state_of
from photinus.trainer.data import rng
from tests.ranks import run_ranks, values
from tests.small_run import QUIET


def ddp_model(seed: int) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def numbers(model: nn.Module) -> list[Any]:
    return [value.tolist() for value in model.state_dict().values()]


def goes_on(rank: int, world_size: int, folder: str) -> Any:
    """Trains 4 steps; saves after 2, loads into fresh objects, trains 2 more: the same weights."""
    model, optimizer = ddp_model(0)
    for number in range(4):
        if number == 2:
            save(Path(folder, "last.pt"), model=model, optimizer=optimizer, step=number)
            assert Path(folder, "last.pt").exists(), "complete on return, on every rank"
        step(model, optimizer, 10 * number + rank)
    other, other_optimizer = ddp_model(1)
    saved = load(Path(folder, "last.pt"), model=other, optimizer=other_optimizer)
    for number in range(saved["step"], 4):
        step(other, other_optimizer, 10 * number + rank)
    return numbers(model.module) == numbers(other.module)


def test_all_ranks_go_on_from_what_rank_0_saved(tmp_path: Path) -> None:
    results = run_ranks(
        "tests.dist.test_checkpoint:goes_on", world_size=2, backend="gloo", arguments={"folder": str(tmp_path)}
    )
    assert values(results) == [True, True]
    names = torch.load(tmp_path / "last.pt", weights_only=True)["model"]
    assert next(iter(names)) == "0.weight"
    assert os.listdir(tmp_path) == ["last.pt"]


def message_of(call: Any) -> str:
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001 - its text is the result
        assert time.monotonic() - began < 20
        return f"{type(error).__name__}: {error}"
    return "no error"


def errors_are_shared(rank: int, world_size: int, folder: str) -> list[str]:
    model, optimizer = ddp_model(0)
    file = Path(folder, "file")
    if rank == 0:
        file.write_text("in the way")
    dist.barrier()
    told = [message_of(lambda: save(file / "x.pt", model=model))]  # rank 0 cannot make the folder
    told.append(message_of(lambda: save(Path(folder, "y.pt"), model=model, bad=(lambda: 1) if rank == 1 else 1)))
    save(Path(folder, "z.pt"), model=model, optimizer=optimizer)

    class FailsOnRank2:
        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            if rank == 2:
                raise RuntimeError("rank 2 will not")

    save(Path(folder, "w.pt"), model=model, picky=FailsOnRank2())
    other, _ = ddp_model(1)
    before = numbers(other)
    told.append(message_of(lambda: load(Path(folder, "w.pt"), model=other, picky=FailsOnRank2())))
    told.append("unchanged" if numbers(other) == before else "changed")
    own = Path(folder, f"only-{rank}.pt")
    torch.save({"epoch": rank}, own)
    told.append(message_of(lambda: load(own)))
    told.append(message_of(lambda: load(Path(folder, "z.pt" if rank != 1 else "nothing.pt"))))
    told.append(message_of(lambda: load(Path(folder, "z.pt"), model=model)))
    return told


def test_an_error_of_one_rank_is_told_on_all_and_nothing_hangs(tmp_path: Path) -> None:
    results = run_ranks(
        "tests.dist.test_checkpoint:errors_are_shared",
        world_size=3,
        backend="gloo",
        arguments={"folder": str(tmp_path)},
        timeout_s=120,
    )
    rank_0, rank_1, rank_2 = values(results)
    assert "CheckpointError" in rank_0[0]
    assert "could not be written" in rank_0[0]
    for rank in (rank_1, rank_2):
        assert "x.pt failed on rank 0 (host" in rank[0]
        assert "could not be written" in rank[0]
    assert rank_0[1] == rank_1[1] == rank_2[1] == "no error"  # what rank 1 gives for a plain value is not written
    assert "rank 2 will not" in rank_2[2]
    assert all("failed on rank 2 (host" in rank[2] and "Nothing was changed." in rank[2] for rank in (rank_0, rank_1))
    assert rank_0[3] == rank_1[3] == rank_2[3] == "unchanged"
    assert all(
        "ValueError: the ranks load different checkpoints: path=" in rank[4] for rank in (rank_0, rank_1, rank_2)
    )
    assert all("path=" in rank[5] for rank in (rank_0, rank_1, rank_2))
    assert rank_0[6] == rank_1[6] == rank_2[6] == "no error"  # the group is as usable as before


def chooses(rank: int, world_size: int, folder: str) -> list[str]:
    def shown(call: Any) -> str:
        try:
            with on_all_ranks(call) as found:
                return "none" if found is None else f"step {found.step} weight {found.load()['model'].tolist()}"
        except CheckpointError as error:
            return str(error)

    shared, own = CheckpointFolder(Path(folder, "shared")), CheckpointFolder(Path(folder, f"rank-{rank}"))
    told = [shown(shared.newest)]
    if rank == 0:
        for number in (1, 2):
            shared.save(number, {"model": torch.tensor([number])}, description={})
        data = bytearray((shared.folder / "step-00000002" / "model.pt").read_bytes())
        data[data.index(b"torch._utils")] ^= 2
        (shared.folder / "step-00000002" / "model.pt").write_bytes(data)
    dist.barrier()
    told.append(shown(shared.newest))  # rank 0 passes over the damaged one, and so all do
    told.append(shown(lambda: find_checkpoint(shared.folder / "step-00000002")))
    own.save(3, {"model": torch.tensor([rank])}, description={})
    hidden = Path(folder, "rank-0", "step-00000003")
    dist.barrier()
    told.append(shown(lambda: find_checkpoint(hidden)))
    os.chdir(own.folder)  # one path, and on each rank another folder behind it
    told.append(shown(CheckpointFolder("/proc/self/cwd").newest))
    return told


def saves_and_loads_slowly(rank: int, world_size: int, folder: str, killed: bool) -> Any:
    """Rank 0 writes, and rank 1 verifies, for longer than the deadline of the group."""
    model, _ = ddp_model(0)
    if not killed:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    write, verify = statefile.write_state_file, statefile._verify

    def write_slowly(path: Path, states: Any) -> None:
        time.sleep(1.0 if killed else 2.5)
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, states)

    def verify_slowly(path: Path) -> str:
        time.sleep(2.5 * rank)
        return verify(path)

    statefile.write_state_file, statefile._verify = write_slowly, verify_slowly
    began = time.monotonic()
    try:
        save(Path(folder, "slow.pt"), model=model)
        load(Path(folder, "slow.pt"), model=model)
    except PhotinusError as error:
        return [f"{type(error).__name__}: {error}", time.monotonic() - began]
    return numbers(model)


@pytest.mark.parametrize("backend", ["photinus", "gloo"])
def test_a_save_and_a_load_that_take_longer_than_the_deadline_are_waited_for(tmp_path: Path, backend: str) -> None:
    found = values(
        run_ranks(
            "tests.dist.test_checkpoint:saves_and_loads_slowly",
            world_size=2,
            backend=backend,
            environ={"PHOTINUS_TIMEOUT_S": "1"},
            arguments={"folder": str(tmp_path), "killed": False},
        )
    )
    assert found[0] == found[1]
    assert isinstance(found[0][0], list), found


def test_a_rank_that_is_killed_while_it_saves_is_named_by_those_that_wait(tmp_path: Path) -> None:
    found = run_ranks(
        "tests.dist.test_checkpoint:saves_and_loads_slowly",
        world_size=2,
        backend="photinus",
        expect={0: -9},
        arguments={"folder": str(tmp_path), "killed": True},
    )
    message, seconds = found[1].value
    assert message.startswith("PeerLostError: rank 0 (pid")
    assert "was killed by SIGKILL" in message
    assert seconds < 3.0


def trains(strategy: str, epochs: int) -> tuple[Any, photinus.Loop]:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = photinus.wrap(plain, torch.optim.Adam(plain.parameters(), lr=0.01), strategy=strategy)
    data = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    loop = photinus.Loop(model, optimizer, data, batch_size=4, epochs=epochs, out="run", report=QUIET)
    for (batch,) in loop:
        loop.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        loop.log(quality=-loop.step)
    return model, loop


def sees_no_folder_but_its_own(rank: int, world_size: int, folder: str, strategy: str) -> Any:
    """Each rank is on a host of its own, as far as files go; in one case rank 1's has another run at the same place."""
    if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS of sched.h
        return "no mount namespaces"
    if rank == 1:
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    os.chdir(folder)
    checkpoints._PIECE_BYTES = 1000  # so that files travel in several
    whole = numbers_of(trains(strategy, 2)[0])
    if rank == 0:
        os.rename("run", "whole")
    elif strategy == "ddp":
        CheckpointFolder("run/checkpoints").save(4, {"model": {"0.weight": torch.ones(1)}}, description={})
    trains(strategy, 1)
    model, loop = trains(strategy, 2)
    resumed = [str(loop.resumed_from).endswith("run/checkpoints/step-00000004"), numbers_of(model) == whole]
    fresh = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    rest = load("run", model=fresh)
    save("by hand.pt", model=fresh, epoch=7)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    by_hand = load("by hand.pt", model=fresh)["epoch"]
    whole = gather_per_rank(whole)[0]
    return [*resumed, rest["position"]["step"], by_hand, numbers(fresh) == whole, sorted(os.listdir("."))]


def numbers_of(model: nn.Module) -> Any:
    return [None if value is None else value.tolist() for value in state_of(model).values()]  # of zero on rank 0 alone


@pytest.mark.parametrize(
    "strategy", ["ddp", "zero3", *(pytest.param(s, marks=pytest.mark.slow) for s in ("zero1", "zero2"))]
)
def test_ranks_that_do_not_see_a_checkpoint_get_it_from_rank_0(tmp_path: Path, strategy: str) -> None:
    call = "tests.dist.test_checkpoint:sees_no_folder_but_its_own"
    options: dict[str, Any] = {"world_size": 2, "backend": "photinus", "timeout_s": 120}
    ranks = run_ranks(call, arguments={"folder": str(tmp_path), "strategy": strategy}, **options)
    if ranks[1].value == "no mount namespaces":
        pytest.skip("mount namespaces need root")
    for rank in ranks:
        left = ["by hand.pt", "run", "whole"] if rank.rank == 0 else ["run"] if strategy == "ddp" else []
        assert rank.value == [True, True, 8, 7, True, left], rank.output
    there = "something else" if strategy == "ddp" else "nothing"
    assert f"step-00000004 is not shared: rank 1 found {there} there, so rank 0 sends it" in ranks[0].output
    assert re.search(r"note: run is on host \S+, and rank 1 cannot see it: rank 0's counts", ranks[0].output)


def exchanges(rank: int, world_size: int, folder: str) -> Any:
    rng.seed_everything(5, rank)
    mine = rng.capture()
    everyone = gather_per_rank(mine)
    wanted = torch.rand(2).tolist()
    rng.restore(everyone[rank])
    assert torch.rand(2).tolist() == wanted
    rng.restore(everyone[(rank + 1) % world_size])
    neighbour = torch.rand(2).tolist()
    sizes = gather_per_rank({"text": "x" * 1000 * rank, "tensor": torch.full((rank,), rank), "none": None})
    assert [len(one["text"]) for one in sizes] == [1000 * r for r in range(world_size)]
    assert [one["tensor"].tolist() for one in sizes] == [[r] * r for r in range(world_size)]
    choice = from_rank_0(lambda: {"path": f"chosen on {rank}"}, "choosing")
    told = []
    try:
        with together("a step"):
            if rank == 1:
                raise ValueError("too bad")
    except (ValueError, CheckpointError) as error:
        told.append(f"{type(error).__name__}: {error}")
    return [wanted, neighbour, choice, told, chooses(rank, world_size, folder)]


def test_small_state_errors_and_the_choice_of_a_checkpoint_travel_between_ranks(tmp_path: Path) -> None:
    call = "tests.dist.test_checkpoint:exchanges"
    results = values(run_ranks(call, world_size=3, backend="gloo", arguments={"folder": str(tmp_path)}))
    own = [result[0] for result in results]
    assert len({str(draw) for draw in own}) == 3
    assert [result[1] for result in results] == [own[1], own[2], own[0]]
    assert all(result[2] == {"path": "chosen on 0"} for result in results)
    assert results[1][3] == ["ValueError: too bad"]
    for rank in (0, 2):
        assert results[rank][3][0].startswith("ValueError: a step failed on rank 1 (host ")
        assert f"ValueError: too bad). This rank ({rank}) had no error of its own" in results[rank][3][0]
    for rank, result in enumerate(results):
        told = result[4]
        assert told[0] == "none"
        assert told[1] == "step 1 weight [1]"
        assert "damaged: checksum of its " in told[2]
        assert ("failed on rank 0" in told[2]) == (rank > 0)
        assert told[3] == "step 3 weight [0]"
        assert told[4] == "step 3 weight [0]"  # ranks that find another one get that of rank 0


def saves_under_an_odd_name(rank: int, world_size: int, folder: str) -> Any:
    """Saves and loads a file whose name is not UTF-8; rank 1 waits for rank 0 in between."""
    path = os.path.join(folder, os.fsdecode(b"\xff.pt"))
    save(path, numbers=torch.arange(4))
    with together(f"reading {path}", is_long=True):
        time.sleep(0.3 * (rank == 0))
    return load(path)["numbers"].tolist()


def test_a_file_whose_name_is_not_utf8_is_saved_and_loaded(tmp_path: Path) -> None:
    arguments = {"folder": str(tmp_path)}
    results = run_ranks(f"{__name__}:saves_under_an_odd_name", world_size=2, backend="photinus", arguments=arguments)
    assert values(results) == [[0, 1, 2, 3]] * 2
