"""Every backend of torch.distributed, really tried: two processes, one all_reduce that is checked, a deadline."""

from __future__ import annotations

from typing import Any

from ...runlog.units import bandwidth
from ..contestants.contestant import Contestant, torch_ranks
from .finding import LATE, Finding

_SECTION = "Backends (two processes, all_reduce tried)"
_PATH = "all_reduce:ordinary"  # the sum is looked at
_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 16 << 20
_ADVICE = {
    "photinus": "See `engine` and `memfd` above; the message says what was missing.",
    "gloo": "Often the network: loopback down, or GLOO_SOCKET_IFNAME names an interface that is not there.",
    "nccl": "NCCL_DEBUG=INFO makes it say more; a driver older than torch's CUDA is the usual cause.",
}


def look_at_backends(torch: dict[str, Any] | None, timeout_s: float) -> list[Finding]:
    """Tries photinus, gloo, nccl, mpi and ucc, where this torch has them; each may take `timeout_s`."""
    if torch is None or not torch["distributed"]:
        return []
    found = [_try("photinus", timeout_s), _try("gloo", timeout_s)]
    gpus = len(torch["gpus"])
    for name in ("nccl", "mpi", "ucc"):
        if not torch["available"][name]:
            usual = " (as all released builds are)" if name == "mpi" else ""
            found.append(Finding(_SECTION, name, "absent", f"this torch is built without it{usual}"))
        elif name == "nccl" and gpus == 0:
            found.append(Finding(_SECTION, name, "absent", "there is no GPU to try it on"))
        elif name == "mpi":
            found.append(Finding(_SECTION, name, "note", "not tried", "Only mpirun can start it: mpirun -n 2 ..."))
        else:
            found.append(_try(name, timeout_s, world_size=min(2, gpus) if name == "nccl" else 2))
    return found


def _try(backend: str, timeout_s: float, world_size: int = 2) -> Finding:
    with Contestant(backend, torch_ranks(backend, world_size), world_size, timeout_s=timeout_s) as tried:
        tried.prepare("float32", _SMALL_BYTES)
        small_s = tried.run(_PATH, 200)
        tried.prepare("float32", _LARGE_BYTES)
        large_s = tried.run(_PATH, 5)
    if tried.is_late:
        error = LATE.format(timeout_s)
        return Finding(_SECTION, backend, "bad", error, "TORCH_DISTRIBUTED_DEBUG=DETAIL makes it say more.")
    if small_s is None or large_s is None:
        advice = _ADVICE.get(backend, "The message is the backend's own.")
        return Finding(_SECTION, backend, "bad", str(tried.absent), advice)
    value = f"works: 4 KiB in {small_s * 1e6:.0f} µs, 16 MiB at {bandwidth(_LARGE_BYTES / large_s)}"
    facts = {"small_s": small_s, "large_s": large_s, "large_bytes": _LARGE_BYTES}
    return Finding(_SECTION, backend, "good", value, facts=facts)
