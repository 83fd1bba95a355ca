"""The code that fetches samples, in the rank itself or in its worker processes.

The global generators are seeded before each sample from (seed, epoch, sample), and before a batch is collated from
(seed, epoch, first sample of the batch). So augmentation is a function of the sample and the epoch: it is the same with
0 or 8 workers, on 1 rank or 4, and after a resume. Where the rank itself fetches, its generators are put back after
each batch, so that loading does not shift dropout.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Subset, get_worker_info

from ...errors import LoaderTimeoutError, PhotinusError
from .rng import derive_seed, keep_generators, seed_host_streams

_SHARED_MEMORY = "/dev/shm"
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_FOR_THE_RANK = (signal.SIGTERM, signal.SIGUSR1)  # by which it is asked to suspend


@dataclass(frozen=True)
class BatchRequest:
    """One local batch to fetch: the epoch and the samples."""

    epoch: int
    indices: list[int]


class Fetch:
    """Turns a BatchRequest into a collated batch. Given to torch's DataLoader as a dataset whose keys are requests.

    Args:
        dataset: the user's, with __getitem__ or __getitems__ (many samples in one call).
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self._many_at_once = _fetches_many_at_once(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, request: BatchRequest) -> Any:
        # A worker's generators serve nothing else.
        with keep_generators() if get_worker_info() is None else contextlib.nullcontext():
            samples = self._samples(request)
            if not self._many_at_once:
                self._seed("batch", request, request.indices[0])
            with _noted(request, request.indices):
                return self.collate(samples)

    def _samples(self, request: BatchRequest) -> Any:
        if self._many_at_once:
            self._seed("batch", request, request.indices[0])
            with _noted(request, request.indices):
                return self.dataset.__getitems__(request.indices)
        samples = []
        with _noted(request, []) as noted:
            for index in request.indices:
                noted.indices = [index]
                self._seed("sample", request, index)
                samples.append(self.dataset[index])
        return samples

    def _seed(self, kind: str, request: BatchRequest, index: int) -> None:
        seed_host_streams(derive_seed(self.seed, kind, request.epoch, index))


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


def make_data_loader(
    dataset: Any, sampler: Any, workers: int, timeout_s: float, options: Mapping[str, Any], *, pin_memory: bool = False
) -> DataLoader[Any]:
    """Return torch's DataLoader over a data set whose samples are whole batches."""
    of_workers = {**options, "timeout": timeout_s, "worker_init_fn": WorkerStart(options.get("worker_init_fn"))}
    return DataLoader(
        dataset, batch_size=None, sampler=sampler, collate_fn=identity, num_workers=workers, pin_memory=pin_memory,
        # Without a generator of its own it would draw from torch's global one and shift dropout after a resume.
        generator=torch.Generator(device="cpu").manual_seed(0),
        **of_workers if workers else {},
    )  # fmt: skip


@contextlib.contextmanager
def explaining(workers: int, timeout_s: float, where: str) -> Iterator[None]:
    """A block that waits for workers: says what to do where one is late, or has no shared memory."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        # By its text: torch raises a plain RuntimeError.
        if workers and "timed out" in str(error):
            raise LoaderTimeoutError(
                f"no batch came from the {workers} loader workers within {timeout_s} s ({where}): a sample takes too "
                f"long or a worker is stuck. Give it more time by PHOTINUS_TIMEOUT_S or DataLoader(timeout=...), or "
                f"num_workers=0 to see where it waits."
            ) from error
        if workers and ("shared memory" in str(error) or getattr(error, "errno", None) == errno.ENOSPC):
            disk = shutil.disk_usage(_SHARED_MEMORY)
            raise PhotinusError(
                f"{_SHARED_MEMORY} of host {socket.gethostname()} has no room ({disk.free >> 20} MiB of "
                f"{disk.total >> 20} are free), and num_workers={workers} loader workers pass batches through it "
                f"({where}). Enlarge it (docker run --shm-size=8g), or lower num_workers, prefetch_factor or "
                f"batch_size."
            ) from error
        raise


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

    def __init__(self, request: BatchRequest, indices: list[int]) -> None:
        self.request, self.indices = request, indices

    def __enter__(self) -> _noted:
        return self

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
