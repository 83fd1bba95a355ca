"""The program that `photinus run --hostfile` starts on each host, over ssh:

    ssh HOST python -m photinus.run.ssh.remote

It says who it is and does what it is told by lines of JSON on stdin, so that neither a secret nor an environment stands
on a command line; each answer is a line of JSON on stdout. The last order makes it `photinus run`: output and exit code
are ssh's then, and stdin is its lifeline (see `lifeline`).

    {"do": "prepare", "cwd": ..., "program": ..., "listen": ...}   look whether the job can start; bind the port
    {"do": "run", "options": ..., "words": ..., "environ": ..., "merged": ...}     become `photinus run`
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import signal
import socket
import sys
from typing import Any

from ...env import LISTEN_FD
from ...errors import PhotinusError, UsageError
from ...job.ports import listen_as
from ...job.spec import Program
from ...version import __version__
from ..local.program import check_program
from .command import MARK, safe_path

_SILENCE_S = 300
_OUT, _ERR = 1, 2


def main() -> None:
    """Serves the place where the user typed until nobody is there any more, or the job begins."""
    orders = io.FileIO(0, closefd=False)  # unbuffered: what comes behind the last order is the launcher's to read
    os.write(_OUT, MARK)
    _say({"hello": _who_is_here()})
    listener: socket.socket | None = None
    while True:
        signal.alarm(_SILENCE_S)  # ends the process
        line = orders.readline()
        signal.alarm(0)
        if not line:
            return
        order = json.loads(line)
        try:
            if order["do"] == "prepare":
                listener = _prepare(order)
            else:
                assert order["do"] == "run", order
                _become_launcher(order, listener)
        except (PhotinusError, UsageError, OSError) as error:
            _say({"trouble": str(error)})


def _say(content: dict[str, Any]) -> None:
    data = json.dumps(content).encode() + b"\n"
    while data:
        data = data[os.write(_OUT, data) :]


def _prepare(order: dict[str, Any]) -> socket.socket | None:
    cwd = order["cwd"]
    try:
        os.chdir(cwd)
    except OSError as error:
        raise UsageError(
            f"cannot enter the folder {cwd} ({error.strerror}). The job runs in the folder where you typed the "
            f"command. Share or copy it to the same path, or start in a folder that all hosts have."
        ) from None
    if importlib.util.find_spec("torch") is None:
        raise UsageError("torch is not installed there. Install the same torch as on the other hosts.")
    check_program(Program(order["program"]["kind"], order["program"]["target"]))
    if order["listen"] is None:
        _say({"prepared": {}})
        return None
    listener = listen_as(**order["listen"])
    address, port = listener.getsockname()[:2]
    _say({"prepared": {"address": address, "port": port}})
    return listener


def _become_launcher(order: dict[str, Any], listener: socket.socket | None) -> None:
    environ = {**os.environ, **order["environ"]}
    if listener is not None:
        os.set_inheritable(listener.fileno(), True)
        environ[LISTEN_FD.name] = str(listener.fileno())
    folder = os.path.dirname(sys.executable)
    path = environ.get("PATH", os.defpath)
    if folder not in path.split(os.pathsep):
        environ["PATH"] = folder + os.pathsep + path
    if order["merged"]:  # both end at the same place, so their order is kept
        os.dup2(_OUT, _ERR)
    python = [sys.executable, *order["options"], *safe_path()]
    os.execve(sys.executable, [*python, "-m", "photinus", "run", *order["words"]], environ)


def _who_is_here() -> dict[str, Any]:
    # sshd says: client address, client port, own address, own port.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "photinus": __version__,
        "address": connection[2] if len(connection) == 4 else None,
        "seen": connection[0] if len(connection) == 4 else None,
    }


if __name__ == "__main__":
    main()
    # Nothing is left to be done, and nobody reads what an interpreter says that cannot flush a closed pipe.
    os._exit(0)
