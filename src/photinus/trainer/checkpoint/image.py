"""An image: the state of a loop as bytes in memory files, one file for each rank of a host, each byte once per host.

    head       step, run, rank, lengths and digest; zeros while the file is written: only a sealed one has a head
    skeleton   the content with places instead of tensors, as torch.save writes it: no code runs when it is read
    cut        this rank's part of the tensors that all ranks hold alike, which lie one behind the other over the files
    own        tensors that this rank alone copies

What is `common` to all ranks is described by local rank 0, what is a rank's `own` by that rank: its random numbers, its
parts of what a strategy splits. `load` puts them together again. Nothing here knows where the files come from.
"""

from __future__ import annotations

import ctypes
import fcntl
import io
import json
import math
import mmap
import os
import struct
import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ...errors import CheckpointError
from ...parallel.zero.split_states import is_split, part_of
from .durable import BlockDigest
from .states import PlainState

HEAD_BYTES = 4096
_PROGRESS = HEAD_BYTES - 16  # behind the head: the last finished step, and its complement
_MAGIC = b"PHOTIMG1"
_ALIGNED = 64
_PLACE = "\0place "  # begins a text of the skeleton that stands for a tensor; JSON follows, see `_Skeleton._tensor`
_PLAIN_ITEMS = 5  # area, offset, dtype, shape, stride; of a part also the whole's shape, and where it lies there
_CUT = -1  # in place of a local rank: the bytes lie in the files' cut parts


@dataclass(frozen=True)
class Head:
    """The facts of one file, which one rank wrote. A state that a strategy splits goes back only to the same ranks.

    The cut bytes are those of all files of the host, the digest is that of all behind the head.
    """

    run: str
    step: int
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    split: bool = False
    cut_bytes: int = 0
    skeleton_bytes: int = 0
    bytes: int = 0
    digest: str = ""


@dataclass(frozen=True)
class Content:
    """A state as one rank sees it.

    Attributes:
        common: by entry; local rank 0's counts.
        own: by entry; of each rank. Dicts of several ranks are joined, of split tensors the parts, and of all else the
            first rank's counts.
        equal: addresses of the tensors in `common` with the same values on all ranks, which share the work.
        steady: addresses of the tensors that only optimizer steps change; all others are copied immediately.
    """

    common: Mapping[str, Any]
    own: Mapping[str, Any]
    equal: Collection[int] = ()
    steady: Collection[int] = ()


class MemoryFile:
    """A memory file of this rank, to write images into. One process writes into it: a child of a rank gets OSError."""

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size, self._is_pinned, self.memory = 0, False, torch.empty(0, dtype=torch.uint8)

    @property
    def allocated_bytes(self) -> int:
        """Return the memory that the file has taken so far."""
        return os.fstat(self._descriptor).st_blocks * 512

    def unseal(self) -> None:
        """From now on the file holds no image."""
        if os.fstat(self._descriptor).st_size:
            os.pwrite(self._descriptor, bytes(_PROGRESS), 0)

    def make_room(self, size: int, *, pin: bool = False) -> None:
        """Maps at least this size; for copies from a GPU the memory is pinned, where that is possible."""
        if size <= self._size <= 2 * size:  # each page of a new mapping costs a fault
            return
        size += size // 64
        if self._is_pinned:
            _cuda().cudaHostUnregister(self.memory.data_ptr())
            self._is_pinned = False
        self._size, self.memory = size, torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self._descriptor, size)
        if size:
            self.memory = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)
            self._is_pinned = pin and int(_cuda().cudaHostRegister(self.memory.data_ptr(), size, 0)) == 0

    def seal(self, head: Head) -> None:
        """The image is complete."""
        text = json.dumps(asdict(head)).encode()
        body = struct.pack("<I", len(text)) + text
        body += bytes(_PROGRESS - len(_MAGIC) - 4 - len(body))
        os.pwrite(self._descriptor, _MAGIC + struct.pack("<I", zlib.crc32(body)) + body, 0)

    def digest(self, size: int) -> str:
        """Return the digest of an image of this size, behind its head."""
        return _digest((ctypes.c_char * size).from_address(self.memory.data_ptr()))

    def note_progress(self, step: int) -> None:
        """Remembers the last finished step, beside the image."""
        os.pwrite(self._descriptor, struct.pack("<QQ", step, ~step & (2**64 - 1)), _PROGRESS)


class Copy:
    """This rank's piece of an image, from its planning until it is sealed. Made and used by one thread.

    `begin` copies what may change at any time, and lets a thread copy the rest, digest and seal it. The next optimizer
    step waits for `wait_copied`. A steady tensor that changed before that makes the image not count.

    Attributes:
        bytes: of the file.
        counts: whether it was sealed; known after `wait`.
        changed: addresses of the steady tensors that changed too early.
        copy_s, cpu_s: seconds that copying took, and processor time of copy and digest; known after `wait`.
    """

    def __init__(self, head: Head, content: Content) -> None:
        """Plans the layout. Raises TypeError, ValueError: something in the content cannot be saved."""
        first = head.local_rank == 0
        cut, skeleton = _Skeleton(_CUT, content.equal), _Skeleton(head.local_rank, ())
        with torch.no_grad():
            common = cut.take(content.common, "", skeleton if first else None)
            own = skeleton.take(content.own, "own ", None)
        buffer = io.BytesIO()
        torch.save({"common": common if first else None, "own": own}, buffer)
        self._skeleton = buffer.getvalue()
        self._data_at = _align(HEAD_BYTES + len(self._skeleton))
        start, end = _cut_range(cut.bytes, head.local_rank, head.local_size)
        pieces = []
        for at, tensor in cut.tensors:
            first_byte, last_byte = max(at, start), min(end, at + tensor.nbytes)
            pieces.append((self._data_at + first_byte - start, tensor, first_byte - at, last_byte - first_byte))
        own_at = _align(self._data_at + end - start)
        pieces += [(own_at + at, tensor, 0, tensor.nbytes) for at, tensor in skeleton.tensors]
        pieces = [piece for piece in pieces if piece[3] > 0]
        self._later = [each for each in pieces if each[1].data_ptr() in content.steady and not each[1].is_inference()]
        steady = {id(each[1]) for each in self._later}
        self._now = [each for each in pieces if id(each[1]) not in steady]
        self._uses_gpu = any(piece[1].is_cuda for piece in pieces)
        self.bytes = own_at + skeleton.bytes
        self._head = replace(head, cut_bytes=cut.bytes, skeleton_bytes=len(self._skeleton), bytes=self.bytes)
        self._file: MemoryFile | None = None
        self._copied, self._lock, self._verdict = threading.Event(), threading.Lock(), True
        self._decided = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.counts, self.changed, self.copy_s, self.cpu_s = False, set[int](), 0.0, 0.0

    def begin(self, file: MemoryFile) -> None:
        """Starts copying into the file, whose image is lost from now on."""
        file.unseal()
        file.make_room(self.bytes, pin=self._uses_gpu)
        self._file = file
        self._versions = [(piece[1], piece[1]._version) for piece in self._later]
        ctypes.memmove(file.memory.data_ptr() + HEAD_BYTES, self._skeleton, len(self._skeleton))
        self._stream = torch.cuda.Stream() if self._uses_gpu else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._move(self._now)
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)  # what changes them next waits for these copies
        self._thread = threading.Thread(target=self._run, name="photinus-snapshot", daemon=True)
        self._thread.start()

    def wait_copied(self) -> None:
        """Returns when steady tensors may change."""
        if self._thread is not None and not self._decided:
            self._copied.wait()
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)
            self._decide()

    def wait(self) -> bool:
        """Waits until the image is sealed, or known not to count; returns which. Raises what went wrong."""
        if self._thread is not None:
            self.wait_copied()
            self._thread.join()
            self._thread = None
            self._later, self._now, self._versions = [], [], []
            if self._error is not None:
                raise self._error
        return self.counts

    def _decide(self) -> bool:
        with self._lock:
            if not self._decided:
                self._decided = True
                self.changed = {each.data_ptr() for each, version in self._versions if each._version != version}
                self._verdict = not self.changed
            return self._verdict

    def _run(self) -> None:
        assert self._file is not None
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        try:
            self._move(self._later)
            if self._stream is not None:
                self._copied.set()  # queued: the step's own work waits for the rest on the GPU
                self._stream.synchronize()
            self._copied.set()
            self.copy_s = time.perf_counter() - began_s
            digest = self._file.digest(self.bytes)
            # By now no write is under way that began before the copy's end and has not counted itself yet.
            if self._decide():
                self._file.seal(replace(self._head, digest=digest))
                self.counts = True
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._error = error
        finally:
            self._copied.set()
            self.cpu_s = time.thread_time() - began_cpu_s

    def _move(self, pieces: Sequence[tuple[int, torch.Tensor, int, int]]) -> None:
        assert self._file is not None
        memory = self._file.memory
        for at, tensor, start, size in pieces:
            if not tensor.is_cuda:
                ctypes.memmove(
                    memory.data_ptr() + at, tensor.data_ptr() + start, size
                )  # without the interpreter's lock
                continue
            with torch.no_grad(), torch.cuda.stream(self._stream):
                flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                memory[at : at + size].copy_(flat[start : start + size], non_blocking=True)


class _Skeleton(PlainState):
    """A content with places instead of tensors, and the tensors, each with its offset in the area of their bytes."""

    def __init__(self, area: int, only: Collection[int]) -> None:
        self._area, self._only = area, only
        self._rest: _Skeleton | None = None
        self._places: dict[tuple[Any, ...], str] = {}
        self.bytes = 0
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.needed_bytes = 0

    def take(self, content: Mapping[str, Any], name: str, rest: _Skeleton | None) -> Any:
        """The skeleton of the content; in the cut area, tensors that are not equal on all ranks go to `rest`."""
        self._rest = rest
        return {entry: self._plain(value, f"{name}{entry}") for entry, value in content.items()}

    def _key(self, key: Any, where: str) -> Any:
        return key if type(key) in (str, int) else super()._key(key, where)

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        part = ""
        if type(tensor) is not torch.Tensor and is_split(tensor):
            view = part_of(torch.empty(tensor.shape, device="meta"), tensor)
            part = f", {[*tensor.shape]}, {[*view.shape]}, {[*view.stride()]}, {view.storage_offset()}"
            tensor = tensor.to_local()  # type: ignore[attr-defined]
        is_plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
        if self._area == _CUT and not (is_plain and tensor.data_ptr() in self._only):
            return None if self._rest is None else self._rest._tensor(tensor, where)
        self._check_tensor(tensor, where)
        if not is_plain:
            return tensor.detach().cpu()
        tensor = tensor.detach()
        if not (tensor.is_contiguous() or _is_dense(tensor)) or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg().clone()
        layout = f'"{tensor.dtype}", {[*tensor.shape]}, {[*tensor.stride()]}{part}'
        identity = tensor.device, tensor.data_ptr() if tensor.nbytes else None, layout
        if identity not in self._places:
            # One text each, because the pickler looks at each object.
            self._places[identity] = f"{_PLACE}[{self._area}, {self.bytes}, {layout}]"
            self.tensors.append((self.bytes, tensor))
            self.bytes = _align(self.bytes + tensor.nbytes)
        return self._places[identity]


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _cut_range(cut_bytes: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """The part of the bytes that all ranks hold alike which a rank copies."""
    ends = [cut_bytes * rank // local_size // _ALIGNED * _ALIGNED for rank in (local_rank, local_rank + 1)]
    return ends[0], cut_bytes if local_rank + 1 == local_size else ends[1]


def _align(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements lie one behind the other in memory, in whatever order of dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


# -- reading --------------------------------------------------------------------------------------------------------


def read_head(path: str) -> Head | None:
    """The head of a file; None where it is not sealed, or its head is damaged."""
    raw = _first_bytes(path)
    body = raw[len(_MAGIC) + 4 : _PROGRESS]
    if len(raw) < HEAD_BYTES or raw[: len(_MAGIC) + 4] != _MAGIC + struct.pack("<I", zlib.crc32(body)):
        return None
    (length,) = struct.unpack_from("<I", body)
    return Head(**json.loads(body[4 : 4 + length]))


def read_progress(path: str) -> int:
    """The last finished step that `note_progress` noted; -1 for none."""
    step, complement = struct.unpack("<QQ", _first_bytes(path)[_PROGRESS:].ljust(16, b"\0"))
    return step if step ^ complement == 2**64 - 1 else -1


def _first_bytes(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""


def verify(path: str) -> None:
    """Reads all of a file. Raises CheckpointError: it is not sealed, or its digest differs."""
    head = read_head(path)
    if head is None:
        raise CheckpointError(f"{path} holds no sealed image, or its head is damaged")
    try:
        actual = _digest(_map(path, head))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if actual != head.digest:
        raise CheckpointError(f"{path} is damaged: digest expected {head.digest}, actual {actual}")


def _digest(memory: Any) -> str:
    digest = BlockDigest()
    digest.update(memoryview(memory).cast("B")[HEAD_BYTES:])
    return digest.hexdigest()


def load(paths: Sequence[str], rank: int | None = None) -> dict[str, Any]:
    """The content of an image whose files have been verified; tensors lie over the files' memory: copy what is to last.

    Args:
        paths: of a host's files, by local rank.
        rank: only this rank's parts of split tensors are filled in (memory for others is never taken), and what ranks
            have of their own is this rank's. None: all ranks of the job are here, and all is whole.

    Raises:
        CheckpointError: the files do not belong together, or a part is missing.
    """
    heads = [read_head(path) for path in paths]
    for local_rank, head in enumerate(heads):
        place = heads[0] and replace(heads[0], local_rank=local_rank, local_size=len(paths))
        alike = ("run", "step", "world_size", "cut_bytes", "local_rank", "local_size")
        if head is None or any(getattr(head, name) != getattr(place, name, None) for name in alike):
            raise CheckpointError(f"{paths[local_rank]} holds another image than {paths[0]}: {head} and {heads[0]}")
    files = [_File(path, head) for path, head in zip(paths, heads, strict=True) if head is not None]
    own_first = sorted(files, key=lambda file: (file.head.rank != rank, file.head.rank))
    skeletons = [files[0].skeleton["common"], *(file.skeleton["own"] for file in own_first)]
    content: dict[str, Any] = _Reader(files, rank).join(skeletons)
    return content


def _map(path: str, head: Head) -> mmap.mmap:
    with open(path, "rb") as file:  # what is read may be changed, without changing the file
        return mmap.mmap(file.fileno(), head.bytes, access=mmap.ACCESS_COPY)


class _File:
    """One file to read."""

    def __init__(self, path: str, head: Head) -> None:
        self.head, self.memory = head, _map(path, head)
        try:
            skeleton = self.memory[HEAD_BYTES : HEAD_BYTES + head.skeleton_bytes]
            self.skeleton = torch.load(io.BytesIO(skeleton), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        self.cut_at = _align(HEAD_BYTES + head.skeleton_bytes)
        self.start, self.end = _cut_range(head.cut_bytes, head.local_rank, head.local_size)
        self.own_at = _align(self.cut_at + self.end - self.start)


class _Reader:
    """Joins the skeletons of several ranks to one content (see `Content`), with tensors in the places."""

    def __init__(self, files: Sequence[_File], rank: int | None) -> None:
        self._files, self._rank = files, rank
        self._tensors: dict[Any, torch.Tensor] = {}  # what was one tensor under two names stays one

    def join(self, trees: Sequence[Any]) -> Any:
        """One tree of those of several ranks, of which the first counts."""
        first = trees[0]
        if isinstance(first, str) and first.startswith(_PLACE):
            texts = tuple(trees)
            if texts not in self._tensors:
                places = [json.loads(text.removeprefix(_PLACE)) for text in texts]
                is_split = len(places[0]) > _PLAIN_ITEMS
                self._tensors[texts] = self._whole(places) if is_split else self._tensor(places[0])
            return self._tensors[texts]
        if isinstance(first, dict):
            trees = [tree for tree in trees if isinstance(tree, dict)]
            keys = list(dict.fromkeys(key for tree in trees for key in tree))
            if len(keys) > len(first) and all(isinstance(key, int) for key in keys):
                keys.sort()  # the optimizer's parameters, in the order of its groups
            joined = type(first)()
            vars(joined).update(vars(first)) if hasattr(first, "__dict__") else None  # _metadata
            for key in keys:
                joined[key] = self.join([tree[key] for tree in trees if key in tree])
            return joined
        if type(first) in (list, tuple):
            alike = [tree for tree in trees if type(tree) is type(first) and len(tree) == len(first)]
            return type(first)(self.join(items) for items in zip(*alike, strict=True))
        return first

    def _tensor(self, place: Sequence[Any]) -> torch.Tensor:
        area, at, name, shape, stride = place[:_PLAIN_ITEMS]
        dtype = getattr(torch, name.removeprefix("torch."))
        count = math.prod(shape)
        if not count:
            return torch.empty_strided(shape, stride, dtype=dtype)
        if area != _CUT:
            file = self._files[area]
            return torch.frombuffer(file.memory, dtype=dtype, count=count, offset=file.own_at + at).as_strided(
                shape, stride
            )
        parts = []
        for file in self._files:
            start, end = max(at, file.start), min(at + count * dtype.itemsize, file.end)
            if start < end:
                offset = file.cut_at + start - file.start
                parts.append(torch.frombuffer(file.memory, dtype=torch.uint8, count=end - start, offset=offset))
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(dtype).as_strided(shape, stride)

    def _whole(self, places: Sequence[Sequence[Any]]) -> torch.Tensor:
        """A whole tensor of its parts. Pages that nothing is written to cost nothing."""
        whole_shape, filled = places[0][_PLAIN_ITEMS], 0
        whole = torch.empty(whole_shape, dtype=getattr(torch, places[0][2].removeprefix("torch.")))
        for place in places:
            if self._rank is None or self._files[place[0]].head.rank == self._rank:
                part = whole.as_strided(*place[_PLAIN_ITEMS + 1 :])
                part.copy_(self._tensor(place))
                filled += part.numel()
        if self._rank is None and filled < whole.numel():
            raise CheckpointError(f"parts of a split tensor of shape {list(whole_shape)} lie on other hosts")
        return whole
