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
from photinus.trainer.data.arguments import taken_apart
from tests.small_run import Numbered, points, right

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
    dataset, found = taken_apart(whole)
    assert dataset is NUMBERS
    assert found == {
        "batch_size": 4,
        "shuffle": True,
        "drop_last": False,
        "num_workers": 2,
        "pin_memory": True,
        "collate_fn": _doubled,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "worker_init_fn": _started,
        "timeout_s": 5.0,
        **({} if whole.multiprocessing_context is None else {"multiprocessing_context": whole.multiprocessing_context}),
    }


def test_a_loop_over_a_data_loader_takes_its_batches(world: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batches(data: Any, **options: Any) -> list[list[int]]:
        return [b.tolist() for b in photinus.Loop(model, optimizer, data, epochs=1, progress=False, **options)]

    assert batches(DataLoader(NUMBERS, 4, collate_fn=_doubled)) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
    assert batches(DataLoader(NUMBERS, 4), batch_size=5, drop_last=True) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batches(DataLoader(NUMBERS, 5, shuffle=True)) == batches(NUMBERS, batch_size=5)
    chosen = batches(DataLoader(NUMBERS, 2, sampler=SubsetRandomSampler([1, 3, 5, 7])))
    assert sorted(sample for batch in chosen for sample in batch) == [1, 3, 5, 7]
    assert batches(DataLoader(NUMBERS, 5), shuffle=True) == batches(NUMBERS, batch_size=5)
    with pytest.raises(TypeError, match="batch_size is missing"):
        batches(NUMBERS)


def test_the_batch_size_under_a_distributed_sampler_is_that_of_each_rank() -> None:
    sampler: Any = DistributedSampler(NUMBERS, num_replicas=2, rank=1, shuffle=False)
    _, found = taken_apart(DataLoader(NUMBERS, 3, sampler=sampler))
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
        trainer = photinus.Trainer(
            model, optimizer, loss, epochs=2, progress=False, metrics={"right": right}, **options
        )
        return trainer.fit(train, valid).metrics

    data: TensorDataset = points(48)
    loaders = fit(DataLoader(data, 8, shuffle=True), DataLoader(data, 16))
    assert loaders == fit(data, data, batch_size=8, valid_batch_size=16)
