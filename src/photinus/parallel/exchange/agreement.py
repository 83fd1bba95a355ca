"""Small things that all ranks have to know alike, over plain torch.distributed and without pickle.

Without an initialised process group everything here is a world of one.
"""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist

from ... import env, errors
from ...errors import HAD_NO_ERROR, CollectiveError, PhotinusError
from .collectives import all_gather_bytes

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
T = TypeVar("T")

_MOST_TEXT_BYTES = 16 << 10  # of an error that other ranks are told
_MOST_DIFFERENCES = 4  # that a message lists

_COUNT_EVERY_S = 0.5
_SILENT_S = 10.0  # where nobody but the store tells of a death
_LONGEST_PAUSE_S = 0.1
_LIST_EVERY_S = 2.0

_work_count = 0  # by this process; equal on all ranks at equal places of the program


def place_in_group() -> tuple[int, int]:
    """(rank, world size) in torch.distributed's default group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather_per_rank(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's `value`, by rank, on every rank. For small things such as the state of random number generators.

    What travels are torch files, read with weights_only=True: tensors, numbers, text, lists, tuples, dicts.

    Args:
        value: this rank's; tensors come back on the CPU.
        group: default: the default group.
    """
    if _size_of(group) == 1:
        return [value]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    everyone = _all_gather(buffer.getvalue(), group)
    return [torch.load(io.BytesIO(data), map_location="cpu", weights_only=True) for data in everyone]


def from_rank_0(call: Callable[[], JSON], doing: str, *, is_long: bool = False) -> Any:
    """Calls `call` on rank 0; every rank gets what it returns, or an error when it raises one (see `together`)."""
    rank, _ = place_in_group()
    value: JSON = None
    with together(doing, is_long=is_long):
        if rank == 0:
            value = call()
    return json.loads(_all_gather(json.dumps(value).encode() if rank == 0 else b"")[0])


def check_alike(options: Mapping[str, JSON], what: str, group: dist.ProcessGroup | None = None) -> None:
    """Every rank must have been given the same: else they would train differently, or wait at different places.

    Costs one exchange of 32 bytes; only where something differs, the values travel too.

    Args:
        options: this rank's, by name; what JSON can hold.
        what: differs, for the message, as in "the ranks were given different loops".

    Raises:
        ValueError: they differ; on every rank, says which on which ranks, and both values.
    """
    if _size_of(group) == 1:
        return
    text = json.dumps(options, sort_keys=True).encode()
    if len(set(_all_gather(hashlib.sha256(text).digest(), group))) == 1:
        return
    everyone = [json.loads(data) for data in _all_gather(json.dumps(options).encode(), group)]
    first, ranks = everyone[0], range(len(everyone)) if group is None else dist.get_process_group_ranks(group)
    for rank, theirs in zip(ranks, everyone, strict=True):
        differing = [name for name in {**first, **theirs} if theirs.get(name) != first.get(name)]
        if differing:
            texts = [f"{n}={first.get(n, 'absent')} on rank {ranks[0]}, {theirs.get(n, 'absent')}" for n in differing]
            more = f"; and {len(texts) - _MOST_DIFFERENCES} more" if len(texts) > _MOST_DIFFERENCES else ""
            details = "; ".join(f"{each} on rank {rank}" for each in texts[:_MOST_DIFFERENCES])
            raise ValueError(f"{what}: {details}{more}. All need the same.")


@contextlib.contextmanager
def together(doing: str, *, is_long: bool = False) -> Iterator[None]:
    """A block that succeeds on all ranks or raises on all of them. All ranks must enter it; it ends with an exchange.

    A rank whose own block failed raises its own error. The others raise one of the first failing rank's class (one of
    photinus.errors or a plain built-in one, PhotinusError otherwise) that names the ranks that failed and why. No rank
    is left waiting in a collective for one that has given up.

    Args:
        doing: for the message, such as "saving runs/x/last.pt".
        is_long: it may take longer than the deadline of the group, and is waited for as long as it does.
    """
    own: Exception | None = None
    work = None
    if is_long and place_in_group()[1] > 1:
        _all_gather(b"")  # ranks that have not arrived by now are working, not waiting
        work = LongWork(doing)
    try:
        yield
    except CollectiveError:  # the group is broken: nothing more can be told over it
        raise
    except Exception as error:  # noqa: BLE001 - raised again below, once the other ranks know
        own = error
    finally:
        if work is not None:
            work.end()
    if work is not None:
        work.wait()
    where = f"host {socket.gethostname()}, pid {os.getpid()}"
    # The class, a line break, and text for people.
    text = "" if own is None else f"{type(own).__name__}\n{where}: {type(own).__name__}: {own}"
    reports = [data.decode(errors="replace") for data in _all_gather(text.encode(errors="replace")[:_MOST_TEXT_BYTES])]
    if own is not None:
        raise own
    failed = {rank: text.split("\n", 1) for rank, text in enumerate(reports) if text}
    if failed:
        ranks = [f"rank {rank} ({text})" for rank, (_, text) in failed.items()]
        causes = "; ".join(ranks[:4]) + (f"; and {len(ranks) - 4} more ranks" if len(ranks) > 4 else "")
        first_class, _ = next(iter(failed.values()))
        raise error_class(first_class)(
            f"{doing} failed on {causes}. This rank ({place_in_group()[0]}) {HAD_NO_ERROR} of its own."
        )


class LongWork:
    """Work of some ranks (saving, loading) that may take longer than the deadline of the group.

    A thread of each rank that works counts up in the job's store; ranks that are done wait there while the count goes
    up. A rank that died or froze stops counting. Over photinus its death is seen immediately; elsewhere the exchange
    that follows raises, at its own deadline.

    All ranks make this object together. A rank works until it calls `end`.
    """

    def __init__(self, doing: str) -> None:
        global _work_count
        self._rank, self._doing = dist.get_rank(), doing.encode(errors="replace").decode()  # a path may be no UTF-8
        self._missing = list(range(dist.get_world_size()))
        self._store: Any = dist.distributed_c10d._get_default_store()  # None for MPI
        self._before, _work_count = f"photinus/long work/{_work_count}", _work_count + 1
        self._key = f"photinus/long work/{_work_count}"
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


def error_class(name: str) -> type[Exception]:
    """The class of a peer's error, if it is one of ours or a plain built-in one; PhotinusError otherwise."""
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, PhotinusError):
        return ours
    built_in = getattr(builtins, name, None)
    if built_in in (ValueError, TypeError, OSError, FileNotFoundError, PermissionError, RuntimeError):
        return built_in  # type: ignore[no-any-return]
    return PhotinusError


def _all_gather(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's bytes, of any lengths."""
    if _size_of(group) == 1:
        return [data]
    return all_gather_bytes(data, cast(dist.ProcessGroup, group or dist.group.WORLD))


def _size_of(group: dist.ProcessGroup | None) -> int:
    return place_in_group()[1] if group is None else group.size()
