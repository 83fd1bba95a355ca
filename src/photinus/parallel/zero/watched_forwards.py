"""Forwards of split models: the order of their units; writes into parameters, which would be lost; second gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakIdKeyDictionary

from ...errors import PhotinusError
from ..exchange.tensors import tensors_in
from .shard_units import own_modules
from .split_states import is_split
from .step_facts import AVERAGED

_ORDER = "photinus_unit_order"
_MASK = (1 << 53) - 1  # a float64 carries it
_split_parameters: Any = WeakIdKeyDictionary()  # the parts that ranks hold -> the strategy


def unit_order(model: nn.Module) -> int:
    """A digest of the units that the forwards of a split model have used so far, in their order; 0 for other models.

    Ranks gather in the order of their forwards, so they have to use the same ones.
    """
    return int(vars(model).get(_ORDER, 0))


def refuse_renorm(model: nn.Module, strategy: str) -> None:
    """Refuses embeddings that scale their rows in forward, where that would be lost. Raises ValueError."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"strategy {strategy!r}: {name or 'the model'} ({type(module).__name__}) has max_norm, by which "
                f"forward writes into its weight on each rank alone. Leave max_norm out, and scale the weight after "
                f"steps."
            )


def watch_forwards(model: nn.Module, units: Sequence[nn.Module], strategy: str) -> None:
    """Notes the order in which forwards use the units, and refuses writes into parameters, and second gradients.

    Call it after `fully_shard`, whose hooks gather before these, and drop after them.
    """
    vars(model)[_ORDER] = 0
    for number, unit in enumerate(units):
        own = _own_parameters(unit, units)
        versions: dict[str, tuple[int, int]] = {}
        unit.register_forward_pre_hook(_disable_dynamo(partial(_begin, model, number, own, versions)))
        unit.register_forward_hook(_disable_dynamo(partial(_end, own, versions, strategy)), prepend=True)
    model.register_forward_hook(_disable_dynamo(partial(_refuse_graphs, strategy)))
    for parameter in model.parameters():
        _split_parameters[parameter] = strategy
    _refuse_set_data()


def _own_parameters(unit: nn.Module, units: Sequence[nn.Module]) -> list[tuple[str, nn.Module, str]]:
    """The parameters of a unit that belong to none inside it: full name, module, name."""
    own = own_modules(unit, units)
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in unit.named_modules()
        if module in own
        for name in module._parameters
    ]


def _begin(
    model: nn.Module,
    number: int,
    own: Sequence[tuple[str, nn.Module, str]],
    versions: dict[str, tuple[int, int]],
    *_: Any,
) -> None:
    vars(model)[_ORDER] = (vars(model)[_ORDER] * 1000003 + number + 1) & _MASK
    versions.clear()
    versions.update(_versions(own))


def _end(
    own: Sequence[tuple[str, nn.Module, str]], versions: dict[str, tuple[int, int]], strategy: str, *_: Any
) -> None:
    now = _versions(own)
    changed = [name for name, version in versions.items() if now.get(name, version) != version]
    versions.clear()
    if changed:
        raise PhotinusError(
            f"this forward wrote into {changed[0]}, which strategy {strategy!r} has gathered for the time of the "
            f"forward: what is written is lost. Do it between two steps, under torch.no_grad(), or take "
            f'strategy="ddp".'
        )


def _refuse_graphs(strategy: str, _: nn.Module, __: Any, output: Any) -> None:
    def refuse(_: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise PhotinusError(
                f"this backward has create_graph=True (as a gradient penalty), and the gradient of a gradient needs "
                f'parameters that strategy {strategy!r} has dropped by then: take strategy="ddp" or "zero1".'
            )

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(refuse)  # type: ignore[no-untyped-call]


def _versions(own: Sequence[tuple[str, nn.Module, str]]) -> dict[str, tuple[int, int]]:
    found = {}
    for name, module, key in own:
        parameter = module._parameters.get(key)
        if parameter is not None and not is_split(parameter) and not parameter.is_inference():
            found[name] = (parameter._version, parameter.data_ptr())
    return found


def _refuse_set_data() -> None:
    """Makes `parameter.data = value` an error for split parameters: torch's DTensor ignores it without a word."""
    from torch.distributed.tensor import DTensor

    if "data" in vars(DTensor):
        return
    data: Any = torch.Tensor.data

    def set_data(parameter: Any, value: torch.Tensor) -> None:
        strategy = _split_parameters.get(parameter)
        if strategy is not None:
            raise TypeError(
                f"`parameter.data = value` does not change a parameter that strategy {strategy!r} has split. Write "
                f"`parameter.data.copy_(value)`; and keep its value by `parameter.detach().clone()`."
            )
        data.__set__(parameter, value)

    def get_data(tensor: Any) -> torch.Tensor:
        # torch counts changes in place of what `detach` returns as changes of the tensor itself; see `StepFacts`.
        is_watched = tensor in _split_parameters or AVERAGED in vars(tensor)
        found: torch.Tensor = tensor.detach() if is_watched else data.__get__(tensor)
        return found

    DTensor.data = property(get_data, set_data)  # type: ignore[assignment]
