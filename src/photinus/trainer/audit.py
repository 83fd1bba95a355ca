"""The audit of a loop over logical shards: a rank computes a batch of its neighbour again, and gradients are compared.

Bits do not depend on who computes. So where the digests of one batch's gradients differ between two ranks, one of them
computed wrong, and a third rank that computes the batch tells which. Every N steps each rank gives the first batch of
one of its shards to the rank before it, whose body computes that batch before its own one. Digests are compared before
the optimizer's step, since only then all gradients are there. The third rank's body runs after that step, with the
weights that the step began with.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..errors import FaultyHardwareError, PeerLostError, PhotinusError
from ..job.world import name_ranks
from ..parallel import DistributedDataParallel
from ..parallel.exchange.collectives import all_gather_bytes, control_device, gather_numbers, resolve_group
from ..parallel.exchange.tensors import map_tensors
from ..parallel.reducer.buckets import Bucket
from ..parallel.reducer.shard_sums import places_in
from .data.loader import Batch
from .record.digests import element_digest, steps_apart
from .session.progress import say
from .session.session import Session

_COST = 0.01
_FIRST = 16
_MASK = (1 << 63) - 1
_FACTOR = 0x9E3779B97F4A7C15
_LINE_BYTES = 64


@dataclass(frozen=True)
class Doubt:
    """Two ranks computed other gradients of one batch: its owner, and the rank before it, which computed it again.

    Attributes:
        by_owner, by_auditor: digests of the gradients, by parameter.
    """

    owner: int
    auditor: int
    by_owner: tuple[int, ...]
    by_auditor: tuple[int, ...]

    def third(self, ranks: int) -> int:
        """Return the rank that decides."""
        return (self.auditor - 1) % ranks

    def wrong(self, by_third: Sequence[int]) -> int | None:
        """Return which of both ranks is wrong; None where the third agrees with neither."""
        return {self.by_owner: self.auditor, self.by_auditor: self.owner}.get(tuple(by_third))

    @property
    def differing(self) -> list[int]:
        """Return the places of the parameters whose gradients differ."""
        pairs = zip(self.by_owner, self.by_auditor, strict=True)
        return [place for place, (owners, auditors) in enumerate(pairs) if owners != auditors]


class Audit:
    """The audits of one loop.

    Args:
        wrapped: the models.
        every: steps from one audit to the next; "auto": as many as take 1 % of the time.
        shards: into how many each batch is cut, at least one for each rank.
        scalers: those of losses.

    Attributes:
        place: which of each rank's shards was audited last.
        doubts: of the running step, in the order in which they are decided.
    """

    def __init__(
        self,
        session: Session,
        wrapped: Sequence[DistributedDataParallel],
        every: int | Literal["auto"],
        shards: int,
        scalers: Sequence[torch.amp.GradScaler],
    ) -> None:
        self._session, self._wrapped = session, wrapped
        self._rank, self._ranks = session.rank, session.world_size
        self._is_chosen, self._every = every == "auto", _FIRST if every == "auto" else every
        if session.world_size == 1:
            say(f"note: audit_every={every} makes no audits, since no other process is there")
        self._places = shards // session.world_size  # that all ranks have
        self._slots = [slot for model in wrapped for slot in model.reducer.slots]
        self._has_checked = False
        self._failure = ""  # text
        self._step, self._began_s, self._cost_s = 0, 0.0, 0.0  # of the last audit
        self._last = (0, time.perf_counter())  # step, and moment
        self._passed = ""  # the last audit that did, or the start; text
        self._data = b""  # this rank's batch, before its body ran; empty: no digests are compared in this step
        self._scalers, self._scales = scalers, list[dict[str, Any]]()  # with which the step began
        self._own: list[torch.Tensor] = []  # digests of gradients, by parameter
        self._again: list[torch.Tensor] = []  # those of the neighbour's batch
        self._weights: list[torch.Tensor] = []  # with which the step began
        self._decided: list[tuple[Doubt, int | None]] = []
        self.place = 0
        self.doubts: list[Doubt] = []

    def begin(self, step: int) -> None:
        """Steps begin after this one.

        Raises:
            PhotinusError: an audit has ended the loop.
        """
        if self._failure:
            raise PhotinusError(self._failure)
        self._last, self._data = (step, time.perf_counter()), b""
        unknown = f"the last audit before step {step}, where this start of the run began,"
        self._passed = self._passed or (unknown if step else "step 0")

    def check(self, batch: Batch) -> None:
        """Look at a run's first batch, which may be audited much later.

        Raises:
            TypeError: it holds what cannot travel.
        """
        if self._ranks == 1 or self._has_checked:
            return
        self._has_checked = True
        try:
            _read(_packed(batch), torch.device("cpu"))
        except Exception as error:
            raise TypeError(
                f"audit_every gives batches to other ranks, in files of torch with tensors, numbers, text, lists, "
                f"tuples and dicts. This batch ({type(batch.data).__name__}) has something else. Return one of these "
                f"from the collate function (a dict in place of a tokenizer's BatchEncoding), or name its class in "
                f"torch.serialization.add_safe_globals"
            ) from error

    def place_due(self, step: int) -> int | None:
        """Return which of each rank's shards is audited in this step; None for no audit. Equal on all ranks."""
        is_due = self._ranks > 1 and step % self._every == 0
        return step // self._every % self._places if is_due else None

    def exchange(self, step: int, place: int, batch: Batch) -> tuple[int, Batch]:
        """Give the batch of this rank's shard to the rank before it; return the next rank, and its batch.

        All ranks call it together.
        """
        self._step, self.place, self._began_s = step, place, time.perf_counter()
        self._data, self._scales = _packed(batch), [each.state_dict() for each in self._scalers]
        came = self._send(self._data, {rank: (rank - 1) % self._ranks for rank in range(self._ranks)})
        return (self._rank + 1) % self._ranks, _read(came, self._session.device)

    def computed_again(self) -> None:
        """The body has computed the neighbour's batch, whose gradients are there.

        Raises:
            PhotinusError: there are none.
        """
        if all(slot.parameter.grad is None for slot in self._slots):
            raise PhotinusError(
                "the body made no loop.backward for another rank's batch (audit_every), but gradients are compared. "
                "Leave this batch (loop.micro_batch is 0) out of your counts only"
            )
        self._again = self._digests()
        self._cost_s = time.perf_counter() - self._began_s

    def computed_own(self) -> None:
        """The body has computed this rank's batch, whose gradients are there."""
        self._own = self._digests()

    def _digests(self) -> list[torch.Tensor]:
        gradients = [slot.parameter.grad for slot in self._slots]
        return [self._none() if each is None else element_digest(each) for each in gradients]

    def _none(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._session.device)

    def watch(self, *, leaving: bool) -> None:
        """Begin or end to take digests of gradients before they are exchanged, which the last body of a step does."""
        first = 0
        self._own = [self._none() for _ in self._slots] if leaving else self._own
        for model in self._wrapped:
            assert model.shard_sums is not None
            model.shard_sums.before_exchange = partial(self._take, first) if leaving else None
            first += len(model.reducer.slots)

    def _take(self, first: int, bucket: Bucket) -> None:
        for slot, gradient in zip(bucket.slots, places_in(bucket, bucket.flat), strict=True):
            self._own[first + slot.index] = element_digest(gradient)

    def compare(self) -> None:
        """Compare the digests of all ranks, once in a step with an audit. All ranks call it.

        Raises:
            FaultyHardwareError: those of two ranks differ, and there is no third.
        """
        if not self._data or self.doubts:
            return
        began, count = time.perf_counter(), len(self._slots)
        numbers: list[int] = torch.stack([*self._own, *self._again]).tolist()
        own, again = numbers[:count], numbers[count:]
        cost_s = self._cost_s + time.perf_counter() - began
        step_s = (began - self._last[1] - self._cost_s) / max(1, self._step - self._last[0])
        row = [steps_apart(cost_s, step_s, _COST), _total(own), _total(again)]
        rows = gather_numbers(row, resolve_group(None))
        if self._is_chosen:
            # An audit that took long once, to compile or to wait, must not be the last one.
            self._every = min(4 * self._every, max(row[0] for row in rows))
        self._last = self._step, time.perf_counter()
        pairs = [((rank + 1) % self._ranks, rank) for rank in range(self._ranks)]
        pairs = [(owner, auditor) for owner, auditor in pairs if rows[owner][1] != rows[auditor][2]]
        if not pairs:
            self._data, self._passed = b"", f"step {self._step}"
            return
        found = [(tuple(row[:count]), tuple(row[count:])) for row in gather_numbers(numbers, resolve_group(None))]
        self.doubts = [Doubt(owner, auditor, found[owner][0], found[auditor][1]) for owner, auditor in pairs]
        if self._ranks == 2:
            self._decided = [(self.doubts[0], None)]
            self.fail()
        self._weights = [slot.parameter.detach().clone() for slot in self._slots]

    @torch.no_grad()
    def ask_third(self, doubt: Doubt) -> Batch | None:
        """Put the weights back, and send the batch to the third rank. Return the batch there. All ranks call it."""
        for slot, value in zip(self._slots, self._weights, strict=True):
            slot.parameter.copy_(value)
        for scaler, scale in zip(self._scalers, self._scales, strict=True):
            scaler.load_state_dict(scale)  # an infinite gradient has made it smaller
        third = doubt.third(self._ranks)
        came = self._send(self._data if self._rank == doubt.owner else b"", {doubt.owner: third})
        return _read(came, self._session.device) if self._rank == third else None

    def decide(self, doubt: Doubt) -> None:
        """Take what the third rank has computed. All ranks call it."""
        third = doubt.third(self._ranks)
        own = torch.stack(self._again).tolist()
        self._decided.append((doubt, doubt.wrong(gather_numbers(own, resolve_group(None))[third])))

    def fail(self) -> None:
        """Raise the error that names who is wrong. All ranks call it.

        Raises:
            FaultyHardwareError: this rank computes wrong, or nobody knows which rank does.
            PeerLostError: another rank computes wrong.
        """
        own = f"host {self._session.host}, {_name_of(self._session.device)}"
        places = [each.decode() for each in all_gather_bytes(own.encode(), resolve_group(None))]
        wrong = sorted({rank for _, rank in self._decided if rank is not None})
        if 2 * len(wrong) >= self._ranks:
            wrong = []  # so many faults at the same time are unlikely: the body itself differs
        doubt = next((doubt for doubt, rank in self._decided if rank is not None), self._decided[0][0])
        names = [self._slots[place].name for place in doubt.differing]
        more = f" and {len(names) - 1} more of {len(self._slots)}" if len(names) > 1 else ""
        ranks = wrong or sorted((doubt.owner, doubt.auditor))
        who = " and ".join(f"rank {rank} ({places[rank]})" for rank in ranks)
        others = sorted({doubt.owner, doubt.auditor, doubt.third(self._ranks)} - {*wrong})
        than = f" than {name_ranks(others)}, which agree" if wrong else ""
        if wrong:
            advice = (
                "A processor or memory there is faulty, or the body computes something else on that rank, or where "
                "loop.step_due is true. Start again without that host: the run goes on from its last checkpoint"
            )
        elif self._ranks == 2:
            advice = "Of two ranks nobody can tell which is wrong; of three, an audit can. Test the hardware of both"
        else:
            advice = (
                "The others do not agree on which is wrong: an operation of the model has other bits each time, or "
                "several ranks are faulty, or it is the body, which keeps a state of its own, asks for its rank, or "
                "under `if loop.step_due` computes something else or changes what forwards read beside weights"
            )
        self._failure = (
            f"audit of step {self._step}: {who} computed other gradients of the same batch{than} (parameter {names[0]}"
            f"{more}). {advice}. The step does not count. Those since {self._passed} may be wrong, too, and what was "
            f"saved after it"
        )
        raise (PeerLostError if wrong and self._rank not in wrong else FaultyHardwareError)(self._failure)

    def _send(self, data: bytes, targets: Mapping[int, int]) -> bytes:
        """Send bytes to this rank's target, if it has one, and return what came here. All ranks call it."""
        group, device = resolve_group(None), control_device(resolve_group(None))
        sizes = [size for (size,) in gather_numbers([len(data)], group)]
        to_ranks = [sizes[self._rank] * (targets.get(self._rank) == rank) for rank in range(self._ranks)]
        from_ranks = [sizes[rank] * (targets.get(rank) == self._rank) for rank in range(self._ranks)]
        own = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)].to(device)
        came = torch.empty(sum(from_ranks), dtype=torch.uint8, device=device)
        dist.all_to_all_single(came, own, from_ranks, to_ranks, group=group)
        return came.cpu().numpy().tobytes()


def _packed(batch: Batch) -> bytes:
    buffer = io.BytesIO()
    data = map_tensors(batch.data, _alike)
    torch.save({**vars(batch), "data": data}, buffer)
    return buffer.getvalue()


def _read(data: bytes, device: torch.device) -> Batch:
    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return Batch(**torch.load(io.BytesIO(data), map_location=place, weights_only=True))


def _alike(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of a tensor and its place in a cache line. Kernels may round by both.

    Of a view it has what lies between its elements, too, and not all that it is a view of.
    """
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        return tensor.detach().clone()
    first = tensor.data_ptr() % _LINE_BYTES // tensor.itemsize
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    copy = tensor.detach().new_empty(first + span)
    copy[first:] = tensor.detach().as_strided((span,), (1,))
    return copy.as_strided(tensor.shape, tensor.stride(), first).requires_grad_(tensor.requires_grad)


def _total(digests: Sequence[int]) -> int:
    """Return one number for many; it depends on their order."""
    total = 0
    for digest in digests:
        total = (total * _FACTOR + digest) & _MASK
    return total


def _name_of(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
