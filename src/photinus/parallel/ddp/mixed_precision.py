"""Forward and backward in low precision, parameters and gradients in full: `mixed_precision=` of the wrapper.

Each forward sees its parameters through a cast. Autograd turns the gradients back on their way through it, so the
parameters, their `.grad` and the optimizer never know; gradients that are accumulated are accumulated in full.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from ..exchange.tensors import map_tensors


class MixedPrecisionConfig(Protocol):
    """The attributes read from the given object: torch's `_MixedPrecision` has these, each a floating dtype or None.

    Optional: `cast_forward_inputs` (default True); `keep_low_precision_grads`, which must not be True.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None


class MixedPrecision:
    """Runs a module in low precision.

    Args:
        module: its floating buffers are cast at once, to `buffer_dtype`.

    Raises:
        ValueError: a dtype that is not a floating one, or an option that does not exist here.
        TypeError: not such a configuration.
    """

    def __init__(self, config: MixedPrecisionConfig, module: nn.Module, ignored: set[str]) -> None:
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(hasattr(config, name) for name in names):
            raise TypeError(f"mixed_precision needs an object with {', '.join(names)}, got a {type(config).__name__}")
        for name in names:
            dtype = getattr(config, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"mixed_precision: {name}={dtype!r} is not a floating dtype such as torch.bfloat16")
        if getattr(config, "keep_low_precision_grads", False):
            raise ValueError(
                "mixed_precision: keep_low_precision_grads=True is not possible, because torch wants param.grad in the "
                "dtype of the parameter, which stays in full precision; leave it out"
            )
        self.param_dtype = config.param_dtype
        self.reduce_dtype = config.reduce_dtype or config.param_dtype
        self._casts_inputs = bool(getattr(config, "cast_forward_inputs", True))
        self._cast_names = [
            name
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if name not in ignored and parameter.is_floating_point()
        ]
        if config.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if name not in ignored and buffer.is_floating_point():
                    buffer.data = buffer.to(config.buffer_dtype)
        if self.param_dtype is not None:
            for name, parameter in module.named_parameters():
                if name not in ignored and parameter.is_floating_point():
                    # Names by which code written for torch's class asks for the dtypes; they hold no copy.
                    parameter._mp_param = torch.empty(0, dtype=self.param_dtype)  # type: ignore[attr-defined]
                    parameter._fp_param = parameter.data  # type: ignore[attr-defined]

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`module(*inputs, **kwargs)` in low precision."""
        dtype = self.param_dtype
        if dtype is None:
            return module(*inputs, **kwargs)
        if self._casts_inputs:
            inputs, kwargs = map_tensors((inputs, kwargs), lambda t: t.to(dtype) if t.is_floating_point() else t)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        casts: dict[int, torch.Tensor] = {}
        for name in self._cast_names:
            parameter = parameters[name]
            if id(parameter) not in casts:
                casts[id(parameter)] = parameter.to(dtype)
        low = {name: casts[id(parameters[name])] for name in self._cast_names}
        return torch.func.functional_call(module, low, inputs, kwargs, tie_weights=False)
