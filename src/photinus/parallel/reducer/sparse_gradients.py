"""Averages of sparse gradients (embeddings with `sparse=True`) over the ranks, by dense collectives only.

Ranks touch different rows, so the numbers of entries differ. The ranks first exchange what each has, then their
entries padded to the longest list; each rank concatenates the lists in the order of the ranks and adds up equal
indices. All ranks so hold the same bits, on any backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..exchange.collectives import GroupAverage, gather_numbers

_NONE, _SPARSE, _DENSE = 0, 1, 2


@torch.no_grad()
def average_sparse(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], average: GroupAverage
) -> list[torch.Tensor | None]:
    """Averages each parameter's gradient over the ranks; all ranks call it with the same parameters.

    Args:
        parameters: one per gradient; only shape, dtype and device are used.
        gradients: sparse, dense or None (counts as zero). A parameter whose gradient is dense on any rank (its
            weights are tied to a dense layer) gets a dense average.

    Returns:
        The averages, coalesced where sparse; None where no rank has a gradient.
    """
    if not parameters:
        return []
    # Equal indices are added here, so that fewer entries travel.
    coalesced = [g.coalesce() if g is not None and g.is_sparse else g for g in gradients]
    own = [number for gradient in coalesced for number in _state(gradient)]
    # All ranks see all states, so all take the same branch below.
    rows = gather_numbers(own, average.group)
    by_rank = [[row[begin : begin + 3] for begin in range(0, len(row), 3)] for row in rows]
    averages: list[torch.Tensor | None] = []
    for index, (parameter, gradient) in enumerate(zip(parameters, coalesced, strict=True)):
        kinds = {state[index][0] for state in by_rank}
        if kinds == {_NONE}:
            averages.append(None)
        # Rows are exchanged along one sparse dimension. What has others, or is dense on one rank, goes dense for all.
        elif _DENSE in kinds or any(state[index][2] != 1 for state in by_rank if state[index][0] == _SPARSE):
            # Contiguous on all ranks: with strides of their own, ranks would add unlike elements.
            dense = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if gradient is not None:
                dense.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
            average(dense)
            averages.append(dense)
        else:
            averages.append(_average_rows(parameter, gradient, [state[index][1] for state in by_rank], average))
    return averages


def _state(gradient: torch.Tensor | None) -> list[int]:
    """The numbers that a rank announces: kind, number of entries, number of sparse dimensions."""
    if gradient is None:
        return [_NONE, 0, 0]
    if not gradient.is_sparse:
        return [_DENSE, 0, 0]
    return [_SPARSE, gradient._nnz(), gradient.sparse_dim()]


def _average_rows(
    parameter: torch.Tensor, gradient: torch.Tensor | None, counts: Sequence[int], average: GroupAverage
) -> torch.Tensor:
    """The average of gradients whose rows (first dimension) are sparse; `counts` has each rank's number of rows."""
    # Padded, because dense collectives need equal sizes.
    longest = max(counts)
    rows = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
    values = torch.zeros((longest, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    if gradient is not None:
        rows[: gradient._nnz()] = gradient.indices()[0]
        values[: gradient._nnz()] = gradient.values()
    all_rows = [torch.empty_like(rows) for _ in counts]
    all_values = [torch.empty_like(values) for _ in counts]
    # Zero on all ranks or on none, so all leave the exchange out together.
    if longest:
        dist.all_gather(all_rows, rows, group=average.group)
        dist.all_gather(all_values, values, group=average.group)
    indices = torch.cat([r[:count] for r, count in zip(all_rows, counts, strict=True)])
    entries = torch.cat([v[:count] for v, count in zip(all_values, counts, strict=True)])
    # Equal indices are added in the order of the ranks, which is the same on all of them.
    total = torch.sparse_coo_tensor(indices[None], entries, parameter.shape, check_invariants=False).coalesce()
    return total.mul_(1.0 / average.contributors)
