"""Data without a length: which samples come in which step, on any number of ranks, with workers, after any resume."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from itertools import chain, count, zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import photinus
from photinus.trainer.checkpoint.states import state_of
from photinus.trainer.data.stream import StreamShares
from tests.small_run import QUIET, fingerprint
from tests.streams import ALL, KINDS, Split, Threads, Whole, files, of_shard


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def steps(ranks: Threads, world_size: int, kind: str, *, epoch: int = 0, **options: Any) -> list[list[int]]:
    """The global batches of an epoch, one rank's part after the other's, without repeats of weight 0."""

    def work(rank: int, world: int) -> list[tuple[list[int], float, int]]:
        batches = photinus.loader(KINDS[kind](), place=(rank, world), **{"batch_size": 8, **options})
        return [(b.data.tolist()[: b.samples], b.weight, b.global_samples) for b in batches.epoch(epoch)]

    parts = ranks.run(world_size, work)
    assert len({len(part) for part in parts}) == 1, "each rank has the same number of steps"
    found = []
    for step in zip(*parts, strict=True):
        whole = list(chain(*(samples for samples, _, _ in step)))
        assert {total for _, _, total in step} == {len(whole)}
        assert [weight for _, weight, _ in step] == [len(s) * world_size / len(whole) for s, _, _ in step]
        found.append(whole)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, 5])
def test_each_sample_comes_once_an_epoch_and_in_the_same_step_on_any_number_of_ranks(
    ranks: Threads, kind: str, shuffle: int
) -> None:
    options = {"shuffle": shuffle, "shards": None if kind == "whole" else 4}
    alone = steps(ranks, 1, kind, **options)
    assert sorted(chain(*alone)) == ALL
    for world_size in (2, 3, 4):
        found = steps(ranks, world_size, kind, **options)
        # One shard's last, short batch is cut where a full one is.
        assert found == alone
    if shuffle:
        assert alone != steps(ranks, 1, kind, **{**options, "shuffle": False})
        other = steps(ranks, 1, kind, epoch=1, **options)
        assert [x % 10_000 for x in chain(*other)] != list(chain(*alone))
        assert sorted(x % 10_000 for x in chain(*other)) == ALL


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, 5])
def test_workers_read_the_same_samples(ranks: Threads, kind: str, world_size: int, shuffle: int) -> None:
    options = {"shuffle": shuffle, "shards": None if kind == "whole" else 4}
    assert steps(ranks, world_size, kind, num_workers=2, **options) == steps(ranks, 1, kind, **options)


def test_a_source_that_looks_for_workers_itself_gives_each_sample_all_the_same() -> None:
    def samples(workers: int) -> list[int]:
        batches = photinus.loader(lambda n, of: Divides(n, of), batch_size=8, shards=4, num_workers=workers)
        return [sample for batch in batches.epoch(0) for sample in batch.data.tolist()]

    assert samples(2) == samples(0)
    assert sorted(samples(2)) == ALL


def test_each_block_of_a_shard_has_an_order_of_its_own() -> None:
    batches = photinus.loader(lambda shard, shards: range(80), batch_size=8, shards=1, shuffle=8)
    orders = [[sample % 8 for sample in batch.data.tolist()] for batch in batches.epoch(0)]
    assert all(sorted(order) == [*range(8)] for order in orders)
    assert len({tuple(order) for order in orders}) > 8


class Augmented:
    """A generator over a shard that adds random numbers, and leaves out samples by chance."""

    def __init__(self, number: int, count: int) -> None:
        self.samples = files(number, count)

    def __iter__(self) -> Iterator[float]:
        for sample in self.samples:
            if random.random() < 0.8:
                yield sample + float(np.random.rand() + torch.rand(())) / 4


class Iterators:
    """Its iterators have the state, as those of torchdata's nodes."""

    def __init__(self, number: int, total: int) -> None:
        self.samples = files(number, total)

    def __iter__(self) -> Iterator[int]:
        return _Stateful(self.samples)


class _Stateful:
    def __init__(self, samples: list[int]) -> None:
        self.samples, self.place = samples, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.place == len(self.samples):
            raise StopIteration
        self.place += 1
        return self.samples[self.place - 1]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Live:
    """Gives its state out as it is and goes on changing it, and keeps the one that it is given."""

    def __init__(self, number: int, total: int) -> None:
        self.samples, self.state = files(number, total), {"place": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["place"] < len(self.samples):
            self.state["place"] += 1
            yield self.samples[self.state["place"] - 1]

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


class Divides:
    """Looks for torch's workers by itself, and reads a part of its samples in each of them."""

    def __init__(self, number: int, total: int) -> None:
        self.samples = files(number, total)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from self.samples if info is None else self.samples[info.id :: info.num_workers]


SOURCES: dict[str, Callable[[], Any]] = {
    **KINDS,
    "draws": lambda: lambda shard, shards: Augmented(shard, shards),
    "iterators": lambda: lambda shard, shards: Iterators(shard, shards),
    "live": lambda: lambda shard, shards: Live(shard, shards),
}


def resumed(ranks: Threads, kind: str, worlds: list[tuple[int, int]], **options: Any) -> list[list[float]]:
    """The global batches of an epoch that starts several times: by `worlds`, each on N ranks for M steps."""
    found: list[list[float]] = []
    saved: Any = None
    for world_size, most in worlds:
        before, place = saved, len(found)

        def work(rank: int, world: int, before: Any = before, place: int = place, most: int = most) -> Any:
            batches = photinus.loader(SOURCES[kind](), batch_size=8, place=(rank, world), **options)
            batches.load_stream(before, 1, place)
            mine = []
            for batch in batches.epoch(1, place):
                mine.append(batch.data.tolist()[: batch.samples])
                if len(mine) == most:
                    break
            return mine, batches.stream_state(1, place + len(mine))

        parts = ranks.run(world_size, work)
        found += [list(chain(*step)) for step in zip(*(mine for mine, _ in parts), strict=True)]
        states = [state for _, state in parts]
        merged = {number: each for state in states for number, each in state["states"].items()}
        saved = copy.deepcopy({"shards": states[0]["shards"], "states": merged})
    return found


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("shuffle", [False, 3])
def test_a_run_goes_on_at_another_world_size_as_if_nothing_had_happened(
    ranks: Threads, kind: str, shuffle: int
) -> None:
    options: dict[str, Any] = {"shuffle": shuffle, "shards": None if kind == "whole" else 4}
    undisturbed = resumed(ranks, kind, [(1, 99)], **options)
    assert len(undisturbed) > 5
    for worlds in ([(4, 1), (2, 2), (1, 1), (4, 99)], [(1, 5), (3, 1), (2, 99)], [(2, len(undisturbed) - 1), (4, 9)]):
        assert resumed(ranks, kind, worlds, **options) == undisturbed


def test_the_number_of_shards_is_that_of_the_runs_start(ranks: Threads) -> None:
    undisturbed = resumed(ranks, "function", [(2, 99)])
    assert resumed(ranks, "function", [(2, 2), (4, 2), (1, 99)]) == undisturbed
    assert resumed(ranks, "function", [(4, 99)]) != undisturbed


def test_what_has_a_state_is_not_read_from_its_beginning_and_what_has_none_says_how_long_that_took(
    capsys: pytest.CaptureFixture[str],
) -> None:
    read = []

    class Counted(Split):
        def shard(self, num_shards: int, index: int) -> Split:
            read.append(Split(index, num_shards))
            return read[-1]

    def go_on(dataset: Any) -> None:
        first = photinus.loader(dataset, batch_size=8, place=(0, 1))
        batches = first.epoch(0)
        for _ in range(5):
            next(batches)
        again = photinus.loader(dataset, batch_size=8, place=(0, 1))
        again.load_stream(copy.deepcopy(first.stream_state(0, 5)), 0, 5)
        assert next(again.epoch(0, 5)).data.tolist() == next(batches).data.tolist()

    go_on(Counted())
    assert read[-1].read <= 16 + 3 * 8
    assert "read" not in capsys.readouterr().out
    go_on(of_shard)
    words = "samples of shard 0 of 1 were read again in 0.0 s, to come back to sample 40 of epoch 1"
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_a_stream_does_not_shift_the_training_s_random_numbers(workers: int) -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    wanted = torch.rand(2).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    batches = photinus.loader(
        lambda shard, shards: Augmented(shard, shards), batch_size=8, shards=2, num_workers=workers, shuffle=True
    )
    (first, second) = ([batch.data.tolist() for batch in batches.epoch(epoch)] for epoch in (0, 1))
    assert first != second
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == wanted


def uneven(shard: int, shards: int) -> list[int]:
    return list(range(100 * shard, 100 * shard + (6 if shard == 0 else 2)))


def test_a_rank_whose_shard_has_ended_repeats_its_first_samples_for_a_weight_of_0(ranks: Threads) -> None:
    def work(rank: int, world: int, start: int = 0) -> Any:
        batches = photinus.loader(uneven, batch_size=4, place=(rank, world))
        return [(b.data.tolist(), b.weight, b.samples, not b.to_come) for b in batches.epoch(0, start)]

    long, short = ranks.run(2, work)
    assert long == [([0, 1], 1, 2, False), ([2, 3], 2, 2, False), ([4, 5], 2, 2, True)]
    assert short == [([100, 101], 1, 2, False), ([100, 101], 0, 0, False), ([100, 101], 0, 0, True)]
    assert ranks.run(2, lambda rank, world: work(rank, world, 2)) == [long[2:], short[2:]]


def test_drop_last_ends_an_epoch_with_the_last_full_batch(ranks: Threads) -> None:
    def work(rank: int, world: int) -> Any:
        batches = photinus.loader(uneven, batch_size=4, place=(rank, world), drop_last=True)
        return [(b.data.tolist(), not b.to_come) for b in batches.epoch(0)]

    assert ranks.run(2, work) == [[([0, 1], True)], [([100, 101], True)]]


def test_an_error_of_one_shard_is_one_of_all_ranks(ranks: Threads) -> None:
    def broken(shard: int, shards: int) -> Iterator[int]:
        yield from range(5)
        if shard == 1:
            raise OSError("the file is cut off")

    def work(rank: int, world: int) -> str:
        try:
            return str(list(photinus.loader(broken, batch_size=4, place=(rank, world)).epoch(0)))
        except (OSError, RuntimeError) as error:
            return " ".join([str(error), *getattr(error, "__notes__", [])])

    whole, cut = ranks.run(2, work)
    assert whole == "rank 1 could not read batch 2 of the stream: see its own error. Rank 0 had none"
    assert cut.startswith("the file is cut off")
    if hasattr(OSError, "add_note"):
        assert "while reading sample 5 of shard 1 of 2 in epoch 0" in cut


def test_a_shard_without_a_sample_is_an_error_that_says_what_to_do(ranks: Threads) -> None:
    def work(rank: int, world: int) -> str:
        try:
            return str(
                list(photinus.loader(lambda s, n: [1] * 8 * (s == 0), batch_size=4, place=(rank, world)).epoch(0))
            )
        except Exception as error:  # noqa: BLE001 - what is tested
            return str(error)

    assert "rank 1 has no sample of its shards [1] of 2 in epoch 0: use fewer" in ranks.run(2, work)[1]


def test_batches_that_another_thread_takes_beside_training_are_an_error(ranks: Threads) -> None:
    made = ranks.run(2, lambda rank, world: photinus.loader(of_shard, batch_size=4, place=(rank, world)))
    with pytest.raises(photinus.PhotinusError, match="in the thread that made its loader: take its batches there"):
        next(made[0].epoch(0))


def test_a_stream_without_a_batch_is_an_error() -> None:
    with pytest.raises(photinus.PhotinusError, match="Whole gave not one full batch in epoch 0"):
        next(photinus.loader(Whole(), batch_size=99, drop_last=True).epoch(0))


def test_epochs_are_passed_on_and_a_plain_pass_is_resumed_inside_one() -> None:
    batches = photinus.loader(Split(), batch_size=8, shards=2)
    first = [batch.tolist() for batch in batches]
    second = [batch.tolist() for batch in batches]
    assert [[x - 10_000 for x in batch] for batch in second] == first
    left = photinus.loader(Split(), batch_size=8, shards=2)
    for number, _ in zip(count(1), left, strict=False):
        if number == 3:
            break
    again = photinus.loader(Split(), batch_size=8)
    again.load_state_dict(copy.deepcopy(left.state_dict()))
    assert [batch.tolist() for batch in again] == first[3:]
    assert [batch.tolist() for batch in again] == second
    other = photinus.loader(Split(), batch_size=8, shards=4)
    with pytest.raises(ValueError, match="of a stream in 2 shards, and shards=4 now: set it back"):
        other.load_state_dict(left.state_dict())


class Inner:
    def __init__(self) -> None:
        self.epoch, self.files, self.place, self.table = 0, [*range(20)], 0, {"read": 0}
        self.numpy, self.torch = np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.python, self.old = random.Random(1), np.random.RandomState(1)


class Counting(IterableDataset[int]):
    """Counts its epochs, or draws their order, in some place."""

    def __init__(self, how: str) -> None:
        self.how, self.epoch, self.place, self.inner = how, 0, 0, Inner()

    def order(self) -> list[int]:
        inner, files = self.inner, self.inner.files
        self.epoch += self.how == "epoch"
        inner.epoch += self.how == "inner.epoch"
        inner.table["read"] += self.how == "inner.table.read"
        if self.how == "inner.files":
            random.Random(3).shuffle(files)
        drawn = {
            "inner.numpy": lambda: inner.numpy.permutation(20),
            "inner.torch": lambda: torch.randperm(20, generator=inner.torch),
            "inner.python": lambda: inner.python.sample(range(20), 20),
            "inner.old": lambda: inner.old.permutation(20),
        }
        shift = self.epoch + inner.epoch + inner.table["read"]
        return [int(x) + 100 * shift for x in (drawn[self.how]() if self.how in drawn else files)]

    def __iter__(self) -> Iterator[int]:
        self.place = self.inner.place = 0
        for x in self.order():
            self.place += 1
            self.inner.place += 1
            yield x


class Told(Counting):
    """Its epochs differ, as it has set_epoch."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


COUNTS = ["epoch", *(f"inner.{name}" for name in ("epoch", "table.read", "files", "numpy", "torch", "python", "old"))]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", COUNTS)
def test_a_stream_that_counts_its_own_epochs_has_a_line_and_is_resumed_exactly(
    how: str, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    def batches() -> Any:
        return photinus.loader(Counting(how), batch_size=4, num_workers=workers)

    straight = batches()
    epochs = [[batch.tolist() for batch in straight] for _ in range(3)]
    assert f"warning: reading Counting changes its {how}. Each epoch" in (printed := capfd.readouterr().out)
    assert printed.count("warning") == 1
    left, again = batches(), batches()
    assert [batch.tolist() for batch in left] == epochs[0]
    for number, _ in zip(count(1), left, strict=False):
        if number == 3:
            break
    again.load_state_dict(copy.deepcopy(left.state_dict()))  # in the second epoch, in a new process
    assert [batch.tolist() for batch in again] == epochs[1][3:]
    assert [batch.tolist() for batch in again] == epochs[2]


def test_a_stream_that_counts_samples_or_is_told_its_epoch_has_no_line(capfd: pytest.CaptureFixture[str]) -> None:
    for dataset in (Counting("none"), Told("epoch"), Told("inner.numpy"), Whole()):
        batches = photinus.loader(dataset, batch_size=4)
        epochs = [[batch.tolist() for batch in batches] for _ in range(2)]
        assert (epochs[0] != epochs[1]) == isinstance(dataset, Told)
    assert "warning" not in capfd.readouterr().out


def test_torch_s_data_loader_over_a_stream_is_taken_apart() -> None:
    torchs: Any = DataLoader(Whole(), 8, num_workers=1)
    assert [batch.tolist() for batch in photinus.loader(torchs)] == [
        [*filter(lambda x: x is not None, part)] for part in zip_longest(*[iter(ALL)] * 8)
    ]


class Sized(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_stream_that_has_a_length_after_all_is_read_as_a_stream() -> None:
    assert [batch.tolist() for batch in photinus.loader(Sized(), batch_size=2)] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("dataset", "options", "words"),
    [
        (Whole(), {"train": False}, "Whole has no length, which validation needs: give a list of samples"),
        (
            Whole(),
            {"shards": 2},
            r"shards=2, but Whole cannot be split: use at most 1 .* function of \(shard, shards\)",
        ),
        (Split(), {"shards": 5}, r"shards=5, but Split has 4: use at most 4 \(ranks can share a shard\)"),
        ([1, 2], {"shards": 2}, "shards=2 is for streams, but list has a length: leave shards out"),
        (of_shard, {"shards": 9}, r"batch_size=8 is fewer samples than 1 ranks and 9 shards need.*at least 9"),
        (of_shard, {"shards": 0}, "shards=0 is too small"),
        (Whole(), {"batch_size": None}, "batch_size is missing"),
        (Whole(), {"shuffle": 2.5}, "shuffle needs a whole number, not 2.5"),
        (Whole(), {"place": (1, 4)}, r"place=\(1, 4\): ranks agree by torch.distributed.*photinus.init\(\) before"),
        (iter(ALL), {}, r"a list_iterator can be read only once: give a function of \(shard, shards\)"),
        (lambda shard: ALL, {}, r"<lambda> needs to take \(shard, shards\) and return an iterable"),
        (lambda shard, shards: None, {}, "shard 0 of 1 is a NoneType: 'NoneType' object is not iterable"),
        (DataLoader(Whole(), batch_size=None), {"batch_size": None}, "batch_size is missing"),
        (Whole, {}, "a dataset is needed; this is the class Whole"),
    ],
)
def test_what_cannot_be_is_refused(dataset: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        next(photinus.loader(dataset, **{"batch_size": 8, **options}).epoch(0))


def test_a_stream_that_split_dataset_by_node_divided_is_refused() -> None:
    stream = Whole()
    stream._distributed = (0, 2)  # as Hugging Face's function leaves it
    photinus.loader(stream, batch_size=8)  # one process reads all that it gets
    with pytest.raises(
        ValueError, match=r"this Whole is one rank's part of a stream already.*Leave split_dataset_by_n"
    ):
        StreamShares(stream, 8, rank=0, world_size=2)


def pairs(shard: int, shards: int) -> Iterator[tuple[torch.Tensor, int]]:
    for sample in files(shard, shards):
        yield torch.full((6,), sample / 400), sample % 3


@pytest.fixture
def world() -> Iterator[Any]:
    with photinus.init("gloo", "cpu", seed=0) as session:
        yield session


@pytest.mark.parametrize(("length", "steps", "epochs"), [({"epochs": 2}, 14, 2), ({"steps": 10}, 10, 2)])
def test_the_trainer_takes_a_stream(world: Any, length: dict[str, int], steps: int, epochs: int) -> None:
    torch.manual_seed(0)
    model, seen = torch.nn.Linear(6, 3), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = photinus.Trainer(
        model, optimizer, torch.nn.functional.cross_entropy, batch_size=8, report=QUIET, **length,
        callbacks=[lambda loop: seen.append((loop.epoch, loop.step, loop.epochs, loop.steps, loop.epoch_ended))],
    )  # fmt: skip
    with pytest.raises(TypeError, match="function has no length, which validation needs"):
        trainer.fit(pairs, pairs)
    result = trainer.fit(pairs, list(pairs(0, 1)))
    assert [row["step"] for row in result.history] == [7, steps]
    known = (length.get("epochs"), length.get("steps"))
    assert seen == [(1, 7, *known, True), (epochs, steps, *known, True)]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_stream_and_a_list_of_its_samples_train_alike_also_where_an_epoch_ends_inside_a_step(
    world: Any, accumulate: int
) -> None:
    def train(data: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = photinus.loader(data, batch_size=8, shuffle=False, drop_last=False)
        loop = photinus.Loop(model, optimizer, batches, epochs=2, accumulate=accumulate, report=QUIET)
        found = []
        for inputs, targets in loop:
            loop.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
            found.append((loop.step, loop.step_due, loop.epoch_ended, loop.whole_epoch_ended))
            if loop.step_due:
                optimizer.step()
                optimizer.zero_grad()
        return found, fingerprint(model), [row["loss"] for row in loop.history], loop.steps_per_epoch

    *stream, unknown = train(pairs)
    *in_memory, known = train(list(pairs(0, 1)))
    assert stream == in_memory
    assert (unknown, known) == (None, -(-7 // accumulate))
    with pytest.raises(TypeError, match="function is a stream, whose length is not known"):
        len(photinus.loader(pairs, batch_size=8))


def test_a_state_that_no_file_can_hold_is_left_out_and_the_shard_read_from_its_beginning(world: Any) -> None:
    class Odd(Split):
        def state_dict(self) -> dict[str, Any]:
            return {"place": Odd}

        def shard(self, num_shards: int, index: int) -> Split:
            return Odd(index, num_shards)

    batches = photinus.loader(Odd(), batch_size=8)
    whole = [batch.data.tolist() for batch in batches.epoch(0)]
    for number, _ in zip(count(1), batches, strict=False):
        if number == 4:
            break
    state = state_of(batches)
    assert state["stream"]["states"][0] == {"taken": 32, "ended": False, "at": 0, "source": None, "of": None}
    again = photinus.loader(Odd(), batch_size=8)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == whole[4:]
