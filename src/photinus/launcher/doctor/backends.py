"""Every backend of torch.distributed, really tried: two processes, one all_reduce that is checked, a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .finding import Finding
from .load import LATE, not_judged

__all__ = ["look_at_backends"]

_SECTION = "Backends (two processes, all_reduce tried)"
_TRIAL = Path(__file__).with_name("trial.py")
_ABSENT = {
    "nccl": "this torch is built without it",
    "mpi": "this torch is built without it (as all released builds are)",
    "ucc": "this torch is built without it",
}


def look_at_backends(torch: dict[str, Any] | None, timeout_s: float) -> list[Finding]:
    """Tries photinus, gloo, nccl, mpi and ucc, where this torch has them.

    Args:
        torch: what `software.ask_torch` found; None when there is no torch.
        timeout_s: for each backend.
    """
    if torch is None or not torch["distributed"]:
        return []
    found = [_tried("photinus", timeout_s), _tried("gloo", timeout_s)]
    gpus = len(torch["gpus"])
    for name in ("nccl", "mpi", "ucc"):
        if not torch["available"][name]:
            found.append(Finding(_SECTION, name, "absent", _ABSENT[name]))
        elif name == "nccl" and gpus == 0:
            found.append(Finding(_SECTION, name, "absent", "there is no GPU to try it on"))
        elif name == "mpi":
            found.append(Finding(_SECTION, name, "note", "not tried", "Only mpirun can start it: mpirun -n 2 ..."))
        else:
            found.append(_tried(name, timeout_s, world_size=min(2, gpus) if name == "nccl" else 2))
    return found


def _tried(backend: str, timeout_s: float, world_size: int = 2) -> Finding:
    with tempfile.TemporaryDirectory(prefix="photinus-doctor-") as folder:
        environ = {
            "GLOO_SOCKET_IFNAME": "lo",
            **os.environ,
            "OMP_NUM_THREADS": "1",
        }
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PHOTINUS_WORLD_SIZE"):
            environ.pop(name, None)  # of a job inside of which this may run
        processes = [
            subprocess.Popen(
                [sys.executable, str(_TRIAL), backend, str(rank), str(world_size), folder, str(timeout_s)],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        outputs, late = _collect(processes, timeout_s)
    if late:
        error = LATE.format(timeout_s)
        advice = "Run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL set, or --timeout with more seconds."
        return not_judged(_SECTION, backend, error) or Finding(_SECTION, backend, "bad", error, advice)
    for rank, process in enumerate(processes):
        if process.returncode != 0:
            said = [line for line in outputs[rank][1].strip().splitlines() if line.strip()]
            value = f"rank {rank} ended with code {process.returncode}: {said[-1] if said else 'it said nothing'}"
            return Finding(_SECTION, backend, "bad", value, _advice(backend))
    facts: dict[str, Any] = json.loads(outputs[0][0].strip().splitlines()[-1])
    bandwidth = facts["large_bytes"] / facts["large_s"] / 1e9
    value = f"works: 4 KiB in {facts['small_s'] * 1e6:.0f} µs, 16 MiB at {bandwidth:.1f} GB/s"
    return Finding(_SECTION, backend, "good", value, facts=facts)


def _collect(processes: list[subprocess.Popen[str]], timeout_s: float) -> tuple[list[tuple[str, str]], bool]:
    """Output of each process, and whether some had to be ended because the time was over."""
    deadline, outputs, late = time.monotonic() + timeout_s, [], False
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            late = True
            for each in processes:
                if each.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        each.kill()
            outputs.append(process.communicate())
    return outputs, late


def _advice(backend: str) -> str:
    return {
        "photinus": "See `engine` and `memfd` above; the message says what was missing.",
        "gloo": "Often the network: loopback down, or GLOO_SOCKET_IFNAME names an interface that is not there.",
        "nccl": "NCCL_DEBUG=INFO makes it say more; a driver older than torch's CUDA is the usual cause.",
    }.get(backend, "The message is the backend's own.")
