"""Choose the number of workers of this host: one per GPU, one per usable core, or the number that the user gave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ... import env
from ...errors import DeviceError, UsageError
from ...job.cgroup import cpu_quota_cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
_MOST_PER_CORE = 4
# NVIDIA's driver, the same under Windows' Linux, AMD's: what torch counts as CUDA devices needs one of them.
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True)
class WorkerCount:
    """Number of workers on this host, and why (empty when the user gave the number)."""

    count: int
    reason: str = ""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by the control group's CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota_cores()
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def count_gpus(kind: str, environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that torch sees with these variables, asked in a child process.

    It is not asked where no driver of a GPU is loaded: the import takes seconds. `kind`: cuda, or Intel's xpu.

    Raises:
        DeviceError: torch cannot say.
    """
    if kind == "cuda" and not any(os.path.exists(path) for path in _DRIVERS):
        return 0
    leave_out_folder = "import sys; sys.path[:] = filter(None, sys.path)"  # it may hold a random.py
    question = f"{leave_out_folder}; import torch; print(torch.{kind}.device_count())"  # starts no CUDA context
    variables = {**environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    variables.pop(env.JOB_SECRET.name, None)
    process = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, env=variables)
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()[-1:] or ["it printed nothing"]
        raise DeviceError(f"torch cannot count the GPUs of this host: {lines[0]}")
    return int(process.stdout.split()[-1])


def visible_devices(numbers: Sequence[int], visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for the GPUs of these numbers, counted among those that are visible now.

    Raises:
        DeviceError: fewer are visible.
    """
    if visible is None:
        return ",".join(map(str, numbers))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    missing = [number for number in numbers if number >= len(names)]
    if missing:
        raise DeviceError(
            f"--device names GPU {missing[0]}, but {VISIBLE}={visible!r} shows {len(names)} here, numbered from 0."
        )
    return ",".join(names[number] for number in numbers)


def check_devices(numbers: Sequence[int], present: int) -> None:
    """Raises DeviceError unless torch sees as many GPUs as `--device` names, once only those are visible."""
    if present < len(numbers):
        raise DeviceError(
            f"--device {','.join(map(str, numbers))} names {len(numbers)} GPU{'s' * (len(numbers) > 1)}, but torch "
            f"sees {present} of them here. `photinus doctor` lists the GPUs; --cpu trains on the CPU."
        )


def gpu_names(workers: int, present: int, visible: str | None, ranks_per_gpu: int) -> tuple[str, ...]:
    """Return the name of each worker's GPU for messages, by local rank: "GPU 3", as in nvidia-smi; () without GPUs."""
    if present * ranks_per_gpu < workers:
        return ()
    numbers = [name.strip() for name in visible.split(",")] if visible else list(map(str, range(present)))
    return tuple(f"GPU {numbers[worker // ranks_per_gpu]}" for worker in range(workers))


def choose_worker_count(
    request: int | str,
    *,
    cpu_only: bool,
    gpus: Callable[[], int],
    cores: Callable[[], int],
    ranks_per_gpu: int = 1,
    oversubscribe: bool = False,
) -> WorkerCount:
    """Turns `--nproc-per-node` into a number of workers for this host.

    Args:
        request: a number above 0, or "auto" (GPUs if there are any, else cores), "gpu", "cpu".
        cpu_only: the workers see no GPU (`--cpu`), so GPUs neither count nor limit.
        gpus: number of GPUs; asked only when it matters, since it needs torch.
        cores: number of usable cores.
        ranks_per_gpu: so many workers share each GPU.
        oversubscribe: without GPUs, any number of workers may share the cores.

    Raises:
        UsageError: a number that must be a slip: too many for the cores.
        DeviceError: GPUs were asked for and there is none, or there are fewer than workers.
    """
    if isinstance(request, int):
        present = 0 if cpu_only else gpus()
        if 0 < present * ranks_per_gpu < request:
            room = "each worker needs its own" if ranks_per_gpu == 1 else f"each GPU takes {ranks_per_gpu}"
            raise DeviceError(
                f"--nproc-per-node {request} asks for {request} workers, but this host has {present} "
                f"GPU{'s' if present > 1 else ''}, and {room}. Give --nproc-per-node {present * ranks_per_gpu}, or "
                f"--cpu to train on the CPU. (--ranks-per-gpu {-(-request // present)} lets them share, for testing.)"
            )
        if present == 0 and request > _MOST_PER_CORE * cores() and not oversubscribe:
            raise UsageError(
                f"--nproc-per-node {request} asks for {request} workers, but this host has {cores()} usable "
                f"core{'s' * (cores() > 1)} and no GPU. More than {_MOST_PER_CORE} per core "
                f"({_MOST_PER_CORE * cores()} here) only take turns. To start them all the same, add --oversubscribe."
            )
        return WorkerCount(request)
    looks_for_gpus = request == "gpu" or (request == "auto" and not cpu_only)
    present = gpus() if looks_for_gpus else 0
    if present > 0:
        why = "one per GPU" if ranks_per_gpu == 1 else f"{ranks_per_gpu} per GPU"
        return WorkerCount(present * ranks_per_gpu, why)
    if request == "gpu":
        hidden = os.environ.get(VISIBLE)
        raise DeviceError(
            "--nproc-per-node gpu asks for one worker per GPU, but torch sees 0 GPUs here"
            + (f" ({VISIBLE}={hidden!r})" if hidden is not None else "")
            + f". Give a number, or cpu for one worker per usable core ({cores()} here)."
        )
    return WorkerCount(cores(), "one per usable core" + ("; torch sees no GPU here" if looks_for_gpus else ""))
