"""A rank that trains a user's model for some seconds: times of a step, of its computing, and of the exchange alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROUNDS = 5
_GPU_BACKWARD = 2 / 3  # of a step, by the count of operations: the host does not wait for a GPU's backward


@dataclass(frozen=True)
class Trial:
    """A model to measure.

    Attributes:
        model: FILE.py:FUNCTION or MODULE:FUNCTION; it returns a model, or a model and its optimizer.
        batch: shape of a float32 input, or the name of a function of the same file that takes a number of samples.
        samples: samples of a step, over all ranks.
        backend: over which the ranks average gradients.
        seconds: approximate time of each measurement.
        timeout_s: seconds after which a rank that makes no progress is killed.
    """

    model: str
    batch: tuple[int, ...] | str
    samples: int
    backend: str = "photinus"
    seconds: float = 1.0
    timeout_s: float = 120.0


@dataclass(frozen=True)
class Times:
    """Seconds of the slowest rank.

    Attributes:
        shares: for each number of samples: seconds of computing on one rank, without exchange, and of its backward.
    """

    step_s: float
    compute_s: float
    exchange_s: float
    data_s: float
    gradient_bytes: int
    parameters: int
    optimizer: str
    device: str
    shares: Mapping[int, tuple[float, float]]


def measure_model(trial: Trial, divisors: tuple[int, ...] = ()) -> Times:
    """Measure as one of the ranks, and computing also with a part of the samples for each of `divisors`."""
    signal.setitimer(signal.ITIMER_REAL, trial.timeout_s)  # without a handler it ends a rank in C++ too
    import torch
    import torch.distributed as dist

    from ...parallel.ddp.ddp import DistributedDataParallel

    dist.init_process_group(trial.backend)
    ranks, on_gpu = dist.get_world_size(), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    agreeing = device if trial.backend == "nccl" else torch.device("cpu")  # nccl has no CPU tensors
    torch.manual_seed(0)
    model, optimizer = _load(trial, device)

    def slowest(seconds: float) -> float:
        signal.setitimer(signal.ITIMER_REAL, trial.timeout_s)
        agreed = torch.tensor(seconds, dtype=torch.float64, device=agreeing)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return float(agreed)

    def timed(call: Callable[[], float]) -> tuple[float, float]:
        """Return the median over rounds of the slowest rank's seconds of a call; and of the part that it times."""

        def turn(calls: int) -> tuple[float, float]:
            dist.barrier()
            began, part_s = time.perf_counter(), 0.0
            for _ in range(calls):
                part_s += call()
            if on_gpu:
                torch.cuda.synchronize()
            return slowest((time.perf_counter() - began) / calls), part_s / calls

        turn(1)  # the first call allocates, and chooses kernels
        calls = max(1, int(trial.seconds / _ROUNDS / turn(2)[0]))
        turn(calls)
        rounds = [turn(calls) for _ in range(_ROUNDS)]
        whole_s, part_s = (statistics.median(times) for times in zip(*rounds, strict=True))
        return whole_s, _GPU_BACKWARD * whole_s if on_gpu else part_s

    def step_of(trained: Any, samples: int) -> Callable[[], float]:
        inputs = _make_batch(trial, samples, device)

        def step() -> float:
            optimizer.zero_grad()
            loss = _loss_of(trained(*inputs[0], **inputs[1]))
            began = time.perf_counter()
            loss.backward()
            backward_s = time.perf_counter() - began
            optimizer.step()
            return backward_s

        return step

    share = max(1, trial.samples // ranks)
    shares = {part: timed(step_of(model, part)) for d in divisors if (part := max(1, trial.samples // d)) != share}
    began = time.perf_counter()
    _make_batch(trial, share, torch.device("cpu"))
    data_s = slowest(time.perf_counter() - began)
    shares[share] = timed(step_of(model, share))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.zeros(sum(p.numel() for p in trained), dtype=trained[0].dtype, device=device)
    exchange_s = step_s = 0.0
    if ranks > 1:

        def exchange() -> float:
            dist.all_reduce(gradients)
            return 0.0

        exchange_s = timed(exchange)[0]
        step_s = timed(step_of(DistributedDataParallel(model), share))[0]
    dist.destroy_process_group()
    return Times(
        step_s or shares[share][0],
        shares[share][0],
        exchange_s,
        data_s,
        gradients.nbytes,
        sum(parameter.numel() for parameter in model.parameters()),
        type(optimizer).__name__,
        str(device),
        shares,
    )


def _load(trial: Trial, device: Any) -> tuple[Any, Any]:
    import torch

    result = _function(trial.model)()
    model, optimizer = result if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"--model {trial.model}: the function returned {type(result).__name__}, but a torch.nn.Module, or a "
            f"module and its optimizer, is needed"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"--model {trial.model}: the model has no parameters to train")
    model.to(device)  # in place, so an optimizer that was made before keeps its parameters
    return model, optimizer or torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)


def _function(name: str) -> Callable[..., Any]:
    """Return the function that FILE.py:FUNCTION or MODULE:FUNCTION names."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        if path.stem not in sys.modules:
            sys.path.insert(0, str(path.parent))  # as `python FILE.py` does
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if spec is None or spec.loader is None or not path.is_file():
                raise ValueError(f"--model {name}: there is no file {path}")
            sys.modules[path.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[path.stem])
        module = sys.modules[path.stem]
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(place)
    member = getattr(module, function, None)
    if not callable(member):
        raise AttributeError(f"{place} has no function {function}")
    return member  # type: ignore[no-any-return]


def _make_batch(trial: Trial, samples: int, device: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model's forward."""
    import torch

    if isinstance(trial.batch, tuple):
        return (torch.randn(samples, *trial.batch[1:], device=device),), {}
    inputs = _function(f"{trial.model.rpartition(':')[0]}:{trial.batch}")(samples)

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    parts = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    parts = parts if isinstance(parts, (tuple, list)) else [parts]
    sizes = {len(each) for each in parts if isinstance(each, torch.Tensor) and each.dim()}
    if sizes and samples not in sizes:
        raise ValueError(
            f"--batch {trial.batch}: {trial.batch}({samples}) returned tensors of {min(sizes)} samples, but {samples} "
            f"are needed"
        )
    if isinstance(inputs, Mapping):
        return (), {name: moved(value) for name, value in inputs.items()}
    return tuple(moved(value) for value in parts), {}


def _loss_of(output: Any) -> Any:
    """Return a scalar to differentiate: the model's own loss, or the mean square of its (first) output."""
    import torch

    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is not None:
        return loss
    while not isinstance(output, torch.Tensor):
        if not isinstance(output, (Mapping, tuple, list)) or not output:
            raise TypeError(f"the model returned {type(output).__name__}, but a tensor or a .loss is needed")
        output = next(iter(output.values() if isinstance(output, Mapping) else output))
    return output if output.dim() == 0 else output.float().square().mean()
