"""The registry of strategies and the call that wraps a model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from photinus.errors import NotInitializedError
from photinus.parallel import STRATEGIES, DistributedDataParallel, SyncBatchNorm, find_strategy, wrap_model

CPU = torch.device("cpu")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_each_strategy_is_found_by_its_own_name() -> None:
    assert {"ddp", "torch-ddp"} <= set(STRATEGIES)
    for name, strategy in STRATEGIES.items():
        assert strategy.name == name
        assert find_strategy(name) is strategy


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("dpp", "dp"),
        ("torch_ddp", "torch-ddp"),
        ("DDP", "ddp"),
        ("ddpp", "ddp"),
        ("zero_3", "zero3"),
        ("ZERO2", "zero2"),
    ],
)
def test_unknown_strategy_lists_those_there_are_and_the_closest(wrong: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=f"unknown strategy '{wrong}'; there are 'ddp', 'torch-ddp'.* Did you mean '{meant}'"
    ):
        wrap_model(nn.Linear(1, 1), strategy=wrong, device=CPU)


def test_a_name_like_no_other_gets_no_guess() -> None:
    with pytest.raises(ValueError, match=r"unknown strategy 'qqqq'; there are [^?]*$"):
        find_strategy("qqqq")


@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp"])
def test_wrapping_without_a_process_group_says_what_to_do(strategy: str) -> None:
    with pytest.raises(NotInitializedError, match=r"photinus\.init"):
        wrap_model(nn.Linear(1, 1), strategy=strategy, device=CPU)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp"])
class TestEachStrategy:
    def test_has_the_same_verbs(self, strategy: str) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        wrapped = wrap_model(model, strategy=strategy, device=CPU)
        chosen = STRATEGIES[strategy]()
        assert chosen.unwrap(wrapped) is model
        assert list(chosen.unwrap(wrapped).state_dict()) == list(model.state_dict())
        with chosen.no_sync(wrapped):
            wrapped(torch.randn(4, 2)).sum().backward()
        assert model[0].weight.grad is not None
        with pytest.raises(TypeError, match="did not wrap this Sequential"):
            chosen.no_sync(model)

    def test_converts_batch_norms_when_asked(self, strategy: str) -> None:
        def layer(**options: bool) -> nn.Module:
            wrapped = wrap_model(nn.Sequential(nn.BatchNorm1d(3)), strategy=strategy, device=CPU, **options)
            return STRATEGIES[strategy]().unwrap(wrapped)[0]  # type: ignore[index]

        assert type(layer(sync_batch_norm=True)) is SyncBatchNorm
        assert type(layer(sync_batch_norm=False)) is nn.BatchNorm1d

    def test_passes_options_on_and_refuses_unknown_ones_by_name(self, strategy: str) -> None:
        wrapped = wrap_model(nn.Linear(1, 1), strategy=strategy, device=CPU, find_unused_parameters=True)
        assert wrapped.find_unused_parameters
        with pytest.raises(TypeError, match="no_such_option"):
            wrap_model(nn.Linear(1, 1), strategy=strategy, device=CPU, no_such_option=True)

    def test_refuses_a_model_with_nothing_to_train(self, strategy: str) -> None:
        with pytest.raises(ValueError, match="ReLU has no parameter that requires grad"):
            wrap_model(nn.ReLU(), strategy=strategy, device=CPU)


@pytest.mark.usefixtures("alone")
def test_ddp_is_ours_and_torch_ddp_is_torchs() -> None:
    assert type(wrap_model(nn.Linear(1, 1), strategy="ddp", device=CPU)) is DistributedDataParallel
    theirs = wrap_model(nn.Linear(1, 1), strategy="torch-ddp", device=CPU)
    assert type(theirs) is nn.parallel.DistributedDataParallel
