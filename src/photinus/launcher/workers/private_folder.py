"""A folder in the temporary directory that is gone when its owners are, however they end.

`tempfile.TemporaryDirectory` leaves its folder when the process is killed by SIGKILL. Here a shell in a session of its
own waits at a pipe for its end, which comes when nobody holds the pipe any more, and then removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .interrupts import block_signals

__all__ = ["private_folder"]

# A process of the owners may still write while the folder is being removed: then once more.
_KEEPER = """cd /
while read -r _; do :; done
tries=0
until rm -rf -- "$1" || [ $tries -ge 50 ]; do tries=$((tries+1)); sleep 0.1; done
"""


@contextlib.contextmanager
def private_folder(prefix: str) -> Iterator[tuple[Path, int]]:
    """A new folder that only this user can enter, and a file descriptor: the folder lasts while a process holds it.

    The descriptor is closed in processes that are started, unless it is passed on (`pass_fds`). At the end of the block
    the folder is removed, whoever holds it.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        reading, writing = os.pipe()
        try:
            keeper = _start_keeper(name, reading)
        finally:
            os.close(reading)
        try:
            yield Path(name), writing
        finally:
            os.close(writing)
            if keeper is not None:
                keeper.kill()  # the rest is ours to do
                keeper.wait()


def _start_keeper(name: str, reading: int) -> subprocess.Popen[bytes] | None:
    """None where there is no shell (a container that holds nothing but Python): only SIGKILL then leaves the folder."""
    with contextlib.suppress(FileNotFoundError), block_signals():
        return subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "photinus-keeper", name],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return None
