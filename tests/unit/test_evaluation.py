from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

import photinus
from photinus.trainer.evaluation import _exact_sum
from photinus.trainer.forwards import batches_of, blocks_of
from photinus.waiting_time import waiting_time
from tests.small_run import Net, points, right


@pytest.fixture
def world() -> Iterator[Any]:
    with photinus.init("gloo", "cpu", seed=0) as session:
        yield session


@given(st.integers(1, 9), st.integers(0, 200), st.integers(1, 40))
def test_every_sample_is_in_exactly_one_block_of_one_rank(world_size: int, total: int, block: int) -> None:
    shares = [blocks_of(rank, world_size, total, block) for rank in range(world_size)]
    assert sorted(itertools.chain(*shares)) == list(range(total))


@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 40))
def test_every_rank_computes_blocks_of_a_single_process(world_size: int, total: int, block: int) -> None:
    whole = [tuple(range(start, min(start + block, total))) for start in range(0, total, block)]
    for rank in range(world_size):
        share = blocks_of(rank, world_size, total, block)
        assert all(tuple(share[i : i + block]) in whole for i in range(0, len(share), block))


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=60), st.data())
def test_the_sum_does_not_depend_on_how_values_are_spread(values: list[float], data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values)))
    parts = [_exact_sum([v for v, owner in zip(values, owners, strict=True) if owner == rank]) for rank in range(4)]
    assert math.fsum(part for pair in parts for part in pair) == math.fsum(values)


def test_waits_of_an_evaluation_are_no_part_of_a_training_step(world: Any) -> None:
    def metric(x: Tensor, _: Tensor) -> Tensor:
        began = waiting_time.begin()
        time.sleep(0.01)
        waiting_time.end(began)
        return x

    waiting_time.start()
    try:
        before = waiting_time.total_ns
        photinus.evaluate(torch.nn.Identity(), TensorDataset(torch.ones(4), torch.ones(4)), metric, batch_size=4)
        assert waiting_time.total_ns == before
    finally:
        waiting_time.stop()


def test_the_mean_is_over_all_samples_and_not_over_batches(world: Any) -> None:
    data = TensorDataset(torch.arange(5.0), torch.zeros(5))
    assert photinus.evaluate(torch.nn.Identity(), data, lambda x, _: x, batch_size=4) == 2.0


def test_several_metrics_come_by_name(world: Any) -> None:
    data = TensorDataset(torch.arange(4.0), torch.ones(4))
    metrics = {"mean": lambda x, y: x, "below": lambda x, y: x < y}
    assert photinus.evaluate(torch.nn.Identity(), data, metrics) == {"mean": 1.5, "below": 0.25}


def test_the_wrapper_is_taken_off_and_every_modules_mode_put_back(world: Any) -> None:
    plain = Net()
    plain[1].eval()  # BatchNorm frozen on purpose
    model = photinus.wrap(plain, sync_batch_norm=False)
    seen = []

    def metric(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.append((plain.training, outputs.requires_grad))
        return right(outputs, targets)

    photinus.evaluate(model, points(16), metric)
    assert seen == [(False, False)]
    assert [module.training for module in plain] == [True, False, True, True, True]
    assert model.training


def test_the_mode_is_put_back_after_an_error(world: Any) -> None:
    model = Net()
    with pytest.raises(ZeroDivisionError):
        photinus.evaluate(model, points(16), lambda x, y: 1 / 0)
    assert model.training


def test_running_statistics_do_not_change(world: Any) -> None:
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    photinus.evaluate(model, points(16), right)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_training_draws_the_same_numbers_whether_or_not_it_is_validated(world: Any) -> None:
    torch.manual_seed(1)
    photinus.evaluate(Net().train(), points(16), right)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    model = torch.nn.Identity()
    photinus.evaluate(model, TensorDataset(torch.zeros(4), torch.zeros(4)), lambda x, y: x)
    assert torch.equal(torch.rand(3), expected)


def test_a_metric_of_the_whole_batch_is_refused(world: Any) -> None:
    with pytest.raises(ValueError, match=r"'metric' gave shape \[\] for 16 samples, but \[16\] is needed"):
        photinus.evaluate(Net(), points(16), lambda x, y: right(x, y).float().mean())


def test_a_complex_metric_is_refused(world: Any) -> None:
    with pytest.raises(ValueError, match=r"'metric' gave torch.complex64 values, but real numbers are needed"):
        photinus.evaluate(Net(), points(16), lambda x, y: torch.complex(y.float(), y.float()).flatten())


def test_what_is_no_model_or_no_metric_is_refused(world: Any) -> None:
    with pytest.raises(TypeError, match="model is a function, but evaluate needs"):
        photinus.evaluate(right, points(16), right)  # type: ignore[call-overload]
    for metric, words in (([right], "metric 'metric' is a list"), ({"right": "right"}, "metric 'right' is a str")):
        with pytest.raises(TypeError, match=words):
            photinus.evaluate(Net(), points(16), metric)


def test_an_empty_data_set_is_refused(world: Any) -> None:
    with pytest.raises(ValueError, match="is empty"):
        photinus.evaluate(Net(), points(0), right)


def test_a_stream_is_refused(world: Any) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(TypeError, match="Stream has no length, which validation needs: give a list of samples"):
        photinus.evaluate(Net(), Stream(), right)


def test_other_batches_than_pairs_need_a_forward(world: Any) -> None:
    data = [{"x": torch.ones(2), "y": 2.0}] * 3
    with pytest.raises(TypeError, match=r"batches \(inputs, targets\), but got a dict.*forward="):
        photinus.evaluate(torch.nn.Identity(), data, lambda x, y: y)
    found = photinus.evaluate(
        torch.nn.Identity(), data, lambda x, y: x.sum(1) - y, forward=lambda model, b: (model(b["x"]), b["y"])
    )
    assert found == 0.0


def test_a_mean_that_is_not_finite_is_given_as_it_is(world: Any) -> None:
    data = TensorDataset(torch.tensor([1.0, math.inf]), torch.zeros(2))
    assert photinus.evaluate(torch.nn.Identity(), data, lambda x, _: x) == math.inf
    nan = TensorDataset(torch.tensor([1.0, math.nan]), torch.zeros(2))
    assert math.isnan(photinus.evaluate(torch.nn.Identity(), nan, lambda x, _: x))


class Drawn(Dataset[Any]):
    """Samples that are random numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


def test_what_is_drawn_for_a_sample_does_not_depend_on_the_rank_that_loads_it(world: Any) -> None:
    def drawn(world_size: int) -> dict[int, float]:
        found = {}
        for rank in range(world_size):
            mine = blocks_of(rank, world_size, 8, 2)
            drawn = photinus.loader(Drawn(), batch_size=2, train=False, seed=0, place=(0, 1))
            values = torch.cat([batch.data for batch in batches_of(drawn, mine)])
            found |= dict(zip(mine, values.tolist(), strict=True))
        return found

    assert drawn(1) == drawn(2) == drawn(3)
    assert len(set(drawn(1).values())) == 8


def test_a_loaders_batch_size_is_that_of_one_forward_under_a_distributed_sampler_too(world: Any) -> None:
    data = TensorDataset(torch.arange(32.0), torch.zeros(32))
    sampler: Any = DistributedSampler(data, num_replicas=8, rank=0)
    seen = []

    def forward(model: Any, batch: Any) -> Any:
        seen.append(len(batch[0]))
        return batch

    photinus.evaluate(torch.nn.Identity(), DataLoader(data, 4, sampler=sampler), lambda x, _: x, forward=forward)
    assert seen == [4] * 8


_opened: list[int] = []


class NeedsWorker(Dataset[Any]):
    """As one that opens its file where it is read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(float(_opened[0])), torch.zeros(())


def test_a_loaders_workers_begin_as_it_says(world: Any) -> None:
    data: Any = DataLoader(NeedsWorker(), 2, num_workers=1, worker_init_fn=lambda _: _opened.append(3))
    assert photinus.evaluate(torch.nn.Identity(), data, lambda x, _: x) == 3.0


def test_infinities_of_both_signs_have_no_mean_and_end_nothing(world: Any) -> None:
    data = TensorDataset(torch.tensor([math.inf, -math.inf]), torch.zeros(2))
    assert math.isnan(photinus.evaluate(torch.nn.Identity(), data, lambda x, _: x))


def test_an_iterable_data_set_without_batches_is_refused_for_what_it_is(world: Any) -> None:
    class Endless(IterableDataset[Any]):
        pass

    with pytest.raises(TypeError, match="Endless"):
        photinus.evaluate(torch.nn.Identity(), DataLoader(Endless(), batch_size=None), lambda x, _: x)
