"""Strategies "zero2" and "zero3": parameters, gradients and optimizer states split over the ranks.

On torch's FSDP2 (`fully_shard`). Every parameter is cut along its first dimension, one part for each rank. Units
(blocks of layers) are gathered before they compute; during backward each unit's gradients are averaged and split by one
reduce_scatter. The buffers of these exchanges are ordinary memory: FSDP2 takes them anew for each, and the group's own
gives its pages back each time (a GPT of 20 M parameters, 4x64 tokens, had 3.6 times the page faults with it).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from ..ddp.checks import one_device
from ..ddp.held_parameters import HeldParameters, take_over_parameters
from ..exchange.broadcast import broadcast_tensors
from ..exchange.collectives import control_device
from ..exchange.verify_models import describe, verify_same_model
from ..zero.sharded_optimizer import check_repointable, repoint
from ..zero.split_parts import drop_gathered, note_split, split_models, split_once, watch_split_models, with_sums
from ..zero.split_states import copy_state, is_split, split_as
from ..zero.split_values import watch_values
from ..zero.step_facts import StepFacts, facts_of
from ..zero.units import SplitUnits, refuse_renorm, shard_units
from .strategy import Strategy, explain_errors

_NEED_WHOLE = {
    "Adafactor": "computes with whole rows and columns, which torch's DTensors refuse",
    "Muon": "multiplies whole matrices, and steps differently from parts of them",
    "Rprop": "writes through masks, which torch's DTensors refuse",
    "SparseAdam": "wants sparse gradients",
}
"""Optimizers of torch.optim that do not step parts of parameters as they step whole ones, and why (all were tried)."""

_OF_SPLIT = ("__deepcopy__", "inside_no_sync", "has_gathered")  # attributes of a split model
_KEPT = "photinus_kept"  # attribute of a gradient that some rank has used; later backwards add to such a gradient


class FullyShardedStrategy(Strategy):
    """FSDP2. The wrapped model is the model itself, whose parameters are DTensors while it does not compute.

    Only `forward` gathers: other methods of a model that compute with parameters find parts of them, unless they are
    registered with torch.distributed.fsdp.register_fsdp_forward_method. Buffers are whole on every rank, and not
    exchanged: with batch norms that are not synchronised rank 0's statistics are saved and evaluated with. A unit whose
    forward returns no tensor that requires grad (the loss is in an attribute) stays gathered up to its backward.

    Options:
        shard: which submodules are units, a function or a list of classes; see `shard_units` for it and the default.
        process_group: the ranks; default: all.
        find_unused_parameters: the ranks may use different parameters; what one did not use counts as zero. Without
            `shard` the whole model is then one unit; with it, all ranks call all units. Without this option all ranks
            have to use the same parameters in the same order; a Loop finds out if they do not. Those that none used get
            no gradient.
        mp_policy: torch's MixedPrecisionPolicy, the dtypes in which units compute and gradients are averaged.
        check_ranks: check that all ranks make the same optimizer steps, in every 8th forward (on GPUs over nccl: every
            64th) and in `photinus.save`; see `photinus.parallel.zero.step_facts`. Default: True.
    """

    accepted: ClassVar[frozenset[str]] = frozenset(
        {"shard", "process_group", "find_unused_parameters", "mp_policy", "check_ranks"}
    )
    forward_exchanges: ClassVar[bool] = True
    drops_after_forward: ClassVar[bool]

    def check(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Refuses scalar parameters, lazy and meta ones, units of mixed dtypes, sparse gradients, odd optimizers."""
        parameters = list(model.named_parameters())
        one_device(parameters, model)
        for name, parameter in parameters:
            if parameter.dim() == 0:
                raise ValueError(
                    f"strategy {self.name!r} cuts parameters along their first dimension, but {name} has none (its "
                    f"shape is []). Give it the shape [1]."
                )
            if parameter.requires_grad and not parameter.numel():
                text = f"strategy {self.name!r} cannot split {name}: it is empty (its shape is {list(parameter.shape)})"
                raise ValueError(f"{text}. Remove it, or freeze it with requires_grad_(False).")
            if parameter in split_once:
                raise ValueError(
                    f"strategy {self.name!r}: {name} was split before, as {split_once[parameter]}, so each of the two "
                    f"models would train a copy of its own. Wrap one module that holds both."
                )
        if self.options.get("find_unused_parameters") and not _can_miss_parameters():
            raise ValueError(
                f"strategy {self.name!r}: torch {torch.__version__} cannot average gradients of ranks that use "
                f'different parameters (2.13 can); leave find_unused_parameters out, or take strategy="ddp"'
            )
        sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
        if sparse:
            raise ValueError(
                f"strategy {self.name!r} cannot split the sparse gradient of {sparse[0]}; set sparse=False there, or "
                f'take strategy="ddp"'
            )
        claimed: set[nn.Parameter] = set()
        for unit in self._units(model):
            own = [p for p in unit.parameters() if p.requires_grad and p not in claimed]
            claimed.update(own)
            if len({parameter.dtype for parameter in own}) > 1:
                types = " and ".join(sorted({str(p.dtype).removeprefix("torch.") for p in own}))
                raise ValueError(
                    f"strategy {self.name!r} averages the gradients of a unit together, but in one unit "
                    f"({type(unit).__name__}) parameters are {types}. Put them into different units with shard=..., or "
                    f"make them one dtype."
                )
        for optimizer in optimizers:
            kinds = ((getattr(torch.optim, kind, ()), why) for kind, why in _NEED_WHOLE.items())  # old torch lacks some
            needs = next((why for kind, why in kinds if isinstance(optimizer, kind)), None)
            if needs is not None:
                raise TypeError(
                    f"strategy {self.name!r} gives the optimizer a part of each parameter, but "
                    f"{type(optimizer).__name__} {needs}. Take one that treats each element by itself (SGD, Adam, "
                    f'AdamW ...), or strategy="zero1".'
                )
        check_repointable(optimizers, self.name)
        refuse_renorm(model, self.name)

    def _units(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are gathered one by one; the model itself last."""
        units = shard_units(model, self.options.get("shard"))
        # Gathers are matched by their order. Ranks that call different blocks would get each other's parameters.
        by_default = self.options.get("shard") is None
        return [model] if by_default and self.options.get("find_unused_parameters") else [*units, model]

    def wrap(self, model: nn.Module, device: torch.device, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Splits the model, in place, and makes the optimizers step the parts. Returns the model."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        if "_orig_mod" in model._modules:  # torch.compile came first: what it calls is split, and it stays around that
            self.wrap(cast(nn.Module, model._modules["_orig_mod"]), device, optimizers)
            return model
        group = self.group
        before = dict(model.named_parameters())
        take_over_parameters(model, {parameter: name for name, parameter in before.items()})
        self._start_as_rank_0(model, group, device)
        for parameter in before.values():
            parameter.data = parameter.data.contiguous()  # FSDP2 takes no other
        mesh = DeviceMesh.from_group(group, device.type)
        settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": self.drops_after_forward}
        if self.options.get("mp_policy") is not None:
            settings["mp_policy"] = self.options["mp_policy"]
        units = self._units(model)
        for unit in units:
            fully_shard(unit, **settings)
        watch_updates = getattr(group, "watch_updates", None)
        if watch_updates is not None:  # backend photinus then says which ranks are a step apart
            watch_updates(model.parameters())
        after = dict(model.named_parameters())
        new_of: dict[torch.Tensor, torch.Tensor] = {old: after[name] for name, old in before.items()}
        held_parameters, rank = HeldParameters(model), group.rank()
        watched = SplitUnits(model, units, self.name, new_of, held_parameters.learn)
        if self.options.get("find_unused_parameters"):
            cast(Any, model).set_reduce_scatter_unused_params(True)
            watched.watchers.append(UnusedParameters(model, group).note)
        # Before FSDP's hook, which would put its own tensors in the place of those that came.
        model.register_forward_pre_hook(_disable_dynamo(lambda *_: held_parameters.check(rank)), prepend=True)
        model.register_forward_pre_hook(_disable_dynamo(_make_memory_for_training), prepend=True)
        vars(model)["__deepcopy__"] = partial(copy_split, model)
        model.register_forward_hook(_disable_dynamo(partial(_drop_without_backward, watched)))
        model.register_load_state_dict_pre_hook(_split_plain)  # type: ignore[no-untyped-call]
        note_split(before, type(model).__name__[4:])  # FSDP...
        for optimizer in optimizers:
            repoint(optimizer, new_of, split_as)
            optimizer.register_load_state_dict_pre_hook(_split_plain_state)
        split_models.add(held_parameters)
        explain_errors(model, group)
        watch_split_models()
        watch_values()
        if self.options.get("check_ranks", True) and group.size() > 1:
            _check_steps(model, group)
        return model

    def unwrap(self, wrapped: nn.Module) -> nn.Module:
        """The model itself."""
        return wrapped

    @contextmanager
    def _without_exchange(self, wrapped: nn.Module) -> Iterator[None]:
        with_sums.add(wrapped)
        units = [cast(Any, unit) for unit in wrapped.modules() if hasattr(unit, "set_requires_gradient_sync")]
        inside = vars(wrapped).get("inside_no_sync", False)  # torch cannot be asked what is in force
        try:
            for unit in units:
                unit.set_requires_gradient_sync(False, recurse=False)
            vars(wrapped)["inside_no_sync"] = True
            yield
        finally:
            vars(wrapped)["inside_no_sync"] = inside
            for unit in units:
                unit.set_requires_gradient_sync(not inside, recurse=False)

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """See `Strategy.no_sync`. Inside, each rank holds whole gradients."""
        self._require_made(wrapped)
        return self._without_exchange(wrapped)

    def clip(self, wrapped: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """See `Strategy.clip`. The ranks add up the norms of their parts."""
        drop_gathered(wrapped)  # else the whole parameters are listed, which have no gradients
        gradients = [cast(Any, p.grad) for p in wrapped.parameters() if is_split(p.grad)]
        if gradients and gradients[0].device_mesh.ndim == 1 and not 0 <= norm_type < math.inf:
            parts = [part for part in (gradient.to_local() for gradient in gradients) if part.numel()]
            own = gradients[0].to_local().new_tensor(0.0 if norm_type > 0 else math.inf)
            if parts:  # torch has no such norm of an empty part
                own.copy_(nn.utils.get_total_norm(parts, norm_type))
            norms = [torch.empty_like(own) for _ in range(gradients[0].device_mesh.size())]
            dist.all_gather(norms, own, group=gradients[0].device_mesh.get_group())
            norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
            parameters = [*wrapped.parameters()]
            before = [(facts, facts.gradient_versions(parameters)) for facts in facts_of(parameters)]
            for part in parts:
                part.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
            for facts, versions in before:
                facts.note_call("clip", max_norm=max_norm, norm_type=norm_type)
                facts.forgive_changes(parameters, versions)
            return norm
        norm = super().clip(wrapped, max_norm, norm_type)
        return cast(torch.Tensor, cast(Any, norm).full_tensor()) if is_split(norm) else norm

    def load(self, part: nn.Module | Optimizer, state: Mapping[str, Any]) -> None:
        """See `Strategy.load`. Each rank copies its part; nothing is exchanged."""
        if isinstance(part, nn.Module):
            parts = cast("dict[str, Any]", copy.copy(state))  # with the versions that torch noted
            _split_plain(part, parts)
            part.load_state_dict(parts)
            return
        part.load_state_dict(_split_state(part, state))

    def splits(self, part: nn.Module | Optimizer) -> bool:
        """Models and optimizers are split."""
        return self.recognizes(part)

    @classmethod
    def recognizes(cls, part: nn.Module | Optimizer) -> bool:
        """Return whether FSDP2 split it: a model whose root or any part it is, or an optimizer over such parameters."""
        if isinstance(part, nn.Module):
            return any(hasattr(module, "set_requires_gradient_sync") for module in part.modules())
        groups = getattr(part, "param_groups", [])
        return any(is_split(parameter) for group in groups for parameter in group["params"])

    def _start_as_rank_0(self, model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
        parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
        if group.size() == 1:
            return
        lines = [f"strategy: {self.name}, options: {', '.join(sorted(self.options)) or 'none'}"]
        lines += [describe("parameter", name, parameter) for name, parameter in parameters]
        lines += [describe("buffer", name, buffer) for name, buffer in buffers]
        verify_same_model(lines, group)
        broadcast_tensors([*(p.detach() for _, p in parameters), *(b for _, b in buffers)], group, device)


class Zero2Strategy(FullyShardedStrategy):
    """As "zero3", but what forward gathered is kept for backward: faster by one gather, and the whole model in memory.

    Between steps each rank holds its part only.
    """

    name: ClassVar[str] = "zero2"
    drops_after_forward: ClassVar[bool] = False


class Zero3Strategy(FullyShardedStrategy):
    """Gathered parameters are dropped after the forward of their unit, and gathered once more for its backward."""

    name: ClassVar[str] = "zero3"
    drops_after_forward: ClassVar[bool] = True


class UnusedParameters:
    """Parameters that no rank used in a backward: FSDP2 gives them zeros, by which momentum and weight decay move them.

    DDP leaves them without a gradient. So each rank notes which parameters its backward reached. After the backward, in
    one exchange of 4 bytes per parameter, all ranks take the zeros away that nobody added to.

    Watches a model that FSDP2 has split, with `set_reduce_scatter_unused_params(True)`.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self._model, self._group, self._parameters = model, group, list(model.parameters())
        self._used_parameters: set[nn.Parameter] = set()  # since they last got a gradient from all ranks
        self._task = -1

    def note(self, parameter: nn.Parameter) -> None:
        """Called for each gradient of a backward."""
        self._used_parameters.add(parameter)
        task = torch._C._current_graph_task_id()
        if task != self._task and not vars(self._model).get("inside_no_sync"):
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end)  # after FSDP's, which came first

    def _end(self) -> None:
        flags = torch.tensor([p in self._used_parameters for p in self._parameters], dtype=torch.int32)
        flags = flags.to(control_device(self._group))
        dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        for parameter, by_any in zip(self._parameters, flags.tolist(), strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            self._used_parameters.discard(parameter)
            if by_any:
                vars(gradient)[_KEPT] = True
            elif _KEPT not in vars(gradient):
                parameter.grad = None


def _can_miss_parameters() -> bool:
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def _make_memory_for_training(model: nn.Module, *_: Any) -> None:
    """Before the first forward: memory that FSDP2 makes in inference mode could not be written outside of it."""
    if torch.is_inference_mode_enabled() and not vars(model).get("has_gathered"):
        with torch.inference_mode(False), torch.no_grad():
            for module in model.modules():
                if hasattr(module, "unshard"):
                    cast(Any, module).unshard()
                    cast(Any, module).reshard()
    vars(model)["has_gathered"] = True


def _check_steps(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Compares what the ranks do around their steps; no rank holds another one's part to compare with."""
    facts, parameters = StepFacts(model.named_parameters(), group), [*model.parameters()]

    def watch_gradients() -> None:
        trained: list[Any] = [each for each in parameters if each.requires_grad]
        parameters[:] = [each for each in parameters if not each.requires_grad]  # they may be unfrozen later
        for each in trained:  # FSDP2 calls the hook when the average has come
            handle = each.register_post_accumulate_grad_hook(lambda split: facts.note_averaged((split,)))
            each._post_accumulate_grad_hooks.move_to_end(handle.id, last=False)  # users' hooks change gradients

    def begin_forward(*_: Any) -> None:
        watch_gradients()
        facts.begin_forward()

    watch_gradients()
    # Before the other hooks, which gather.
    model.register_forward_pre_hook(_disable_dynamo(begin_forward), prepend=True)


def copy_split(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a copy of a model that FSDP2 has split, split in the same way. All ranks make it; nothing is exchanged.

    Raises:
        TypeError: a parameter is split in another way than along its first dimension, over one group.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import Shard

    drop_gathered(model)
    memo = {} if memo is None else memo
    parameters: Any = dict(model.named_parameters())
    for name, each in parameters.items():
        if not is_split(each) or tuple(each.placements) != (Shard(0),):
            how = f"split as {each.placements}" if is_split(each) else "not split"
            raise TypeError(
                f"{type(model).__name__} cannot be copied: {name} is {how}, and only what is split along its first "
                f"dimension over one group of ranks can"
            )
        # Its memory is used only as far as the new part is cut from it.
        whole = torch.empty(each.shape, dtype=each.dtype, device=each.to_local().device)
        memo[id(each)] = nn.Parameter(whole, each.requires_grad)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in reversed(units):  # inner ones first
        kinds = type(unit).__mro__
        plain: Any = kinds[kinds.index(FSDPModule) + 1]
        new = memo[id(unit)] = plain.__new__(plain)
        state = cast("dict[str, Any]", unit.__reduce_ex__(4)[2])
        state = {key: v for key, v in state.items() if key not in _OF_SPLIT and "composable_api" not in key}
        for key, hooks in state.items():
            if key.endswith("_hooks") and isinstance(hooks, dict):
                state[key] = type(hooks)((k, hook) for k, hook in hooks.items() if not _is_internal(hook))
        new.__setstate__(copy.deepcopy(state, memo))
    own, first = {id(memo[id(unit)]) for unit in units}, next(iter(parameters.values()))
    policy = getattr(cast(Any, fully_shard).state(model), "_mp_policy", None)
    checked = bool(facts_of(model.parameters()))
    options = {"process_group": first.device_mesh.get_group(), "mp_policy": policy, "check_ranks": checked}
    strategy = Zero3Strategy(shard=lambda module: id(module) in own, **options)
    vars(strategy)["_start_as_rank_0"] = lambda *_: None  # the values come from the parts of the model
    copied: Any = strategy.wrap(memo[id(model)], first.to_local().device)
    with torch.no_grad():
        for ours, theirs in zip(copied.parameters(), parameters.values(), strict=True):
            ours.to_local().copy_(theirs.to_local())
    return cast(nn.Module, copied)


def _is_internal(value: Any) -> bool:
    """Return whether it is a hook of FSDP2 or of the strategy; a copy gets them again."""
    hook = inspect.unwrap(getattr(value, "hook", value))
    home = getattr(hook.func if isinstance(hook, partial) else hook, "__module__", "")
    return str(home).startswith(("torch.distributed.", "photinus."))


def _drop_without_backward(units: SplitUnits, model: nn.Module, *_: Any) -> None:
    """After a forward: no backward comes without gradients, so nothing else would drop what is kept for it."""
    if not torch.is_grad_enabled() and not units.hides_loss:
        drop_gathered(model)


def _split_plain(model: nn.Module, state: dict[str, Any], prefix: str = "", *_: Any) -> None:
    """Puts this rank's parts in the place of whole tensors, which FSDP2 cannot load."""
    for name, like in model.state_dict(prefix=prefix).items():
        if is_split(like) and name in state:
            state[name] = _split(state[name], like)


def _split_plain_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """Before `optimizer.load_state_dict`: parts in the place of whole tensors, which could not be stepped."""
    values = [value for remembered in state["state"].values() for value in remembered.values()]
    whole = any(isinstance(value, torch.Tensor) and value.dim() and not is_split(value) for value in values)
    return _split_state(optimizer, state) if whole else None


def _split_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an optimizer's state with this rank's parts of whole tensors."""
    likes = dict(enumerate(parameter for group in optimizer.param_groups for parameter in group["params"]))
    states = {
        key: {name: _split(value, likes[key]) for name, value in remembered.items()} if key in likes else remembered
        for key, remembered in state["state"].items()  # too high a key: torch says so
    }
    return {**copy_state({name: value for name, value in state.items() if name != "state"}), "state": states}


def _split(value: Any, like: Any) -> Any:
    """A copy of this rank's part of a whole tensor where the target is split; a copy of all else."""
    is_whole = isinstance(value, torch.Tensor) and value.dim() > 0 and not is_split(value)
    return split_as(value, like) if is_whole and is_split(like) else copy_state(value)
