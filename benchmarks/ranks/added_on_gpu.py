"""A prototype for comparison: an all_reduce through the host's memory whose additions the GPUs do. torch only.

In chunks, over memory that all ranks share and have registered: each rank copies to the host what others will add,
fetches what the others have of its own slice, adds that on the GPU, copies the slice's sum to the host, and fetches the
other slices' sums. For S bytes on each of G GPUs a link carries S to the host and 2 (G - 1) / G S back, and host memory
carries (3 G - 2) S in all, where addition by the host takes S back and (3 G + 1) S. Python looks at events and counters
all the time: a bandwidth to be compared, nothing to be used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_CHUNK_BYTES, _PLACES = 4 << 20, 4
_LIMIT_S = 60.0


class AddedOnGpu:
    """Calls reduce one tensor in place.

    Args:
        tensor: dense; of the same size on all ranks.
        rank, ranks: whose.
        path: of a file that all ranks map, and that is gone when they have.
        barrier: returns when all ranks have called it.
    """

    def __init__(self, tensor: torch.Tensor, rank: int, ranks: int, path: Path, barrier: Callable[[], object]) -> None:
        self._rank, self._ranks = rank, ranks
        self._device: Any = torch.cuda if tensor.is_cuda else torch.cpu  # the CPU's streams and events do nothing
        self._chunks = tensor.view(-1).split(_CHUNK_BYTES // tensor.itemsize)
        ring = _PLACES * _CHUNK_BYTES
        size = 4096 + (ranks + 1) * ring
        if rank == 0:
            torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8).zero_()
        barrier()
        self._memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        self._register(tensor.is_cuda)
        self._counters = self._memory[:4096].view(torch.int64)[: 3 * ranks].view(3, ranks).numpy()
        rings = self._memory[4096:].view(tensor.dtype).view(ranks + 1, _PLACES, -1)
        self._landings, self._results = rings[:ranks], rings[ranks]
        slice_elems = -(-self._chunks[0].numel() // ranks)
        self._fetched = torch.empty(ranks - 1, slice_elems, dtype=tensor.dtype, device=tensor.device)
        self._streams = [self._device.Stream() for _ in range(3)]
        self._events = [[self._device.Event() for _ in range(_PLACES)] for _ in range(3)]
        self._before = 0  # chunks of earlier calls: counters go on
        barrier()
        if rank == 0:
            path.unlink()  # all have mapped it: nothing stays, however they end

    def __call__(self) -> None:
        """Returns when the last copy back has ended."""
        self._device.synchronize()
        count, begun, ended = len(self._chunks), [0, 0, 0], [0, 0, 0]
        work = (self._copy_out, self._add, self._copy_back)
        deadline = time.monotonic() + _LIMIT_S
        while ended[2] < count:
            least = self._counters.min(axis=1) - self._before
            # A place is free again when all ranks have fetched the chunk that was there.
            allowed = (min(count, least[2] + _PLACES), least[0], least[1])
            for step in range(3):
                if begun[step] < allowed[step]:
                    place = begun[step] % _PLACES
                    with self._device.stream(self._streams[step]):
                        work[step](self._chunks[begun[step]], place)
                        self._events[step][place].record()
                    begun[step] += 1
                if ended[step] < begun[step] and self._events[step][ended[step] % _PLACES].query():
                    ended[step] += 1
                    self._counters[step, self._rank] = self._before + ended[step]
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank}: {ended} of {count} chunks after {_LIMIT_S} s; others: {least}")
        self._before += count

    def close(self) -> None:
        """Unregisters the memory."""
        if self._device is torch.cuda:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())

    def _register(self, is_gpu: bool) -> None:
        if not is_gpu:
            return
        error = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), self._memory.numel(), 0)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister of {self._memory.numel()} bytes: {error}")

    def _slice(self, elems: int, rank: int) -> slice:
        each = -(-elems // self._ranks)
        return slice(min(elems, rank * each), min(elems, (rank + 1) * each))

    def _others(self, elems: int) -> list[slice]:
        """All but the own slice, in runs."""
        own = self._slice(elems, self._rank)
        return [run for run in (slice(0, own.start), slice(own.stop, elems)) if run.stop > run.start]

    def _copy_out(self, chunk: torch.Tensor, place: int) -> None:
        for run in self._others(chunk.numel()):
            self._landings[self._rank, place, run].copy_(chunk[run], non_blocking=True)

    def _add(self, chunk: torch.Tensor, place: int) -> None:
        own = self._slice(chunk.numel(), self._rank)
        sums = chunk[own]
        others = [rank for rank in range(self._ranks) if rank != self._rank]
        for room, rank in zip(self._fetched, others, strict=True):
            room = room[: sums.numel()]
            room.copy_(self._landings[rank, place, own], non_blocking=True)
            sums.add_(room)
        self._results[place, own].copy_(sums, non_blocking=True)

    def _copy_back(self, chunk: torch.Tensor, place: int) -> None:
        for run in self._others(chunk.numel()):
            chunk[run].copy_(self._results[place, run], non_blocking=True)
