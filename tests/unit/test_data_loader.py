"""A torch DataLoader in place of a data set: taken apart, or refused with what to give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import photinus
from photinus.parallel.ddp.sync_batch_norm import Part
from photinus.trainer.data.arguments import taken_apart
from photinus.trainer.data.loader import running_weight
from tests.small_run import QUIET, Numbered, points, right

NUMBERS = Numbered(10)


@pytest.fixture
def world() -> Iterator[Any]:
    with photinus.init("gloo", "cpu", seed=0) as session:
        yield session


def _doubled(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) * 2


def _started(worker: int) -> None:
    pass


def test_what_a_data_loader_was_given_is_taken_over() -> None:
    given: dict[str, Any] = {"num_workers": 2, "worker_init_fn": _started, "prefetch_factor": 3, "timeout": 5.0}
    whole = DataLoader(NUMBERS, 4, shuffle=True, collate_fn=_doubled, persistent_workers=True, pin_memory=True, **given)
    dataset, found, of_workers = taken_apart(whole)
    assert dataset is NUMBERS
    assert found == {
        "batch_size": 4, "shuffle": True, "drop_last": False, "num_workers": 2, "collate_fn": _doubled,
        "seed": None,
    }  # fmt: skip
    assert of_workers == {
        "persistent_workers": True, "prefetch_factor": 3, "worker_init_fn": _started, "timeout": 5.0,
        "multiprocessing_context": whole.multiprocessing_context,
    }  # fmt: skip


def test_a_loop_over_a_data_loader_takes_its_batches(world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batches(data: Any, **options: Any) -> list[list[int]]:
        return [b.tolist() for b in photinus.Loop(model, optimizer, data, epochs=1, report=QUIET, **options)]

    assert batches(DataLoader(NUMBERS, 4, collate_fn=_doubled)) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert batches(DataLoader(NUMBERS, 4), batch_size=5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batches(DataLoader(NUMBERS, 5, shuffle=True)) == batches(NUMBERS, batch_size=5)
    chosen = batches(DataLoader(NUMBERS, 2, sampler=SubsetRandomSampler([1, 3, 5, 7])))
    assert sorted(sample for batch in chosen for sample in batch) == [1, 3, 5, 7]
    with pytest.raises(TypeError, match="batch_size is missing"):
        batches(NUMBERS)


def test_the_batch_size_under_a_distributed_sampler_is_that_of_each_rank() -> None:
    sampler: Any = DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=False)
    _, found, _ = taken_apart(DataLoader(NUMBERS, 3, sampler=sampler))
    assert (found["batch_size"], found["shuffle"]) == (6, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler": WeightedRandomSampler([1.0] * 10, 10)}, r"has a sampler of its own \(WeightedRandomSampler\)"),
        ({"sampler": RandomSampler(NUMBERS, replacement=True)}, r"has a sampler of its own \(RandomSampler\)"),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(NUMBERS), 3, False)},
            r"has a sampler of its own \(BatchSampler\)",
        ),
        ({"sampler": RandomSampler(range(4))}, r"has a sampler of its own \(RandomSampler over 4 of 10 samples\)"),
        ({"sampler": SequentialSampler(range(4))}, r"\(SequentialSampler over 4 of 10 samples\)"),
        ({"sampler": DistributedSampler(range(4), 2, 0)}, r"\(DistributedSampler over 4 of 10 samples\)"),
        ({"batch_size": None}, r"has no batches \(batch_size=None\)"),
    ],
)
def test_a_choice_of_samples_that_cannot_be_divided_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words + ".*data_loader.dataset"):
        taken_apart(DataLoader(NUMBERS, **options))


@pytest.mark.parametrize("verb", ["__iter__", "__len__"])
def test_a_data_loader_that_iterates_in_its_own_way_is_not_taken_apart(world: Any, verb: str) -> None:
    kind = type("Prefetching", (DataLoader,), {verb: lambda self: getattr(DataLoader, verb)(self)})
    for use in (photinus.loader, lambda data: photinus.evaluate(torch.nn.Identity(), data, right)):
        with pytest.raises(TypeError, match=f"this Prefetching is a DataLoader with {verb} of its own.*data_loader"):
            use(kind(NUMBERS, 2))
    plain = type("Configured", (DataLoader,), {"__init__": lambda self: DataLoader.__init__(self, NUMBERS, 2)})
    assert len(photinus.loader(plain())) == 5


def test_the_trainer_and_evaluate_take_data_loaders(world: Any) -> None:
    def fit(train: Any, valid: Any, **options: Any) -> Any:
        torch.manual_seed(1)
        model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = torch.nn.functional.cross_entropy
        trainer = photinus.Trainer(model, optimizer, loss, epochs=2, report=QUIET, metrics={"right": right}, **options)
        return trainer.fit(train, valid).metrics

    data: TensorDataset = points(48)
    loaders = fit(DataLoader(data, 8, shuffle=True), DataLoader(data, 16))
    assert loaders == fit(data, DataLoader(data, 16), batch_size=8)
    assert loaders == fit(photinus.loader(data, batch_size=8), photinus.loader(data, batch_size=16, train=False))


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        ({"train": False}, {}, "leave train=False out"),
        ({"batch_size": 2}, {"batch_size": 5}, "batch_size=5, but train_set is a loader with batch_size=2"),
        ({"place": (1, 3)}, {}, "rank 1 of 3, but this is rank 0 of 1: make it after photinus.init"),
    ],
)
def test_a_loader_of_another_training_is_refused(
    world: Any, options: dict[str, Any], given: dict[str, Any], words: str
) -> None:
    model = torch.nn.Linear(1, 1)
    batches = photinus.loader(NUMBERS, **{"batch_size": 4, **options})
    with pytest.raises(ValueError, match=words):
        photinus.Loop(model, torch.optim.SGD(model.parameters()), batches, epochs=1, **given)


def test_the_order_of_a_loader_is_that_of_the_sessions_seed_until_it_closes(world: Any) -> None:
    def seeds() -> list[int]:
        return [photinus.loader(NUMBERS, batch_size=5, **each).seed for each in ({}, {"seed": 9})]

    with photinus.init(seed=7):
        assert seeds() == [7, 9]
    assert seeds() == [0, 9]


def test_a_distributed_sampler_gives_the_seed_of_the_order_alone(world: Any) -> None:
    def drawn(seed: int, of_order: int) -> tuple[list[Any], float]:
        sampler: Any = DistributedSampler(NUMBERS, num_replicas=1, rank=0, seed=of_order)
        with photinus.init(seed=seed):
            batches = photinus.loader(DataLoader(NUMBERS, 2, sampler=sampler, collate_fn=_with_noise))
            [(indices, noise), *_] = [*batches]
        return indices, noise

    assert drawn(1, 5)[0] == drawn(2, 5)[0] != drawn(1, 6)[0]
    assert drawn(1, 5) != drawn(2, 5)


def _with_noise(samples: list[int]) -> tuple[list[int], float]:
    return samples, float(torch.rand(()))


def test_a_pass_inside_a_pass_leaves_the_outer_one_its_weight_and_its_part() -> None:
    # Of 9 samples by 4, rank 1 of 2 has none in the last batch; of 15 by 5, it has 2 of 5 in each.
    outer = photinus.loader(Numbered(15), batch_size=5, place=(1, 2))
    inner = photinus.loader(Numbered(4), batch_size=4, train=False, place=(1, 2))
    short = photinus.loader(Numbered(9), batch_size=4, shuffle=False, place=(1, 2))
    for _ in outer:
        assert [running_weight() for _ in inner] == [1.0]
        assert running_weight() == pytest.approx(0.8)
    assert running_weight() == 1.0
    for place, _ in enumerate(short):
        assert len([*inner]) == 1
        assert (running_weight(), Part.is_counted) == ((0.0, False) if place == 2 else (1.0, True))
    for _ in zip(outer, short, strict=False):
        pass
    assert (running_weight(), Part.is_counted) == (1.0, True)


def test_a_pass_in_the_body_of_a_loop_leaves_it_its_part(world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    loop = photinus.Loop(
        model, torch.optim.SGD(model.parameters(), lr=0.1), NUMBERS, batch_size=10, epochs=1, report=QUIET
    )
    for _ in loop:
        Part.is_counted = False  # as where the batch has no sample for this rank
        assert len([*photinus.loader(NUMBERS, batch_size=5)]) == 2
        assert not Part.is_counted
