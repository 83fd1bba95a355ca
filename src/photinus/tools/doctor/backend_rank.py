"""A rank in which backends are measured: it makes a group over each, and gives all a turn in each round.

So a busy moment of the machine slows all backends.
"""

from __future__ import annotations

import gc
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import CollectiveError
from .plan import COPY, Plan, send

_ROUNDS = 3
# A trial of a fifth of a turn says how many calls a turn has.
_TRIAL, _MOST_TRIALS, _MOST_CALLS = 1 / 5, 50, 20_000
_CHECKED_ELEMS = 4 << 20


def give_turns(plan: Plan) -> list[dict[str, float]]:
    """Return, for each call of the plan, the median over the rounds of the slowest rank's seconds, by contestant."""
    torch.set_num_threads(1)  # usually there is a rank for each core, and more threads would wait for each other
    gc.disable()  # a collection in one rank would hold up all
    contestants: dict[str, _Contestant] = {}

    def begin(*what: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, plan.timeout_s)  # ends the process, see `measure_here`
        if os.environ["RANK"] == "0":
            send(begins=[*map(str, what)])

    def turn(name: str, calls: int) -> float:
        begin(name, *call)
        # All ranks choose the next number of calls by this figure, so it is the same on all.
        seconds = torch.tensor(contestants[name].run(calls), dtype=torch.float64, device=agreeing)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    for name in plan.contestants:
        begin(name, "starts")
        contestants[name] = _Contestant(name, plan)
    agreeing = contestants["nccl"].device if plan.contestants[0] == "nccl" else "cpu"  # nccl has no CPU tensors
    turn_s, found = plan.seconds / _ROUNDS, []
    for call in plan.calls:
        counts = {}
        for name, contestant in contestants.items():
            begin(name, *call)
            contestant.prepare(*call)
        for name in contestants:
            trials = max(1, min(_MOST_TRIALS, int(turn_s * _TRIAL / turn(name, 1))))
            counts[name] = max(2, min(_MOST_CALLS, int(turn_s / turn(name, trials))))
        rounds = [{name: turn(name, counts[name]) for name in contestants} for _ in range(_ROUNDS)]
        found.append({name: statistics.median(times[name] for times in rounds) for name in contestants})
    dist.destroy_process_group()
    return found


class _Contestant:
    """A backend or COPY in this rank: its group, its tensors, and the call to measure."""

    def __init__(self, name: str, plan: Plan) -> None:
        self._is_copy, self._dtype = name == COPY, getattr(torch, plan.dtype)
        self.device = torch.device("cpu")
        if name == "nccl" or plan.device == "cuda":
            self.device = torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if not dist.is_initialized():
            dist.init_process_group(name)
        is_default = self._is_copy or name == plan.contestants[0]
        self._group: Any = dist.group.WORLD if is_default else dist.new_group(backend=name)
        self._call: Callable[[], object] = lambda: None

    def prepare(self, operation: str, size_bytes: int) -> None:
        """Make the tensors of an operation; `size_bytes` is the size of the whole one. Check that sums are right."""
        self._call = lambda: None  # frees the tensors before
        elems, ranks, group = size_bytes // self._dtype.itemsize, self._group.size(), self._group
        has_arena = self.device.type == "cpu" and not self._is_copy
        offered = getattr(group, "allocate_tensor", None) if has_arena else None

        def zeros(count: int) -> torch.Tensor:
            if offered is None:
                return torch.zeros(count, dtype=self._dtype, device=self.device)
            tensor: torch.Tensor = offered((count,), dtype=self._dtype)
            return tensor.zero_()

        whole = zeros(elems)
        if self._is_copy and self.device.type == "cuda":
            self._call = through_host(whole)
            return
        part = zeros(elems if self._is_copy or operation == "all_to_all" else elems // ranks)
        if operation == "all_reduce" and not self._is_copy:  # a backend that adds wrongly may be fast
            ones = zeros(min(elems, _CHECKED_ELEMS)).fill_(1)
            dist.all_reduce(ones, group=group)
            if not bool((ones == ranks).all()):
                wrong = f"{ones.min().item()} to {ones.max().item()}"
                raise CollectiveError(f"the sum of {ranks} ones came out as {wrong}")
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "all_to_all": lambda: dist.all_to_all_single(part, whole, group=group),
            COPY: lambda: part.copy_(whole),
        }
        self._call = calls[COPY if self._is_copy else operation]

    def run(self, calls: int) -> float:
        """Return the seconds of one call: the mean over `calls`, after a tenth as many to warm up."""
        wait: Callable[[], object] = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        for _ in range(calls // 10 + 1):
            self._call()
        wait()
        dist.barrier(self._group)
        start = time.perf_counter()
        for _ in range(calls):
            self._call()
        wait()
        return (time.perf_counter() - start) / calls


_CHUNK_BYTES, _PLACES = 2 << 20, 8
"""Chunks large enough for Python to queue them faster than they are copied, in as much memory as a reduction takes."""


def through_host(tensor: Any) -> Callable[[], object]:
    """Return a call that copies a GPU's tensor to locked memory of the host and back, in chunks, both ways at once.

    The least that carries it over the link both ways, as each rank does in an all_reduce through the host: nothing is
    added, nobody is waited for. The host only queues it.
    """
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
