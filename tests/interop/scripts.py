"""Starts the scripts of examples/interop under a launcher and reads the numbers that they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fork_server import REPOSITORY

SCRIPTS = REPOSITORY / "examples" / "interop"
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone"],
    "photinus run": ["-m", "photinus", "run", "--max-restarts", "0"],
    "photinus run --cpu": ["-m", "photinus", "run", "--max-restarts", "0", "--cpu"],
    "ray": [],  # the script starts its workers itself
}

Numbers = list[tuple[str, float]]


class ScriptFailedError(AssertionError):
    """A script did not end well; the message holds its output."""


def run_script(
    script: str, *arguments: str, backend: str, launcher: str, processes: int = 2, timeout_s: float = 150.0
) -> Numbers:
    """The numbers of the script's `result` lines, in their order: ("loss", 0.5), ...

    Raises:
        ScriptFailedError: another exit code than 0, no numbers, or the deadline has passed.
    """
    command = [sys.executable, *LAUNCHERS[launcher]]
    command += ["--nproc-per-node", str(processes)] if LAUNCHERS[launcher] else []
    command += [str(SCRIPTS / script), *arguments, "--backend", backend]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryDirectory(prefix="photinus-", dir="/tmp") as folder:
        # In /tmp itself: names of sockets, which Ray has there, have at most 107 bytes.
        env["TMPDIR"] = env["RAY_TMPDIR"] = folder
        env["RAY_AUTH_MODE"] = "disabled"  # a token would be left in the home folder
        # A session of its own: at the deadline the workers end with their launcher.
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env, cwd=folder, start_new_session=True)
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # the launcher ends its workers, which have sessions of their own
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        output.seek(0)
        text = output.read()
        left = [path.name for path in Path(folder).iterdir() if path.name.startswith(_OWN_FOLDERS)]
    numbers = [
        (name, float(value))
        for line in text.splitlines()
        if "result " in line
        for name, value in re.findall(r"(\w+)=(\S+)", line.split("result ", 1)[1])
    ]
    how = f"{' '.join(command)}: " + ("past the deadline, ended" if code is None else f"exit code {code}")
    if code != 0 or not numbers:
        raise ScriptFailedError(f"{how}\n{text}")
    assert not left, f"{how}: left {left}"
    return numbers


_OWN_FOLDERS = ("accelerate-", "fabric-", "lightning-", "hf-trainer-")


def reference(script: str, *arguments: str, processes: int = 2) -> Numbers:
    """The numbers over gloo. Three attempts: gloo's groups now and then fail or hang while they are destroyed."""
    for attempt in range(3):
        try:
            return run_script(script, *arguments, backend="gloo", launcher="torchrun", processes=processes)
        except ScriptFailedError:
            if attempt == 2:
                raise
    raise AssertionError
