"""Averages of a model's weights, which a loop keeps, and the statistics of the batch norms that belong to them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel

from ..parallel import strategy_of
from ..parallel.exchange.agreement import together
from ..parallel.strategies.fully_sharded import copy_split
from ..parallel.zero.split_parts import drop_gathered
from ..parallel.zero.split_states import own_part
from .checkpoint.states import unwrap
from .data.arguments import checking, explains_unknown, whole_number
from .forwards import Data, Forwards
from .session.session import require_session


class Average(AveragedModel):
    """An average of a model's weights: torch's AveragedModel, kept by the loop, under every strategy.

        from torch.optim.swa_utils import get_ema_multi_avg_fn
        average = photinus.Average(model, get_ema_multi_avg_fn(0.999))

    It goes into `state` of a Loop (`state={"average": average}`) or into `callbacks` of a Trainer. The loop updates it
    right after each step of the model's optimizer; of several optimizers, after the last that steps. Evaluate and
    predict with it as with a model. Its entry in a checkpoint has the names of torch's AveragedModel over the plain
    model. `photinus.load(out, average=plain)` loads it into a plain model, too, and `photinus export --average average`
    writes it.

    Args:
        model: wrapped or plain; not an earlier average. All ranks make the average.
        multi_avg_fn: of torch.optim.swa_utils: an exponential average (EMA) by get_ema_multi_avg_fn(decay); or a
            function of yours. Default: the mean of all updates (SWA).
        use_buffers: average the buffers too. Default: they are the model's.
        first_step, every: update in this step of the run, and in every Nth after it. Default: in each.
        validate: a Trainer validates with the average, once it was updated. Default: True.

    Raises:
        TypeError, ValueError: an argument that cannot be right.
    """

    source: nn.Module

    @explains_unknown
    def __init__(
        self,
        model: nn.Module,
        multi_avg_fn: Callable[..., None] | None = None,
        *,
        use_buffers: bool = False,
        first_step: int = 1,
        every: int = 1,
        validate: bool = True,
    ) -> None:
        with checking() as check:
            is_model = isinstance(model, nn.Module) and not isinstance(model, AveragedModel)
            check(is_model, f"an average of a {type(model).__name__}: needs a model", TypeError)
            function = f"multi_avg_fn={multi_avg_fn!r}: needs a function, such as get_ema_multi_avg_fn(0.999)"
            check(multi_avg_fn is None or callable(multi_avg_fn), function, TypeError)
            check.call(whole_number, "first_step", first_step, least=1)
            check.call(whole_number, "every", every, least=1)
        super().__init__(nn.Identity(), multi_avg_fn=multi_avg_fn, use_buffers=use_buffers)
        vars(self)["source"] = model  # not a submodule
        self.first_step, self.every, self.validate = int(first_step), int(every), bool(validate)
        self.module = _copy_of(model)
        # Of a loop's optimizers: those that step the model, and those that did since the last look, in this step.
        self._steppers, self._stepped, self._step = set[int](), set[int](), 0

    def begin(self, optimizers: Sequence[torch.optim.Optimizer], name: str) -> None:
        """A loop begins, after `photinus.wrap` has changed the model. Raises ValueError, with the average's name, if
        none of the loop's optimizers steps the model."""
        drop_gathered(self.source)
        if not int(self.n_averaged):
            self.module = _copy_of(self.source)
        own = {id(parameter) for parameter in self.source.parameters()}
        stepped = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
        self._steppers = {place for place, each in enumerate(stepped) if own & each}
        if not self._steppers:
            kind = type(unwrap(self.source)).__name__
            raise ValueError(
                f"{name} averages a {kind} that no optimizer of the loop steps: make it of the loop's model"
            )

    def optimizer_stepped(self, place: int, step: int) -> None:
        """Take the weights if this optimizer was the last of the model's to step in this step of a loop."""
        if place in self._steppers:
            self._stepped.add(place)
            self._step = step
            if self._stepped == self._steppers:
                self.catch_up()

    def catch_up(self) -> None:
        """Take the weights of a step that some of the model's optimizers made, if it is time.

        A loop calls it at each body's end, and what evaluates calls it: the other optimizers may not step.
        """
        due = self._step >= self.first_step and (self._step - self.first_step) % self.every == 0
        if self._stepped and due:
            self.update_parameters(self.source)
        self._stepped.clear()

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Take a model's weights into the average, each rank the part that it holds."""
        names, own = ("n_averaged", "avg_fn", "multi_avg_fn", "use_buffers"), _parts(self.module)
        mine: Any = SimpleNamespace(module=own, parameters=own.parameters, **{n: getattr(self, n) for n in names})
        AveragedModel.update_parameters(mine, _parts(unwrap(model)))


def _parts(module: nn.Module) -> Any:
    """Return the tensors of a module, as torch's AveragedModel asks for them; of those that are split, the parts."""
    drop_gathered(module)
    parts = [*map(own_part, module.parameters())]
    return SimpleNamespace(parameters=lambda: parts, buffers=module.buffers)


def _copy_of(model: nn.Module) -> nn.Module:
    inner = unwrap(model)
    return copy_split(inner) if strategy_of(inner).splits(inner) else copy.deepcopy(inner)


@explains_unknown
def update_bn(
    model: nn.Module,
    dataset: Data,
    *,
    batch_size: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> None:
    """Give the BatchNorm layers of an average running statistics of their own, by one pass over a data set.

    All ranks call it. The statistics are those of torch.optim.swa_utils.update_bn: the mean over all batches of their
    mean and unbiased variance. One rank computes each batch, so the result is the same at every number of ranks.
    Dropout is off.

    Args:
        model: the average, or any model.
        dataset: map-style data set; or torch's DataLoader, or a `photinus.loader`.
        batch_size: samples of a batch, which the statistics depend on. Default: as in `photinus.evaluate`.
        forward: `forward(model, batch)`. Default: model(batch), of a tuple or list its first part.

    Raises:
        ValueError: the data set is empty, or a batch has one value per channel.
    """
    session = require_session("photinus.update_bn")
    with together("preparing update_bn"):
        forwards = Forwards("update_bn", session, model, dataset, batch_size)
    layers: list[Any] = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    complaint = "the ranks were given different things for update_bn"
    forwards.compare({"layers": len(layers)}, complaint, "data for update_bn")
    # Of float32 values, which float64 adds up exactly in nearly all cases.
    sums = [torch.zeros(2, m.num_features, dtype=torch.float64, device=session.exchange_device) for m in layers]
    with _taking_statistics(layers) as newest:
        for statistics in forwards.rounds(forward or _forward_inputs, lambda *_: [*newest]):
            for total, each in zip(sums, statistics or (), strict=False):
                total += each.to(total.device)
    with together("update_bn"):
        if forwards.error is not None:
            raise forwards.error
    batches = -(-forwards.samples // forwards.batch_size)
    for layer, total in zip(layers, sums, strict=True):
        if session.world_size > 1:
            dist.all_reduce(total)
        layer.running_mean.copy_(total[0] / batches)
        layer.running_var.copy_(total[1] / batches)
        layer.num_batches_tracked.fill_(batches)


def _forward_inputs(model: nn.Module, batch: Any) -> Any:
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


@contextmanager
def _taking_statistics(layers: list[Any]) -> Iterator[list[Tensor]]:
    """Let batch norms normalize by each batch's statistics, which the list that is yielded has after a forward."""
    newest = [torch.empty(0)] * len(layers)

    def forward(place: int, layer: _BatchNorm, inputs: Tensor) -> Tensor:
        variance, mean = torch.var_mean(inputs.float(), [0, *range(2, inputs.dim())])
        newest[place] = torch.stack([mean, variance])
        return F.batch_norm(inputs, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)

    for place, layer in enumerate(layers):
        layer.forward = partial(forward, place, layer)
    try:
        yield newest
    finally:
        for layer in layers:
            del layer.forward
