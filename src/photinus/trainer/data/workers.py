"""The code that fetches samples, in the rank itself or in its worker processes.

What the global generators give while sample i of epoch e is fetched is a function of (seed, e, i), and while a batch is
collated of (seed, e, first sample of the batch). Augmentation is so a function of the sample and the epoch: the same
with 0 or 8 workers, on 1 rank or 4, and after a resume. Where the rank itself fetches, its generators are put back
afterwards, so that loading does not shift dropout.

To seed three generators costs more than a cheap sample. So only those are seeded for each sample from which the data
set was seen to draw, most often none. The others are watched: where one has moved after a batch, it is seeded for each
sample from then on, and the batch is fetched again. (What draws inside `torch.random.fork_rng()`, or reads
`torch.initial_seed()`, moves no generator, and gets no seed of its sample: seed it there.)
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Subset, get_worker_info

from ...errors import PhotinusError
from .rng import HostStream, derive_seed, host_streams

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_FOR_THE_RANK = (signal.SIGTERM, signal.SIGUSR1)  # by which it is asked to suspend


@dataclass(frozen=True)
class Request:
    """One local batch to fetch: the epoch and the samples."""

    epoch: int
    indices: list[int]


class Fetch:
    """Turns a Request into a collated batch. Given to torch's DataLoader as a dataset whose keys are requests.

    Args:
        dataset: the user's, with __getitem__ or __getitems__ (many samples in one call).
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self._many_at_once = _fetches_many_at_once(dataset)
        self._drawn: set[str] = set()  # generators that the data set, or the collate function, was seen to draw from
        self._has_looked = self._many_at_once
        self._marks: dict[str, Any] = {}  # of a worker's generators after its last batch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: Request) -> Any:
        # Each process looks for itself: a worker shares nothing with its rank.
        known = [] if self._has_looked else self._look(request)
        while True:
            batch, moved = self._watched(partial(self._batch, request, known))
            # Seen once, a generator is seeded from then on, so this ends: at the latest when all are.
            if not moved:
                return batch
            known = []

    def _look(self, request: Request) -> list[Any]:
        """Fetches the first sample of all, which shows from which generators the others will draw."""
        streams = host_streams()
        saved = {name: each.get() for name, each in streams.items()}
        try:
            self._seed([*streams.values()], "sample", request.epoch, request.indices[0])
            marks = {name: each.mark() for name, each in streams.items()}
            with _noted(request, request.indices[:1]):
                sample = self.dataset[request.indices[0]]
            self._drawn = {name for name, mark in marks.items() if streams[name].mark() != mark}
        finally:
            for name, state in saved.items():
                streams[name].put_back(state)
        self._has_looked = True
        return [sample]

    def _watched(self, fetch: Callable[[list[HostStream]], Any]) -> tuple[Any, bool]:
        """Return the samples, and whether to discard them because `fetch` drew from unseeded generators."""
        streams = host_streams()
        serves_training = get_worker_info() is None  # a worker's generators serve nothing else
        watched = [name for name in streams if name not in self._drawn]
        marks = {name: self._marks[name] if name in self._marks else streams[name].mark() for name in watched}
        saved = {name: each.get() for name, each in streams.items() if serves_training and name in self._drawn}
        result, error = None, None
        try:
            result = fetch([each for name, each in streams.items() if name in self._drawn])
        except Exception as caught:  # noqa: BLE001 - raised below, unless it came of numbers that were not the sample's
            error = caught
        for name, state in saved.items():
            streams[name].put_back(state)
        after = {name: streams[name].mark() for name in watched}
        moved = {name for name in watched if after[name] != marks[name]}
        self._marks = {} if serves_training else after
        if serves_training:
            for name in moved:
                streams[name].put_back(marks[name])
        self._drawn |= moved
        if error is not None and not moved:
            raise error
        return result, bool(moved)

    def _batch(self, request: Request, known: list[Any], seeded: list[HostStream]) -> Any:
        if self._many_at_once:
            self._seed(seeded, "batch", request.epoch, request.indices[0])
            with _noted(request, request.indices):
                samples = self.dataset.__getitems__(request.indices)
        else:
            samples, noted = [*known], _noted(request, [])
            with noted:
                for index in request.indices[len(known) :]:
                    noted.indices = [index]
                    if seeded:
                        self._seed(seeded, "sample", request.epoch, index)
                    samples.append(self.dataset[index])
            self._seed(seeded, "batch", request.epoch, request.indices[0])
        with _noted(request, request.indices):
            return self.collate(samples)

    def _seed(self, streams: list[HostStream], kind: str, epoch: int, index: int) -> None:
        if streams:
            seed = derive_seed(self.seed, kind, epoch, index)
            for stream in streams:
                stream.seed(seed)


class WorkerStart:
    """Runs first in each worker process: leaves signals to its rank, dies with it, then calls the user's own function.

    SIGTERM and SIGUSR1 may come to a whole process group. The rank saves then, for which it needs its workers' batches.
    A handler that does nothing, and not SIG_IGN, which programs that a worker starts would inherit.

    A rank that is killed (-9) cannot end its workers, and torch's workers look only every few seconds whether their
    parent lives; until then they hold its sockets and memory open. The kernel does it at once: PR_SET_PDEATHSIG. (It
    watches the thread that started the worker, so only a main thread will do: the rank's, or a fork server's.)
    """

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self.parent, self.user = os.getpid(), user
        self.in_main_thread = threading.current_thread() is threading.main_thread()

    def __call__(self, worker: int) -> None:
        """Torch's DataLoader calls this in each worker with the worker's number."""
        # Unblocked only when the handlers are there: a signal that came while Python started would end the worker.
        for number in _FOR_THE_RANK:
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_RANK)
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        has_server = os.getppid() != self.parent
        if prctl is not None and (self.in_main_thread or has_server):
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            rank = multiprocessing.parent_process()
            if rank is None or not rank.is_alive() or has_server != (os.getppid() != self.parent):
                os.kill(os.getpid(), signal.SIGKILL)  # the rank died in between
        if self.user is not None:
            self.user(worker)


def start_workers(data_loader: DataLoader[Any]) -> Iterator[Any]:
    """A pass over a DataLoader, whose workers (and a fork server) SIGTERM and SIGUSR1 do not end, from the start on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANK)  # inherited, until WorkerStart
    try:
        fetched = iter(data_loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for worker in getattr(fetched, "_workers", ()):  # torch and multiprocessing end one that is not done by SIGTERM
        worker._popen.terminate = partial(_end, worker.pid, id(fetched))
    return fetched


def _end(pid: int, owner: int) -> None:
    with contextlib.suppress(ValueError):  # torch knows it no more
        _remove_worker_pids(owner)  # or it would report this death as an error
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def identity(batch: Any) -> Any:
    """The batch as it is: `Fetch` has collated it already."""
    return batch


def _fetches_many_at_once(dataset: Any) -> bool:
    """Return whether the dataset itself can fetch more than one sample at a time (torch's Subset only passes it on)."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


class _noted:  # noqa: N801 - reads as a statement; a class, since contextmanager costs as much as a small sample
    """An exception gets a note that says which samples it was about (Python >= 3.11)."""

    def __init__(self, request: Request, indices: list[int]) -> None:
        self.request, self.indices = request, indices

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        shown = ", ".join(map(str, self.indices[:8])) + (", ..." if len(self.indices) > 8 else "")
        of = f"sample {shown}" if len(self.indices) == 1 else f"the batch of {len(self.indices)} samples {shown}"
        where = f"photinus: while loading {of} in epoch {self.request.epoch}"
        if isinstance(error, StopIteration):  # a generator turns it into a RuntimeError that does not say where
            raise PhotinusError(f"{where}: StopIteration") from error
        if hasattr(error, "add_note"):
            error.add_note(where)
