"""Do all ranks still train the same model, with the same hyperparameters?

What a rank was given is compared when a model is wrapped and when a loop is made. What may drift later travels with the
loop's losses, as three numbers: two digests of 48 bits (whole numbers that float64 holds exactly), and the seconds that
the second one took.

| digest of | how often | what it takes |
|---|---|---|
| the optimizers' options, and the calls since the last exchange | at each exchange | some microseconds per group |
| all parameters | before each checkpoint, and as often as costs at most 0.5 % of the training | one read of them |

With a GPT of 18 M parameters and a checkpoint every 8 steps (2 ranks on 2 busy cores) all of it takes 0.29 % of the
time: 18 ms before a save of 1.2 s.

The calls are those that all ranks make alike: each optimizer step with its options, each `clip` with its arguments.
Where each rank steps a part of the model (ZeRO), nothing else shows that one did it differently: no weight is held
twice.

Only where a digest differs do the ranks exchange more, to name what and where. A parameter's own digest is that of
photinus.parallel.exchange.verify_models, with which DDP by itself compares a part of the parameters every few steps.
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...parallel import is_replicated, step_facts_of, unwrap_compiled
from ...parallel.exchange.agreement import JSON, check_alike
from ...parallel.exchange.collectives import resolve_group
from ...parallel.exchange.verify_models import compare_parameters, digest_of
from ...parallel.zero.split_states import is_split
from ...parallel.zero.units import unit_order
from ..checkpoint.states import unwrap
from .session import Session

_COST = 0.005  # of the time of the steps, at most
_DIGEST_BYTES = 6  # fewer than the 53 bits of a float64's fraction


def describe_replicas(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, JSON]:
    """Return what has to be equal on all ranks of optimizers: class, options, and which parameters each group steps."""
    names = {id(parameter): name for model in models for name, parameter in unwrap(model).named_parameters()}
    found: dict[str, JSON] = {}
    for place, optimizer in enumerate(optimizers):
        which = f"optimizer {place + 1}" if place else "optimizer"
        found[which] = type(optimizer).__qualname__
        for index, group in enumerate(optimizer.param_groups):
            where = f"{which}, group {index}, "
            found |= {where + name: plain(value) for name, value in group.items() if name != "params"}
            for number, parameter in enumerate(group["params"]):
                found[f"{where}parameter {number}"] = names.get(id(parameter)) or str(list(parameter.shape))
    return found


def describe_states(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, JSON]:
    """Return a digest of what optimizers remember of each parameter, which has to be equal on all ranks."""
    found: dict[str, JSON] = {}
    for place, optimizer in enumerate(optimizers):
        order = {parameter: n for n, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"])}
        for parameter, state in optimizer.state.items():
            values = [
                (str(name), int(digest_of(value)) if isinstance(value, torch.Tensor) else plain(value))
                for name, value in sorted(state.items(), key=lambda item: str(item[0]))
            ]
            if parameter in order and values:
                digest = hashlib.sha256(repr(values).encode()).hexdigest()[:8]
                found[f"state of optimizer {place + 1} for parameter {order[parameter]}"] = f"digest {digest}"
    return found


def plain(value: Any, other: Callable[[Any], str] = lambda value: type(value).__qualname__) -> Any:
    """A value as lists, dicts, numbers and text, which are compared and saved; of all `other` things the class."""
    value = value.tolist() if hasattr(value, "tolist") else value  # tensors, and numpy's
    if isinstance(value, Mapping):
        return {str(name): plain(item, other) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, other) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else other(value)


class Replicas:
    """A check that the ranks' models and optimizers are still alike. All ranks call its methods together.

    Args:
        models: of those that are whole on each rank and exchange their gradients, parameters are compared; but for
            those that were wrapped with check_ranks=False, where ranks differ on purpose for a while.

    Attributes:
        is_alone: there is one rank, and nothing to compare.
    """

    def __init__(
        self, session: Session, models: Iterable[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._session = session
        self.is_alone = session.world_size == 1
        models = [*models]
        self._models = [] if self.is_alone else [unwrap_compiled(model) for model in models]
        self._split = [*self._models]  # those that are; the order of others is always 0
        self._models = [model for model in self._models if is_replicated(model, session.world_size)]
        self._step_facts = step_facts_of(self._split)
        self._optimizers = optimizers
        self._names = {id(p): name for model in models for name, p in unwrap(model).named_parameters()}
        self._groups = sum(len(optimizer.param_groups) for optimizer in optimizers)  # as they were looked at
        self._calls: dict[str, list[dict[str, JSON]]] = {}  # arguments, by step and call
        self._repeats: dict[str, int] = {}
        self._trained_s = 0.0  # since the digest before
        self._pause_s = 0.0  # to the next one

    def begin(self) -> None:
        """Bodies begin: what ranks do around their steps is compared here, and not with gradients or in forwards."""
        for facts in self._step_facts:
            facts.is_deferred = True

    def end(self) -> None:
        """Bodies are over."""
        for facts in self._step_facts:
            facts.is_deferred = False

    def names_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """Return the names of parameters in the models."""
        return [self._names.get(id(parameter), str(list(parameter.shape))) for parameter in parameters]

    def note(self, call: str, *groups: Mapping[str, object]) -> None:
        """Remembers a call that all ranks have to make with the same arguments (of a step: groups of options)."""
        if self.is_alone:
            return
        self._repeats[call] = self._repeats.get(call, 0) + 1
        if self._repeats[call] > 1:
            call += f", call {self._repeats[call]}"
        self._calls[call] = [
            # not those on a GPU: reading them would make the host wait
            {name: plain(v) for name, v in each.items() if name != "params" and not getattr(v, "is_cuda", False)}
            for each in groups
        ]

    def local_row(self, *, saves: bool) -> list[float]:
        """This rank's three numbers, which `compare` takes of all ranks.

        Args:
            saves: a checkpoint follows, so parameters are looked at however long ago that was done; equal on all ranks.
        """
        if self.is_alone:
            return [0.0, 0.0, 0.0]
        began_s = time.perf_counter()
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if len(groups) != self._groups:  # some were added
            self._groups = len(groups)
            parameters = [each for group in groups for each in group["params"] if each.requires_grad]
            alone = [each for each in parameters if id(each) not in self._names and not is_split(each)]
            if alone:
                raise ValueError(
                    f"add_param_group gave an optimizer {len(alone)} parameters of none of the models given to the "
                    f"loop, which nothing averages: each rank would train others. Put their module into the model "
                    f"before photinus.wrap, or wrap it and give it in state=..."
                )
        options = [[plain(v) for k, v in group.items() if k != "params"] for group in groups]
        orders = [unit_order(model) for model in self._split]
        # Weights that each rank holds whole are compared themselves.
        steps = [(facts.digest, facts.pending if saves and facts.is_split else []) for facts in self._step_facts]
        own = [_digest(repr((options, self._calls, orders, steps)).encode()), 0.0, 0.0]
        if self._models and (saves or self._trained_s >= self._pause_s):
            digests = [digest_of(parameter).to(self._session.device) for _, parameter in self._named()]
            sums = torch.stack(digests).tolist() if digests else []
            own[1] = _digest(struct.pack(f"<{len(sums)}q", *sums))
            own[2] = time.perf_counter() - began_s
        return own

    def compare(self, rows: Sequence[Sequence[float]], *, step: int, seconds: float) -> None:
        """Takes what `local_row` returned on each rank, and the seconds of the steps since the last call.

        Raises:
            ValueError: an optimizer has other options on some rank, or a call was made on some ranks only or with
                other arguments; on all ranks, says which and both values.
            ModelMismatchError: the ranks hold different parameters; on all ranks, names ranks and parameters.
        """
        if self.is_alone:
            return
        self._trained_s += seconds
        acts, weights, digests_s = (set(column) for column in zip(*rows, strict=True))
        if max(digests_s) > 0.0:
            self._trained_s, self._pause_s = 0.0, max(digests_s) / _COST
        if len(acts) > 1:
            optimizers = describe_replicas(self._models, self._optimizers)
            check_alike(optimizers, f"the ranks' optimizers differ after step {step}")
            made = dict.fromkeys(self._calls, "made")
            check_alike(made, f"up to step {step} some ranks made calls that others left out")
            arguments = {
                f"{call}, {f'group {index}, ' * (len(groups) > 1)}{name}": value
                for call, groups in self._calls.items()
                for index, group in enumerate(groups)
                for name, value in group.items()
            }
            check_alike(arguments, f"up to step {step} the ranks made the same calls with other arguments")
            orders: dict[str, JSON] = {f"forwards of {type(each).__name__}": unit_order(each) for each in self._split}
            text = "the ranks used different blocks of a split model, or in another order, and got each other's weights"
            advice = "let all use the same ones, or give photinus.wrap find_unused_parameters=True"
            check_alike(orders, f"up to step {step} {text}; {advice}")
            for facts in self._step_facts:
                facts.compare(saving=facts.is_split)
        self._calls.clear()
        self._repeats.clear()
        if len(weights) > 1:
            compare_parameters(self._named(), resolve_group(None), f"after step {step} ")

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        """The parameters that are compared."""
        named: list[tuple[str, torch.Tensor]] = []
        for place, model in enumerate(self._models):
            ignored: set[str] = getattr(model, "parameters_to_ignore", set())
            prefix = f"state model {place}: " if place else ""
            named += [(prefix + n, p.detach()) for n, p in unwrap(model).named_parameters() if n not in ignored]
        return named


def _digest(data: bytes) -> float:
    return float(int.from_bytes(hashlib.sha256(data).digest()[:_DIGEST_BYTES], "little"))
