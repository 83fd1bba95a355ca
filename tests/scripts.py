"""Runs a script to its end in a forked process (tests.fork_server), where it need not be a fresh interpreter."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fork_server import fork_python

_globals_of_scripts: list[dict[str, Any]] = []


def run_forked(
    script: Path, *words: str, environ: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """What `python script words` printed, in the script's folder, and its exit code.

    Args:
        environ: variables that it has besides those of this process.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        call = [str(script.parent), str(script), *words]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        process = fork_python("tests.scripts:run_script", call, environ=variables, stdout=out, stderr=err)
        try:
            code = process.wait(timeout=timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess([str(script), *words], code, out.read(), err.read())


def run_script(folder: str, script: str, *words: str) -> None:
    """`python script words` in a folder, in a forked process."""
    os.chdir(folder)
    sys.argv, sys.path[0:0] = [script, *words], [os.path.dirname(script)]
    # Kept until the interpreter ends, as those of `python script.py` are. Were they dropped here, torch's DDP could be
    # the last to hold gloo's group, whose destructor joins a thread that may be waiting for the GIL (torch 2.13).
    _globals_of_scripts.append(runpy.run_path(script, run_name="__main__"))
