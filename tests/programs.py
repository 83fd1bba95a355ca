"""Runs a Python program on several ranks, each in an environment of its own (namespaces, limits, variables).

`tests.ranks` runs functions; this runs source text, whose exit code, standard output and standard error are looked at
apart, and which a command (`unshare`, `sh -c 'ulimit ...'`) may wrap. A program sees `rank`, `world_size`, `address`,
numpy as `np`, `engine` and `errors`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from photinus import engine
from tests.fork_server import REPOSITORY

_HEAD = "import os, sys, time; import numpy as np; from photinus import engine, errors; " + (
    "rank, world_size, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]\n"
)


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    rank: int
    pid: int
    code: int | None  # None: it was past the deadline and was killed
    out: str
    err: str


def run_programs(
    program: str,
    *,
    world_size: int,
    wrap: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    by_rank: Mapping[int, Mapping[str, str]] | None = None,
    expect: Mapping[int, int | None] | None = None,
    timeout_s: float = 60.0,
    meanwhile: Callable[[list[subprocess.Popen[bytes]]], None] | None = None,
) -> list[Ended]:
    """How the ranks ended; AssertionError with every rank's output unless each exits with 0, or as expected.

    Args:
        expect: exit codes by rank, where they are not 0; None for any.
        wrap: a command that gets the rank's command as further arguments.
        by_rank: environment variables of single ranks.
        meanwhile: called with the processes while they run.
    """
    address = engine.new_address()
    started = time.monotonic()
    processes, files = [], []
    try:
        for rank in range(world_size):
            out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below
            files.append((out, err))
            command = [*wrap, sys.executable, "-c", _HEAD + program, str(rank), str(world_size), address]
            env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            env.update(environ or {})
            env.update((by_rank or {}).get(rank, {}))
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, env=env, cwd=REPOSITORY))
        if meanwhile is not None:
            meanwhile(processes)
        for process in processes:
            try:
                process.wait(timeout=max(0.1, timeout_s - (time.monotonic() - started)))
            except subprocess.TimeoutExpired:
                break
    finally:
        late = {process.pid for process in processes if process.poll() is None}
        for process in processes:
            if process.pid in late:
                process.kill()
                process.wait()
        ended = []
        for rank, (process, pair) in enumerate(zip(processes, files, strict=False)):
            texts = []
            for file in pair:
                file.seek(0)
                texts.append(file.read())
                file.close()
            ended.append(Ended(rank, process.pid, None if process.pid in late else process.returncode, *texts))
    wanted = dict.fromkeys(range(world_size), 0) | dict(expect or {})
    wrong = [end.rank for end in ended if end.code is None or wanted[end.rank] not in (None, end.code)]
    shown = "\n".join(f"----- rank {e.rank}: exit code {e.code}\n{e.out}\n-- stderr:\n{e.err}" for e in ended)
    assert not wrong, f"ranks {wrong} of {world_size} did not end as expected\n{shown}"
    return ended
