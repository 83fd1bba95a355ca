"""Makes a process group with all its ranks: finds the hosts, and joins them through the engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from .. import engine, env
from ..errors import WorldSizeError
from ..job.world import name_ranks
from . import device_map, hosts
from .arguments import Options, wires
from .engine_reductions import ThroughEngine
from .process_group import GroupParts, InnerGloo, Limit, ProcessGroup

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

_JOINING_S = 60.0  # for the engine's rendezvous, after all ranks have shown themselves in the store


def make(
    description: _DistributedBackendOptions, request: device_map.DeviceRequest | None = None, own: Options | None = None
) -> ProcessGroup:
    """Makes the group that torch describes; called by all its ranks.

    Raises:
        ValueError: the device map holds a backend that cannot share a group with ours.
        WorldSizeError: the default group is not as large as the launcher means.
        CollectiveTimeoutError: ranks are missing; names them.
        PeerLostError, MismatchError: a missing rank has ended, or makes another group.
        HostError: other hosts cannot reach this one, or this process may not open what it needs.
    """
    own, request = own or Options(), request or device_map.DeviceRequest()
    parts = GroupParts(
        lambda part, subset: make(part, request.for_a_part(subset), own), list(description.global_ranks_in_group)
    )
    ours = _make_ours(description, own, request.ours, parts)
    group: ProcessGroup = ours
    if request.devices:
        try:
            # Ours was made first: it says which ranks are missing, and torch's backends only time out.
            group = device_map.ByDevice(ours, *device_map.others(description, request), request.device)
        except BaseException:
            ours.shutdown()
            raise
    return group


def _make_ours(
    description: _DistributedBackendOptions, own: Options, devices: Sequence[str], parts: GroupParts
) -> ThroughEngine:
    rank, size, store = description.group_rank, description.group_size, description.store
    members = list(description.global_ranks_in_group)
    if not members:  # the default group
        _check_world_size(size)
    label = "world" if not members else f"{description.group_id} ({name_ranks(members, 8)} of the world)"
    # It knows who is alive, and how fast the hosts are linked.
    world = _default_group() if members else None
    limit = Limit(_timeout_s(description.timeout, world))
    rendezvous = hosts.meet(
        store, rank, size, timeout_s=limit.timeout_s, name=label, members=members, world=world and world.communicator
    )
    communicator = engine.Communicator(
        rank,
        size,
        rendezvous.address,
        # All ranks have just shown themselves, so what takes longer now is a fault and no slow start.
        timeout_s=min(limit.timeout_s, _JOINING_S),
        name=label,
        places=rendezvous.places(),
        job=rendezvous.job,
        attempt=rendezvous.attempt,
        # Measured once, by the default group: its parts use the same cards.
        speeds=world.communicator.speeds if world and world.communicator else (0.0, 0.0),
    )
    try:
        # gloo takes any address that it finds, and earlier groups may have left theirs.
        private = PrefixStore(f"photinus/{rendezvous.session}", store)
        address = hosts.LOOPBACK if rendezvous.one_host else hosts.choose_addresses(rendezvous.members, rank)[0]
        gloo = InnerGloo(private, rank, size, limit, address)
        if rank == 0 and size > 1:
            # Every rank has joined, so nobody reads these keys any more.
            hosts.tidy(store, rendezvous)
            # Once for the job: parts of it use the same links.
            if communicator.about_hosts and not members:
                line = f"photinus: {size} ranks on {rendezvous.hosts()}; {communicator.about_hosts}"
                print(line, file=sys.stderr, flush=True)
        served = [torch.device(device) for device in devices]
        return ThroughEngine(communicator, gloo, store, limit, label, served, parts, wires(own.wire_dtype))
    except BaseException:
        # Else the peers would wait for this rank until their deadline.
        communicator.close()
        raise


def _check_world_size(size: int) -> None:
    # A script that sets its own RANK or WORLD_SIZE would train copies of the model, without a word.
    job_size = env.EXPECTED_WORLD_SIZE.get()
    if job_size is not None and job_size != size:
        raise WorldSizeError(
            f"the default process group has {size} rank{'s' if size > 1 else ''}, but the launcher expects {job_size} "
            f"({env.EXPECTED_WORLD_SIZE.name}={job_size}): each process would train alone, or wait for ranks that do "
            f"not exist. Remove rank= and world_size= from init_process_group, or start the script with "
            f"`photinus run --nproc-per-node {size}`."
        )


def _default_group() -> ProcessGroup | None:
    """The default group, where it is one of ours."""
    world = dist.group.WORLD
    return world if isinstance(world, ProcessGroup) else None


def _timeout_s(timeout: timedelta, world: ProcessGroup | None) -> float:
    """Return the timeout that the caller gave, else the default group's, else PHOTINUS_TIMEOUT_S (300 s).

    torch fills its own default of half an hour in and passes a copy on, so only its frame shows whether a caller gave
    one: libraries pass the same half an hour of their own.
    """
    if device_map.locals_of_torch().get("timeout") is not dist.default_pg_timeout:
        return timeout.total_seconds()
    return env.TIMEOUT_S.get() if world is None else world.timeout_s
