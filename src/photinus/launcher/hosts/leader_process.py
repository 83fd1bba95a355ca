"""The leader's process: started by the launcher that leads, and ended with it.

    python -m photinus.launcher.hosts.leader_process job ID of pid LAUNCHER

Inherits the listening socket, and reads one line from its standard input: JSON, with the key of the job's proofs among
it. It ends when its standard input does, however the launcher ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

from ..workers.interrupts import block_signals
from .leader import Leader
from .membership import Membership

__all__ = ["start_leader"]

_ENDS_S = 5.0


@contextlib.contextmanager
def start_leader(
    listener: socket.socket, key: bytes, rules: Membership, *, max_restarts: int, job_id: str
) -> Iterator[None]:
    """Runs the leader's process for the duration of the block. Closes the socket here: it is that process's."""
    words = {
        "fd": listener.fileno(),
        "key": key.hex(),
        "least": rules.least,
        "most": rules.most,
        "join_timeout_s": rules.join_timeout_s,
        "last_call_s": rules.last_call_s,
        "heartbeat_timeout_s": rules.heartbeat_timeout_s,
        "max_restarts": max_restarts,
        "job_id": job_id,
    }
    # The rest is for who meets the process in a list, or holding a port.
    command = [sys.executable, "-m", __name__, "job", job_id, "of", "pid", str(os.getpid())]
    with block_signals():
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    assert process.stdin is not None
    try:
        listener.close()
        process.stdin.write(json.dumps(words).encode() + b"\n")
        process.stdin.flush()
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _lead() -> None:
    loop = asyncio.get_running_loop()
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 4096)
        if not part:
            return  # the launcher ended before it had said what to do
        line += part
    words = json.loads(line)
    names = ("least", "most", "join_timeout_s", "last_call_s", "heartbeat_timeout_s")
    rules = Membership(*(words[name] for name in names))
    leader = Leader(bytes.fromhex(words["key"]), rules, max_restarts=words["max_restarts"], job_id=words["job_id"])
    await leader.open(socket.socket(fileno=words["fd"]))
    over = asyncio.Event()
    loop.add_reader(0, over.set)
    await over.wait()
    loop.remove_reader(0)
    await leader.close()


if __name__ == "__main__":
    asyncio.run(_lead())
    sys.stdout.flush()
    os._exit(0)
