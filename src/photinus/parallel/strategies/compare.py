"""Do the ranks hold one model, and have they made the same steps? Asked before it is saved."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..exchange.agreement import place_in_group
from ..exchange.collectives import resolve_group
from ..exchange.verify_models import compare_parameters
from ..zero.step_facts import StepFacts, facts_of
from .choose import is_replicated, strategy_of, unwrap_compiled


def step_facts_of(models: Iterable[nn.Module]) -> list[StepFacts]:
    """Return what is noted of the steps of models that ranks step in parts ("zero1", "zero2", "zero3"), in order."""
    found = [facts for model in models for facts in facts_of(model.parameters())]
    return list(dict.fromkeys(found))


def compare_ranks(models: Iterable[nn.Module], when: str) -> None:
    """Compares weights that all ranks hold (by digests: one read of them) and the steps that ranks made; all call it.

    Models that were wrapped with check_ranks=False and plain ones are left out.

    Args:
        when: begins the message, as in "before saving x.pt ".

    Raises:
        ModelMismatchError: they differ; on all ranks, says where.
    """
    _, world_size = place_in_group()
    if world_size == 1:
        return
    wrapped = [unwrap_compiled(model) for model in models]
    for facts in step_facts_of(wrapped):
        facts.compare(saving=True)
    for model in wrapped:
        if is_replicated(model, world_size):
            ignored: set[str] = getattr(model, "parameters_to_ignore", set())
            pairs = strategy_of(model).unwrap(model).named_parameters()
            compare_parameters([(n, p.detach()) for n, p in pairs if n not in ignored], resolve_group(None), when)
