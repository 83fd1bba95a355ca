"""The choice of a rank's device, and of the backend over which ranks exchange, each with its reason.

Ranks on GPUs write into the store which GPU each has, before there is a group. So two ranks that share a GPU are
refused before they exchange anything, with a clearer error than NCCL's. Where the user named no backend, rank 0 chooses
for all: other ranks may not have what it reads on its host (measured backends, which GPUs reach each other).
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ... import env
from ...backend_choice import COMMAND, BackendChoice, Setting, driver_version, read_choice
from ...errors import DeviceError
from ...job.slurm import has_a_gpu_of_its_own
from ...job.world import World
from ...parallel.exchange.verify_models import gpu_identity
from .progress import say


def choose_device(
    device: str | torch.device, place: World, cuda_devices: int | None = None
) -> tuple[torch.device, str]:
    """Return the device of the rank at `place` and the reason in a few words.

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
            raise ValueError(f'device={device!r} is not a device: use "auto", "cpu", "cuda" or "cuda:0"') from error
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
    """Return the torch.distributed backend to use and the reason in a few words.

    On CUDA devices the choice depends on all ranks' GPUs: ("auto", "") leaves it to `agree_on_backend`.

    Raises:
        ValueError: torch does not know a backend of this name.
    """
    backend, reason = backend.lower(), "as asked"  # as torch reads it
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
        names = {"auto", *dist.Backend.backend_list, "photinus"} - {"undefined", "fake"}
        known = (n for n in sorted(names) if n in ("auto", "photinus") or dist.is_backend_available(n))
        raise ValueError(f"backend {backend!r} is not available; known here: {', '.join(known)}")
    return backend, reason


def missing_on_gpus() -> dict[str, str]:
    """Return the backends that cannot take tensors of this process's GPUs, with the reasons."""
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


_sessions = 0  # of this process, equal on all ranks: each has keys of its own in a store that several share


class Gpu(NamedTuple):
    """A rank's GPU.

    Attributes:
        identity: text that is equal for two ranks exactly when they have the same GPU.
        uuid: torch's name for it; "" where torch knows none.
    """

    identity: str
    uuid: str


@dataclass(frozen=True)
class Gpus:
    """The facts that the choice depends on.

    Attributes:
        by_rank: UUID of each rank's GPU, equal for ranks that share one; "" if torch does not know it.
        on_one_host: whether all ranks are on one host.
        missing: for each backend that cannot be used, the reason.
        apart: pairs of GPUs of this host that cannot reach each other's memory ("0-1").
    """

    by_rank: Sequence[str]
    on_one_host: bool
    missing: Mapping[str, str]
    apart: Sequence[str] = ()


def choose_among(gpus: Gpus, measured: BackendChoice) -> BackendChoice:
    """Choose by what was measured here, then by what can be used at all, then by what is usual."""
    missing = gpus.missing
    if gpus.on_one_host and measured.backend and measured.backend not in missing:
        return BackendChoice(measured.backend, f"as `{COMMAND}` measured here: {measured.why}")
    known = [gpu for gpu in gpus.by_rank if gpu]
    why = "nccl takes one rank per GPU, and ranks share one here" if len(set(known)) < len(known) else ""
    why = why or (f"nccl cannot be used: {missing['nccl']}" if "nccl" in missing else "")
    if why and "photinus" in missing:
        return BackendChoice("gloo", f"{why}; nor photinus: {missing['photinus']}")
    if why:
        return BackendChoice("photinus", why)
    measure = f"run `{COMMAND} --nproc-per-node {len(gpus.by_rank)}`, and the fastest is taken from then on"
    stale = f"photinus: no verdict counts: {measured.why}: {measure}" if measured.why and not measured.backend else ""
    if len(gpus.by_rank) == 1:
        return BackendChoice("nccl", "the choice for CUDA devices")
    if gpus.on_one_host and gpus.apart and "photinus" not in missing:
        pairs = ", ".join(gpus.apart[:8]) + (" ..." if len(gpus.apart) > 8 else "")
        advice = f"photinus: GPUs {pairs} cannot reach each other, where nccl is often slow: {measure}"
        return BackendChoice("nccl", "the choice for CUDA devices", stale or advice)
    return BackendChoice("nccl", "the choice for CUDA devices", stale if gpus.on_one_host else "")


def gather_gpus(store: Any, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> list[Gpu]:
    """Return the GPU of each rank that has this store, by rank; every rank calls it with its CUDA device.

    Raises:
        torch.distributed.DistStoreError: a rank did not come in time.
    """
    global _sessions
    _sessions += 1
    keys = [f"photinus/gpu/{_sessions}/{other}" for other in range(world_size)]
    store.set(keys[rank], json.dumps([gpu_identity(device), _uuid(device)]))
    store.wait(keys, timeout)
    return [Gpu(*json.loads(store.get(key))) for key in keys]


def agree_on_backend(
    store: Any, place: World, gpus: Sequence[Gpu], missing: Mapping[str, str], timeout: timedelta
) -> tuple[str, str]:
    """Return the backend for the ranks with these GPUs, and why; every rank calls it after `gather_gpus`.

    Rank 0 says what else there is to do, in one line.

    Raises:
        torch.distributed.DistStoreError: rank 0 did not choose in time.
    """
    chosen = f"photinus/backend/{_sessions}"
    if place.rank == 0:
        by_rank = [gpu.uuid for gpu in gpus]
        facts = Gpus(by_rank, place.local_world_size == place.world_size, missing, _pairs_apart(by_rank))
        setting = Setting(tuple(by_rank), driver_version(), str(torch.__version__))
        choice = choose_among(facts, read_choice(setting) if all(by_rank) else BackendChoice("", ""))
        if choice.advice:
            say(choice.advice)
        store.set(chosen, json.dumps([choice.backend, choice.why]))
        return choice.backend, choice.why
    store.wait([chosen], timeout)
    backend, why = json.loads(store.get(chosen))
    return backend, why


def _uuid(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def _pairs_apart(by_rank: Sequence[str]) -> list[str]:
    """Return the pairs of ranks' GPUs, visible here, that cannot reach each other's memory ("0-1")."""
    ours = [i for i in range(torch.cuda.device_count()) if _uuid(torch.device("cuda", i)) in by_rank]
    reach = torch.cuda.can_device_access_peer
    return [f"{i}-{j}" for i, j in itertools.combinations(ours, 2) if not (reach(i, j) and reach(j, i))]
