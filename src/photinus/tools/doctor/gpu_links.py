"""How GPUs are linked, as a program that prints a line of JSON: a process of its own, for a driver may hang.

For each GPU: bytes per second between its memory and locked memory of the host, each way alone, both ways at once, and
so on all GPUs at once. For each pair: whether one reaches the other's memory, and with atomics, as over NVLink but not
over PCIe.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

_BYTES = 32 << 20
_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_WAYS = ("to_host", "to_gpu")


class Copies:
    """A GPU's copies to the host and back, each way on a stream of its own; on the CPU, for tests, plain copies."""

    def __init__(self, device: Any, size_bytes: int) -> None:
        import torch

        self._device = device
        self._torch: Any = torch.cuda if device.type == "cuda" else torch.cpu
        host = [torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in _WAYS]
        gpu = [torch.zeros(size_bytes, dtype=torch.uint8, device=device) for _ in _WAYS]
        self._tensors = {"to_host": (host[0], gpu[0]), "to_gpu": (gpu[1], host[1])}
        self._streams = {way: self._torch.Stream(device) for way in _WAYS}
        self.settle()

    def begin(self, way: str) -> None:
        """Puts a copy into its stream."""
        to, source = self._tensors[way]
        with self._torch.stream(self._streams[way]):
            to.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Waits for all copies."""
        self._torch.synchronize(self._device)


def rate(gpus: Sequence[Copies], ways: Iterable[str], size_bytes: int) -> float:
    """Bytes per second each way on each GPU, all at once."""
    taken = 0.0
    for times in (1, 8):  # the first to warm up
        began = time.perf_counter()
        for _ in range(times):
            for way in ways:
                for gpu in gpus:
                    gpu.begin(way)
        for gpu in gpus:
            gpu.settle()
        taken = (time.perf_counter() - began) / times
    return size_bytes / taken


def measure(devices: Sequence[Any], size_bytes: int = _BYTES) -> dict[str, Any]:
    """Takes some milliseconds for each device; all rates are bytes per second, each way and GPU."""
    gpus = [Copies(device, size_bytes) for device in devices]
    told = []
    for gpu in gpus:
        rates = {way: rate([gpu], [way], size_bytes) for way in _WAYS}
        told.append({**rates, "both": rate([gpu], _WAYS, size_bytes)})
    return {"gpus": told, "all_at_once": rate(gpus, _WAYS, size_bytes)}


def main() -> None:
    """Looks at the GPUs that torch sees."""
    import torch

    count = torch.cuda.device_count()
    everybody = range(count)
    atomics = [[False] * count for _ in everybody]
    if torch.version.cuda is not None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        driver = ctypes.CDLL("libcuda.so.1")
        number = ctypes.c_int()
        for i in everybody:
            for j in everybody:
                told = i != j and driver.cuDeviceGetP2PAttribute(ctypes.byref(number), _ATOMICS, i, j) == 0
                atomics[i][j] = told and bool(number.value)
    peers = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in everybody] for i in everybody]
    measured = measure([torch.device("cuda", i) for i in everybody])
    print(json.dumps({**measured, "peers": peers, "atomics": atomics}))


if __name__ == "__main__":
    main()
