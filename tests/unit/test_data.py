"""Batches of a dataset: values, order, augmentation, resumption, workers, and what is refused."""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    get_worker_info,
    random_split,
)

import photinus
from photinus.parallel.exchange.tensors import move_tensors
from photinus.trainer.data import rng
from photinus.trainer.data.loader import Batch, loader

Pair = namedtuple("Pair", "x y")


class Augmented(Dataset[Any]):
    """Sample i is (i, three random numbers), one from each global generator."""

    def __init__(self, samples: int = 40) -> None:
        self.samples = samples
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.loaded.append(index)
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return index, torch.tensor(drawn, dtype=torch.float64)


class ManyAtOnce(Augmented):
    """Has the better method for many samples, and so draws once for all of them."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, torch.Tensor]]:
        noise = torch.rand(len(indices), dtype=torch.float64)
        return list(zip(indices, noise, strict=True))


def collate_and_draw(samples: list[tuple[int, torch.Tensor]]) -> tuple[list[int], torch.Tensor]:
    return [index for index, _ in samples], torch.rand(2) + torch.stack([value for _, value in samples]).sum()


def numbers(batches: Iterator[Batch]) -> list[tuple[list[Any], Any]]:
    """What was loaded, comparable: the indices and the random numbers of each batch."""
    return [(torch.as_tensor(batch.data[0]).tolist(), batch.data[1].tolist()) for batch in batches]


def of_torch(dataset: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, 4, shuffle=True, drop_last=True, **options)


TENSORS = TensorDataset(torch.arange(23.0).reshape(23, 1) * torch.ones(1, 4), torch.arange(23))


def test_it_gives_collated_batches_with_their_place() -> None:
    batches = list(loader(TENSORS, batch_size=8, shuffle=False, drop_last=False, place=(1, 2)).epoch(0))
    assert [(b.index, b.samples, b.global_samples, b.weight) for b in batches] == [
        (0, 4, 8, 1.0),
        (1, 4, 8, 1.0),
        (2, 3, 7, 6 / 7),
    ]
    assert [b.data[1].tolist() for b in batches] == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 21]]
    assert batches[0].data[0].shape == (4, 4)


@pytest.mark.parametrize(
    "dataset",
    [
        TENSORS,
        Subset(TENSORS, range(3, 19)),
        Subset(Subset(TENSORS, torch.randperm(23).tolist()), np.arange(1, 20, 2)),  # type: ignore[arg-type]
        random_split(TENSORS, [15, 8], torch.Generator().manual_seed(0))[0],
        TensorDataset(torch.arange(9, dtype=torch.bfloat16), torch.rand(9, 2, 3) > 0.5, torch.rand(3, 9).t()),
    ],
    ids=["plain", "subset", "subset of subset", "split", "dtypes"],
)
def test_tensors_in_memory_give_what_sample_by_sample_would(dataset: Any) -> None:
    fast = loader(dataset, batch_size=4, seed=3, drop_last=False)
    naive = loader([dataset[index] for index in range(len(dataset))], batch_size=4, seed=3, drop_last=False)
    assert fast._tensors is not None
    assert naive._tensors is None
    for ours, theirs in zip(fast.epoch(1), naive.epoch(1), strict=True):
        assert type(ours.data) is type(theirs.data)
        assert (ours.weight, ours.samples, ours.global_samples, ours.index) == (
            theirs.weight, theirs.samples, theirs.global_samples, theirs.index,
        )  # fmt: skip
        for mine, other in zip(ours.data, theirs.data, strict=True):
            assert torch.equal(mine, other)
            assert (mine.dtype, mine.stride()) == (other.dtype, other.stride())


def test_a_subclass_of_tensor_dataset_keeps_its_own_way() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * value for value in super().__getitem__(index))

    ((_, y),) = list(loader(Doubled(*TENSORS.tensors), batch_size=23, shuffle=False))
    assert y.tolist() == list(range(0, 46, 2))


@pytest.mark.parametrize("dataset", [Augmented(), ManyAtOnce(), Subset(Augmented(), range(40)), TENSORS])
@pytest.mark.parametrize("train", [True, False])
def test_an_epoch_goes_on_at_any_batch_as_if_nothing_had_happened(dataset: Any, train: bool) -> None:
    batches = loader(dataset, batch_size=6, seed=2, train=train)
    whole = numbers(batches.epoch(3))
    for start in range(len(batches) + 1):
        assert numbers(loader(dataset, batch_size=6, seed=2, train=train).epoch(3, start)) == whole[start:]


def test_what_was_seen_before_is_not_loaded_again() -> None:
    dataset = Augmented(12)
    seen = [batch.data[0].tolist() for batch in loader(dataset, batch_size=4, seed=1).epoch(0, start=2)]
    assert len(seen) == 1
    assert dataset.loaded == seen[0]


@pytest.mark.parametrize("dataset", [Augmented(), ManyAtOnce()])
@pytest.mark.parametrize("collate", [None, collate_and_draw])
def test_samples_and_augmentation_are_the_same_with_workers(dataset: Any, collate: Any) -> None:
    """Also after a resume, with another number of workers."""
    here = numbers(loader(dataset, batch_size=5, seed=9, collate_fn=collate).epoch(2))
    for workers, start in ((1, 0), (2, 5)):
        there = loader(dataset, batch_size=5, seed=9, collate_fn=collate, num_workers=workers)
        assert numbers(there.epoch(2, start)) == here[start:]


def test_augmentation_is_a_matter_of_sample_and_epoch_whatever_the_world_size() -> None:
    def drawn(world_size: int, epoch: int, batch_size: int) -> dict[int, Any]:
        shares = [
            loader(Augmented(), batch_size=batch_size, seed=4, place=(rank, world_size)) for rank in range(world_size)
        ]
        return {
            int(index): values.tolist()
            for share in shares
            for batch in share.epoch(epoch)
            for index, values in zip(*batch.data, strict=True)
        }

    assert drawn(1, 0, 8) == drawn(2, 0, 8) == drawn(4, 0, 20)
    epochs = [drawn(1, epoch, 8) for epoch in range(2)]
    assert all(epochs[0][index] != epochs[1][index] for index in range(40))
    assert len({str(value) for value in epochs[0].values()}) == 40


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_does_not_shift_the_ranks_own_random_numbers(workers: int) -> None:
    """Otherwise dropout would differ after a resume, which loads at other moments."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = random.random(), np.random.rand(), torch.rand(3).tolist()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    for _ in loader(Augmented(), batch_size=10, num_workers=workers).epoch(0):
        pass
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == wanted


class Draws(Augmented):
    """Draws from one generator in some samples."""

    def __init__(self, stream: str, drawing: range) -> None:
        super().__init__()
        self.stream, self.drawing = stream, drawing

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        self.loaded.append(index)
        draw = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(())}[self.stream]
        return index, torch.tensor([float(draw()) if index in self.drawing else 0.0], dtype=torch.float64)


def _seeded_by_hand(data: Draws, epoch: int, seed: int) -> dict[int, list[float]]:
    """Each sample with all generators seeded for it."""
    values = {}
    for index in range(len(data)):
        rng.seed_host_streams(rng.derive_seed(seed, "sample", epoch, index))
        values[index] = data[index][1].tolist()
    return values


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", ["python", "numpy", "torch"])
@pytest.mark.parametrize("drawing", [range(40), range(17, 19)], ids=["all", "few"])
def test_samples_that_draw_have_numbers_of_their_own_on_every_rank(stream: str, drawing: range, workers: int) -> None:
    data = Draws(stream, drawing)
    expected = _seeded_by_hand(data, 1, 3)
    found: dict[int, Any] = {}
    for rank in range(2):
        batches = loader(data, batch_size=8, seed=3, num_workers=workers, place=(rank, 2))
        for indices, values in numbers(batches.epoch(1)):
            found |= dict(zip(indices, values, strict=True))
    assert found == expected


def test_a_collate_function_draws_numbers_of_its_batch() -> None:
    batches = loader(
        Augmented(), batch_size=4, shuffle=False, seed=3, collate_fn=lambda samples: torch.rand(2).tolist()
    )
    found = [batch.data for batch in batches.epoch(1)]
    rng.seed_host_streams(rng.derive_seed(3, "batch", 1, 4))
    assert found[1] == torch.rand(2).tolist()


@pytest.mark.parametrize("draw", [np.random.rand, np.random.randn])
def test_the_normal_that_numpy_keeps_in_reserve_stays_the_ranks_own(draw: Any) -> None:
    found = []
    for drawn in range(2):  # with one, a second lies in reserve
        np.random.seed(1)
        normals = np.random.randn(drawn).tolist()
        batches = loader(range(12), batch_size=4, collate_fn=lambda items: [draw() if i == 9 else i for i in items])
        found.append([batch.data for epoch in range(3) for batch in batches.epoch(epoch)])
        normals += np.random.randn(4 - drawn).tolist()
        np.random.seed(1)
        assert normals == np.random.randn(4).tolist()
    assert found[0] == found[1]


def test_a_loader_whose_pass_was_left_early_is_no_cycle() -> None:
    batches = loader(of_torch(Draws("python", range(0)), num_workers=1, persistent_workers=True))
    for _ in batches:
        break
    gone = weakref.ref(batches)
    gc.disable()
    try:
        del batches
        assert gone() is None
    finally:
        gc.enable()


def test_each_plain_pass_is_the_next_epoch() -> None:
    batches = loader(TENSORS, batch_size=5, seed=7)
    passes = [[y.tolist() for _, y in batches] for _ in range(3)]
    assert passes == [[batch.data[1].tolist() for batch in batches.epoch(epoch)] for epoch in range(3)]
    assert passes[0] != passes[1]
    for _ in batches:
        break
    assert [y.tolist() for _, y in batches] == [batch.data[1].tolist() for batch in batches.epoch(4)]


def test_a_plain_pass_goes_on_where_its_state_stood_twice_in_one_epoch() -> None:
    straight = loader(TENSORS, batch_size=3, seed=5, drop_last=True)
    wanted = [[y.tolist() for _, y in straight] for _ in range(3)]
    seen: list[list[int]] = []
    state = straight.state_dict()
    assert (state["epoch"], state["batch"]) == (3, 0)
    state = loader(TENSORS, batch_size=3, seed=5, drop_last=True).state_dict()
    for stop in (2, 3, 2):  # killed after 2 batches, 3 more, 2 more: the end of the epoch
        batches = loader(TENSORS, batch_size=3, seed=5, drop_last=True)
        batches.load_state_dict(state)
        for number, (_, y) in enumerate(batches, 1):
            seen.append(y.tolist())
            if number == stop:
                state = batches.state_dict()
                break
    assert seen == wanted[0]
    batches = loader(TENSORS, batch_size=3, seed=5, drop_last=True)
    batches.load_state_dict(state)
    assert [[y.tolist() for _, y in batches] for _ in range(2)] == wanted[1:]


def test_set_epoch_names_the_epoch_of_the_next_pass_and_keeps_a_loaded_place_inside_it() -> None:
    batches = loader(TENSORS, batch_size=5, seed=7)
    batches.set_epoch(3)
    assert batches.state_dict()["epoch"] == 3
    assert [y.tolist() for _, y in batches] == [batch.data[1].tolist() for batch in batches.epoch(3)]
    batches.set_epoch(3)  # again: the pass that has begun is over
    iterator = iter(batches)
    next(iterator), next(iterator)
    resumed = loader(TENSORS, batch_size=5, seed=7)
    resumed.load_state_dict(batches.state_dict())
    resumed.set_epoch(3)
    assert [y.tolist() for _, y in resumed] == [batch.data[1].tolist() for batch in batches.epoch(3, start=2)]
    for epoch in (-1, 1.5):
        with pytest.raises((TypeError, ValueError), match="epoch"):
            batches.set_epoch(epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize("cure", ["none", "set_epoch", "loader", "fine-tuning", "validation"])
def test_a_training_that_goes_on_without_its_loaders_place_says_so(
    tmp_path: Path, cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photinus.trainer.data.loader._loaded", None)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = loader(TENSORS, batch_size=5, seed=7)
    list(batches)
    photinus.save(tmp_path / "last.pt", model=model, optimizer=optimizer, loader=batches)
    resumed = loader(TENSORS, batch_size=5, seed=7, train=cure != "validation")
    given: dict[str, Any] = {} if cure == "fine-tuning" else {"optimizer": optimizer}
    photinus.load(tmp_path / "last.pt", model=model, **given, **({"loader": resumed} if cure == "loader" else {}))
    if cure == "set_epoch":
        resumed.set_epoch(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        orders = [[y.tolist() for _, y in resumed] for _ in range(2)]
    told = [str(each.message) for each in caught if "photinus" in str(each.message)]
    if cure == "none":
        assert len(told) == 1
        assert "last.pt, but not the place of this loader, which starts again at epoch 0" in told[0]
        assert "photinus.save(..., loader=loader)" in told[0]
    else:
        assert told == []
    if cure in ("set_epoch", "loader"):
        assert orders == [[batch.data[1].tolist() for batch in batches.epoch(epoch)] for epoch in (1, 2)]


def test_a_position_inside_an_epoch_of_another_order_is_refused() -> None:
    batches = loader(TENSORS, batch_size=4, seed=5)
    next(iter(batches))
    middle = batches.state_dict()
    with pytest.raises(ValueError, match=r"batch 1 of epoch 0.*batch_size was 4 and is 5, seed was 5 and is 6"):
        loader(TENSORS, batch_size=5, seed=6).load_state_dict(middle)
    loader(TENSORS, batch_size=5, seed=6).load_state_dict({**middle, "batch": 0})  # at a boundary nothing is lost
    validation = loader(TENSORS, batch_size=4, train=False, place=(0, 2))
    next(iter(validation))
    for saved in (validation.state_dict(), {"epoch": 0, "batch": 1, "samples": 10, "batch_size": 4, "seed": 0}):
        with pytest.raises(ValueError, match=r"cannot be found again: .*world_size was (2|None) and is 1"):
            loader(TENSORS, batch_size=4, train=False, place=(0, 1)).load_state_dict(saved)


def test_validation_keeps_the_order_and_counts_once() -> None:
    seen = []
    for rank in range(3):
        share = loader(TENSORS, batch_size=8, train=False, place=(rank, 3))
        seen += [int(y) for batch in share.epoch(0) for y in batch.data[1]]
        assert len(share) == len(list(share.epoch(5)))
    assert seen == list(range(23))
    nothing = loader(Subset(TENSORS, [0]), batch_size=8, train=False, place=(2, 3))
    assert (len(nothing), list(nothing)) == (0, [])


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_serve_epoch_after_epoch_also_when_one_is_left_early(persistent: bool) -> None:
    plain = loader(Augmented(), batch_size=4, seed=6)
    batches = loader(of_torch(Augmented(), num_workers=2, persistent_workers=persistent), seed=6)
    for epoch in range(2):
        assert numbers(batches.epoch(epoch)) == numbers(plain.epoch(epoch))
    left = batches.epoch(2)
    next(left)
    assert numbers(batches.epoch(3, start=4)) == numbers(plain.epoch(3, start=4))
    if persistent:
        with pytest.raises(RuntimeError, match="one pass at a time"):
            next(left)
    else:
        assert numbers(left) == numbers(plain.epoch(2))[1:]


class Pids(Augmented):
    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, os.getpid()


def test_persistent_workers_are_the_same_processes_in_the_next_epoch() -> None:
    def pids(batches: Any, epoch: int) -> set[int]:
        return {pid for _, values in numbers(batches.epoch(epoch)) for pid in values}

    kept = loader(of_torch(Pids(), num_workers=2, persistent_workers=True))
    assert pids(kept, 0) == pids(kept, 1)
    assert os.getpid() not in pids(kept, 2)
    renewed = loader(Pids(), batch_size=4, num_workers=2)
    assert not pids(renewed, 0) & pids(renewed, 1)


def initial_mark(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.dataset.mark = worker + 100  # type: ignore[attr-defined]


class Marked(Augmented):
    mark = 0

    def __getitem__(self, index: int) -> tuple[int, int]:  # type: ignore[override]
        return index, self.mark


def test_the_users_start_function_runs_in_each_worker() -> None:
    batches = loader(of_torch(Marked(8), num_workers=2, worker_init_fn=initial_mark))
    assert {mark for _, marks in numbers(batches.epoch(0)) for mark in marks} == {100, 101}


class Failing(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise KeyError("label 'cat' is unknown")
        return super().__getitem__(index)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_says_which_sample_it_was(workers: int) -> None:
    with pytest.raises(KeyError) as caught:
        list(loader(Failing(), batch_size=4, num_workers=workers).epoch(2))
    assert "while loading sample 7 in epoch 2" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


def test_a_sample_that_raises_stop_iteration_is_named() -> None:
    class Ends(Augmented):
        def __getitem__(self, index: int) -> Any:
            return next(iter([])) if index == 5 else index

    with pytest.raises(RuntimeError, match="while loading sample 5 in epoch 0: StopIteration"):
        list(loader(Ends(8), batch_size=4))


class Slow(Augmented):
    def __getitem__(self, index: int) -> Any:
        time.sleep(30)


@pytest.mark.seconds
def test_a_stuck_worker_is_told_after_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no batch came from the 1 loader workers within 1\.5 s.*epoch 4, batch 0"):
        list(loader(of_torch(Slow(), num_workers=1, timeout=1.5, prefetch_factor=1)).epoch(4))
    assert time.monotonic() - began < 25


@pytest.mark.seconds
def test_a_full_shared_memory_names_it_and_num_workers() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a small /dev/shm of its own needs root and unshare")
    code = "import torch, photinus; list(photinus.loader([torch.ones(10**6)] * 8, batch_size=4, num_workers=2))"
    small = 'mount -t tmpfs -o size=1M tmpfs /dev/shm && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", small, "sh", sys.executable, "-c", code]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert re.search(
        r"PhotinusError: /dev/shm of host \S+ has no room .*num_workers=2 loader workers pass", ended.stderr
    )


class Killed(Augmented):
    def __getitem__(self, index: int) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_pass_at_once() -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"DataLoader worker .*(killed by signal|exited unexpectedly)"):
        list(loader(Killed(), batch_size=4, num_workers=2).epoch(0))
    assert time.monotonic() - began < 25


def test_objects_that_move_themselves_are_asked_to_inside_containers_too() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    moved, label = move_tensors((packed, torch.zeros(1)), torch.device("meta"))
    assert moved.data.device.type == label.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu", "torch wants these on the CPU"


def test_batches_of_any_nesting_are_moved() -> None:
    class Moves:
        def to(self, device: torch.device) -> str:
            return f"moved to {device}"

    data = {"a": [torch.zeros(2), (torch.ones(1), "text")], "b": Pair(torch.zeros(1), 3), "n": None}
    moved = move_tensors(data, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert moved["b"].x.is_meta
    assert (moved["b"].y, moved["n"], type(moved["b"])) == (3, None, Pair)
    assert move_tensors(Moves(), torch.device("meta")) == "moved to meta"
    ((x, y), *_) = list(loader(TENSORS, batch_size=8, device="meta"))
    assert x.is_meta
    assert y.is_meta


def test_rank_and_world_size_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (loader(TENSORS, batch_size=8).shares.rank, loader(TENSORS, batch_size=8).shares.world_size) == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (loader(TENSORS, batch_size=8).shares.rank, loader(TENSORS, batch_size=8).shares.world_size) == (2, 4)


@pytest.mark.parametrize(
    ("dataset", "error", "said"),
    [
        ("no/such/folder", TypeError, "'no/such/folder' is a path, not a dataset \\(and it does not exist, seen from"),
        (Path("/no/such/folder"), TypeError, "'/no/such/folder' is a path, not a dataset \\(and it does not exist"),
        ("/tmp", TypeError, "'/tmp' is a path, not a dataset"),
        (Augmented, TypeError, "the class Augmented, not an object"),
        (None, TypeError, "NoneType has no __len__ and no __getitem__"),
        ({1, 2}, TypeError, "set has no __getitem__"),
        ([], ValueError, "empty"),
    ],
)
def test_what_is_no_dataset_is_refused_with_advice(dataset: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        loader(dataset, batch_size=4)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"place": 0}, TypeError, r"place=0: needs \(rank, world_size\)"),
        ({"place": (2, 2)}, ValueError, "rank=2 does not exist in a world of 2: ranks go from 0 to 1"),
        ({"place": (0, 0)}, ValueError, "world_size=0"),
        ({"batch_size": 1, "place": (0, 2)}, ValueError, "fewer samples than world_size=2 ranks"),
        ({"batch_size": 24, "drop_last": True}, ValueError, "more than the 23 samples"),
        ({"train": False, "shuffle": True}, ValueError, "shuffle=True with train=False"),
        ({"num_workers": -1}, ValueError, "num_workers=-1"),
        ({"num_workers": 1.0}, TypeError, "num_workers"),
        ({"collate_fn": 3}, TypeError, "collate_fn"),
        ({"seed": -3}, ValueError, "seed=-3"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"seed": 2**63}, ValueError, "below 2"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"batch_size": True}, TypeError, "batch_size needs a whole number, not True"),
        ({"batch_size": 8.0}, TypeError, "batch_size needs a whole number, not 8.0"),
        ({"batch_size": "8"}, TypeError, "not '8'"),
        ({"shuffle": 1}, TypeError, "shuffle needs True or False, not 1"),
        ({"drop_last": 1}, TypeError, "drop_last needs True or False, not 1"),
    ],
)
def test_wrong_options_are_refused_when_the_loader_is_made(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        loader(TENSORS, **{"batch_size": 4, **options})
    with pytest.raises(ValueError, match="start=7 is beyond the end of the epoch, which has 6 batches"):
        loader(TENSORS, batch_size=4).epoch(0, 7)


def test_numpy_integers_are_whole_numbers() -> None:
    options: dict[str, Any] = {"batch_size": np.int32(4), "seed": np.int64(2), "place": (np.int64(0), np.int64(1))}
    found, wanted = loader(range(10), **options), loader(range(10), batch_size=4, seed=2)
    assert [each.tolist() for each in found] == [each.tolist() for each in wanted]


def test_any_sequence_and_concatenation_is_a_dataset() -> None:
    words = ["a", "b", "c", "d"]
    assert list(loader(words, batch_size=2, shuffle=False)) == [["a", "b"], ["c", "d"]]
    both = ConcatDataset([TENSORS, TENSORS])
    assert sum(len(y) for _, y in loader(both, batch_size=2)) == 46


def test_a_place_that_is_loaded_after_iter_counts() -> None:
    first = loader(TENSORS, batch_size=4)
    batches = iter(first)
    next(batches)
    rest = [y.tolist() for _, y in batches]
    second = loader(TENSORS, batch_size=4)
    batches = iter(second)
    second.load_state_dict({**first.state_dict(), "epoch": 0, "batch": 1})
    assert [y.tolist() for _, y in batches] == rest


def note_initial_seed(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.dataset.started_with = torch.initial_seed()  # type: ignore[attr-defined]


class InitialSeeds(Augmented):
    """Gives what its worker_init_fn may seed generators with, and what its samples may."""

    started_with = 0

    def __getitem__(self, index: int) -> Any:
        return self.started_with, torch.tensor(torch.initial_seed())


def test_workers_have_another_seed_in_each_epoch_and_on_each_rank_and_samples_their_own() -> None:
    def seeds(rank: int) -> list[Any]:
        data = of_torch(InitialSeeds(8), num_workers=1, worker_init_fn=note_initial_seed)
        batches = loader(data, place=(rank, 2), shuffle=False)
        return [found for epoch in range(2) for found in numbers(batches.epoch(epoch))]

    found = [*seeds(0), *seeds(1)]
    assert seeds(0) == found[:4]
    assert len({seed for started_with, _ in found for seed in started_with}) == 4
    of_samples = {seed for _, samples in found for seed in samples}
    assert of_samples == {rng.derive_seed(0, "sample", epoch, index) for epoch in range(2) for index in range(8)}


def test_a_thread_that_fetches_beside_training_is_warned_of_once() -> None:
    batches = loader(Augmented(8), batch_size=4)
    list(batches)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            thread = threading.Thread(target=lambda: list(batches), name="prefetch")
            thread.start()
            thread.join()
    (message,) = (str(each.message) for each in told)
    assert re.search(
        r"another thread .* takes its batches \(thread prefetch\), and num_workers=0: .* num_workers=1", message
    )
