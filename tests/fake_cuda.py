"""A GPU for tests without one: CPU tensors that pass for CUDA ones, over the driver that is none.

    gpu = FakeGpu()            # once in a process, before its first CUDA tensor
    x = gpu.tensor(values)     # lies in memory of the fake driver, says that it is on cuda:0
    with gpu.on(gpu.stream()):
        dist.all_reduce(x)

`RealGpu` has the same face over torch.cuda. Two things are as on a GPU and make mistakes visible: an operation of torch
sees what the streams behind which its own stream stands have done, and nothing later; and memory that is freed is gone,
for copies of the engine too, when the streams have come by that torch's allocator was told of. Unlike on a GPU the host
waits for operations of torch, but for copies and fills.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.futures import Future
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from photinus.backend import torch_tools
from tests.fork_server import REPOSITORY

__all__ = ["FakeGpu", "RealGpu", "library", "tensor_without_driver"]

_LIMIT_S = 20.0


def library() -> Path:
    """The libcuda.so.1 that is none, compiled when its sources have changed."""
    folder = REPOSITORY / "native" / "tests" / "fake_cuda"
    sources = sorted(folder.glob("*.cc"))
    read = [*sources, *folder.glob("*.h"), REPOSITORY / "native" / "device" / "cuda" / "types.h"]
    name = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(read))).hexdigest()[:16]
    place = REPOSITORY / "build" / "fake_cuda" / name / "libcuda.so.1"
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        made = place.with_suffix(f".{os.getpid()}")
        words = ["-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{REPOSITORY / 'native'}"]
        command = [
            os.environ.get("CXX", "c++"),
            *words,
            *map(str, sources),
            "-Wl,-soname,libcuda.so.1",
            "-o",
            str(made),
        ]
        subprocess.run(command, check=True, timeout=120)
        made.rename(place)
    return place


_KERNEL = ctypes.CFUNCTYPE(None)


class _Driver:
    """The library. The engine finds it by its name, since it is loaded already."""

    def __init__(self) -> None:
        # A torch that is built for CUDA looks for a driver when first asked for a GPU. This one is not for it.
        torch.accelerator.is_available()
        self.all = ctypes.CDLL(str(library()))
        for name, result, arguments in (
            ("configure", None, [ctypes.c_char_p]),
            ("make_stream", ctypes.c_size_t, []),
            ("allocate", ctypes.c_size_t, [ctypes.c_size_t]),
            ("free", None, [ctypes.c_size_t, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.c_int]),
            ("launch", None, [ctypes.c_size_t, ctypes.c_double, _KERNEL]),
            ("record", ctypes.c_void_p, [ctypes.c_size_t]),
            ("follow", None, [ctypes.c_size_t, ctypes.c_void_p]),
            ("query", ctypes.c_int, [ctypes.c_void_p]),
            ("settle", ctypes.c_int, [ctypes.c_size_t, ctypes.c_double]),
        ):
            function = getattr(self.all, f"fake_cuda_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


class _Event:
    def __init__(self, driver: _Driver, stream: int) -> None:
        self._driver = driver
        self.handle = driver.record(stream)

    def query(self) -> bool:
        return bool(self._driver.query(self.handle))


class _Streams(torch_tools.Streams):
    """What the backend asks of torch.cuda. Streams are handles; 0 is the default one."""

    def __init__(self, driver: _Driver) -> None:
        super().__init__()
        self.driver = driver
        self._of_thread = threading.local()

    def current(self, device: torch.device) -> int:
        handle: int = getattr(self._of_thread, "stream", 0)
        return handle

    @contextmanager
    def on(self, stream: int) -> Iterator[int]:
        before = self.current(DEVICE)
        self._of_thread.stream = stream
        try:
            yield stream
        finally:
            self._of_thread.stream = before

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[int]:
        with self._making:
            stream = self._beside.setdefault(device, None) or self.driver.make_stream()
            self._beside[device] = stream
        with self.on(stream):
            yield stream

    def record(self, device: torch.device) -> _Event:
        return _Event(self.driver, self.current(device))

    def follow(self, event: _Event, device: torch.device) -> None:
        self.driver.follow(self.current(device), event.handle)

    def keep_for(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        for tensor in tensors:
            block = _Block.by_address.get(_storage(tensor))
            if block is not None:
                block.streams.add(self.current(device))

    def future(self, devices: Sequence[torch.device]) -> Future[Any]:
        assert all(device.type == "cuda" for device in devices)
        return _Future(self)


class _Future(Future):  # type: ignore[type-arg]
    """As torch's with devices (ivalue::Future): completed behind the current stream if a tensor is in the value."""

    def __init__(self, streams: _Streams) -> None:
        super().__init__()
        self._streams = streams
        self._event: _Event | None = None

    def set_result(self, value: Any) -> None:
        if isinstance(value, list) and any(isinstance(each, FakeCudaTensor) for each in value):
            self._event = self._streams.record(DEVICE)
        super().set_result(value)

    def _synchronize(self) -> None:
        if self._event is not None:
            self._streams.follow(self._event, DEVICE)

    def wait(self) -> Any:
        value = super().wait()
        self._synchronize()
        return value

    def then(self, callback: Callable[[Any], Any]) -> Any:
        child = _Future(self._streams)

        def run(_: Any) -> None:
            with self._streams.on(self._streams.driver.make_stream()):
                self._synchronize()
                try:
                    value = callback(self)
                except Exception as error:  # noqa: BLE001 - the child's
                    child.set_exception(error)
                else:
                    child.set_result(value)

        super().then(run)
        return child


DEVICE = torch.device("cuda", 0)


class _Block:
    """Memory that was allocated. It is freed behind the stream that was current then, and others that were named."""

    by_address: ClassVar[dict[int, _Block]] = {}
    gpu: ClassVar[FakeGpu]

    def __init__(self, nbytes: int) -> None:
        streams = self.gpu.streams
        self.streams = {streams.current(DEVICE)}
        self.nbytes = max(nbytes, 1)
        self.address = streams.driver.allocate(self.nbytes)
        self.bytes = (ctypes.c_char * self.nbytes).from_address(self.address)
        self.by_address[self.address] = self

    @classmethod
    def tensor_like(cls, values: Tensor) -> Tensor:
        """The same values in memory of its own."""
        block = cls(values.nbytes)
        held, block.bytes = block.bytes, None
        weakref.finalize(held, block.free)
        flat = torch.frombuffer(held, dtype=torch.uint8)[: values.nbytes]
        made = flat.view(values.dtype).view(values.shape)
        made.copy_(values)
        return torch.Tensor._make_subclass(FakeCudaTensor, made)

    @classmethod
    def without_hold(cls, tensor: Tensor) -> Tensor:
        """The same place as a plain tensor that keeps no memory, as a kernel has it; CPU tensors as they are."""
        block = cls.by_address.get(_storage(tensor))
        if block is None:
            return tensor.clone()
        whole = torch.frombuffer((ctypes.c_char * block.nbytes).from_address(block.address), dtype=torch.uint8)
        elems = whole[: block.nbytes // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        raw = elems.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        raw = raw.conj() if tensor.is_conj() else raw
        return torch._neg_view(raw) if tensor.is_neg() else raw

    def free(self) -> None:
        del self.by_address[self.address]
        behind = (ctypes.c_size_t * len(self.streams))(*self.streams)
        self.gpu.streams.driver.free(self.address, self.nbytes, behind, len(self.streams))


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()


class _NamedCudaTensor(Tensor):
    """A CPU tensor that says it is on cuda:0, and no more."""

    is_cpu = False  # type: ignore[assignment]
    is_cuda = True  # type: ignore[assignment]
    device = DEVICE  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class FakeCudaTensor(_NamedCudaTensor):
    """See the module."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _QUEUED and args[0].layout is torch.strided:
            with no_dispatch():
                raw = [_Block.without_hold(each) if isinstance(each, Tensor) else each for each in args]
            _Block.gpu.launch(lambda: func(*raw, **(kwargs or {})))
            return args[0]
        if not func.is_view and name not in _NO_DATA:
            _Block.gpu.settle()
        with no_dispatch():
            return tree_map(cls._on_gpu, func(*args, **(kwargs or {})))

    @classmethod
    def _on_gpu(cls, result: Any) -> Any:
        """The same; what is fresh in memory of the GPU."""
        if not isinstance(result, Tensor) or isinstance(result, FakeCudaTensor):
            return result
        if result.layout is torch.strided and _storage(result) not in _Block.by_address:
            return _Block.tensor_like(result)
        return torch.Tensor._make_subclass(cls, result)


_NO_DATA = {"detach", "new_empty", "empty_like", "new_empty_strided"}  # these look at no elements
_QUEUED = {"copy_", "fill_"}  # the host runs ahead of these


class _OtherGpuTensor(FakeCudaTensor):
    """One that says it is on another GPU."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def tensor_without_driver(values: Tensor) -> Tensor:
    """The values as a tensor that says it is on cuda:0, where there is no driver: for calls that are refused."""
    return torch.Tensor._make_subclass(_NamedCudaTensor, values)


class FakeGpu:
    """See the module.

    Args:
        words: how the driver behaves (native/tests/fake_cuda/fake_cuda.h).
        kernel_s: how long torch's copies take.
    """

    device = DEVICE

    def __init__(self, words: str = "seed=2", kernel_s: float = 0.0) -> None:
        self.streams = _Streams(_Driver())
        self.kernel_s = kernel_s
        self._kernels = deque[Any](maxlen=10_000)  # more than ever are under way
        self.configure(words)
        _Block.gpu = self
        torch_tools.streams = self.streams
        torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]  # torch asks it for float8

    def configure(self, words: str) -> None:
        """Makes the driver behave so; before the first CUDA tensor."""
        self.streams.driver.configure(words.encode())

    def tensor(self, values: Tensor) -> Tensor:
        """The values on the GPU, laid out as they are."""
        if values.layout is not torch.strided:
            return torch.Tensor._make_subclass(FakeCudaTensor, values.clone())
        whole = torch.empty(0, dtype=values.dtype).set_(values.untyped_storage())  # type: ignore[call-overload]
        there = _Block.tensor_like(whole).as_strided(values.shape, values.stride(), values.storage_offset())
        there = there.conj() if values.is_conj() else there
        return torch._neg_view(there) if values.is_neg() else there

    def tensor_elsewhere(self, values: Tensor) -> Tensor:
        """The values on another GPU, or on what says so."""
        return torch.Tensor._make_subclass(_OtherGpuTensor, values.clone())

    def read(self, tensor: Tensor) -> Tensor:
        """What whoever reads it on the current stream sees."""
        self.settle()
        with no_dispatch():
            return tensor.as_subclass(Tensor).clone()

    def stream(self) -> int:
        """A new stream."""
        stream: int = self.streams.driver.make_stream()
        return stream

    def on(self, stream: int) -> Any:
        """Makes a stream current."""
        return self.streams.on(stream)

    def delay(self, seconds: float) -> None:
        """Keeps the current stream busy."""
        self.launch(None, seconds)

    def launch(self, kernel: Callable[[], object] | None, seconds: float | None = None) -> None:
        """Puts something into the current stream, which takes so long."""

        def run() -> None:
            if kernel is not None:
                with torch.inference_mode():  # in which its tensors may have been made
                    kernel()

        called = _KERNEL(run)
        self._kernels.append(called)
        self.streams.driver.launch(self.streams.current(DEVICE), self.kernel_s if seconds is None else seconds, called)

    def bytes_held(self) -> int:
        """How much memory is allocated."""
        return sum(block.nbytes for block in _Block.by_address.values())

    def settle(self) -> None:
        """Waits for what is in the current stream."""
        assert self.streams.driver.settle(self.streams.current(DEVICE), _LIMIT_S), "the fake GPU's stream does not end"


class RealGpu:
    """The same over torch.cuda."""

    device = torch.device("cuda", 0)

    def tensor(self, values: Tensor) -> Tensor:
        if values.layout is not torch.strided:
            return values.to(self.device)
        whole = torch.empty(0, dtype=values.dtype).set_(values.untyped_storage())  # type: ignore[call-overload]
        there = whole.to(self.device).as_strided(values.shape, values.stride(), values.storage_offset())
        there = there.conj() if values.is_conj() else there
        return torch._neg_view(there) if values.is_neg() else there

    def read(self, tensor: Tensor) -> Tensor:
        return tensor.cpu().clone()

    def stream(self) -> Any:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if stream else nullcontext()

    def delay(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * 1.5e9))  # in cycles

    def tensor_elsewhere(self, values: Tensor) -> Tensor:
        return values.to(torch.device("cuda", 1))

    def bytes_held(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def settle(self) -> None:
        torch.cuda.current_stream().synchronize()


def wait_until(done: Callable[[], bool]) -> None:
    """Polls."""
    deadline = time.monotonic() + _LIMIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)
