"""The links between GPUs, as a program that prints a line of JSON: a process of its own, because a driver may hang.

For each GPU: bytes per second between its memory and locked memory of the host, each way alone, both ways at once, and
so on all GPUs at once. For each pair: whether one reaches the other's memory, and with atomics, as over NVLink but not
over PCIe.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Sequence
from typing import Any

import torch

_BYTES = 32 << 20
_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_WAYS = ("to_host", "to_gpu")
_TIMES = (1, 8)  # the first to warm up


def rate(devices: Sequence[Any], ways: Sequence[str] = _WAYS, size_bytes: int = _BYTES) -> float:
    """Return bytes per second each way on each device, all at once, each on a stream of its own.

    On the CPU, for tests, these are plain copies.
    """
    kind: Any = torch.cuda if devices[0].type == "cuda" else torch.cpu
    copies = []
    for device in devices:
        for way in ways:
            host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            gpu = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            copies.append((kind.Stream(device), *((host, gpu) if way == "to_host" else (gpu, host))))

    def seconds(times: int) -> float:
        begun_s = time.perf_counter()
        for _ in range(times):
            for stream, to, source in copies:
                with kind.stream(stream):
                    to.copy_(source, non_blocking=True)
        for device in devices:
            kind.synchronize(device)
        return (time.perf_counter() - begun_s) / times

    for device in devices:  # the tensors are made on other streams
        kind.synchronize(device)
    return size_bytes / [seconds(times) for times in _TIMES][-1]


def measure(devices: Sequence[Any], size_bytes: int = _BYTES) -> dict[str, Any]:
    """Measure each device alone and all at once; all rates are bytes per second, each way and GPU."""
    ways = {**{way: (way,) for way in _WAYS}, "both": _WAYS}
    gpus = [{name: rate([device], these, size_bytes) for name, these in ways.items()} for device in devices]
    return {"gpus": gpus, "all_at_once": rate(devices, _WAYS, size_bytes)}


def main() -> None:
    """Look at the GPUs that torch sees."""
    everybody = range(torch.cuda.device_count())
    atomics = [[False for _ in everybody] for _ in everybody]
    if torch.version.cuda is not None:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        driver, number = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        for i in everybody:
            for j in everybody:
                is_known = i != j and driver.cuDeviceGetP2PAttribute(ctypes.byref(number), _ATOMICS, i, j) == 0
                atomics[i][j] = is_known and bool(number.value)
    peers = [[i == j or torch.cuda.can_device_access_peer(i, j) for j in everybody] for i in everybody]
    measured = measure([torch.device("cuda", i) for i in everybody])
    print(json.dumps({**measured, "peers": peers, "atomics": atomics}))


if __name__ == "__main__":
    main()
