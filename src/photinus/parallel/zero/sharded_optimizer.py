"""Optimizers changed in place: to step other parameters, or (ZeRO stage 1) only this rank's part of them.

The user's optimizer object stays the face: its groups list all parameters, as schedulers and `zero_grad` want them, and
its class becomes a subclass of what it was. Behind it stands torch's ZeroRedundancyOptimizer, which decides which rank
steps which parameters, lets a twin of the optimizer do it, and broadcasts the results.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ...errors import PhotinusError
from ..exchange.tensors import tensors_in
from .split_states import gather_states
from .step_facts import StepFacts

_KNOWN = frozenset({"param_groups", "state", "defaults"})
_APART = frozenset({"param_groups", "state", "step", "_zero", "_linked", "_step_facts"})  # of face and twin


def is_sharded(optimizer: object) -> bool:
    """Return whether `shard_optimizer` has changed it."""
    return isinstance(optimizer, _Sharded)


def check_shardable(optimizers: Sequence[Optimizer]) -> None:
    """Refuses what torch's class cannot split. Raises ValueError, TypeError."""
    for optimizer in optimizers:
        if is_sharded(optimizer):
            raise ValueError(
                f"the optimizer ({type(optimizer).__name__}) is split over the ranks already; give strategy 'zero1' a "
                f"plain one"
            )
        inner = next((name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)), None)
        if inner is not None:
            raise TypeError(
                f"strategy 'zero1' cannot split {type(optimizer).__name__}: it steps through the optimizer in its "
                f"attribute {inner!r}, and computes over the gradients of one rank's parameters only. Take "
                f'strategy="ddp".'
            )
        dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
        if len(dtypes) > 1:
            names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
            raise ValueError(
                f"strategy 'zero1' needs parameters of one dtype per optimizer, but {type(optimizer).__name__} steps "
                f'{names}. Make an optimizer for each dtype, or take strategy="ddp".'
            )


def shard_optimizer(optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Splits an optimizer over the ranks of a group, in place. What it remembers for other ranks' parts is forgotten.

    Args:
        optimizer: over the same parameters in the same order on every rank; it passed `check_shardable`.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    zero = ZeroRedundancyOptimizer(
        [{"params": list(group["params"])} for group in optimizer.param_groups],
        optimizer_class=cast(Any, functools.partial(_twin_of, optimizer)),
        process_group=group,
    )
    own = _own(zero)
    remembered = {key: state for key, state in optimizer.state.items() if _is_own(key, own)}
    patched = "step" in vars(optimizer)  # by a scheduler that was made before: it has the old class's step inside
    optimizer.__class__ = _sharded_class(type(optimizer))  # type: ignore[arg-type]
    optimizer._zero = zero  # type: ignore[attr-defined]
    optimizer._step_facts = None  # type: ignore[attr-defined]
    # Where it is true (fused=True), GradScaler would leave unscaling to an optimizer that steps nothing itself.
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    _link(optimizer, remembered)
    if patched:
        optimizer.step = _tell_schedulers(optimizer)  # type: ignore[method-assign]


def consolidated_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state_dict of the whole optimizer, on the CPU, on rank 0; no use elsewhere. Called by all ranks of its group.

    (torch's class can do that, too, but unpickles what the other ranks send.)

    Raises:
        TypeError: it remembers something else than tensors, numbers, text, lists and dicts; on all ranks.
    """
    whole = cast(_Sharded, optimizer).state_dict(part=True)
    parts = gather_states(whole["state"], cast(_Sharded, optimizer)._zero.process_group)
    # To look at `optimizer.state[p]` makes an empty state for a parameter that another rank steps.
    remembered = {key: state for part in parts for key, state in part.items() if state}
    order = sorted(remembered, key=lambda key: (isinstance(key, str), key))
    return {**whole, "state": {key: remembered[key] for key in order}}


class _Sharded(Optimizer):
    """The methods that differ in an optimizer that only shows the parts of others; they precede its class's."""

    _zero: Any
    _linked: list[list[int]]
    _step_facts: StepFacts | None

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Steps this rank's part, and brings everyone's to everyone."""
        _relink(self)
        _copy_attributes(self, self._zero.optim)
        facts = self._step_facts

        def begin() -> None:
            if facts is not None:
                facts.begin_step(self)

        def evaluate() -> float:
            assert closure is not None
            loss = closure()
            begin()
            return loss

        if closure is None:
            begin()
        loss = cast("float | None", self._zero.step(closure and evaluate))
        _copy_attributes(self._zero.optim, self)
        if facts is not None:
            facts.end_step(self)
        return loss

    def state_dict(self, *, part: bool = False) -> dict[str, Any]:
        """Refuses to return this rank's part, unless it is asked for."""
        if self._zero.world_size > 1 and not part:
            raise PhotinusError(
                f"{type(self).__name__}.state_dict() would be a part: use photinus.save(path, optimizer=optimizer)"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of a whole optimizer, or that of this rank's part; keeps this rank's part."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        own = _own(self._zero)
        others = {place for place, parameter in enumerate(parameters) if parameter not in own}
        part = {key: state for key, state in state_dict["state"].items() if key not in others}
        super().load_state_dict({**state_dict, "state": part})
        _link(self, dict(self.state))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, part of which this rank steps. Called on all ranks alike."""
        for name, default in self.defaults.items():
            param_group.setdefault(name, default)
        _relink(self)
        self._zero.add_param_group(param_group)
        self._zero._all_params = [p for group in self._zero.param_groups for p in group["params"]]
        self._zero._is_trainable_mask = self._zero._get_is_trainable_mask()
        self._linked = _layout(self)


@functools.cache
def _sharded_class(cls: type[Optimizer]) -> type[Optimizer]:
    """The subclass that faces of this class have."""
    step = Optimizer.profile_hook_step(_Sharded.step)
    step.hooked = True  # type: ignore[attr-defined]
    body = {"step": step, "__module__": __name__, "__doc__": cls.__doc__}
    # Schedule-free ones change parameters there: each rank those that it steps.
    body |= {name: _shared(getattr(cls, name)) for name in ("train", "eval") if hasattr(cls, name)}
    return type(f"Sharded{cls.__name__}", (_Sharded, cls), body)


def _shared(method: Callable[..., Any]) -> Callable[..., None]:
    def call(face: Any, *arguments: Any) -> None:
        method(face, *arguments)
        face._zero._sync_params()
        if face._step_facts is not None:
            face._step_facts.end_step(face)

    return call


def _twin_of(optimizer: Optimizer, param_groups: list[dict[str, Any]], **_: Any) -> Optimizer:
    """An optimizer like this one, attribute by attribute, over other groups, with nothing remembered yet."""
    cls = type(optimizer)
    twin = cls.__new__(cls)
    vars(twin).update({name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")})  # the face has them
    _copy_attributes(optimizer, twin)
    pairs = zip(optimizer.param_groups, param_groups, strict=True)
    twin.param_groups = [{**group, "params": own["params"]} for group, own in pairs]
    twin.state = defaultdict(dict)
    return twin


def _copy_attributes(source: Optimizer, target: Optimizer) -> None:
    """Give an optimizer what another one has beside groups, state and hooks: scripts set it, and steps change it."""
    own = {name: value for name, value in vars(source).items() if name not in _APART and not name.endswith("_hooks")}
    vars(target).update(own)


def _own(zero: Any) -> set[torch.Tensor]:
    return {parameter for group in zero.optim.param_groups for parameter in group["params"]}


def note_steps(optimizers: Sequence[Optimizer], facts: StepFacts) -> None:
    """Notes from now on what is done around the steps of split optimizers."""
    for optimizer in cast("Sequence[_Sharded]", optimizers):
        optimizer._step_facts = facts
    if not all(map(_all_ranks_step_some, optimizers)):
        facts.compares_states = False


def _all_ranks_step_some(optimizer: Optimizer) -> bool:
    """Return whether each rank steps some of the parameters of a split optimizer."""
    parts = cast(_Sharded, optimizer)._zero._partition_parameters()
    return all(any(group["params"] for group in part) for part in parts)


def _is_own(key: object, own: set[torch.Tensor]) -> bool:
    """Return whether a key of an optimizer's state stands for a parameter that this rank steps, or for none."""
    return not isinstance(key, torch.Tensor) or key in own


def _link(face: Any, remembered: Mapping[Any, Any]) -> None:
    """Gives the face, torch's class and the twin the same groups and the same state, which is this rank's part."""
    face._zero.param_groups = face.param_groups
    face.state = face._zero.optim.state = defaultdict(dict, remembered)
    face._zero._sync_param_groups(face.param_groups, face._zero.optim.param_groups)
    face._linked = _layout(face)


def _relink(face: Any) -> None:
    """Takes over a state or groups that the user has put in the place of those of the last `_link`."""
    if _layout(face) != face._linked:
        raise PhotinusError(
            f"the parameter groups of {type(face).__name__} had {[*map(len, face._linked)]} parameters in wrap, and "
            f"{[*map(len, _layout(face))]} or others now: 'zero1' takes them from optimizer.add_param_group only."
        )
    if face.state is not face._zero.optim.state or face.param_groups is not face._zero.param_groups:
        own = _own(face._zero)
        _link(face, {key: state for key, state in face.state.items() if _is_own(key, own)})


def _layout(optimizer: Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _tell_schedulers(optimizer: Optimizer) -> Callable[..., Any]:
    """A `step` as a scheduler leaves it, which notes that it was called: else schedulers warn of a wrong order."""
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        face = reference()
        assert face is not None, "the optimizer holds this function"
        face._opt_called = True  # type: ignore[attr-defined]
        return type(face).step(face, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def check_repointable(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Refuses optimizers that would go on stepping the old parameters, or that mix values of different parameters."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"strategy {strategy!r} has to change what the optimizer steps, and {kind} is not "
                f"a torch.optim.Optimizer, so where it keeps its parameters is not known. "
                'Give the torch optimizer inside it, or take "ddp".'
            )
        # LBFGS does, and others that compute with all parameters as one long vector.
        holding = [name for name, value in vars(optimizer).items() if name not in _KNOWN and _holds(value, optimizer)]
        if holding:
            raise TypeError(
                f"strategy {strategy!r} cannot split {kind}: it keeps parameters in its attribute {holding[0]!r} "
                f"beside param_groups, as optimizers do that compute with all parameters together. Take an optimizer "
                f'that steps each parameter by itself, or strategy="ddp".'
            )


def repoint(
    optimizer: Optimizer,
    new_of: Mapping[torch.Tensor, torch.Tensor],
    new_state: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Makes the optimizer step `new_of[p]` wherever it stepped `p`.

    Args:
        new_of: the new parameter for each of the optimizer's.
        new_state: `new_state(value, parameter)`: what becomes of a tensor that the optimizer remembers, of one
            dimension or more, for the new parameter. (One without dimensions, such as a step count, stays.)
    """
    for group in optimizer.param_groups:
        group["params"][:] = [new_of[parameter] for parameter in group["params"]]  # scripts may hold the list
    before = dict(optimizer.state)
    optimizer.state.clear()
    for old, remembered in before.items():
        new = new_of[old] if isinstance(old, torch.Tensor) else old
        optimizer.state[new] = {
            name: new_state(value, new) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in remembered.items()
        }


def _holds(value: Any, optimizer: Optimizer) -> bool:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return any(id(tensor) in own for tensor in tensors_in(value))
