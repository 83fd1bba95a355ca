"""The program that `photinus run --hostfile` starts on each host, over ssh:

    ssh HOST python -m photinus.run.remote

It says who it is, and gets the job in two lines of JSON on stdin, so that neither a secret nor an environment stands on
a command line:

    {"cwd": ..., "environ": ..., "spec": ..., "listen": ..., "merged": ...}    can the job start here? bind the port
    {"secret": ..., "leader": ..., "port": ...}                                start the job's part on this host

It answers the first with a line on stdout. From the second on, stdout, stderr and exit code are the job's, and stdin is
its lifeline (see `lifeline`).
"""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from .. import env
from ..errors import PhotinusError, UsageError
from ..job.own_address import listen_as
from ..job.spec import JobSpec
from ..version import __version__
from .exit_code import run_as_process
from .local.job import Job
from .plan import plan
from .ssh.command import MARK
from .supervise import supervise

_SILENCE_S = 300
_OUT, _ERR = 1, 2


def main() -> None:
    """Serve the place where the user typed until it is gone, or run the job's part on this host."""
    orders = io.FileIO(0, closefd=False)  # unbuffered: what comes behind the last order is for the lifeline
    os.write(_OUT, MARK)
    _answer({"hello": _who_is_here()})
    if (request := _next(orders)) is None:
        return
    try:
        job, listener = _prepare(request)
    except (PhotinusError, UsageError, OSError, ValueError) as error:
        _answer({"trouble": str(error)})
        return
    address, port = listener.getsockname()[:2] if listener is not None else (None, None)
    _answer({"prepared": {"address": address, "port": port}})
    if (start := _next(orders)) is None:
        return
    if request["merged"]:  # both end at the same place, so their order is kept
        os.dup2(_OUT, _ERR)
    if start["leader"] is not None:
        hosts = replace(job.spec.hosts, leader=start["leader"], port=start["port"])
        environ = {**job.base_environ, env.JOB_SECRET.name: start["secret"]}
        job = replace(job, spec=replace(job.spec, hosts=hosts), base_environ=environ)
    run_as_process(partial(supervise, job, listener=listener), host=job.spec.started_as or "")


def _next(orders: io.FileIO) -> dict[str, Any] | None:
    signal.alarm(_SILENCE_S)  # ends the process
    line = orders.readline()
    signal.alarm(0)
    return dict(json.loads(line)) if line else None


def _answer(content: dict[str, Any]) -> None:
    data = json.dumps(content).encode() + b"\n"
    while data:
        data = data[os.write(_OUT, data) :]


def _prepare(request: dict[str, Any]) -> tuple[Job, socket.socket | None]:
    """Enter the folder, take over the environment and plan the job; bind the port if this host leads.

    Raises:
        UsageError, PhotinusError, ValueError: the job cannot start on this host.
    """
    spec, cwd = JobSpec.from_json(request["spec"]), request["cwd"]
    try:
        os.chdir(cwd)
    except OSError as error:
        raise UsageError(
            f"cannot enter the folder {cwd} ({error.strerror}). The job runs in the folder where you typed the "
            f"command. Share or copy it to the same path, or start in a folder that all hosts have."
        ) from None
    os.environ.update(request["environ"])
    path, own = os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)
    if own not in path.split(os.pathsep):
        os.environ["PATH"] = own + os.pathsep + path
    sys.path += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))  # where a module is looked for
    job = plan(spec, os.environ)
    return job, None if request["listen"] is None else listen_as(**request["listen"])


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
