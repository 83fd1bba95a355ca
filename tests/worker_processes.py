"""Find the workers of `photinus run` among processes. Forked ones show the command line of the process that forks."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path


def rank_of(pid: int) -> int | None:
    """Return a worker's rank, by the file that it has open for its stack at a fatal signal; None: not a worker."""
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if found := re.match(r"/memfd:photinus-fault-(\d+) ", os.readlink(file)):
                    return int(found[1])
    return None
