"""SyncBatchNorm in one process: its derivative, conversion both ways, and that one process is left as it is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from photinus.parallel import SyncBatchNorm, convert_sync_batchnorm
from photinus.parallel.ddp.sync_batch_norm import _SynchronisedBatchNorm


class Alone:
    """The process group of a world of one: `alone` sums over it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group: None)


def normalise(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float = 1e-5) -> Any:
    return _SynchronisedBatchNorm.apply(x, weight, bias, eps, Alone())[0]


@pytest.mark.parametrize("shape", [(5, 3), (4, 3, 6), (3, 2, 4, 5), (2, 2, 3, 2, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_derivative_is_that_of_the_function(shape: tuple[int, ...], affine: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[1], dtype=torch.float64, requires_grad=True) if affine else None
    bias = torch.randn(shape[1], dtype=torch.float64, requires_grad=True) if affine else None
    assert torch.autograd.gradcheck(normalise, (x, weight, bias))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_value_and_derivative_are_those_of_batch_norm(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias = torch.randn(5, dtype=wide), torch.randn(5, dtype=wide)
    x = (torch.randn(4, 5, 6, 7) * 3 + 10).to(dtype).contiguous(memory_format=memory_format)
    dy = torch.randn(4, 5, 6, 7).to(dtype)
    results = []
    for function in (normalise, lambda x, w, b: nn.functional.batch_norm(x, None, None, w, b, True)):
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = function(*leaves)
        y.backward(dy)
        results.append((y.detach(), *(t.grad for t in leaves)))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 3e-2)
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_output_keeps_the_memory_format() -> None:
    x = torch.randn(4, 5, 6, 7).contiguous(memory_format=torch.channels_last)
    assert normalise(x, None, None).is_contiguous(memory_format=torch.channels_last)


def test_a_large_mean_does_not_eat_the_variance() -> None:
    """E[x²] - E[x]² in float32 would be off by more than the variance itself."""
    torch.manual_seed(0)
    x = torch.randn(64, 3, 8, 8, dtype=torch.float64) * 0.1 + 1000
    *_, variance, _ = _SynchronisedBatchNorm.apply(x.float(), None, None, 1e-5, Alone())
    torch.testing.assert_close(variance, x.float().double().var((0, 2, 3), correction=0).float(), rtol=1e-3, atol=0)


def test_a_second_derivative_is_refused_in_words() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    (slope,) = torch.autograd.grad(normalise(x, None, None).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
@pytest.mark.parametrize("track", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_one_process_is_left_as_it_is(affine: bool, track: bool, momentum: float | None) -> None:
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, momentum=momentum, affine=affine, track_running_stats=track)
    ours = convert_sync_batchnorm(copy.deepcopy(plain))
    assert isinstance(ours, SyncBatchNorm)
    for training in (True, True, False):
        plain.train(training)
        ours.train(training)
        x = torch.randn(4, 3, 5, 5)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = plain(a), ours(b)
        y.square().sum().backward()
        z.square().sum().backward()
        assert torch.equal(y, z)
        assert torch.equal(a.grad, b.grad)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.BatchNorm1d(4, eps=1e-3, momentum=None)
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False), nn.InstanceNorm2d(3))
        self.again = self.inner[1]
        self.deep = nn.ModuleDict({"volume": nn.BatchNorm3d(2, track_running_stats=False)})


def test_conversion_keeps_parameters_settings_and_sharing() -> None:
    model = Model().eval()
    parameters = list(model.parameters())
    names = list(model.state_dict())
    assert convert_sync_batchnorm(model) is model
    assert [type(m).__name__ for m in model.modules() if "Norm" in type(m).__name__] == [
        "SyncBatchNorm1d",
        "SyncBatchNorm2d",
        "InstanceNorm2d",
        "SyncBatchNorm3d",
    ]
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == names
    assert model.again is model.inner[1]
    assert (model.flat.eps, model.flat.momentum, model.flat.training) == (1e-3, None, False)
    assert not model.deep["volume"].track_running_stats


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d])
def test_a_converted_layer_is_the_same_object_and_kind_with_its_hooks(kind: Any) -> None:
    seen: list[str] = []
    layer = kind(3)
    layer.register_forward_hook(lambda *_: seen.append("hook"))
    assert SyncBatchNorm.convert_sync_batchnorm(layer) is layer
    assert isinstance(layer, kind)
    assert isinstance(layer, SyncBatchNorm)
    x = torch.randn(4, 3, *[2] * (int(kind.__name__[-2]) - 1 + (kind is not nn.BatchNorm1d)))
    layer(x)
    assert seen == ["hook"]
    copied = pickle.loads(pickle.dumps(nn.Sequential(copy.deepcopy(nn.Sequential(kind(3))))))
    assert isinstance(convert_sync_batchnorm(copied)[0][0], kind)
    assert type(pickle.loads(pickle.dumps(SyncBatchNorm.convert_sync_batchnorm(kind(3))))) is type(layer)


def test_frozen_layers_stay_frozen() -> None:
    model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    model(torch.randn(4, 1, 2, 2))
    assert int(model[1].num_batches_tracked) == 0


def test_torchs_own_sync_batch_norm_becomes_ours() -> None:
    converted = convert_sync_batchnorm(nn.Sequential(nn.SyncBatchNorm(3)))
    assert type(converted[0]) is SyncBatchNorm
    assert converted(torch.randn(4, 3)).shape == (4, 3)  # torch's refuses the CPU


def test_a_group_that_is_given_holds_for_layers_that_are_ours_already() -> None:
    first, second = object(), object()
    layer = SyncBatchNorm(3)
    for group in (first, second, None):
        converted = convert_sync_batchnorm(nn.Sequential(layer), group)  # type: ignore[arg-type]
        assert converted[0] is layer
    assert layer.process_group is second


def test_a_lazy_layer_is_refused() -> None:
    with pytest.raises(ValueError, match="LazyBatchNorm1d is not initialised yet"):
        convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_an_input_without_channels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got \[3\]"):
        SyncBatchNorm(3)(torch.randn(3))


def test_copies_do_not_carry_the_group() -> None:
    layer = SyncBatchNorm(3)
    layer.process_group = object()  # type: ignore[assignment]
    assert copy.deepcopy(layer).process_group is None
