"""Find the workers of `photinus run` among processes. Forked ones show the command line of the process that forks."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path


def rank_of(pid: int) -> int | None:
    """Return a worker's rank, by the file that it has open for its stack at a fatal signal; None: not a worker."""
    links = []
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(file))
    ranks = [int(found[1]) for link in links if (found := re.match(r"/memfd:photinus-fault-(\d+) ", link))]
    is_launcher = any(link.startswith("/memfd:photinus-error-") for link in links)  # which holds the files of all
    return ranks[0] if ranks and not is_launcher else None
