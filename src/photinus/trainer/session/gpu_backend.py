"""Over which backend ranks on GPUs exchange where nobody asked for one: by what all of them compute on.

Ranks tell their GPUs by the store at which they meet, before there is a group, and rank 0 chooses for all: what it
reads on its own host (a verdict, which GPUs reach each other) others may not have. By that store they learn, too, that
two share a GPU, which is refused before they exchange anything: nccl would say it later, in words of its own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ... import env
from ...job.world import World
from ...parallel.exchange.gpu_sharing import gpu_identity, refuse_shared_gpus
from ...verdict import COMMAND, Setting, Verdict, driver_version, look_up_verdict
from .progress import say

_choices = _checks = 0  # sessions of this process, equal on all ranks: each has keys of its own


@dataclass(frozen=True)
class Gpus:
    """What the choice depends on.

    Attributes:
        by_rank: identity of each rank's GPU, equal where two ranks have the same one; "" where torch cannot tell.
        on_one_host: whether all ranks are on one.
        missing: why a backend cannot be used, for those that cannot.
        apart: pairs of GPUs of this host that cannot reach each other's memory ("0-1").
    """

    by_rank: Sequence[str]
    on_one_host: bool
    missing: Mapping[str, str]
    apart: Sequence[str] = ()


@dataclass(frozen=True)
class Choice:
    """A backend, why in a few words, and what else to do: a line, or ""."""

    backend: str
    why: str
    advice: str = ""


def choose_among(gpus: Gpus, verdict: Verdict) -> Choice:
    """The rules, in the order of their weight: what was measured here, what can be used at all, what is usual."""
    missing = gpus.missing
    if gpus.on_one_host and verdict.backend and verdict.backend not in missing:
        return Choice(verdict.backend, f"as `{COMMAND}` measured here: {verdict.why}")
    known = [gpu for gpu in gpus.by_rank if gpu]
    why = "nccl takes one rank per GPU, and ranks share one here" if len(set(known)) < len(known) else ""
    why = why or (f"nccl cannot be used: {missing['nccl']}" if "nccl" in missing else "")
    if why and "photinus" in missing:
        return Choice("gloo", f"{why}; nor photinus: {missing['photinus']}")
    if why:
        return Choice("photinus", why)
    measure = f"run `{COMMAND} --nproc-per-node {len(gpus.by_rank)}`, and the fastest is taken from then on"
    stale = f"photinus: no verdict counts: {verdict.why}: {measure}" if verdict.why and not verdict.backend else ""
    if len(gpus.by_rank) == 1:
        return Choice("nccl", "the choice for CUDA devices")
    if gpus.on_one_host and gpus.apart and "photinus" not in missing:
        pairs = ", ".join(gpus.apart[:8]) + (" ..." if len(gpus.apart) > 8 else "")
        advice = f"photinus: GPUs {pairs} cannot reach each other, where nccl is often slow: {measure}"
        return Choice("nccl", "the choice for CUDA devices", stale or advice)
    return Choice("nccl", "the choice for CUDA devices", stale if gpus.on_one_host else "")


def agree_on_backend(
    store: Any, place: World, device: torch.device, missing: Mapping[str, str], timeout: timedelta
) -> tuple[str, str]:
    """The backend for the ranks that meet at a store, and why; every rank calls it with its CUDA device.

    Rank 0 says what else there is to do, in one line.

    Raises:
        torch.distributed.DistStoreError: a rank did not come in time.
    """
    global _choices
    _choices += 1
    keys = [f"photinus/gpu of rank/{_choices}/{rank}" for rank in range(place.world_size)]
    chosen = f"photinus/backend/{_choices}"
    store.set(keys[place.rank], _identity(device))
    if place.rank == 0:
        store.wait(keys, timeout)
        by_rank = [store.get(key).decode() for key in keys]
        gpus = Gpus(by_rank, place.local_world_size == place.world_size, missing, _pairs_apart(by_rank))
        choice = choose_among(gpus, _verdict(by_rank))
        if choice.advice:
            say(choice.advice)
        store.set(chosen, json.dumps([choice.backend, choice.why]))
        return choice.backend, choice.why
    store.wait([chosen], timeout)
    backend, why = json.loads(store.get(chosen))
    return backend, why


def check_gpus(device: torch.device, backend: str) -> None:
    """Every rank of the default group calls it with its CUDA device.

    Raises:
        DeviceError: on every rank, if more ranks share a GPU than PHOTINUS_RANKS_PER_GPU allows, or any over nccl.
    """
    global _checks
    _checks += 1
    store: Any = dist.distributed_c10d._get_default_store()
    keys = [f"photinus/gpu/{_checks}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], gpu_identity(device))
    store.wait(keys, timedelta(seconds=env.TIMEOUT_S.get()))
    refuse_shared_gpus([store.get(key).decode() for key in keys], backend, env.RANKS_PER_GPU.get())


def _identity(device: torch.device) -> str:
    properties: Any = torch.cuda.get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def _verdict(by_rank: Sequence[str]) -> Verdict:
    if not all(by_rank):
        return Verdict("", "")
    return look_up_verdict(Setting(tuple(by_rank), driver_version(), str(torch.__version__)))


def _pairs_apart(by_rank: Sequence[str]) -> list[str]:
    """Of the ranks' GPUs that are visible here, by their numbers."""
    ours = [i for i in range(torch.cuda.device_count()) if _identity(torch.device("cuda", i)) in by_rank]
    reach = torch.cuda.can_device_access_peer
    return [f"{i}-{j}" for i, j in itertools.combinations(ours, 2) if not (reach(i, j) and reach(j, i))]
