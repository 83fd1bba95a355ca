"""A model's outputs for a data set, computed by all ranks together, in the order of the data set and with its bits.

After each round of blocks (see forwards.py) they travel, so no rank holds more than it was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..parallel.exchange.agreement import together
from .checkpoint.durable import DurableFile, replacing
from .data.arguments import explains_unknown
from .data.loader import Batch
from .forwards import Data, Forwards
from .session.session import require_session

Outputs = Any
"""A tensor, or a tuple, list or dict of them, each with a row per sample."""


@explains_unknown
def predict(
    model: nn.Module,
    dataset: Data,
    *,
    batch_size: int | None = None,
    forward: Callable[[nn.Module, Any], Outputs] | None = None,
    out: str | os.PathLike[str] | None = None,
    on_all_ranks: bool = False,
) -> Outputs | None:
    """Return the outputs of a model for a data set, in its order. Every rank must call it.

    During the call the model is unwrapped, in eval mode and without gradients. Then each module gets its mode back.

    Args:
        model: wrapped or plain model.
        dataset: map-style data set, torch's DataLoader over one, or a `photinus.loader`, whose collate_fn and workers
            are used. The order is that of the data set.
        batch_size: samples of one forward on one rank. Default: as for `photinus.evaluate`.
        forward: function forward(model, batch) that returns a tensor, or a tuple, list or dict of them, each with a row
            per sample. Default: `model(batch)`, or `model(inputs)` for a batch (inputs,) or (inputs, targets).
        out: file to write instead of returning anything: a NumPy array (.npy), which may be larger than memory. For
            outputs of one tensor; bfloat16 and 8-bit floats are written as float32. Rank 0 writes it, and replaces what
            was there.
        on_all_ranks: return the outputs on every rank, not only on rank 0.

    Returns:
        The outputs on rank 0 (on all ranks with `on_all_ranks`), on the CPU; None on other ranks, and with `out`.

    Raises:
        ValueError: the data set is empty, an output does not have one row per sample, outputs of different blocks do
            not fit together, or arguments or data differ between ranks.
        TypeError: an output is not a tensor, or a structure of tensors.
        PhotinusError: another rank failed; the message names it.
    """
    session = require_session("photinus.predict")
    with together("preparing to predict"):
        forwards = Forwards("predict", session, model, dataset, batch_size)
        if out is not None and on_all_ranks:
            raise ValueError("out= and on_all_ranks=True exclude each other: the file is the result")
        path = None if out is None else Path(out)
        if path is not None and session.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise ValueError(f"out={str(path)!r} is a folder, but a file is needed")
    alike = {"on_all_ranks": on_all_ranks, "out": path is not None}
    forwards.compare(alike, "the ranks were asked for different predictions", "data to predict")
    parts: list[Outputs] = []
    with ExitStack() as stack:
        take: Callable[[Outputs], object] = parts.append
        if path is not None and session.is_main:
            rows = forwards.attempt(partial(_open, path, forwards.samples, stack))
            take = rows.write if rows is not None else take
        with closing(forwards.rounds(forward or _forward, _checked)) as rounds:
            for part in rounds:
                forwards.share(part, take, everywhere=on_all_ranks)
        with together("predicting"):
            if forwards.error is not None:
                raise forwards.error
            found = _joined(parts) if parts else None
        with together("predicting"), stack:  # no rank failed: the file may take its place
            return found


def _forward(model: nn.Module, batch: Any) -> Outputs:
    batch = batch[0] if isinstance(batch, (tuple, list)) and len(batch) in (1, 2) else batch
    if not isinstance(batch, Tensor):
        raise TypeError(
            f"a batch of this data set is a {type(batch).__name__}: give forward=..., which takes (model, batch) and "
            f"returns the outputs"
        )
    return model(batch)


def _checked(outputs: Outputs, batch: Batch) -> Outputs:
    """Return copies of the outputs of a block, on the CPU."""
    if isinstance(outputs, Tensor):
        if outputs.dim() == 0 or outputs.shape[0] != batch.samples:
            raise ValueError(
                f"the model gave shape {list(outputs.shape)} for {batch.samples} samples, but one row per sample is "
                f"needed, [{batch.samples}, ...]"
            )
        # A copy: the next forward may write to the same memory, and a view keeps the memory of what it is a part of.
        return outputs.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
    if isinstance(outputs, Mapping):
        return {name: _checked(value, batch) for name, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return _like(outputs, [_checked(value, batch) for value in outputs])
    raise TypeError(
        f"the model gave a {type(outputs).__name__}, but a tensor, or a tuple, list or dict of tensors is needed: give "
        f"forward=..., which takes (model, batch) and returns that"
    )


def _like(outputs: Any, values: list[Outputs]) -> Outputs:
    """Return a tuple, a named one or a list of some values, as `outputs` is."""
    return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)


def _kind_of(outputs: Outputs) -> str:
    if isinstance(outputs, Tensor):
        return f"rows of shape {list(outputs.shape[1:])} and type {str(outputs.dtype).removeprefix('torch.')}"
    return f"a dict of {', '.join(map(str, outputs))}" if isinstance(outputs, dict) else f"{len(outputs)} parts"


def _check_same(kinds: Iterable[str]) -> None:
    if len(found := sorted({*kinds})) > 1:
        raise ValueError(
            f"outputs of different blocks do not fit together: {found[0]}, and {found[1]}. Give forward=..., which "
            f"returns the same structure, shape and type for each batch"
        )


def _joined(parts: list[Outputs]) -> Outputs:
    first = parts[0]
    _check_same(map(_kind_of, parts))
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    return _like(first, [_joined([*each]) for each in zip(*parts, strict=True)])


def _open(path: Path, samples: int, stack: ExitStack) -> _Rows:
    return _Rows(stack.enter_context(DurableFile(stack.enter_context(replacing(path)))), samples)


class _Rows:
    """A NumPy file, written row by row. (Not as a memory map: a full disk would end the process by SIGBUS.)"""

    def __init__(self, file: DurableFile, total: int) -> None:
        self._file, self._total = file, total
        self._kind = ""

    def write(self, outputs: Outputs) -> None:
        """Append the rows of a block."""
        if not isinstance(outputs, Tensor):
            raise TypeError("out= takes outputs of one tensor: give forward=..., which returns one of them")
        is_known = not outputs.is_floating_point() or outputs.dtype in (torch.float16, torch.float32, torch.float64)
        rows = (outputs if is_known else outputs.float()).contiguous().numpy()
        if not self._kind:
            self._kind = _kind_of(outputs)
            descr = np.lib.format.dtype_to_descr(rows.dtype)
            header = {"descr": descr, "fortran_order": False, "shape": (self._total, *rows.shape[1:])}
            np.lib.format.write_array_header_2_0(self._file, header)
        _check_same([self._kind, _kind_of(outputs)])
        self._file.write(rows.tobytes())
