"""The rank of `photinus doctor --hosts` on each host: sends what is there, and how well this host reaches the others.

    python -m photinus.tools.doctor.host_rank TIMEOUT_S        under `photinus run --hostfile`

Two hosts at a time make a group over backend photinus, as a job would, once for each direction: rank 0 of a group
dials. The engine measures the latency, and a transfer the bandwidth. In a round no host is in two groups, so no
transfer shares a host with another.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from ... import env
from ...job.own_address import own_address
from ...run.local.devices import usable_cores
from ...version import __version__
from .host import look_at_host
from .plan import send

_GROUP_S = 5.0
_TRANSFERS, _TRANSFER_S = 2, 0.5  # the faster one counts
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 64 << 20


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return all ordered pairs of hosts, in rounds in which each host takes part at most once."""
    found = []
    for total in range(count):  # a host is in one pair of each sum
        matches = [(one, (total - one) % count) for one in range(count) if one < (total - one) % count]
        found += [matches, [(second, first) for first, second in matches]]
    return [matches for matches in found if matches]


def main(timeout_s: float) -> None:
    """Measure as the rank of this host."""
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # without a handler, the signal ends this process
    import torch
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    rank, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    os.environ.pop(env.EXPECTED_WORLD_SIZE.name)  # the groups are smaller
    versions = {"photinus": __version__, "python": platform.python_version(), "torch": torch.__version__}
    place = {"address": own_address(socket.gethostname()), "cores": usable_cores(), "clock_s": time.time()}
    send(rank=rank, **versions, **place, bad=[asdict(each) for each in look_at_host() if each.state == "bad"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for number, pairs in enumerate(rounds(hosts)):
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        for pair in pairs:
            if rank in pair:
                _try(pair, rank, PrefixStore(f"pair {pair}", store))
        store.set(f"{number}/{rank}", "")
        store.wait([f"{number}/{each}" for each in range(hosts)], timedelta(seconds=timeout_s))


def _try(pair: tuple[int, int], rank: int, store: Any) -> None:
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    try:
        limit = timedelta(seconds=_GROUP_S)
        dist.init_process_group("photinus", store=store, rank=pair.index(rank), world_size=2, timeout=limit)
        measured = _measure()
    except Exception as error:  # noqa: BLE001 - any error is the result of this pair
        measured = {"error": str(error).rpartition(" s: ")[2].partition(". ")[0]}
    if rank == pair[0]:
        send(pair=pair, **measured)
    if not dist.is_initialized():
        # torch numbers the groups of a process, failed ones too, and ranks with different numbers cannot join. The
        # numbers start over when the default group is destroyed: here, one of this rank alone.
        dist.init_process_group("photinus", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _measure() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    latency_s, bytes_per_s = group.communicator.speeds  # the same on both hosts; 0: not known
    size = int(min(_MOST_BYTES, max(_LEAST_BYTES, bytes_per_s * _TRANSFER_S)))
    tensor, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(_TRANSFERS):
        dist.barrier()
        begun_s = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        seconds.append(time.perf_counter() - begun_s)
    return {"rtt_s": 2 * latency_s, "bytes_per_s": size / min(seconds)}


if __name__ == "__main__":
    main(float(sys.argv[1]))
