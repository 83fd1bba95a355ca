"""The books of a loop's step: its backwards, losses and optimizer steps.

A step on gradients that the loop did not make is an error, because they lack their weight, and the log their loss. A
step on gradients of an earlier body is an error, too: only `accumulate` adds them up. A checkpoint between two bodies
has no gradients, and a run that goes on from it would lose them.

Each step is also noted for the comparison of the ranks: its options, whether gradients of the last step were kept, and
which parts of parameters something else has changed since (torch counts changes in place): no other rank has a copy of
these to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..errors import PhotinusError
from ..optimizer_steps import StepWatcher, unwatch_steps, watch_steps
from ..parallel.ddp.sync_batch_norm import Part
from ..parallel.zero.split_states import is_split, own_part
from .averages import Average
from .data.loader import Batch, running_weight
from .logical_shards import ShardMeans
from .record.step_clock import StepClock
from .record.step_losses import ShardLosses, StepLosses
from .session.replicas import Replicas
from .session.session import require_session
from .weighted_means import WeightedMeans, zero_gradients


@dataclass(slots=True)
class _Gradients:
    """The gradients that an optimizer has, known by the one of its first parameter with a gradient.

    Attributes:
        parameter: this parameter, which has a gradient.
        body: the first body that made them.
        version: of the gradient, which changes in place count up.
        is_used: whether the optimizer has stepped with them, or they were set to zeros.
        tensor: the gradient, while it lives; None in the body that noted it.
    """

    parameter: Any
    body: int
    version: int
    is_used: bool = False
    tensor: Any = None

    @property
    def is_gone(self) -> bool:
        """Return whether they were cleared, by None or by zeros."""
        gradient = self.parameter.grad
        return gradient is None or (gradient._version != self.version and (self.is_used or not bool(gradient.any())))


class StepLedger(StepWatcher):
    """Runs the backwards of a loop, and knows for each optimizer which of them it has used.

    Args:
        optimizers: that the loop trains; their steps are looked at while a body runs.
        losses: takes those of backwards.
        clock: takes the times of backwards.
        replicas: takes what is noted of each step.
        means: knows the factors of losses.
        averages: take the weights after each step in a body; after the body, if only an optimizer inside of another was
            seen to step (Lookahead moves the weights after that).
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        averages: Sequence[Average],
        losses: StepLosses | ShardLosses,
        clock: StepClock,
        replicas: Replicas,
        means: WeightedMeans | ShardMeans,
    ) -> None:
        self._optimizers, self._averages = optimizers, averages
        self._losses, self._clock, self._replicas = losses, clock, replicas
        self._means = means
        self._stepped_inside: set[int] = set()  # in the running body
        self._has_begun = False
        self._hooks: list[Any] = []
        self._batch: Batch | None = None  # of the running body
        self._batches = 1  # of the running step
        self._may_step = True  # in the running body
        self._step = 0  # of the loop
        self._body, self._first_body = 0, 0  # the running one, from 1, and the first one of its step
        # By optimizer: its gradients; those cleared inside the running step; and what its last step left behind:
        # whether its gradients were still there at the next backward, and its split parameters with their versions.
        self._gradients: dict[int, _Gradients] = {}
        self._cleared: set[int] = set()
        self._kept: dict[int, bool] = {}
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}
        # Backwards of the running step; by optimizer those before its last step in it.
        self._made, self._used = 0, [0] * len(optimizers)
        self._evaluations = 0  # of the closure of the step that is under way
        self.rate: Any = None  # of the first optimizer's last step: its scheduler may have moved on since

    def begin(self) -> None:
        """Begin to watch the steps of the optimizers.

        Steps that an optimizer inside of one of them makes count, too. Wrappers such as SAM and Lookahead have one
        inside, and their own hooks do not run.
        """
        if self._has_begun:
            return
        self._has_begun = True
        watch_steps(self)
        self._replicas.begin()
        for place, optimizer in enumerate(self._optimizers):
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_pre_hook(partial(self._before_step, place)))
                self._hooks.append(optimizer.register_step_post_hook(partial(self._after_step, place)))
            if place not in self._gradients:  # made before the loop
                self._note_used(place)

    def end(self) -> None:
        """Watch no more steps. May be called again."""
        if self._has_begun:
            self._has_begun = False
            unwatch_steps(self)
            self._replicas.end()
        while self._hooks:
            self._hooks.pop().remove()

    def body_began(self, batch: Batch, step: int, epoch: int, *, batches: int, is_first: bool, may_step: bool) -> None:
        """Begin the body of a batch.

        Args:
            batches: number of batches in the step.
            is_first: the batch is the step's first one.
            may_step: the batch is the step's last one, in whose body the optimizers step.
        """
        self._losses.begin_batch(step, epoch, batch, batches)
        self._means.body_began(batches=batches, is_first=is_first, is_last=may_step)
        self._batch, self._batches, Part.is_counted = batch, batches, batch.samples > 0
        self._body += 1
        if is_first:
            self._first_body, self._cleared = self._body, set()
            self._made, self._used = 0, [0] * len(self._optimizers)
        self._may_step, self._step, self._evaluations = may_step, step, 0

    def body_ended(self, *, is_left: bool = False) -> None:
        """End the running body. A body that was left does not count.

        Raises:
            PhotinusError: the losses of the body are parts of a mean that is not whole.
        """
        self._batch, Part.is_counted = None, True
        if self._made > max(self._used):  # by hand, perhaps, which nothing saw
            self._note_gradients()
        for gradients in self._gradients.values():
            if not gradients.is_used and gradients.tensor is None and gradients.parameter.grad is not None:
                gradients.tensor = TensorWeakRef(gradients.parameter.grad)
        while self._stepped_inside:
            self._report_step(self._stepped_inside.pop())
        for average in self._averages:
            average.catch_up()
        if is_left:
            self._losses.drop_last()
            return
        self._means.body_ended()
        if self._may_step:
            self._losses.end_step()

    @property
    def weight(self) -> float:
        """See `Loop.weight`."""
        assert self._batch is not None
        return self._batch.weight / self._batches

    def gradients_taken(self) -> None:
        """Forget the gradients of earlier bodies, which the loop has taken from the parameters."""
        self._gradients.clear()
        self._cleared.clear()

    def drop_step(self) -> None:
        """Forget the running step, which begins again."""
        self._losses.drop_step()

    def record(self, loss: Tensor, share: float) -> None:
        """See `Loop.record`."""
        check_loss(loss)
        if self._count():
            self._losses.add(loss, share)

    def backward(self, loss: Tensor, weight: Any, share: float, scaler: Any) -> None:
        """See `Loop.backward`."""
        check_loss(loss)
        self._look_at_older()
        batch = self._batch
        assert batch is not None
        counts = weight is None or batch.samples  # not samples that a stream repeats
        own, factor, counted_share = self._means.part(weight if counts else 0, share)
        if weight is None:
            self.record(loss, share)
            factor = self.weight * share
        elif self._count():  # by samples, as the log adds up
            self._losses.add(loss.detach() * (own / batch.weight) if own else torch.zeros_like(loss), counted_share)
        # Without a factor the bits are those of a script for one process.
        weighted = loss if factor == 1.0 else loss * factor
        weighted = weighted if scaler is None else scaler.scale(weighted)
        self._clock.backward_began()
        self._means.backward_began()
        if factor:
            weighted.backward()
        else:
            with zero_gradients(weighted):
                weighted.backward()
        if weight is not None:
            self._means.backward_ended()
        self._means.gradients_came()
        self._note_gradients()
        self._clock.backward_ended()

    def _count(self) -> bool:
        """Count a backward. Return whether its loss is logged: of a closure's evaluations, only the first one's is."""
        if self._means.steps_last and any(self._used):
            raise PhotinusError(
                f"a backward after an optimizer's step, in step {self._step}: with logical_shards, the step's earlier "
                f"shards had the weights from before. Run all backwards of a body first, then step all optimizers"
            )
        self._made += 1
        for place, gradients in [*self._gradients.items()]:
            if gradients.is_used:
                self._kept.setdefault(place, not gradients.is_gone)
                self._note_used(place, gradients.parameter)
        return self._evaluations <= 1

    def _look_at_older(self) -> None:
        """Look at the gradients of earlier bodies, before a backward. Raise PhotinusError if those of this step are
        gone, or others are there that no optimizer step has used.

        Of several optimizers it is an error only if this one steps: another's loss may have left the gradients.
        """
        if not self._gradients and not self._cleared:
            return
        for place, gradients in [*self._gradients.items()]:
            if not gradients.is_used and gradients.is_gone:
                if self._first_body <= gradients.body < self._body:
                    self._cleared.add(place)
                else:
                    self._note_used(place, gradients.parameter)
        if len(self._optimizers) == 1:
            self._refuse_cleared(0)
            self._refuse_older(0)

    def _note_gradients(self) -> None:
        """Remember the gradients that are there."""
        for place, optimizer in enumerate(self._optimizers):
            found = _first_with_gradient(optimizer)
            if found is None:
                continue
            before, now = self._gradients.get(place), _Gradients(found, self._body, found.grad._version)
            if before is not None and before.is_used:
                if before.parameter is found and before.version == now.version:
                    continue  # another optimizer's backward did not reach them
            elif before is not None and len(self._optimizers) > 1:  # SAM clears them between its two backwards
                now.body = before.body
            self._gradients[place] = now

    def _note_used(self, place: int, parameter: Any = None) -> None:
        """Remember that an optimizer's present gradients are not for its next step."""
        self._gradients.pop(place, None)
        if parameter is None:
            parameter = _first_with_gradient(self._optimizers[place])
        if parameter is not None and parameter.grad is not None:
            self._gradients[place] = _Gradients(parameter, self._body, parameter.grad._version, is_used=True)

    def _refuse_cleared(self, place: int) -> None:
        if place in self._cleared:
            kind = f" of {type(self._optimizers[place]).__name__}" * (len(self._optimizers) > 1)
            raise PhotinusError(
                f"the gradients{kind} of step {self._step} were cleared before its last batch (zero_grad()?): with "
                f"accumulate=... they add up over its batches. Write it under `if loop.step_due`."
            )

    def _refuse_older(self, place: int) -> None:
        gradients, optimizer = self._gradients.get(place), self._optimizers[place]
        if gradients is None or gradients.is_used or gradients.body >= self._first_body:
            return
        is_there = gradients.tensor is None or gradients.tensor() is gradients.parameter.grad
        if is_there and not gradients.is_gone and _has_gradients(optimizer):
            raise PhotinusError(
                f"step {self._step} adds to gradients of a step before, which {type(optimizer).__name__}.step() has "
                f"not used. To make one step of N batches, write photinus.Loop(..., accumulate=N), "
                f"`if loop.step_due:` before optimizer.step() and zero_grad(), and neither no_sync nor a loss / N. To "
                f"leave a step out, clear its gradients by zero_grad()."
            )

    def _before_step(
        self, place: int, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if place == 0:
            rate = optimizer.param_groups[0].get("lr")
            self.rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        if self._batch is not None and not self._may_step:
            raise PhotinusError(
                f"{type(optimizer).__name__}.step() before the last batch of step {self._step}: with accumulate=... "
                f"the ranks' gradients are averaged in the last one. Write `if loop.step_due: optimizer.step()`."
            )
        if self._batch is not None:
            self._refuse_cleared(place)
            self._means.before_step()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:  # a closure has its backward inside the step
            if self._batch is not None:
                self._refuse_older(place)
            self._check(place, optimizer)
        elif self._batch is not None and self._means.steps_last:
            raise PhotinusError(
                f"{type(optimizer).__name__}.step(closure) computes losses inside of the step, which logical_shards "
                f"cannot cut into shards: use an optimizer without closure"
            )
        if self._batch is not None and place in self._versions:
            changed = [each for each, version in self._versions[place] if each._version != version]
            between = {
                "gradients of the step before kept": self._kept.pop(place, False),
                "parameters changed since": self._replicas.names_of(changed),
            }
            self._replicas.note(f"before {self._call(place)}", between)
        if closure is None:
            return None
        # SAM's step has a backward before it, too, whose loss is the one to log.
        self._evaluations = int(len(self._optimizers) == 1 and self._made > self._used[0])
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, partial(self._evaluate, closure), *args[2:]), others

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._evaluations += 1
        return closure()

    def _after_step(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._check(place, optimizer)
        self._evaluations, self._used[place] = 0, self._made
        self._note_used(place)
        if self._batch is not None:
            if not self._replicas.is_alone:
                self._replicas.note(self._call(place), *optimizer.param_groups)
                self._versions[place] = [(each, each._version) for each in _parameters_of(optimizer) if is_split(each)]
            self._stepped_inside.discard(place)
            if not getattr(optimizer, "found_inf", None):  # of a GradScaler: a fused optimizer skips a step itself
                self._report_step(place)

    def _report_step(self, place: int) -> None:
        for average in self._averages:
            average.optimizer_stepped(place, self._step)

    def _call(self, place: int) -> str:
        return f"optimizer{f' {place + 1}' * (place > 0)}.step() in step {self._step}"

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """See `StepWatcher`: notes a step that was made for one of the optimizers."""
        if not any(optimizer is each for each in self._optimizers):
            inner = {id(parameter) for parameter in _parameters_of(optimizer)}
            for place, each in enumerate(self._optimizers):
                if any(id(parameter) in inner for parameter in _parameters_of(each)):
                    self._used[place] = self._made
                    self._note_used(place)
                    self._stepped_inside.add(place)

    def _check(self, place: int, optimizer: torch.optim.Optimizer) -> None:
        if not (self._batch is not None and self._made == self._used[place] and _has_gradients(optimizer)):
            return
        if self._made:
            raise PhotinusError(
                f"{type(optimizer).__name__}.step() twice in step {self._step}, and no loop.backward came since. "
                f"Step once for each loop.backward, or call zero_grad() after the first step. Gradients that you make "
                f"in another way need a loop.record(loss) before each step."
            )
        raise PhotinusError(
            f"{type(optimizer).__name__}.step() found gradients that loop.backward did not make. In the body of a "
            f"Loop, write loop.backward(loss) in place of loss.backward(), and loop.backward(loss, scaler=scaler) "
            f"in place of scaler.scale(loss).backward(): the loop gives a short last batch its right weight, and "
            f"logs the loss. Gradients that you make in another way: multiply the loss by loop.weight, and call "
            f"loop.record(loss) before the step."
        )


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _first_with_gradient(optimizer: torch.optim.Optimizer) -> Any:
    return next((p for group in optimizer.param_groups for p in group["params"] if p.grad is not None), None)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step would use any: those that zero_grad(set_to_none=False) left do not count."""
    for parameter in _parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None:
            gradient = own_part(gradient)
            if gradient.is_sparse or bool(gradient.any()):
                return True
    return False


def parameters_with_gradients(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    """Return all parameters that have gradients, each once."""
    parameters = [*(each.parameters() for each in models), *map(_parameters_of, optimizers)]
    found = {id(each): each for some in parameters for each in some}
    return [each for each in found.values() if each.grad is not None]


def backward(loss: Tensor, *, weight: float | None = None) -> None:
    """Run backward of a scalar loss, in a loop of your own.

    Args:
        loss: mean over this rank's samples of the batch; a tensor with one element.
        weight: `batch.weight` of the loader's batch, which makes the mean over ranks that over the global batch.
            Default: the weight of the last batch of a running `photinus.loader`, else 1.

    Raises:
        NotInitializedError: a launcher started several processes, and `photinus.init()` was not called.
        TypeError: the loss is not a tensor.
        ValueError: the loss does not have exactly one element, or nothing in it requires a gradient.
    """
    require_session("photinus.backward")
    check_loss(loss)
    weight = running_weight() if weight is None else weight
    (loss if weight == 1.0 else loss * weight).backward()  # type: ignore[no-untyped-call]


def check_loss(loss: Any) -> None:
    """Raises TypeError or ValueError unless backward can begin at it: one number that requires a gradient."""
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss is a {type(loss).__name__}, but a tensor is needed")
    if loss.numel() != 1:
        raise ValueError(f"loss has shape {list(loss.shape)}, but backward needs one number: take its mean")
    if is_split(loss):
        raise ValueError(
            "the loss was computed from parts of split parameters (a penalty on model.parameters()?): compute that "
            "inside of the model's forward, where parameters are whole, or let the optimizer's weight_decay do it"
        )
    if not loss.requires_grad:
        raise ValueError("nothing in the loss requires a gradient: was it computed under torch.no_grad() or detached?")
