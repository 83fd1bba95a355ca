"""Do all ranks hold the same weights? Digests of parameters, and the comparison of all of them by one exchange.

A digest is the sum of the bytes' 64-bit words, modulo 2**64: it runs at the speed of memory on any device, and what it
has to find are other values (another learning rate, another optimizer, a weight that was set), not forgeries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...errors import ModelMismatchError
from ...job.world import name_ranks
from .collectives import control_device
from .tensors import dense_strides
from .verify_models import ranks_by

_WORD_BYTES = 8
_PIECES = 32
_LEAST_ELEMS = 64 * 1024


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor of any shape and dtype: int64, no dimension, on its device. Equal bytes, equal digests.

    Bytes in the order in which they lie: strides are equal on all ranks, which is compared when a model is wrapped.
    """
    return _digest(_flat(tensor))


def compare_parameters(named: Sequence[tuple[str, torch.Tensor]], group: dist.ProcessGroup, when: str = "") -> None:
    """Compares the values of all parameters between the ranks; every rank of the group calls it.

    Args:
        named: (name, parameter) pairs, the same names, shapes and dtypes in the same order on every rank.
        group: the ranks.
        when: begins the message, as in "after step 3 ".

    Raises:
        ModelMismatchError: on every rank, naming the first parameter that differs, and the ranks.
    """
    if not named:
        return
    own = torch.stack([digest_of(parameter).cpu() for _, parameter in named]).to(control_device(group))
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    digests = torch.stack(gathered).cpu()
    differing = (digests != digests[0]).any(dim=0).nonzero().flatten().tolist()
    if not differing:
        return
    name, parameter = named[differing[0]]
    more = f" (and {len(differing) - 1} more of {len(named)} parameters)" if len(differing) > 1 else ""
    raise ModelMismatchError(
        f"{when}the ranks hold different weights: {_sides(digests[:, differing[0]].tolist())} in parameter {name} "
        f"{list(parameter.shape)}{more}; seen from rank {group.rank()}. All ranks start from one model and make the "
        f"same steps, so something was done on some ranks only: another learning rate or optimizer, a step left out, "
        f"weights that were loaded or changed. Do it on all ranks, or on none. Where weights are to differ (local SGD, "
        f"processors that round differently), pass check_ranks=False to DistributedDataParallel or photinus.wrap, and "
        f"compare_parameters=False to a photinus.Loop, which saves no checkpoint of this."
    )


def _sides(by_rank: Sequence[int]) -> str:
    """Who holds what; who is wrong can be told only where most ranks agree."""
    sides = ranks_by(by_rank)
    most = max(sides.values(), key=len)
    others = [rank for rank in range(len(by_rank)) if rank not in most]
    if len(most) > len(others):
        return f"{name_ranks(others)} {'have' if len(others) > 1 else 'has'} other values than {name_ranks(most)}"
    return f"{' and '.join(map(name_ranks, sides.values()))} have different values"


class ParameterPieces:
    """The parameters cut into pieces of about equal bytes, so that all are looked at in turn at little cost each time.

    Args:
        parameters: the same shapes and dtypes in the same order on every rank.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        quota = sum(p.nbytes for p in parameters) / _PIECES
        self._pieces: list[list[tuple[int, int, int]]] = []
        filled = quota
        for index, parameter in enumerate(parameters):
            step = max(_LEAST_ELEMS, -(-int(quota / parameter.element_size()) // _WORD_BYTES) * _WORD_BYTES)
            for begin in range(0, parameter.numel(), step):
                if filled >= quota:
                    self._pieces.append([])
                    filled = 0
                end = min(begin + step, parameter.numel())
                self._pieces[-1].append((index, begin, end))
                filled += (end - begin) * parameter.element_size()

    def __len__(self) -> int:
        return len(self._pieces)

    def digest(self, number: int) -> int:
        """The digest of one piece; numbers go round. Waits for the device."""
        parts = self._pieces[number % len(self._pieces)]
        digests = [_digest(_flat(self._parameters[index])[begin:end]) for index, begin, end in parts]
        total = 0
        for digest in torch.stack(digests).tolist() if digests else ():  # one wait for a GPU, not one for each
            total = 31 * total + digest
        return total % 2**64

    def digest_of_all(self) -> int:
        """The digest of all pieces. Waits for the device."""
        total = 0
        for number in range(len(self._pieces)):
            total = (31 * total + self.digest(number)) % 2**64
        return total


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order in which they lie: one dimension, no copy unless there are gaps between them."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    if dense_strides(tensor) == tensor.stride():
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.reshape(-1)


def _digest(flat: torch.Tensor) -> torch.Tensor:
    """The digest of a tensor of one dimension without gaps."""
    data = flat.view(torch.uint8) if flat.numel() else flat.new_zeros(0, dtype=torch.uint8)
    if data.storage_offset() % _WORD_BYTES:  # where it lies must not matter: it may lie elsewhere on another rank
        data = data.clone()
    whole = data.numel() // _WORD_BYTES * _WORD_BYTES
    return data[:whole].view(torch.int64).sum() + data[whole:].sum(dtype=torch.int64)
