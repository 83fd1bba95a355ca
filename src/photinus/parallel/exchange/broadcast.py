"""Tensors of one rank of a group, copied to all ranks in few large pieces.

A piece is a run of bytes, so tensors of all dtypes share it: a model of 400 tensors in three dtypes goes out in one
broadcast if it is smaller than a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import cast

import torch
import torch.distributed as dist

from .collectives import Pending, allocate
from .verify_models import hold_same_bytes

BROADCAST_PIECE_BYTES = 250 * 1024 * 1024
"""Size of a piece: the memory that a broadcast needs besides the tensors themselves."""

_ALIGNMENT_BYTES = 64


class Staging:
    """Room for one set of tensors in a flat piece of memory, and the broadcast of it.

    Made once and used again as long as the tensors keep shapes and dtypes (`fits`). It lies on `device`, the one
    that the group serves; the tensors may lie elsewhere.

    Attributes:
        places: where each tensor travels, in its shape and dtype.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._layout = [(t.shape, t.dtype) for t in tensors]
        # A backend that compares labels finds other tensors by it, also where these take as many bytes.
        self._label = ", ".join(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for shape, dtype in self._layout)
        offsets, end = [], 0
        for tensor in tensors:
            offsets.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._flat = allocate(group, end, torch.uint8, device)
        self.places = [
            self._flat[offset : offset + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
            for offset, t in zip(offsets, tensors, strict=True)
        ]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether this staging fits tensors of these shapes and dtypes."""
        return [(t.shape, t.dtype) for t in tensors] == self._layout

    @torch.no_grad()
    def start(self, tensors: Sequence[torch.Tensor], source: int = 0) -> Pending:
        """Sends those of the group's rank `source`; they lie in `places` when the work has been waited for."""
        if self.group.rank() == source:
            copy_each(self.places, tensors)
        with getattr(self.group, "labelled", nullcontext)(self._label):
            work = dist.broadcast(self._flat, group=self.group, group_src=source, async_op=True)
        return cast(Pending, work)

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Overwrites the tensors of every rank with those of the group's rank `source`. Blocks until it is done."""
        self.start(tensors, source).wait()
        if self.group.rank() != source:
            copy_each(tensors, self.places)


def copy_each(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    """Copies each tensor into the one at its place in `to`. On a GPU each dtype takes one kernel."""
    of_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, tensor in zip(to, source, strict=False):
        if target.is_conj() or target.is_neg():  # a lazy conjugate or negative, into which foreach cannot write
            target.copy_(tensor)
            continue
        targets, tensors = of_dtype.setdefault(target.dtype, ([], []))
        targets.append(target)
        tensors.append(tensor)
    for targets, tensors in of_dtype.values():
        torch._foreach_copy_(targets, tensors)


@torch.no_grad()
def broadcast_tensors(
    tensors: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    piece_bytes: int = BROADCAST_PIECE_BYTES,
    source: int = 0,
) -> None:
    """Overwrites the tensors of every rank with those of the group's rank `source`, in pieces of at most `piece_bytes`.

    Tensors in the host's memory are compared first: ranks with the same seed hold the same ones already, and a
    comparison needs no new memory, whose pages take longer than the copy.

    Args:
        tensors: the same number, shapes and dtypes on every rank, in the same order; any strides.
        device: the device that the group serves; the exchanged memory lies there.
        piece_bytes: memory that the exchange may take. A contiguous tensor above it is sent in slices; a
            non-contiguous one is staged whole.
        source: rank in the group.
    """
    if device.type == "cpu" and not any(t.is_quantized for t in tensors) and hold_same_bytes(tensors, group):
        return
    for piece in _pieces(tensors, piece_bytes):
        Staging(piece, group, device).broadcast(piece, source)


def _pieces(tensors: Sequence[torch.Tensor], piece_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors, and of slices of large tensors, of at most `piece_bytes` each."""
    piece: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        whole = tensor.detach()
        fits = whole.nbytes <= piece_bytes or not whole.is_contiguous()
        parts = [whole] if fits else torch.split(whole.view(-1), max(1, piece_bytes // whole.element_size()))
        for part in parts:
            if piece and size + part.nbytes > piece_bytes:
                yield piece
                piece, size = [], 0
            if part.nbytes:
                piece.append(part)
                size += part.nbytes
    if piece:
        yield piece
