"""State of a training process for the backend, DDP and training loops: its waits, optimizer steps and heap.

Whoever blocks in an exchange adds to `waiting_time`, at every floor: a wait of the backend's inside a wait of DDP's
counts once. While nobody measures, a wait pays for one look at `waiting_time.on`.

    began = waiting_time.begin() if waiting_time.on else 0
    work.wait()
    if began:
        waiting_time.end(began)
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

PER_GRADIENTS = 4
"""What a training step may free in all, in gradients: these, what they are computed from, and activations."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20  # what malloc takes; its own adjustment, which ends here too, is off from now on
_LARGEST_INT = 2**31 - 1
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")

_kept_bytes = 0


class DeviceWaits(Protocol):
    """An object that times waits in a device's stream, where Python does not wait."""

    def wait_began(self) -> None:
        """Note that work queued from now on waits for other ranks."""

    def wait_ended(self) -> None:
        """Note that work queued from now on does not."""


class WaitingTime:
    """A clock of one thread's waits, and of those that work for it meanwhile; a loop switches it on.

    Attributes:
        on: how many loops measure; 0 while nobody does.
        total_ns: nanoseconds waited since the process began to measure.
    """

    __slots__ = ("_device", "_threads", "on", "total_ns")

    def __init__(self) -> None:
        self.on = 0
        self.total_ns = 0
        self._threads: set[int] = set()
        self._device: DeviceWaits | None = None

    def start(self, device: DeviceWaits | None = None) -> None:
        """From now on the waits of the calling thread are counted, and told to `device`."""
        self._threads = {get_ident()}
        self._device = device
        self.on += 1

    def stop(self) -> None:
        """Ends what `start` began."""
        self.on = max(0, self.on - 1)
        self._device = None

    def lend_thread(self) -> None:
        """The calling thread works for the measured one: autograd's, which runs the backward of a GPU."""
        self._threads.add(get_ident())

    def begin(self) -> int:
        """A wait begins. What is returned goes to `end`; 0 (nothing to end) on a thread that is not measured."""
        if get_ident() not in self._threads:
            return 0
        if self._device is not None:
            self._device.wait_began()
        # The beginning, less what was counted before: `end` then counts what lies inside it, other waits too, once.
        return time.perf_counter_ns() - self.total_ns

    def end(self, began: int) -> None:
        """The wait that began then is over. A wait that raised need not be ended; it is not counted."""
        if self._device is not None:
            self._device.wait_ended()
        self.total_ns = time.perf_counter_ns() - began


waiting_time = WaitingTime()
"""That of this process."""


class OptimizerSteps:
    """Calls `began` and `ended` with the outermost optimizer, around each whole step in this process, until `remove`.

    An optimizer may call another: ZeRO's steps a part with the user's. That makes one step.
    """

    def __init__(
        self, *, began: Callable[[Optimizer], object] = lambda _: None, ended: Callable[[Optimizer], object]
    ) -> None:
        self._began, self._ended = began, ended
        self._under_way: list[Optimizer] = []
        self._hooks = [
            register_optimizer_step_pre_hook(self._enter),
            register_optimizer_step_post_hook(self._leave),
        ]

    def remove(self) -> None:
        """No more calls."""
        for hook in self._hooks:
            hook.remove()

    def _enter(self, optimizer: Optimizer, *_: Any) -> None:
        self._forget_from(optimizer)  # a step that raised has not ended
        if not self._under_way:
            self._began(optimizer)
        self._under_way.append(optimizer)

    def _leave(self, optimizer: Optimizer, *_: Any) -> None:
        if self._forget_from(optimizer) and not self._under_way:
            self._ended(optimizer)

    def _forget_from(self, optimizer: Optimizer) -> bool:
        place = next((i for i, other in enumerate(self._under_way) if other is optimizer), None)
        if place is not None:
            del self._under_way[place:]
        return place is not None


def keep_freed_memory(size_bytes: int) -> bool:
    """Lets the heap keep at least this many free bytes from now on; returns whether it does.

    It does not where the user has set malloc's own variables, or put another allocator in its place.

    glibc returns the free top of the heap to the kernel when it is larger than a threshold (64 MiB at most by itself).
    A backward frees each gradient as soon as it lies in its bucket, so the heap is cut after every step, and the next
    one touches every page again: the kernel zeroes it first, which for small batches takes a tenth of the step or more.
    With a threshold as large as the gradients, the pages stay. The peak stays the same; only what lies between peaks
    does not go back. (mallopt(3); tensors above 32 MiB are mapped and unmapped one by one whatever the thresholds.)
    """
    global _kept_bytes
    threshold = min(_LARGEST_INT, size_bytes)
    if threshold <= _kept_bytes:
        return True
    if any(os.environ.get(name) for name in _USERS_OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not in musl
    if mallopt is None:
        return False
    is_set = bool(mallopt(_TRIM_THRESHOLD, threshold)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))
    if is_set:
        _kept_bytes = threshold
    return is_set


def let_gloo_finish(timeout_s: float = 1.0) -> None:
    """Wait until gloo's threads have let go of their last tensors; to be called before the interpreter ends.

    A thread that frees a tensor of Python's needs the interpreter. Python before 3.14 makes it exit in the middle when
    the interpreter has ended, and the C++ around it then ends the process: "terminate called without an active
    exception", SIGABRT. With torch 2.13 that befell half of the scripts that ended right behind a collective of gloo,
    under torchrun as well; `destroy_process_group` leaves gloo's threads there.
    """
    deadline, quiet = time.monotonic() + timeout_s, 0
    while quiet < 2 and time.monotonic() < deadline:
        states = _gloo_states()
        if not states:
            return
        quiet = quiet + 1 if states == {"S"} else 0  # one that waits for the interpreter sleeps, until we do
        time.sleep(0.001)


def _gloo_states() -> set[str]:
    """Return what the kernel says of gloo's threads: S for one that sleeps, R or D for one at work."""
    states = set()
    for file in glob.glob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as stat:
            name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith("pt_gloo"):
                states.add(rest.split()[0])
    return states
