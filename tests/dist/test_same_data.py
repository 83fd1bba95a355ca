"""Ranks that were given different data say so, whatever uses them; equal data train as before, with the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import photinus
from photinus.trainer.data import same_data
from tests.ranks import run_ranks, values

OWN = np.random.default_rng(0)  # a generator that a data set draws from


def points(count: int = 60, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 3, generator=generator), torch.randn(count, 1, generator=generator))


class Wrapped:
    """A data set of a user's class."""

    def __init__(self, change: Callable[[Any], Any] = lambda sample: sample, count: int = 60) -> None:
        self.data, self.change, self.fetched = points(count), change, 0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        self.fetched += 1
        return self.change(self.data[index])


class Drawing(Wrapped):
    """A data set with generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [{"numpy": np.random.RandomState(1), "python": random.Random(1)}]
        self.torch, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + self.draw(), y

    def draw(self) -> float:
        drawn = self.inner[0]["numpy"].rand() + self.inner[0]["python"].random() + float(self.numpy.random())
        return drawn + float(torch.rand([], generator=self.torch)) + float(OWN.random())


class OpensLate(Wrapped):
    """A data set that opens a file in the process that reads it."""

    file: Any = None

    def __getitem__(self, index: int) -> Any:
        self.file = self.file or open("/dev/zero", "rb")  # noqa: SIM115
        return super().__getitem__(index)


def augmented(sample: Any) -> Any:
    return sample[0] + torch.randn(3) + random.random() + np.random.rand(), sample[1]


def nearly(sample: Any) -> Any:
    return sample[0] * (1 + 1e-6 * torch.distributed.get_rank()), sample[1]


def broken(sample: Any) -> Any:
    raise OSError("this sample cannot be read")


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 1)
    return photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def splits(rank: int) -> dict[str, Any]:
    """Data that are not the same on rank 2 (of 3)."""
    apart = np.random.default_rng(rank // 2).permutation(60)
    return {
        "a Subset": Subset(points(), apart.tolist()),
        "a Subset inside": Subset(Subset(points(), apart), range(50)),
        "equal samples": Subset(TensorDataset(torch.zeros(60, 1)), apart),
        "tensors": TensorDataset(*(tensor[apart] for tensor in points().tensors)),
        "a list": [(x, y) for x, y in points(seed=rank // 2)],
        "texts": [str(number) for number in apart],
        "arrays": [{"x": np.float32([number, 1]), "y": int(number)} for number in apart],
        "an object": Wrapped(lambda sample: (sample[0] + rank // 2, sample[1])),
    }


def all_refuse(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    with photinus.init():
        model, optimizer = pair()
        quiet = photinus.Reporting(progress=False, curves=False)

        def mse(outputs: Any, targets: Any) -> Any:
            return F.mse_loss(outputs, targets)

        def per_sample(outputs: Any, targets: Any) -> Any:
            return (outputs - targets).square().sum(1)

        def fit(train: Any, valid: Any) -> None:
            trainer = photinus.Trainer(*pair(), mse, batch_size=6, epochs=1, report=quiet)
            trainer.fit(train, valid)

        for name, data in splits(rank).items():
            found[f"loader: {name}"] = error_of(lambda data=data: photinus.loader(data, batch_size=6))
        split = splits(rank)["a Subset"]
        workers = DataLoader(splits(rank)["an object"], batch_size=6, num_workers=1, multiprocessing_context="fork")
        found["loader: workers"] = error_of(lambda: photinus.loader(workers))
        found["loader: validation"] = error_of(lambda: photinus.loader(split, batch_size=6, train=False))
        found["Loop"] = error_of(lambda: photinus.Loop(model, optimizer, split, batch_size=6, epochs=1))
        found["Trainer: train_set"] = error_of(lambda: fit(split, None))
        found["Trainer: valid_set"] = error_of(lambda: fit(points(), split))
        found["evaluate"] = error_of(lambda: photinus.evaluate(model, split, per_sample))
        found["predict"] = error_of(lambda: photinus.predict(model, split))
        found["length"] = error_of(lambda: photinus.loader(points(60 + rank // 2), batch_size=6))
        found["seed"] = error_of(lambda: photinus.loader(points(), batch_size=6, seed=rank // 2))
        found["one side fails"] = error_of(lambda: photinus.loader(points(60 if rank < 2 else 5), batch_size=6))
        found["valid_set on some"] = error_of(lambda: fit(points(), points() if rank < 2 else None))
    return found


def test_different_data_are_an_error_on_all_ranks_which_names_the_sample() -> None:
    ranks = values(run_ranks("tests.dist.test_same_data:all_refuse", world_size=3, backend="gloo", timeout_s=180))
    for name in ranks[0]:
        texts = [rank[name] for rank in ranks]
        assert all("rank 2" in text for text in texts[:2]), f"{name}: {texts}"
        assert texts[2], name
    text = ranks[0]["loader: tensors"]
    assert "different training data: sample 0 of 60 on rank 2 differs from that on rank 0" in text
    assert "photinus.init(seed=0)" in text
    assert "Subset" in ranks[1]["loader: equal samples"]


def all_accept(rank: int, world_size: int) -> dict[str, Any]:
    """Equal data, and such as cannot be compared."""
    torch.manual_seed(rank)
    before = generators()
    drawing, late, cheap = Drawing(), OpensLate(), Wrapped()
    same_data._LIMIT_S = 1e9
    for data in (cheap, drawing, Wrapped(augmented), Wrapped(nearly), Wrapped(broken)):
        photinus.loader(data, batch_size=6)
        photinus.loader(data, batch_size=6, train=False)
    same_data._LIMIT_S, slow = 0.0, Wrapped()
    photinus.loader(slow, batch_size=6)
    photinus.loader(late, batch_size=6, num_workers=1)
    photinus.loader(points(seed=rank), batch_size=6, place=(0, 1))
    found = {"generators": generators() == before, "fetched": [cheap.fetched, slow.fetched], "opened": late.file}
    global OWN
    drawn, OWN = drawing.draw(), np.random.default_rng(0)
    return {**found, "its own": drawn == Drawing().draw()}


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def test_equal_data_are_accepted_and_fetching_them_changes_no_generator() -> None:
    for rank in values(run_ranks("tests.dist.test_same_data:all_accept", world_size=2, backend="gloo")):
        assert rank["generators"]
        assert rank["its own"]
        assert rank["opened"] is None
        assert rank["fetched"] == [8, 2]


class Numbers(IterableDataset[int]):
    """A stream of whole numbers."""

    def __init__(self, start: int, step: int) -> None:
        self.start, self.step = start, step

    def __iter__(self) -> Iterator[int]:
        yield from range(self.start, 16, self.step)


def read_streams(rank: int, world_size: int) -> dict[str, str]:
    """Return the number of samples of two epochs, or the error, by what the ranks read."""
    texts = {}
    for name, stream in {"the same": Numbers(0, 2), "divided by rank": Numbers(rank, world_size)}.items():
        for workers in (0, 1):
            for shuffle in (False, True):
                loader = photinus.loader(stream, batch_size=4, shuffle=shuffle, num_workers=workers)
                try:
                    texts[f"{name}, {workers}, {shuffle}"] = str(sum(len(each) for _ in range(2) for each in loader))
                except ValueError as error:
                    texts[f"{name}, {workers}, {shuffle}"] = str(error)
    if rank == 1:  # alone, so that nothing is exchanged
        texts["alone"] = str([each.tolist() for each in photinus.loader(Numbers(1, 5), batch_size=2, place=(0, 1))])
    return texts


def test_a_stream_that_divides_itself_by_rank_is_refused_before_the_first_batch() -> None:
    found = values(run_ranks("tests.dist.test_same_data:read_streams", world_size=2, backend="gloo"))
    assert found[1]["alone"] == "[[1, 6], [11]]"
    for texts in found:
        assert {text for name, text in texts.items() if name.startswith("the same")} == {"8"}
        for name, text in texts.items():
            if name.startswith("divided"):
                assert "the first sample of shard 0 of 1 of Numbers on rank 1 differs from that on rank 0" in text, name
                assert "of one that is divided by rank already, samples would be lost" in text, name
