"""Which device a rank computes on, and over which backend the ranks exchange: chosen with the reason in a few words."""

from __future__ import annotations

import importlib
import os

import torch
import torch.distributed as dist

from ... import env
from ...errors import DeviceError
from ...job.slurm import has_a_gpu_of_its_own
from ...job.world import World


def choose_device(
    device: str | torch.device, place: World, cuda_devices: int | None = None
) -> tuple[torch.device, str]:
    """The device of the rank at `place` and the reason in a few words.

    Args:
        device: "auto", "cpu", "cuda", "cuda:i" or a torch.device.
        place: the rank's place in the job.
        cuda_devices: number of CUDA devices here; None asks CUDA.

    Raises:
        DeviceError: CUDA was asked for and is absent, the index does not exist, or more ranks than devices.
        ValueError: not the name of a device.
    """
    if cuda_devices is None:
        cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if str(device) == "auto":
        if cuda_devices == 0:
            return torch.device("cpu"), "no CUDA device here"
        reason = f"{cuda_devices} CUDA device{'s' if cuda_devices > 1 else ''} here"
        wanted = torch.device("cuda")
    else:
        try:
            wanted = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f'device={device!r} is no device: use "auto", "cpu", "cuda" or "cuda:0"') from error
        reason = "as asked"
    if wanted.type != "cuda":
        return wanted, reason
    if cuda_devices == 0:
        build = "no CUDA device is visible"
        if torch.version.cuda is None:
            build = "this build of torch has no CUDA"
            if torch.version.hip is not None:
                build = f"this build of torch is for ROCm {torch.version.hip}, and no GPU of AMD is visible"
        raise DeviceError(
            f"device={str(device)!r} was asked for on rank {place.rank}, but {build} "
            f'(CUDA_VISIBLE_DEVICES={os.environ.get("CUDA_VISIBLE_DEVICES", "not set")}). Use --device cpu, or "auto".'
        )
    if ":" in str(wanted):
        if wanted.index >= cuda_devices:
            raise DeviceError(f"device={str(device)!r} does not exist: {cuda_devices} CUDA devices are visible here")
        return wanted, reason
    if cuda_devices == 1 and place.local_world_size > 1 and has_a_gpu_of_its_own(os.environ):
        return torch.device("cuda", 0), "the one that Slurm gave this task"
    # Every rank of the host checks the same numbers, so that all of them stop and none waits for the others.
    ranks_per_gpu = env.RANKS_PER_GPU.get()
    if place.local_world_size > cuda_devices * ranks_per_gpu:
        raise DeviceError(
            f"local rank {place.local_rank} of {place.local_world_size} ranks on this host, but only {cuda_devices} "
            f"CUDA device{' is' if cuda_devices == 1 else 's are'} visible. Start {cuda_devices} "
            f"(--nproc-per-node {cuda_devices}), or use --device cpu. To let several share a GPU on purpose: "
            f"photinus run --ranks-per-gpu {-(-place.local_world_size // cuda_devices)}."
        )
    return torch.device("cuda", place.local_rank // ranks_per_gpu), reason


def choose_backend(backend: str, device: torch.device) -> tuple[str, str]:
    """The torch.distributed backend to use and the reason in a few words.

    On CUDA devices the choice hangs on all ranks' GPUs: ("auto", "") leaves it to `gpu_backend.agree_on_backend`.

    Raises:
        ValueError: torch does not know a backend of this name.
    """
    reason = "as asked"
    if backend == "auto":
        backend, reason = env.BACKEND.get(), f"{env.BACKEND.name} is set"
    if backend == "auto":
        if device.type == "cuda":
            return "auto", ""
        missing = _register_photinus()
        return ("gloo", f"photinus cannot be used: {missing}") if missing else ("photinus", "the choice for CPUs")
    missing = _register_photinus() if backend == "photinus" else None
    if missing:
        raise ValueError(f"backend 'photinus' cannot be used: {missing}. Install Photinus again or use 'gloo'.")
    # A mixed name such as "cpu:gloo,cuda:nccl" is torch's own affair; it checks the parts.
    if ":" not in backend and not dist.is_backend_available(backend):
        raise ValueError(f"backend {backend!r} is not available; known here: {', '.join(_known_backends())}")
    return backend, reason


def missing_on_gpus() -> dict[str, str]:
    """The backends that cannot take tensors of this process's GPUs, and why."""
    missing = {} if dist.is_nccl_available() else {"nccl": "this build of torch has none"}
    photinus = _register_photinus()
    if torch.version.hip is not None:
        photinus = f"it needs NVIDIA's driver, and this build of torch is for ROCm {torch.version.hip}"
    return missing | ({"photinus": photinus} if photinus else {})


def _register_photinus() -> str | None:
    """Registers backend "photinus"; returns why that is impossible, None when it is done."""
    try:
        importlib.import_module("photinus.backend")
    except ImportError as error:
        return str(error)
    return None if dist.is_backend_available("photinus") else "photinus.backend did not register it"


def _known_backends() -> list[str]:
    names = {"auto", *dist.Backend.backend_list, "photinus"} - {"undefined", "fake"}
    return sorted(name for name in names if name in ("auto", "photinus") or dist.is_backend_available(name))
