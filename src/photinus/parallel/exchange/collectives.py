"""Calls of a process group, the same for gloo, nccl, photinus and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from ...errors import NotInitializedError, UnsuitableModelError

_AVERAGING_BACKENDS = frozenset({"photinus", "nccl"})
"""Backends whose ReduceOp.AVG we use. Gloo has it too, but it sums before it divides: 60000 + 60000 in float16 is
infinite. Everywhere else each rank divides first and SUM follows, as torch's DDP does."""


class Pending(Protocol):
    """An operation in flight, as torch.distributed returns it."""

    def wait(self) -> object:
        """Blocks until the operation is done; raises what went wrong."""

    def is_completed(self) -> bool:
        """Return whether a wait would return or raise immediately."""


def resolve_group(process_group: dist.ProcessGroup | None, device_mesh: Any = None) -> dist.ProcessGroup:
    """The group itself, that of a mesh of one dimension, or the default group where neither is given.

    Raises:
        NotInitializedError: there is no default group.
        UnsuitableModelError: both are given, or a mesh of several dimensions.
        ValueError: this process is not a member of the group.
    """
    if not dist.is_available():
        raise NotInitializedError("this build of torch has no torch.distributed, which exchanging gradients needs")
    if device_mesh is not None:
        if process_group is not None:
            raise UnsuitableModelError("Cannot specify both process_group and device_mesh arguments. Leave one out.")
        if getattr(device_mesh, "ndim", None) != 1:
            raise UnsuitableModelError(
                f"Only 1D device mesh is supported, but got {device_mesh}. Pass the dimension along which the model is "
                f"replicated: device_mesh[name]."
            )
        return cast(dist.ProcessGroup, device_mesh.get_group(mesh_dim=0))
    if process_group is None:
        if not dist.is_initialized():
            raise NotInitializedError(
                "there is no process group yet. Enter `with photinus.init():` (or call "
                "torch.distributed.init_process_group) before wrapping a model; one process needs it too."
            )
        return cast(dist.ProcessGroup, dist.group.WORLD)
    if not isinstance(process_group, dist.ProcessGroup) or dist.get_rank(process_group) < 0:
        raise ValueError(
            f"this process (rank {dist.get_rank() if dist.is_initialized() else '?'}) is not a member of the process "
            f"group given ({process_group!r}). Pass what new_group returned, and only on the ranks that it lists."
        )
    return process_group


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves tensors of `device` in this group, in lower case."""
    for entry in str(dist.get_backend_config(group)).lower().split(","):
        device_type, _, backend = entry.partition(":")
        if device_type == device.type and backend:
            return backend
    return str(dist.get_backend(group)).lower()


def rate_between_hosts(group: dist.ProcessGroup, device: torch.device) -> float:
    """Bytes a second into a host, as the engine measured them while the group formed, equal on all ranks; 0.0 where
    there is one host, where nothing could be measured, and on other backends."""
    communicator: Any = getattr(group, "communicator", None) if backend_name(group, device) == "photinus" else None
    return communicator.speeds[1] if communicator else 0.0


def control_device(group: dist.ProcessGroup) -> torch.device:
    """The device of small messages between the ranks: the CPU, unless the group serves only GPUs (nccl)."""
    config = str(dist.get_backend_config(group)).lower()
    if "cpu:" in config or ":" not in config:
        return torch.device("cpu")
    return torch.device(config.partition(":")[0], torch.accelerator.current_device_index())


def all_gather_bytes(data: bytes, group: dist.ProcessGroup, length: int | None = None) -> list[bytes]:
    """Every rank's bytes, by rank, on every rank. Called by all ranks of the group.

    Args:
        length: of the data, where it is equal on all ranks; else lengths are exchanged first.
    """
    device, size = control_device(group), group.size()
    if size == 1:
        return [data]
    lengths = [count for (count,) in gather_numbers([len(data)], group)] if length is None else [length] * size
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
    if not padded.numel():
        return [b""] * size
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(device)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return [part[:end].cpu().numpy().tobytes() for part, end in zip(gathered, lengths, strict=True)]


def gather_numbers(own: Sequence[float], group: dist.ProcessGroup, dtype: torch.dtype = torch.int64) -> list[list[Any]]:
    """Every rank's numbers, by rank, on every rank. Called by all ranks of the group, with as many numbers on each."""
    row = torch.tensor(own, dtype=dtype, device=control_device(group))
    rows = [torch.empty_like(row) for _ in range(group.size())]
    dist.all_gather(rows, row, group=group)
    return cast("list[list[Any]]", torch.stack(rows).tolist())


def wait_all(works: Sequence[Pending | None], after: Callable[[int], None] | None = None) -> None:
    """Waits for the exchanges in the order of their launch; raises the first error after it has let go of the rest.

    Args:
        works: None where nothing was launched.
        after: called with the index of each one that ended well, before the next is waited for.
    """
    first: BaseException | None = None
    for index, work in enumerate(works):
        if work is None:
            continue
        try:
            if first is None or work.is_completed():
                work.wait()
                if after is not None and first is None:
                    after(index)
        except Exception as error:  # noqa: BLE001 - raised below, when the others have been looked at
            first = first or error
    if first is not None:
        raise first


class GroupAverage:
    """Averages tensors over the ranks of a group, in place.

    Where the backend averages by itself (photinus adds in the order of the ranks and divides once), that is used;
    elsewhere each rank divides by the world size and the backend adds.

    Attributes:
        contributors: what the sum is divided by. The world size, unless ranks that ran out of input stand aside.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.world_size = group.size()
        self.contributors = self.world_size
        self.by_backend = backend_name(group, device) in _AVERAGING_BACKENDS

    def start(self, tensor: torch.Tensor, wire_dtype: torch.dtype | None = None) -> Pending:
        """Starts averaging `tensor` (any shape, contiguous); it must not be touched until the returned work is done.

        `wire_dtype` is the type in which values travel between hosts; for groups of backend photinus only.
        """
        op = dist.ReduceOp.AVG
        if not self.by_backend or self.contributors != self.world_size:
            tensor.mul_(1.0 / self.contributors)
            op = dist.ReduceOp.SUM
        if wire_dtype is not None:
            return cast(Pending, cast(Any, self.group).all_reduce_as(tensor, op, wire_dtype))
        return cast(Pending, dist.all_reduce(tensor, op=op, group=self.group, async_op=True))

    def __call__(self, tensor: torch.Tensor) -> None:
        """Averages `tensor` and waits for it."""
        self.start(tensor).wait()


def allocate(group: dist.ProcessGroup, elems: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, shape [elems]: in the group's own memory where it offers some (`allocate_tensor`), ordinary ones else.

    Tensors in the arena of backend photinus are reduced where they lie; others are staged.
    """
    offered: Any = getattr(group, "allocate_tensor", None) if device.type == "cpu" else None
    if offered is None or elems == 0:
        return torch.zeros(elems, dtype=dtype, device=device)
    if dtype.is_complex:  # the group knows real numbers
        real = cast(torch.Tensor, offered(2 * elems, dtype.to_real())).zero_()
        return torch.view_as_complex(real.view(elems, 2))
    return cast(torch.Tensor, offered(elems, dtype)).zero_()


def wait_for_callbacks(group: dist.ProcessGroup) -> None:
    """Waits for the callbacks of earlier collectives where a backend (photinus) runs them on threads of its own."""
    wait: Any = getattr(group, "wait_for_callbacks", None)
    if wait is not None:
        wait()
