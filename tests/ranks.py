"""Runs a function on several real processes and shows every rank's output when one fails.

    results = run_ranks("tests.dist.test_all_reduce:sum_of_ranks", world_size=2, backend="photinus")

The function lives at module level of a test file, takes `rank` and `world_size` and keyword arguments that JSON can
carry, and returns a JSON value. With `backend`, a default process group is made before and destroyed after it, over a
FileStore in a private folder (no port). Each run has its own deadline; processes are ended by pid.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fork_server import fork_python


@dataclass(frozen=True)
class RankResult:
    """What one rank left: its return value (None when it failed), exit code (-9 for SIGKILL) and output."""

    rank: int
    pid: int
    value: Any
    exit_code: int
    output: str


class RanksFailedError(AssertionError):
    """A rank failed or the deadline passed; the message holds every rank's output."""


def run_ranks(
    function: str,
    *,
    world_size: int,
    backend: str | None = None,
    timeout_s: float = 60.0,
    environ: Mapping[str, str] | None = None,
    expect: Mapping[int, int] | None = None,
    arguments: Mapping[str, Any] | None = None,
    hosts: Sequence[str] | None = None,
) -> list[RankResult]:
    """Runs `module:function` on `world_size` processes; raises RanksFailedError unless each exits as expected.

    `expect` maps a rank to the exit code that it should have (default 0; -9 for a rank that kills itself). `hosts` has
    for each rank what it takes for its host (by PHOTINUS_HOST_ID), as in "aabb"; default: all are on one.
    """
    with tempfile.TemporaryDirectory(prefix="photinus-test-") as folder:
        processes, started = [], time.monotonic()
        for rank in range(world_size):
            env = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                **({"PHOTINUS_HOST_ID": hosts[rank]} if hosts else {}),
                **(environ or {}),
            }
            log = open(Path(folder, f"{rank}.log"), "w+")  # noqa: SIM115 - closed below
            words = [function, str(rank), str(world_size), backend or "", folder, json.dumps(dict(arguments or {}))]
            processes.append((fork_python("tests.ranks:main", words, environ=env, stdout=log, stderr=log), log))
        codes: list[int | None] = [None] * world_size
        try:
            for rank, (process, _) in enumerate(processes):
                try:
                    codes[rank] = process.wait(timeout=max(0.1, timeout_s - (time.monotonic() - started)))
                except subprocess.TimeoutExpired:
                    codes[rank] = None
        finally:
            for process, _ in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        results = []
        for rank, (process, log) in enumerate(processes):
            log.seek(0)
            value_file = Path(folder, f"{rank}.json")
            value = json.loads(value_file.read_text()) if value_file.exists() else None
            code = codes[rank]
            results.append(RankResult(rank, process.pid, value, -999 if code is None else code, log.read()))
            log.close()
    wrong = [r for r in results if r.exit_code != (expect or {}).get(r.rank, 0)]
    if wrong:
        shown = "\n".join(f"----- rank {r.rank}: {_how(r.exit_code)}\n{r.output}" for r in results)
        raise RanksFailedError(f"{function}: ranks {[r.rank for r in wrong]} of {world_size} did not end well\n{shown}")
    return results


def values(results: Sequence[RankResult]) -> list[Any]:
    """The ranks' return values, by rank."""
    return [r.value for r in results]


def _how(code: int) -> str:
    return "past the deadline, killed" if code == -999 else f"exit code {code}"


def main(function: str, rank: str, world_size: str, backend: str, folder: str, arguments: str) -> None:
    module, name = function.split(":")
    call = getattr(importlib.import_module(module), name)
    if backend:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(str(Path(folder, "store")), int(world_size))
        dist.init_process_group(backend, store=store, rank=int(rank), world_size=int(world_size))
        if backend == "gloo":
            dist.barrier()  # a rank that ends while another still connects to it makes that one fail
    value = call(rank=int(rank), world_size=int(world_size), **json.loads(arguments))
    Path(folder, f"{rank}.json").write_text(json.dumps(value))
    if backend == "gloo":
        # The reference's threads now and then abort the process while groups are taken apart ("terminate called without
        # an active exception"). What is tested is over, so they are left as they are.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    if backend:
        dist.destroy_process_group()
