"""The registry of strategies and the call that wraps a model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import photinus
from photinus.errors import NotInitializedError
from photinus.parallel import STRATEGIES, DistributedDataParallel, SyncBatchNorm, find_strategy, strategy_of, wrap_model
from photinus.trainer import CheckpointFolder
from photinus.trainer.checkpoint.states import load_into, state_of

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


@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp", "zero2", "zero3"])
def test_wrapping_without_a_process_group_says_what_to_do(strategy: str) -> None:
    with pytest.raises(NotInitializedError, match=r"photinus\.init"):
        wrap_model(nn.Linear(1, 1), strategy=strategy, device=CPU)


def _wrapped(strategy: str, model: nn.Module, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad] or [nn.Parameter(torch.ones(1))])
    return wrap_model(model, [optimizer], strategy=strategy, device=CPU, **options), optimizer


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("strategy", list(STRATEGIES))
class TestEachStrategy:
    def test_has_the_same_verbs_in_one_process_and_trains_what_plain_torch_trains(self, strategy: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        plain = copy.deepcopy(model)
        plain_optimizer = torch.optim.AdamW(plain.parameters())
        wrapped, optimizer = _wrapped(strategy, model)
        verbs = strategy_of(wrapped)
        assert verbs.unwrap(wrapped) is model
        for step in range(3):
            first, second = torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(step))
            with verbs.no_sync(wrapped):
                wrapped(first).square().mean().backward()
            wrapped(second).square().mean().backward()
            plain(first).square().mean().backward()
            plain(second).square().mean().backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert verbs.clip(wrapped, 0.1).item() == pytest.approx(norm.item(), rel=1e-6)
            optimizer.step()
            plain_optimizer.step()
            optimizer.zero_grad()
            plain_optimizer.zero_grad()
        for saved, wanted in (
            (verbs.save(wrapped), plain.state_dict()),
            (strategy_of(optimizer).save(optimizer), plain_optimizer.state_dict()),
        ):
            torch.testing.assert_close(saved, wanted, rtol=1e-6, atol=0.0)
        plain.load_state_dict(verbs.save(wrapped))

    def test_loads_what_it_saved_and_keeps_what_it_had(self, strategy: str) -> None:
        model, optimizer = _wrapped(strategy, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
        parts = (model, optimizer)
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        saved = [copy.deepcopy(strategy_of(part).save(part)) for part in parts]
        optimizer.step()
        later = [copy.deepcopy(strategy_of(part).save(part)) for part in parts]
        back = [strategy_of(part).keep(part) for part in parts]
        for part, state in zip(parts, saved, strict=True):
            strategy_of(part).load(part, state)
            torch.testing.assert_close(strategy_of(part).save(part), state, rtol=0.0, atol=0.0)
        optimizer.step()  # what was loaded shares no memory with the state
        for part, put_back, state in zip(parts, back, later, strict=True):
            put_back()
            torch.testing.assert_close(strategy_of(part).save(part), state, rtol=0.0, atol=0.0)
        torch.testing.assert_close(saved[1]["state"][0]["step"], torch.tensor(1.0))

    def test_layers_are_told_the_version_that_saved_them(self, strategy: str) -> None:
        seen: list[object] = []

        class Versioned(nn.Linear):
            _version = 7

            def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *rest: Any) -> None:
                seen.append(metadata.get("version"))
                super()._load_from_state_dict(state, prefix, metadata, *rest)

        model, _ = _wrapped(strategy, nn.Sequential(Versioned(2, 1)))
        load_into(model, state_of(model))
        assert seen == [7]

    def test_a_scheduler_that_was_made_before_drives_the_optimizer_without_a_warning(self, strategy: str) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
        wrapped = wrap_model(model, [optimizer], strategy=strategy, device=CPU)
        steps = []
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
        verbs = strategy_of(wrapped)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                wrapped(torch.ones(3, 2)).sum().backward()
                optimizer.step()
                scheduler.step()
        weights = copy.deepcopy(verbs.save(wrapped))
        optimizer.step()  # the rate is 0 from the first scheduler step on
        torch.testing.assert_close(verbs.save(wrapped), weights, rtol=0.0, atol=0.0)
        assert len(steps) == 3
        assert scheduler.optimizer is optimizer

    def test_takes_an_optimizer_that_has_stepped_already_with_what_it_remembers(self, strategy: str) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        before = copy.deepcopy(optimizer.state_dict())
        wrap_model(model, [optimizer], strategy=strategy, device=CPU)
        torch.testing.assert_close(strategy_of(optimizer).save(optimizer), before, rtol=0.0, atol=0.0)

    def test_a_group_of_parameters_can_be_added_later(self, strategy: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.5, momentum=0.9)
        wrapped = wrap_model(model, [optimizer], strategy=strategy, device=CPU)
        verbs = strategy_of(wrapped)
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.25})
        before = copy.deepcopy(verbs.save(wrapped))
        wrapped(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        after = verbs.save(wrapped)
        torch.testing.assert_close(after["1.bias"], before["1.bias"] - 0.25 * 3, rtol=1e-6, atol=0.0)
        state = strategy_of(optimizer).save(optimizer)
        assert sorted(state["state"]) == [0, 1, 2, 3]
        assert [group["momentum"] for group in state["param_groups"]] == [0.9, 0.9]

    def test_converts_batch_norms_when_asked(self, strategy: str) -> None:
        def layer(**options: bool) -> nn.Module:
            wrapped, _ = _wrapped(strategy, nn.Sequential(nn.BatchNorm1d(3)), **options)
            return strategy_of(wrapped).unwrap(wrapped)[0]  # type: ignore[index]

        assert isinstance(layer(sync_batch_norm=True), SyncBatchNorm)
        assert not isinstance(layer(sync_batch_norm=False), SyncBatchNorm)

    def test_refuses_unknown_options_by_name_and_says_what_there_is(self, strategy: str) -> None:
        model = nn.Linear(1, 1)
        one = sorted(STRATEGIES[strategy].accepted)[0]
        for wrong, words in (("no_such_option", "there are .*[a-z]"), (one + "s", f"Did you mean '{one}'")):
            with pytest.raises(TypeError, match=f"strategy '{strategy}' has no option '{wrong}'.*{words}"):
                _wrapped(strategy, model, **{wrong: 1})

    def test_refuses_a_model_with_nothing_to_train(self, strategy: str) -> None:
        with pytest.raises(ValueError, match="ReLU has no parameter that requires grad"):
            _wrapped(strategy, nn.ReLU())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp", "zero1"])
def test_options_of_ddp_are_passed_on(strategy: str) -> None:
    wrapped, _ = _wrapped(strategy, nn.Linear(1, 1), find_unused_parameters=True)
    assert wrapped.find_unused_parameters


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "dp"])
def test_no_sync_of_a_model_that_the_strategy_did_not_wrap_is_refused(strategy: str) -> None:
    with pytest.raises(TypeError, match=f"strategy '{strategy}' did not wrap this Sequential"):
        STRATEGIES[strategy]().no_sync(nn.Sequential(nn.Linear(1, 1)))


def test_dp_on_a_cpu_is_the_plain_model_and_refuses_device_ids() -> None:
    model = nn.Linear(1, 1)
    assert wrap_model(model, strategy="dp", device=CPU) is model
    with pytest.raises(ValueError, match=r"strategy 'dp': device_ids=\[0, 1\], but the device is cpu"):
        wrap_model(model, strategy="dp", device=CPU, device_ids=[0, 1])


def test_torchs_data_parallel_is_known_as_dp_and_unwrapped() -> None:
    model = nn.Linear(1, 1)
    wrapped = nn.DataParallel(model)
    verbs = strategy_of(wrapped)
    assert verbs.name == "dp"
    assert verbs.unwrap(wrapped) is model
    assert list(verbs.save(wrapped)) == ["weight", "bias"]


@pytest.mark.usefixtures("alone")
def test_a_model_that_torch_split_without_us_has_the_same_verbs() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fully_shard(model[0])
    fully_shard(model)
    verbs = strategy_of(model)
    with verbs.no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    norm = verbs.clip(model, 1e-3)
    assert type(norm) is torch.Tensor
    whole = [p.grad.full_tensor() for p in model.parameters()]
    assert torch.nn.utils.get_total_norm(whole).item() == pytest.approx(1e-3, rel=1e-3)
    assert {type(value) for value in verbs.save(model).values()} == {torch.Tensor}


@pytest.mark.usefixtures("alone")
def test_a_process_that_is_alone_saves_a_split_model_by_itself(tmp_path: Path) -> None:
    model, optimizer = _wrapped("zero3", nn.Linear(2, 1))
    path = CheckpointFolder(tmp_path).save(1, {"model": model, "optimizer": optimizer}, description={})
    nn.Linear(2, 1).load_state_dict(torch.load(path / "model.pt", weights_only=True))


@pytest.mark.usefixtures("alone")
def test_none_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"^optimizer is None, but a torch.optim.Optimizer is needed"):
        photinus.wrap(nn.Linear(1, 1), None)


@pytest.mark.usefixtures("alone")
def test_a_model_of_which_only_parts_are_split_counts_as_wrapped() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    fully_shard(model[0])
    with pytest.raises(ValueError, match="the model is wrapped already"):
        photinus.wrap(model)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_units_compute_in_the_dtype_of_the_policy(strategy: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, optimizer = _wrapped(strategy, nn.Linear(2, 1), mp_policy=policy)
    output = model(torch.ones(3, 2))
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    optimizer.step()
    assert {value.dtype for value in strategy_of(model).save(model).values()} == {torch.float32}


@pytest.mark.usefixtures("alone")
def test_ddp_is_ours_and_torch_ddp_is_torchs() -> None:
    assert type(wrap_model(nn.Linear(1, 1), strategy="ddp", device=CPU)) is DistributedDataParallel
    theirs = wrap_model(nn.Linear(1, 1), strategy="torch-ddp", device=CPU)
    assert type(theirs) is nn.parallel.DistributedDataParallel


@pytest.mark.usefixtures("alone")
def test_a_mesh_gives_the_group_of_batch_norms_and_of_the_split_optimizer_too() -> None:
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group([0])
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    mesh = DeviceMesh.from_group(group, "cpu")
    wrapped = wrap_model(model, [optimizer], strategy="zero1", device=CPU, device_mesh=mesh)
    assert wrapped.process_group is group
    assert wrapped.module[1].process_group is group
    assert optimizer._zero.process_group is group


@pytest.mark.parametrize("device_ids", [[1], [1, 2], ["cuda:1", "cuda:0"]])
def test_dp_refuses_devices_of_which_the_first_is_not_the_models(device_ids: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"device_ids=\[.*\], but the model goes to cuda:0"):
        find_strategy("dp")(device_ids=device_ids).wrap(nn.Linear(1, 1), torch.device("cuda", 0))


def test_dp_with_the_models_own_device_is_the_plain_model() -> None:
    model = nn.Linear(1, 1)
    for device_ids in ([1], ["cuda:1"]):
        assert find_strategy("dp")(device_ids=device_ids).wrap(model, torch.device("cuda", 1)) is model
