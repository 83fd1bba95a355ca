"""The gradients that a loop made: a step on others is an error, because they lack their weight, and the log their loss.

Each step is also noted for the comparison of the ranks: its options, whether gradients of the last step were kept, and
which parts of parameters something else has changed since (torch counts changes in place): no other rank has a copy of
these to compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import PhotinusError
from ..optimizer_steps import StepWatcher, unwatch_steps, watch_steps
from ..parallel.zero.split_states import is_split, own_part
from .averages import Average
from .data.loader import running_weight
from .session.replicas import Replicas
from .session.session import require_session

_SURE_BODIES = 100


class Backwards(StepWatcher):
    """Counts the backwards of a loop, and for each optimizer which of them it has used.

    Args:
        optimizers: whose steps are looked at while a body runs.
        replicas: takes what is noted of each step.
        averages: take the weights after each step in a body; after the body, if only an optimizer inside of another was
            seen to step (Lookahead moves the weights after that).
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], replicas: Replicas, averages: Sequence[Average]
    ) -> None:
        self._optimizers = optimizers
        self._replicas = replicas
        self._averages = averages
        self._stepped_inside: set[int] = set()  # in the running body
        self._step = 0  # of the loop
        # By optimizer, from its last step: a parameter whose gradient it used; whether this gradient was still there at
        # the next backward; and its split parameters, with the changes that they had seen.
        self._witnesses: dict[int, torch.Tensor] = {}
        self._kept: dict[int, bool] = {}
        self._versions: dict[int, list[tuple[torch.Tensor, int]]] = {}
        self._has_begun = False
        self._hooks: list[Any] = []
        self._always_reached: set[int] = set()  # optimizers, by each backward
        self._watched = False  # while a body of the loop runs
        self._may_step = True  # in the running body
        # By optimizer: a gradient of the running step, with its version; and those that had one which was cleared.
        self._kept_gradients: dict[int, tuple[Any, int]] = {}
        self._cleared: set[int] = set()
        self._body = 0  # the running one, from 1
        self._settled = 0  # the last body after which no optimizer had gradients to use
        # By optimizer: the last body with a backward that gave it gradients, and the last with a step, or 0.
        self._reached = [0] * len(optimizers)
        self._stepped = [0] * len(optimizers)
        self._made = 0
        self._used = [0] * len(optimizers)
        self._evaluations = 0  # of the closure of the step that is under way
        self.rate: Any = None  # of the first optimizer's last step: its scheduler may have moved on since

    @property
    def unstepped(self) -> bool:
        """Return whether gradients accumulate for an optimizer's later step; those of a body with its step do not."""
        return any(reached > stepped for reached, stepped in zip(self._reached, self._stepped, strict=True))

    def begin(self) -> None:
        """Bodies begin. From now on steps count that are made for one of the optimizers, too: of wrappers that have
        one inside, as SAM and Lookahead do, no hook runs."""
        if self._has_begun:
            return
        self._has_begun = True
        watch_steps(self)
        self._replicas.begin()
        for place, optimizer in enumerate(self._optimizers):
            if hasattr(optimizer, "register_step_post_hook"):
                self._hooks.append(optimizer.register_step_pre_hook(partial(self._before_step, place)))
                self._hooks.append(optimizer.register_step_post_hook(partial(self._after_step, place)))
            parameters = _parameters_of(optimizer)
            # Of parts of parameters no hook runs while gradients are not averaged.
            if len(self._optimizers) == 1 or any(map(is_split, parameters)):
                self._always_reached.add(place)
                continue
            reach = partial(self._reach, place)
            self._hooks += [p.register_post_accumulate_grad_hook(reach) for p in parameters if p.requires_grad]

    def end(self) -> None:
        """Bodies are over. May be called again."""
        if self._has_begun:
            self._has_begun = False
            unwatch_steps(self)
            self._replicas.end()
        while self._hooks:
            self._hooks.pop().remove()

    def waits_in_vain(self, bodies: int) -> bool:
        """Return whether N bodies, and at least 100, ended with gradients to use, although their optimizers stepped
        meanwhile, or never did."""
        waiting = zip(self._reached, self._stepped, strict=True)
        used = all(stepped > self._settled or not stepped for reached, stepped in waiting if reached > stepped)
        return used and self._body - self._settled >= max(bodies, _SURE_BODIES)

    def body_began(self, step: int, *, may_step: bool) -> None:
        """The loop hands out a batch of a step: the last one if it `may_step`."""
        if step != self._step:
            self._kept_gradients, self._cleared = {}, set()
        self._watched, self._may_step, self._step, self._evaluations = True, may_step, step, 0
        self._body += 1

    def body_ended(self) -> bool:
        """The body came to its end, or was left. Returns whether it used all gradients that it made, and no others."""
        self._watched = False
        while self._stepped_inside:
            self._report_step(self._stepped_inside.pop())
        for average in self._averages:
            average.catch_up()
        is_alone = self._body - self._settled == 1
        return self._settle(self._body) and is_alone

    def _settle(self, body: int) -> bool:
        """Returns whether no optimizer has gradients of the bodies up to this one to use: they were, or are gone, as
        where a GradScaler leaves a step out."""
        for place, optimizer in enumerate(self._optimizers):
            is_waiting = self._reached[place] > self._stepped[place]
            # Gradients of split parameters lie elsewhere while they are not averaged.
            if is_waiting and all(each.grad is None and not is_split(each) for each in _parameters_of(optimizer)):
                self._stepped[place] = self._reached[place]
        if self.unstepped:
            return False
        self._settled = max(self._settled, body)
        return True

    def add(self) -> bool:
        """One more backward is made. Returns whether its loss counts: a closure's first evaluation, not those after."""
        self._made += 1
        if max(self._reached) < self._body:
            self._settle(self._body - 1)
        for place in self._always_reached:
            self._reach(place)
        for place, parameter in self._witnesses.items():
            self._kept.setdefault(place, parameter.grad is not None)
        return self._evaluations <= 1

    @property
    def adds_up(self) -> bool:
        """Return whether a backward adds to gradients of an earlier body, as far as this rank sees them."""
        waits = len(self._optimizers) == 1 and self._stepped[0] < self._reached[0] < self._body
        return waits and _has_gradients(self._optimizers[0])

    def note_kept(self) -> None:
        """Remember the gradients of a batch that is not the last of its step."""
        for place, optimizer in enumerate(self._optimizers):
            found = next((p for p in _parameters_of(optimizer) if p.grad is not None), None)
            if found is not None:
                self._kept_gradients[place] = found, found.grad._version

    def check_kept(self) -> None:
        """Look for the gradients that `note_kept` saw, before a backward. Raise PhotinusError if they are gone.

        Of several optimizers it is an error only if this one steps: another's loss may have left the gradients.
        """
        for place, (parameter, version) in self._kept_gradients.items():
            gradient = parameter.grad
            is_gone = gradient is None or (gradient._version != version and not bool(gradient.any()))
            if is_gone and self._stepped[place] < self._body:
                self._cleared.add(place)
        if len(self._optimizers) == 1:
            self._kept_gradients = {}  # SAM clears them between its two backwards
            self._refuse_cleared(0)

    def _refuse_cleared(self, place: int) -> None:
        if place in self._cleared:
            kind = f" of {type(self._optimizers[place]).__name__}" * (len(self._optimizers) > 1)
            raise PhotinusError(
                f"the gradients{kind} of step {self._step} were cleared before its last batch (zero_grad()?): with "
                f"accumulate=... they add up over its batches. Write it under `if loop.step_due`."
            )

    def _reach(self, place: int, *_: Any) -> None:
        self._reached[place] = self._body

    def _before_step(
        self, place: int, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if place == 0:
            rate = optimizer.param_groups[0].get("lr")
            self.rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        if self._watched and not self._may_step:
            raise PhotinusError(
                f"{type(optimizer).__name__}.step() before the last batch of step {self._step}: with accumulate=... "
                f"the ranks' gradients are averaged in the last one. Write `if loop.step_due: optimizer.step()`."
            )
        if self._watched:
            self._refuse_cleared(place)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:  # a closure has its backward inside the step
            self._check(place, optimizer)
        if self._watched and place in self._versions:
            changed = [each for each, version in self._versions[place] if each._version != version]
            between = {
                "gradients of the step before kept": self._kept.pop(place, False),
                "parameters changed since": self._replicas.names_of(changed),
            }
            self._replicas.note(f"before {self._call(place)}", between)
        if closure is None:
            return None
        # SAM's step has a backward before it, too, whose loss is the one to log.
        self._evaluations = int(
            len(self._optimizers) == 1 and self._reached[place] == self._body > self._stepped[place]
        )
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (optimizer, partial(self._evaluate, closure), *args[2:]), others

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._evaluations += 1
        return closure()

    def _after_step(self, place: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._check(place, optimizer)
        self._used[place] = self._made
        self._stepped[place] = self._body
        self._evaluations = 0
        if self._watched:
            self._replicas.note(self._call(place), *optimizer.param_groups)
            parameters = _parameters_of(optimizer)
            self._versions[place] = [(each, each._version) for each in parameters if is_split(each)]
            self._stepped_inside.discard(place)
            if not getattr(optimizer, "found_inf", None):  # of a GradScaler: a fused optimizer skips a step itself
                self._report_step(place)
            self._witnesses[place] = next((each for each in parameters if each.grad is not None), parameters[0])

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
                    self._stepped[place] = self._body
                    self._stepped_inside.add(place)

    def _check(self, place: int, optimizer: torch.optim.Optimizer) -> None:
        if not (self._watched and self._made == self._used[place] and _has_gradients(optimizer)):
            return
        if self._stepped[place] == self._body:
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


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step would use any: those that zero_grad(set_to_none=False) left do not count."""
    for parameter in _parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None:
            gradient = own_part(gradient)
            if gradient.is_sparse or bool(gradient.any()):
                return True
    return False


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
    if not loss.requires_grad:
        raise ValueError("nothing in the loss requires a gradient: was it computed under torch.no_grad() or detached?")
