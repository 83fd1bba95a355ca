"""Lets the tests of PyTorch's suite that want CUDA devices run on CPU tensors.

Most of the suite's tests of DDP ask for a GPU per rank though they test nothing of CUDA. What they say of CUDA means
CPU here: `.cuda()` gives the tensor or module itself, device 0 or "cuda:1" is the CPU, streams and events do nothing,
`device_ids` are dropped, and decorators that count GPUs count ranks. torch.cuda itself stays as it is, so torch's own
code still finds no CUDA. Such a test says something of a DDP class only if torch's own passes it like this.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.testing._internal.common_distributed as common
from torch import nn
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
SMALL_WORLD = 3
"""The suite skips tests of sub-groups in worlds under 8; what they do needs three ranks."""


def means_cuda(device: object) -> bool:
    """Whether a `device` argument names a CUDA device: 1, "1", "cuda", "cuda:1", torch.device("cuda")."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.isdigit() or device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def nothing(*_: object, **__: object) -> None:
    """Takes any arguments, does nothing."""


class Idle:
    """Stands for a stream, event or context: takes any arguments, does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing

    def __enter__(self) -> Idle:
        return self

    def __exit__(self, *_: object) -> None: ...


class CudaModule(types.ModuleType):
    """What the suite sees as torch.cuda: one device per rank, all of them the CPU."""

    Stream = Event = Idle
    FloatTensor = torch.FloatTensor

    def __init__(self, devices: int) -> None:
        super().__init__("torch.cuda")
        self.device_count = lambda: devices
        self.is_available = lambda: True
        self.current_device = lambda: 0
        self.memory_allocated = lambda *_: 0
        self.current_stream = Idle
        self.device = self.stream = lambda *_: nullcontext()
        for name in ("set_device", "synchronize", "_sleep", "manual_seed", "manual_seed_all", "empty_cache"):
            setattr(self, name, nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchModule(types.ModuleType):
    """What the suite sees as torch: torch, but for torch.cuda."""

    def __init__(self, devices: int) -> None:
        super().__init__("torch")
        self.cuda = CudaModule(devices)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class OnCpu(TorchFunctionMode):
    """While it is on, calls of torch that name a CUDA device get the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if func is torch.Tensor.to and len(args) > 1 and means_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


def prepare(world_size: int, ddp: type) -> None:
    """To be called before the suite is loaded: decorators, `.cuda()`, `.to()` and the DDP class's device arguments."""

    def needs_ranks(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(test)
            def run(*args: Any, **kwargs: Any) -> Any:
                if int(os.environ["WORLD_SIZE"]) < count:
                    sys.exit(common.TEST_SKIPS["small_worldsize"].exit_code)
                return test(*args, **kwargs)

            return run

        return decorate

    common.skip_if_lt_x_gpu = lambda count, *, allow_cpu=False: needs_ranks(count)
    common.skip_if_small_worldsize = needs_ranks(SMALL_WORLD)
    common.skip_if_no_gpu = lambda test: test
    common.nccl_skip_if_lt_x_gpu = common.require_n_gpus_for_nccl_backend = lambda *_: lambda test: test
    common.init_multigpu_helper = lambda *_: {rank: [rank] for rank in range(world_size)}

    move = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        args = tuple(CPU if means_cuda(arg) else arg for arg in args)
        return move(self, *args, **{k: CPU if k == "device" and means_cuda(v) else v for k, v in kwargs.items()})

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    nn.Module.cuda = torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]

    make = ddp.__init__  # type: ignore[misc]

    @functools.wraps(make)
    def make_on_cpu(
        self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        make(self, module, None, None, *args, **kwargs)

    ddp.__init__ = make_on_cpu  # type: ignore[misc]


def enter(suite: types.ModuleType, world_size: int) -> None:
    """To be called on each rank before the test: from here on the suite's torch has CUDA devices."""
    suite.torch = TorchModule(world_size)  # type: ignore[attr-defined]
    OnCpu().__enter__()
