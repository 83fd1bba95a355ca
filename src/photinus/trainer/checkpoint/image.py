"""An image: the state of a loop as bytes in memory files, one file for each rank of a host, each byte once per host.

    head       step, run, rank, lengths and digest; zeros while the file is written: only a sealed one has a head
    skeleton   the content with places instead of tensors, as torch.save writes it: no code runs when it is read
    cut        this rank's part of the tensors that all ranks hold alike, which lie one behind the other over the files
    own        tensors that this rank alone copies

What is `common` to all ranks is described by local rank 0, what is a rank's `own` by that rank: its random numbers, its
parts of what a strategy splits. image_reader.py puts them together again. Nothing here knows where the files come from.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import mmap
import os
import secrets
import threading
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...job.worker_files import HEAD_BYTES, PROGRESS_AT, USE_AT, Head, pack_head, progress_bytes
from ...parallel.exchange.tensors import dense_strides, tensors_in
from ...parallel.zero.split_states import is_split, part_of
from .durable import MOST_THREADS
from .states import PlainState

_ALIGNED = 64
_BLOCK_BYTES = 16 << 20  # of what is copied at a time, by one thread or on a GPU
_MOST_STAGED = 16  # blocks on a GPU
PLACE = "\0place "  # begins a text of the skeleton that stands for a tensor; JSON follows, see `_Skeleton._tensor`
PLAIN_ITEMS = 5  # area, offset, dtype, shape, stride; of a part also the whole's shape, and where it lies there
CUT = -1  # in place of a rank: the bytes lie in the files' cut parts


@dataclass(frozen=True)
class Content:
    """A state as one rank sees it.

    Attributes:
        common: by entry; local rank 0's counts.
        own: by entry; of each rank. Dicts of several ranks are joined, of split tensors the parts, and of all else the
            first rank's counts.
        equal: addresses of tensors in `common` that have the same values on all ranks. The ranks of a host share the
            work of copying them.
    """

    common: Mapping[str, Any]
    own: Mapping[str, Any]
    equal: Collection[int] = ()


class MemoryFile:
    """A memory file of this rank, to write images into. One process writes into it: a child of a rank gets OSError.

    Attributes:
        use: see `unseal`.
    """

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size, self._is_pinned, self.memory = 0, False, torch.empty(0, dtype=torch.uint8)
        self.use = 0

    def close(self) -> None:
        """Gives the memory back, as soon as no other process has the file open."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)

    @property
    def allocated_bytes(self) -> int:
        """Return the memory that the file has taken so far."""
        return os.fstat(self.descriptor).st_blocks * 512

    def unseal(self) -> None:
        """Takes the head away before the image is overwritten.

        A process that reads the image may outlive the ranks that wrote it. It finds a different `use` in the file then.
        """
        self.use = secrets.randbits(63)
        os.pwrite(self.descriptor, bytes(USE_AT) + self.use.to_bytes(8, "little"), 0)

    def make_room(self, size: int, *, pin: bool = False) -> None:
        """Maps at least this size; for copies from a GPU the memory is pinned, where that is possible."""
        if 0 < size <= self._size <= 2 * size:  # each page of a new mapping costs a fault
            return
        size += size // 64
        if self._is_pinned:
            _cuda().cudaHostUnregister(self.memory.data_ptr())
            self._is_pinned = False
        self._size, self.memory = 0, torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self.descriptor, size)
        if size:
            self.memory = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
            self._is_pinned = pin and int(_cuda().cudaHostRegister(self.memory.data_ptr(), size, 0)) == 0
        self._size = size  # not before: a limit on memory may have refused the mapping

    def seal(self, head: Head) -> None:
        """The image is complete."""
        os.pwrite(self.descriptor, pack_head(head), 0)

    def digest(self, size: int) -> str:
        """Return the digest of an image of this size, behind its head."""
        return digest_of((ctypes.c_char * size).from_address(self.memory.data_ptr()))

    def note_progress(self, step: int) -> None:
        """Remembers the last finished step, beside the image."""
        os.pwrite(self.descriptor, progress_bytes(step), PROGRESS_AT)


class Copy:
    """This rank's piece of an image, from its planning until it is sealed. Made and used by one thread.

    When `take` returns, the content may change. Only the memory file is read after that: to digest and to seal it.

    Attributes:
        bytes: of the file.
        head: of the image, still without its digest.
        skeleton: described above.
        can_be_parted: whether this rank's own part can be written into a file that others write, too (see parts.py).
        beside_s: processor time of the thread that `seal_beside` starts; known after `wait`.
    """

    def __init__(self, head: Head, content: Content) -> None:
        """Plans the layout. Raises TypeError, ValueError: something in the content cannot be saved."""
        first = head.local_rank == 0
        cut, skeleton = _Skeleton(CUT, content.equal), _Skeleton(head.rank, ())
        with torch.no_grad():
            common = cut.take(content.common, "", skeleton if first else None)
            own = skeleton.take(content.own, "own ", None)
        buffer = io.BytesIO()
        torch.save({"common": common if first else None, "own": own}, buffer)
        self.skeleton = buffer.getvalue()
        self.can_be_parted = skeleton.can_be_parted and cut.can_be_parted
        self._data_at = align(HEAD_BYTES + len(self.skeleton))
        start, end = cut_range(cut.bytes, head.local_rank, head.local_size)
        pieces = []
        for at, tensor in cut.tensors:
            first_byte, last_byte = max(at, start), min(end, at + tensor.nbytes)
            pieces.append((self._data_at + first_byte - start, tensor, first_byte - at, last_byte - first_byte))
        own_at = align(self._data_at + end - start)
        pieces += [(own_at + at, tensor, 0, tensor.nbytes) for at, tensor in skeleton.tensors]
        self._pieces = list(_cut_into_blocks(pieces))
        self._threads = max(1, len(os.sched_getaffinity(0)) // head.local_size)
        self.bytes = own_at + skeleton.bytes
        self.head = replace(head, cut_bytes=cut.bytes, skeleton_bytes=len(self.skeleton), bytes=self.bytes)
        self._file: MemoryFile | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.beside_s = 0.0

    def take(self, file: MemoryFile) -> None:
        """Copies all into the file, whose image is lost from now on.

        What a GPU holds is copied there in the order of the current stream, and comes to the host on another one.
        """
        from_gpu = [piece for piece in self._pieces if piece[1].is_cuda]
        file.unseal()
        file.make_room(self.bytes, pin=bool(from_gpu))
        self._file, memory = file, file.memory
        ctypes.memmove(memory.data_ptr() + HEAD_BYTES, self.skeleton, len(self.skeleton))
        self._staged = _Staging(from_gpu, memory) if from_gpu else None

        def move(piece: tuple[int, torch.Tensor, int, int]) -> None:
            at, tensor, start, size = piece
            ctypes.memmove(memory.data_ptr() + at, tensor.data_ptr() + start, size)  # without the interpreter's lock

        on_host = [piece for piece in self._pieces if not piece[1].is_cuda]
        if self._threads > 1 and sum(piece[3] for piece in on_host) > _BLOCK_BYTES:
            with ThreadPoolExecutor(min(self._threads, MOST_THREADS), thread_name_prefix="photinus-copy") as pool:
                list(pool.map(move, on_host))
        else:
            for piece in on_host:
                move(piece)
        self._pieces = []

    def wait_for_device(self) -> None:
        """Waits until all is in the host's memory."""
        if self._staged is not None:
            self._staged.wait()

    def seal_beside(self) -> None:
        """Lets a thread digest the file, and seal it."""
        if self.bytes < _BLOCK_BYTES and self._staged is None:  # sooner done than a thread is started
            self._digest_and_seal()
            return
        self._thread = threading.Thread(target=self._digest_and_seal, name="photinus-snapshot", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the image is sealed. Raises what went wrong."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error

    def _digest_and_seal(self) -> None:
        assert self._file is not None
        began_s = time.thread_time()
        try:
            self.wait_for_device()
            self._file.seal(replace(self.head, digest=self._file.digest(self.bytes)))
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        finally:
            self.beside_s = time.thread_time() - began_s if self._thread is not None else 0.0


class _Staging:
    """Copies of pieces on a GPU, made in the order of the current stream, on their way to the host's memory.

    The current stream waits only where the state is larger than the memory for these copies.
    """

    def __init__(self, pieces: Sequence[tuple[int, torch.Tensor, int, int]], memory: torch.Tensor) -> None:
        device = pieces[0][1].device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        self._blocks = [
            torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=device) for _ in range(min(_MOST_STAGED, len(pieces)))
        ]
        on_host: list[torch.cuda.Event] = []
        for number, (at, tensor, start, size) in enumerate(pieces):
            block = self._blocks[number % len(self._blocks)][:size]
            if number >= len(self._blocks):
                current.wait_event(on_host[number - len(self._blocks)])
            with torch.no_grad():
                block.copy_(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)[start : start + size])
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):
                    memory[at : at + size].copy_(block, non_blocking=True)
                    on_host.append(self._stream.record_event())

    def wait(self) -> None:
        """Waits until all is in the host's memory."""
        self._stream.synchronize()
        self._blocks = []


def _cut_into_blocks(
    pieces: Iterable[tuple[int, torch.Tensor, int, int]],
) -> Iterator[tuple[int, torch.Tensor, int, int]]:
    """Cut pieces (place in the file, tensor, first byte in the tensor, number of bytes) into blocks of a fixed size."""
    for at, tensor, start, size in pieces:
        for first in range(0, size, _BLOCK_BYTES):
            yield at + first, tensor, start + first, min(_BLOCK_BYTES, size - first)


class _Skeleton(PlainState):
    """A content with places instead of tensors, and the tensors, each with its offset in the area of their bytes."""

    def __init__(self, area: int, only: Collection[int]) -> None:
        self._area, self._only = area, only
        self._rest: _Skeleton | None = None
        self._places: dict[tuple[Any, ...], str] = {}
        self.bytes = 0
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.can_be_parted = True
        self.needed_bytes = 0

    def take(self, content: Mapping[str, Any], name: str, rest: _Skeleton | None) -> Any:
        """The skeleton of the content; in the cut area, tensors that are not equal on all ranks go to `rest`."""
        self._rest = rest
        return {entry: self._plain(value, f"{name}{entry}") for entry, value in content.items()}

    def _plain(self, value: Any, where: str) -> Any:
        if type(value) is set and tensors_in(value):  # in another order when it is read
            self.can_be_parted = False
            return PlainState(value, where).value
        return super()._plain(value, where)

    def _key(self, key: Any, where: str) -> Any:
        return key if type(key) in (str, int) else super()._key(key, where)

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        part = ""
        if type(tensor) is not torch.Tensor and is_split(tensor):
            view = part_of(torch.empty(tensor.shape, device="meta"), tensor)
            part = f", {[*tensor.shape]}, {[*view.shape]}, {[*view.stride()]}, {view.storage_offset()}"
            self.can_be_parted &= view.is_contiguous() and tensor.to_local().is_contiguous()  # type: ignore[attr-defined]
            tensor = tensor.to_local()  # type: ignore[attr-defined]
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        if self._area == CUT and not (is_plain and tensor.data_ptr() in self._only):
            return None if self._rest is None else self._rest._tensor(tensor, where)
        self._check_tensor(tensor, where)
        if not is_plain:
            self.can_be_parted = False
            return tensor.detach().cpu()
        tensor = tensor.detach()
        if dense_strides(tensor) != tensor.stride() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg().clone()
        layout = f'"{tensor.dtype}", {[*tensor.shape]}, {[*tensor.stride()]}{part}'
        identity = tensor.device, tensor.data_ptr() if tensor.nbytes else None, layout
        if identity not in self._places:
            # One text each, because the pickler looks at each object.
            self._places[identity] = f"{PLACE}[{self._area}, {self.bytes}, {layout}]"
            self.tensors.append((self.bytes, tensor))
            self.bytes = align(self.bytes + tensor.nbytes)
        return self._places[identity]


def digest_of(memory: Any) -> str:
    """Return the digest of an image in memory, behind its head: a checksum of the sums of its pages.

    The sums run at the speed of memory, a checksum of all bytes at a fraction of it. They see each flipped bit, and
    a page that is missing or in a different place.
    """
    words = np.frombuffer(memory, np.uint64)[HEAD_BYTES // 8 :]
    return f"{zlib.crc32(np.add.reduceat(words, np.arange(0, len(words), 512)).data):08x}"


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def cut_range(cut_bytes: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """Return the part of the bytes that all ranks hold alike which a rank copies."""
    ends = [cut_bytes * rank // local_size // _ALIGNED * _ALIGNED for rank in (local_rank, local_rank + 1)]
    return ends[0], cut_bytes if local_rank + 1 == local_size else ends[1]


def align(size: int) -> int:
    """Return the size, rounded up to where a tensor may begin."""
    return -(-size // _ALIGNED) * _ALIGNED
