"""Backends of torch.distributed, measured in turn in the same ranks, which `photinus.launch` starts.

Each rank makes a group over every backend, and then all have their turns, round after round, so that a busy moment of
the machine hits all alike. A backend that fails ends the job, whatever it does: it raises, crashes, or waits without
end. Rank 0 prints what it begins, so the command knows which backend it was.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import CollectiveError, LaunchError
from ...run.from_python import launch
from ...run.local.devices import VISIBLE
from .finding import LATE

COPY, HOST_COPY = COPIES = ("copy", "copy in host memory")
"""No backends: what all ranks take to copy their tensor at once (those on GPUs: to the host and back); and to copy as
much in the host's memory, where tensors lie on GPUs."""
_ROUNDS = 3
_BEGINS = "\x00begins: "
_MOST_CALLS = 20_000
_CHECKED_ELEMS = 4 << 20


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        contestants: backends and COPIES; the first is a backend, over which the ranks also agree.
        calls: operations, each with the bytes of the whole tensor.
        seconds: how long a contestant's turns last for each of them, about.
        timeout_s: until a rank that does not get on is ended.
    """

    contestants: tuple[str, ...]
    calls: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    device: str = "cpu"
    seconds: float = 0.3
    timeout_s: float = 120.0


class BackendError(LaunchError):
    """A backend failed: its name, and why. `is_late`: it gave no answer in time."""

    def __init__(self, backend: str, reason: str, *, is_late: bool) -> None:
        super().__init__(reason)
        self.backend, self.is_late = backend, is_late


def measure(plan: Plan, ranks: int, show: Callable[[str], object] = lambda text: None) -> list[dict[str, float]]:
    """For each of the plan's calls, the seconds that it takes on the slowest rank, by contestant.

    `show` gets a line about what begins.

    Raises:
        BackendError: one of the backends failed.
        LaunchError: no rank can be started from here.
    """
    said = _Said(show)
    on_gpus = plan.device == "cuda" or "nccl" in plan.contestants
    visible = os.environ.get(VISIBLE) if on_gpus else ""
    try:
        with contextlib.redirect_stdout(said):  # what the launcher and all ranks print then comes here
            found = launch(measure_here, nprocs=ranks, args=(plan, visible), cpu=True, oversubscribe=True)
    except LaunchError as error:
        if not said.getvalue():
            raise
        backend = (said.begun or plan.contestants[0]).split()[0]
        is_late = error.exit_code == 128 + signal.SIGALRM
        raise BackendError(backend, LATE.format(plan.timeout_s) if is_late else said.cause(), is_late=is_late) from None
    return found[0]


class _Said(io.StringIO):
    """What the job prints. `begun`: what rank 0 began last."""

    begun = ""

    def __init__(self, show: Callable[[str], object]) -> None:
        super().__init__()
        self._show = show

    def write(self, text: str) -> int:
        count = super().write(text)
        _, mark, last = self.getvalue().rpartition("\n")[0].rpartition(_BEGINS)
        if mark:
            self.begun = last.partition("\n")[0]
            self._show(self.begun)
        return count

    def cause(self) -> str:
        """The launcher's line about the first failure."""
        lines = [line.removeprefix("photinus: ") for line in self.getvalue().splitlines()]
        return next((line for line in lines if line.startswith("rank ")), lines[-1])


def measure_here(plan: Plan, visible: str | None) -> list[dict[str, float]]:
    """Measures, as one of the ranks. `visible`: CUDA_VISIBLE_DEVICES of who asks; None: it is not set there."""
    # The launcher hid the GPUs, for it would give each rank one of its own: ranks may share them here.
    os.environ.pop(VISIBLE, None)
    os.environ.update({} if visible is None else {VISIBLE: visible})
    rank = int(os.environ["RANK"])

    def begin(*what: object) -> None:
        # Nobody handles the signal, so it ends a rank in C++ too, which takes no exception while it waits.
        signal.setitimer(signal.ITIMER_REAL, plan.timeout_s)
        if rank == 0:
            print(_BEGINS + " ".join(map(str, what)), flush=True)

    begin(plan.contestants[0], "starts")  # importing torch may take as long as it likes, but not for ever
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.disable()
    members: dict[str, _Member] = {}
    for name in plan.contestants:
        begin(name, "starts")
        members[name] = _Member(name, plan, rank)
    agreeing = next(iter(members.values())).device

    def turn(name: str, calls: int) -> float:
        begin(name, *call)
        seconds = torch.tensor(members[name].run(calls), dtype=torch.float64, device=agreeing)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    found = []
    for call in plan.calls:
        for name, member in members.items():
            begin(name, *call)
            member.prepare(*call)
        calls = {}
        for name in members:
            first = turn(name, 1)
            second = turn(name, max(1, min(50, int(plan.seconds / _ROUNDS / 5 / first))))
            calls[name] = max(2, min(_MOST_CALLS, int(plan.seconds / _ROUNDS / second)))
        rounds = [{name: turn(name, calls[name]) for name in members} for _ in range(_ROUNDS)]
        found.append({name: statistics.median(times[name] for times in rounds) for name in members})
    dist.destroy_process_group()
    return found


class _Member:
    """A contestant in this rank: its group, its tensors, and the call to measure."""

    def __init__(self, name: str, plan: Plan, rank: int) -> None:
        import torch
        import torch.distributed as dist

        self._name, self._dtype = name, getattr(torch, plan.dtype)
        self.device = torch.device("cpu")
        if name == "nccl" or (plan.device == "cuda" and name != HOST_COPY):
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group(name)
        is_default = name in (plan.contestants[0], *COPIES)
        self._group: Any = dist.group.WORLD if is_default else dist.new_group(backend=name)
        # One thread does not fill the channels of a server's memory.
        self._threads = max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()) if name == HOST_COPY else 1
        self._call: Callable[[], object] = lambda: None

    def prepare(self, operation: str, size_bytes: int) -> None:
        """Makes tensors for an operation, of which the whole one has so many bytes, and looks whether it adds right."""
        import torch
        import torch.distributed as dist

        self._call = lambda: None  # frees the tensors before
        elems, ranks, group = size_bytes // self._dtype.itemsize, self._group.size(), self._group
        offered = getattr(group, "allocate_tensor", None) if self.device.type == "cpu" else None

        def zeros(count: int) -> torch.Tensor:
            if offered is None or self._name in COPIES:
                return torch.zeros(count, dtype=self._dtype, device=self.device)
            tensor: torch.Tensor = offered((count,), dtype=self._dtype)
            return tensor.zero_()

        whole = zeros(elems)
        if self._name == COPY and self.device.type == "cuda":
            self._call = through_host(whole)
            return
        keeps_size = self._name in COPIES or operation == "all_to_all"
        part = zeros(elems if keeps_size else elems // ranks)
        if operation == "all_reduce" and self._name not in COPIES:
            ones = zeros(min(elems, _CHECKED_ELEMS)).fill_(1)
            dist.all_reduce(ones, group=group)
            if not bool((ones == ranks).all()):
                raise CollectiveError(f"the sum of {ranks} ones came out as {ones.min().item()} to {ones.max().item()}")
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "all_to_all": lambda: dist.all_to_all_single(part, whole, group=group),
        }
        self._call = (lambda: part.copy_(whole)) if self._name in COPIES else calls[operation]

    def run(self, calls: int) -> float:
        """The seconds of one call, a mean over these calls after a tenth as many to warm up."""
        import torch
        import torch.distributed as dist

        settle: Callable[[], object] = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        torch.set_num_threads(self._threads)
        for _ in range(calls // 10 + 1):
            self._call()
        settle()
        dist.barrier(self._group)
        start = time.perf_counter()
        for _ in range(calls):
            self._call()
        settle()
        seconds = (time.perf_counter() - start) / calls
        torch.set_num_threads(1)
        return seconds


_CHUNK_BYTES, _PLACES = 2 << 20, 8
"""Chunks large enough for Python to queue them faster than they are copied, in as much memory as a reduction takes."""


def through_host(tensor: Any) -> Callable[[], object]:
    """A call that copies a GPU's tensor to locked memory of the host and back, chunk by chunk, both ways at once.

    The least that carries it over the link both ways, as each rank does in an all_reduce through the host: nothing is
    added, nobody is waited for. The host only queues it.
    """
    import torch

    device: Any = torch.cuda if tensor.is_cuda else torch.cpu  # the CPU's streams and events do nothing
    parts = tensor.view(-1).view(torch.uint8).split(_CHUNK_BYTES)
    ring = torch.empty(_PLACES, _CHUNK_BYTES, dtype=torch.uint8, pin_memory=tensor.is_cuda)
    out, back = device.Stream(), device.Stream()
    landed, returned = ([device.Event() for _ in range(_PLACES)] for _ in range(2))

    def call() -> None:
        for number, part in enumerate(parts):
            place = number % _PLACES
            there = ring[place, : part.numel()]
            with device.stream(out):
                out.wait_event(returned[place])
                there.copy_(part, non_blocking=True)
                landed[place].record(out)
            with device.stream(back):
                back.wait_event(landed[place])
                part.copy_(there, non_blocking=True)
                returned[place].record(back)

    return call
