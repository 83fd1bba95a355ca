"""What is said when parameters got no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ...world.ranks import name_ranks
from .gradient_memory import Slot

__all__ = ["changed_graph_text", "missing_text", "other_ranks_text"]

_NAMES_SHOWN = 40


def missing_text(rank: int, missing: Sequence[Slot], total: int, path: str, *, static_graph: bool = False) -> str:
    """Names the parameters and says what to do.

    The sentences that torch's class has for this are part of it: people search for them.

    Args:
        rank: this process's rank in the group.
        missing: the parameters without gradient.
        total: number of parameters that are reduced.
        path: class of the wrapped module.
        static_graph: whether the model was declared to use the same parameters in every step.
    """
    shown = [
        f"  {slot.name} {list(slot.parameter.shape)}" + ("" if slot.parameter.requires_grad else " (frozen since)")
        for slot in missing[:_NAMES_SHOWN]
    ]
    if len(missing) > _NAMES_SHOWN:
        shown.append(f"  and {len(missing) - _NAMES_SHOWN} more")
    names = "\n".join(shown)
    modules = sorted({slot.name.rpartition(".")[0] or "the model itself" for slot in missing})[:5]
    static = (
        "before starting a new one. This error indicates that your training graph has changed in this iteration, "
        "e.g., one parameter is used in first iteration, but then got unused in the second iteration. this is not "
        "compatible with static_graph set to True.\n"
        if static_graph
        else "before starting a new one.\n"
    )
    indices = " ".join(str(slot.index) for slot in missing)
    level = get_debug_level()
    debug = (
        "The parameters are named above; to have torch say more, set the environment variable TORCH_DISTRIBUTED_DEBUG "
        "to either INFO or DETAIL."
        if level == DebugLevel.OFF
        else f"Parameters which did not receive grad for rank {rank}: {', '.join(s.name for s in missing)}"
    )
    return (
        f"rank {rank}: {len(missing)} of {total} parameters of {path} got no gradient in this backward:\n"
        f"{names}\n"
        f"They belong to {', '.join(modules)}. All parameters of a wrapped model are averaged over the ranks, so each "
        f"needs a gradient. What to do: see that all `forward` function outputs participate in calculating loss, and "
        f"call backward once per forward (earlier ones inside no_sync()); freeze them (requires_grad_(False)) before "
        f"wrapping if they are not trained; or, if it changes from step to step which ones are used, enable that by "
        f"passing the keyword argument `find_unused_parameters=True`.\n"
        f"In the words of torch's class: Expected to have finished reduction in the prior iteration {static}"
        f"Parameter indices which did not receive grad for rank {rank}: {indices}\n{debug}"
    )


def other_ranks_text(rank: int, ranks: Sequence[int]) -> str:
    """For a rank on which all went well, when others failed."""
    return (
        f"rank {rank}: the backward of {name_ranks(ranks)} went wrong "
        f"(parameters without gradient, or an exception; the error there says more), so this backward's gradients are "
        f"not the average over all ranks."
    )


def changed_graph_text(rank: int, slot: Slot, learned: int) -> str:
    """For a gradient that a graph declared static did not have when it was learned."""
    was = "got no gradient" if learned == 0 else f"got {learned} gradients"
    return (
        f"rank {rank}: Your training graph has changed in this iteration, but static_graph=True promises that it does "
        f"not: parameter {slot.name} {was} in the first backward, and one more now. Leave static_graph out, or pass "
        f"find_unused_parameters=True instead if it changes which parameters are used."
    )
