"""The ways in which people start a script on several ranks, each as its users type it.

What need not be a fresh interpreter (a plain `python script.py`, variables set by hand) is forked from one that has
imported torch; launchers are real ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.test_run_hosts import free_port
from tests.fork_server import ForkedProcess, fork_python

SCRIPTS = Path(__file__).with_name("scripts")
WAYS = ("by hand", "photinus run", "torchrun", "torch.distributed.launch", "photinus.launch")
_BIN = Path(sys.executable).parent
_DEADLINE_S = 150.0
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FROM_PYTHON = """
import sys, photinus
def main(script, words):
    import os, runpy, sys
    sys.argv, sys.path[0] = [script, *words], os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")
photinus.launch(main, nprocs=int(sys.argv[1]), args=(sys.argv[2], sys.argv[3:]), cpu=True)
"""


@dataclass(frozen=True)
class Ended:
    """What a job printed, and the JSON lines among it, by rank."""

    out: str
    err: str
    facts: list[dict[str, Any]]


def start(
    way: str, script: str, *words: str, ranks: int, folder: Path, environ: Mapping[str, str] | None = None
) -> Ended:
    """Runs a script in a folder to its end. AssertionError with all that it printed unless every process ends with 0.

    Args:
        way: one of WAYS, or "python" for a plain `python script.py`.
    """
    path, port = str(SCRIPTS / script), str(free_port())
    count = ["--nproc_per_node", str(ranks)]
    by_hand = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    hosts = ["--nnodes", str(ranks), "--master_addr", "127.0.0.1", "--master_port", port, "--nproc_per_node", "1"]
    lines: list[tuple[list[str], Mapping[str, str]]] = {
        "python": [([], {})],
        "by hand": [([], {**by_hand, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(ranks)],
        "photinus run": [([str(_BIN / "photinus"), "run", "--cpu", *count, path], {})],
        "torchrun": [([str(_BIN / "torchrun"), "--standalone", "--log-dir", str(folder / "logs"), *count, path], {})],
        "torch.distributed.launch": [
            ([str(_BIN / "photinus"), "run", "--cpu", *hosts, "--node_rank", str(host), path], {})
            for host in range(ranks)
        ],
        "photinus.launch": [([sys.executable, "-c", _FROM_PYTHON, str(ranks), path], {})],
    }[way]
    base = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    base = {**base, "OMP_NUM_THREADS": "1", **(environ or {})}
    processes: list[ForkedProcess | subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            for line, variables in lines:
                env = {**base, **variables}
                if line:
                    command = [*line, *words]
                    process = subprocess.Popen(
                        command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err
                    )
                    processes.append(process)
                else:
                    call = [str(folder), path, *words]
                    processes.append(fork_python("tests.scripts:run_script", call, environ=env, stdout=out, stderr=err))
            deadline = time.monotonic() + _DEADLINE_S
            while None in (codes := [process.poll() for process in processes]) and time.monotonic() < deadline:
                if any(codes):  # the others would wait for it until their own deadline
                    break
                time.sleep(0.01)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            for stream in (out, err):
                stream.seek(0)
            printed = out.read(), err.read()
    assert set(codes) == {0}, (
        f"{way}, {script}: exit codes {codes} (None: still running after {_DEADLINE_S:g} s)\n{printed[0]}\n{printed[1]}"
    )
    # Ranks share the stream, and the ends of their lines may come late (PYTHONUNBUFFERED).
    decode = json.JSONDecoder().raw_decode
    found = [decode(printed[0], match.start())[0] for match in re.finditer(r'\{"rank"', printed[0])]
    facts = sorted(found, key=lambda each: each["rank"])
    places = [(each["rank"], each["world_size"]) for each in facts]
    assert places == [(rank, ranks) for rank in range(ranks)], f"{way}, {script}:\n{printed[0]}\n{printed[1]}"
    return Ended(*printed, facts)
