"""Work of some ranks (saving, loading) that may take longer than the deadline of the group: whoever works says so.

A thread of each rank that works counts up in the job's store; ranks that are done wait there for as long as somebody
counts. A rank that died or froze counts no more. Over photinus its death is seen in the same moment; elsewhere the
exchange that follows tells, with its own deadline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import torch.distributed as dist

from ... import env

_COUNT_EVERY_S = 0.5
_SILENT_S = 10.0  # where nobody but the store tells of a death
_LONGEST_PAUSE_S = 0.1
_LIST_EVERY_S = 2.0

_made = 0  # by this process; equal on all ranks at equal places of the program


class LongWork:
    """One rank's part in it, from its making until `end`. All ranks make it when all have come."""

    def __init__(self, doing: str) -> None:
        global _made
        self._rank, self._doing = dist.get_rank(), doing
        self._missing = list(range(dist.get_world_size()))
        self._store: Any = dist.distributed_c10d._get_default_store()  # None for MPI
        self._before, _made = f"photinus/long work/{_made}", _made + 1
        self._key = f"photinus/long work/{_made}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._count, name="photinus-long-work", daemon=True)
        if self._store is not None:
            self._thread.start()

    def end(self) -> None:
        """This rank works no more, well or not."""
        self._ended.set()

    def wait(self) -> None:
        """Waits, after `end`, for the other ranks as long as one of them says that it works.

        Raises:
            CollectiveError: over photinus, a rank died, or says nothing any more and has not ended its work.
        """
        if self._store is None:
            return
        self._thread.join()
        self._store.set(f"{self._key}/{self._rank}", "done")
        with contextlib.suppress(RuntimeError):  # of a store that cannot delete
            self._store.delete_key(f"{self._before}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(self._before)
        communicator: Any = getattr(dist.group.WORLD, "communicator", None)
        limit_s = env.TIMEOUT_S.get() if communicator is not None else _SILENT_S
        counted, heard_s, listed_s, pause_s, outside = -1, -limit_s, time.monotonic(), 0.002, None
        while not self._store.check([f"{self._key}/{rank}" for rank in self._missing]):
            if time.monotonic() - listed_s > _LIST_EVERY_S:  # one request for each
                self._missing = [rank for rank in self._missing if not self._store.check([f"{self._key}/{rank}"])]
                listed_s = time.monotonic()
            now, count = time.monotonic(), self._store.add(self._key, 0)
            if count != counted and now - heard_s > limit_s / 2:  # its deadline begins again
                counted, heard_s = count, now
                outside = communicator and communicator.wait_outside(self._key, limit_s)
            if outside is not None:
                outside.look(self._missing, self._doing)
            elif now - heard_s > limit_s:
                return
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)

    def _count(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has gone, and the job with it
            while not self._ended.wait(_COUNT_EVERY_S):
                self._store.add(self._key, 1)
