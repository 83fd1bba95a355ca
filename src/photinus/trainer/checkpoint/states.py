"""From objects to plain states that a file can hold, and back, all or none.

A state is made of tensors and Python's own numbers, text and containers: what `torch.load(weights_only=True)` reads,
which never runs code from a file. Names are those of the user's own model, without the prefixes of wrappers, so a
checkpoint of any strategy loads in any other and in plain torch.
"""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from ...errors import CheckpointError
from ...parallel import strategy_of
from ...parallel.exchange.agreement import gather_per_rank, place_in_group
from ...parallel.exchange.tensors import tensors_in
from ...parallel.zero.split_states import copy_state, gather_state, is_split, own_part
from ..data.loader import Loader

_CPU = torch.device("cpu")
_BYTES_PER_TENSOR = 1024  # in a file, beside its data: name, headers, alignment; generously
_BYTES_PER_ITEM = 64
_BYTES_PER_FILE = 4096
_LIKE_ITS_PARAMETER = re.compile(  # in the states of torch's optimizers
    "exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta|sum|prev|ax"
)
_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_LONGEST_INT_BITS = 255 * 8 - 1  # of a pickle's short form, the only one that torch.load(weights_only=True) takes
_AS_THEY_ARE = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module inside DistributedDataParallel (torch's or ours), DataParallel or torch.compile."""
    while True:
        inner = getattr(module, "_orig_mod", None)  # torch.compile's OptimizedModule
        if not isinstance(inner, nn.Module):
            # A wrapper holds one child called `module`; a model of the user's may do so as well, but has no `no_sync`.
            is_wrapper = hasattr(type(module), "no_sync") or isinstance(module, nn.DataParallel)
            inner = getattr(module, "module", None) if is_wrapper else None
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def inside(module: nn.Module) -> nn.Module:
    """Return the user's module, or torch's AveragedModel over it: what has plain names."""
    module = unwrap(module)
    if isinstance(module, AveragedModel) and unwrap(module.module) is not module.module:
        inner, module = unwrap(module.module), copy.copy(module)
        vars(module)["_modules"] = {"module": inner}
    return module


def state_of(value: Any) -> Any:
    """The whole state of an object that has one (`state_dict`; a wrapped model's own), else the value itself.

    Called by all ranks, for what strategies split over the ranks is gathered: on rank 0, what others get is of no use.
    """
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        part = inside(value) if isinstance(value, nn.Module) else value
        return strategy_of(part).save(part)
    if _has_state(value):
        state = gather_state(value.state_dict())  # such as an average of a split model's weights
        return (
            {**state, "stream": whole_stream(state["stream"])} if isinstance(value, Loader) and value.shards else state
        )
    return value


def local_states(objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states as this rank has them, without a copy and without an exchange: those that are whole, and the split."""
    whole, split = dict[str, Any](), dict[str, Any]()
    for name, value in objects.items():
        if isinstance(value, (nn.Module, torch.optim.Optimizer)):
            part = inside(value) if isinstance(value, nn.Module) else value
            strategy = strategy_of(part)
            state, splits = strategy.local_state(part), strategy.splits(part)
        else:
            state, splits = value.state_dict() if _has_state(value) else value, False
        (split if splits or any(map(is_split, tensors_in(state))) else whole)[name] = state  # users split models, too
    return whole, split


def bytes_held(objects: Iterable[Any]) -> int:
    """Return about how much of the states of models and optimizers this rank has."""
    total = 0
    for value in objects:
        tensors = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else []
        tensors += tensors_in(dict(value.state)) if isinstance(value, torch.optim.Optimizer) else []
        tensors = [own_part(each) for each in tensors if not is_lazy(each)]
        total += sum(each.nbytes for each in tensors if each.layout is torch.strided)  # of others torch knows none
    return total


def whole_stream(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The states of a stream's shards of all ranks, as a file can hold them. All ranks call it."""
    if state is None:
        return None
    mine = {}
    for shard, place in state["states"].items():
        try:
            mine[shard] = PlainState(place, f"the state of shard {shard}").value
        except TypeError:  # a resume reads the shard from its beginning, and says so
            mine[shard] = {**place, "at": 0, "source": None, "of": None}
    return {**state, "states": {shard: place for each in gather_per_rank(mine) for shard, place in each.items()}}


def require_whole(value: Any, name: str) -> None:
    """Refuses an object of which this rank holds but a part, where the other ranks are not asked for theirs."""
    is_part = isinstance(value, (nn.Module, torch.optim.Optimizer)) and strategy_of(value).splits(value)
    if is_part and place_in_group()[1] > 1:
        raise TypeError(
            f"{name} ({type(value).__name__}) is split over the ranks, and one rank alone cannot save it: use "
            f"photinus.save or photinus.Loop, which all ranks call"
        )


def _has_state(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


class PlainState:
    """`value` as a file should hold it, and how many bytes that needs at most.

    Tensors become CPU tensors without gradient that own just their elements (a view of a large buffer is not written
    with the whole buffer); what was one tensor under two names stays one. Subclasses of numbers and text, and numpy's
    numbers, become plain ones.

    Args:
        value: nested dict, list, tuple, set, tensors, numbers, text, None.
        name: of the state's entry, for messages.

    Raises:
        TypeError: something in it could not be read back safely; names the place and what to do.
    """

    def __init__(self, value: Any, name: str) -> None:
        self.needed_bytes = _BYTES_PER_FILE
        self._seen: dict[tuple[Any, ...], torch.Tensor] = {}
        self.value = self._plain(value, name)

    def _plain(self, value: Any, where: str) -> Any:
        self.needed_bytes += _BYTES_PER_ITEM
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if kind is int and value.bit_length() > _LONGEST_INT_BITS:
            raise TypeError(f"{where} is a number of {value.bit_length()} bits, which could be saved and not be loaded")
        if kind is bytes and not value:
            return bytearray()  # equal to b"", which torch.load(weights_only=True) refuses
        if kind in _AS_THEY_ARE:
            self.needed_bytes += 4 * len(value) if isinstance(value, (str, bytes)) else 0
            return value
        if kind in (dict, OrderedDict, defaultdict):
            items = {self._key(key, where): self._plain(item, f"{where}[{key!r}]") for key, item in value.items()}
            if kind is not OrderedDict:
                return items
            ordered = OrderedDict(items)
            vars(ordered).update({k: self._plain(v, f"{where}.{k}") for k, v in vars(value).items()})  # _metadata
            return ordered
        if kind is Counter:
            return Counter(value)
        if kind in (list, tuple, set):
            return kind(self._plain(item, f"{where}[{index}]") for index, item in enumerate(value))
        return self._number_or_text(value, where)

    def _number_or_text(self, value: Any, where: str) -> Any:
        if not isinstance(value, Enum):
            for kind in (int, float, str):  # numpy.float64 and torch.__version__ are such subclasses
                if isinstance(value, kind):
                    return kind(value)
            if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
                return self._plain(value.item(), where)
        if type(value).__module__ == "numpy":
            advice = "Make it a tensor (torch.from_numpy) or a list"
        else:
            advice = "Give it a state_dict() of tensors, numbers, text, lists and dicts, or leave it out"
        raise TypeError(
            f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved: loading it "
            f"again would have to run code from the file. {advice}."
        )

    def _key(self, key: Any, where: str) -> Any:
        if isinstance(key, torch.Tensor):
            raise TypeError(f"{where} has a tensor as a key, which cannot be saved")
        return self._plain(key, f"{where}, key {key!r}")

    def _check_tensor(self, tensor: torch.Tensor, where: str) -> None:
        if type(tensor) not in _TENSORS:
            raise TypeError(
                f"{where} is a {type(tensor).__qualname__}, not a plain tensor: make it one first "
                f"(a DTensor by .full_tensor())"
            )
        if tensor.is_meta or is_lazy(tensor):
            raise TypeError(f"{where} has no values yet (it is {'lazy' if is_lazy(tensor) else 'on the meta device'})")

    def _tensor(self, tensor: torch.Tensor, where: str) -> Any:
        self._check_tensor(tensor, where)
        tensor = tensor.detach()
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu()
        storage = tensor.untyped_storage().data_ptr()
        shape = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        identity = (tensor.device, storage, shape, tensor.is_conj(), tensor.is_neg())
        if identity not in self._seen:
            host = tensor.cpu().resolve_conj().resolve_neg()
            if host.untyped_storage().nbytes() != host.numel() * host.element_size():
                host = host.clone()
            self.needed_bytes += host.untyped_storage().nbytes() + _BYTES_PER_TENSOR
            self._seen[identity] = host
        return self._seen[identity]


def plain_names(state: Mapping[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """A model's state without the `module.` or `_orig_mod.` that a wrapper put before every name; a copy, not deep.

    Args:
        wanted: the model's own names. A prefix that belongs to them (the model's only child is called `module`) stays.
            A plain model takes the weights of an average, too.
    """
    if "n_averaged" in state and "n_averaged" not in wanted:  # torch's AveragedModel counts
        state = {name: value for name, value in state.items() if name != "n_averaged"}
    for prefix in ("module.", "_orig_mod."):
        if state and all(str(name).startswith(prefix) for name in state):
            shorter = {str(name).removeprefix(prefix): value for name, value in state.items()}
            fitting = sum(name in state for name in wanted)
            if not fitting or sum(name in shorter for name in wanted) > fitting:
                return plain_names(shorter, wanted)
    return copy.copy(state) if isinstance(state, dict) else dict(state)  # with the versions that torch noted


def check_states(
    objects: Mapping[str, Any], states: Mapping[str, Any], source: str, advice: str = "Nothing was loaded."
) -> None:
    """Raise an error if an object cannot take its state. Only what can be checked without a change is checked.

    Args:
        source: the file or folder, for messages, which end with the advice.
    """
    for name, target in objects.items():
        if not callable(getattr(target, "load_state_dict", None)):
            raise TypeError(
                f"{name} is a {type(target).__name__} without load_state_dict, so nothing can be loaded into it. Plain "
                f"values are returned: saved = photinus.load(...); {name} = saved[{name!r}]"
            )
        if name not in states:
            raise CheckpointError(f"{source} holds no {name!r}; it holds {', '.join(map(repr, states)) or 'nothing'}")
        if isinstance(target, nn.Module):
            _check_module(name, inside(target), states[name], source, advice)
        if isinstance(target, torch.optim.Optimizer):
            _check_optimizer(target, states[name], source, advice, objects.values())


def _check_optimizer(
    optimizer: torch.optim.Optimizer, state: Any, source: str, advice: str, objects: Iterable[Any]
) -> None:
    """Raises CheckpointError where a parameter has another shape than what `state` holds for it.

    Args:
        objects: among them the models, for the parameters' names.
    """
    names = {p: name for each in objects if isinstance(each, nn.Module) for name, p in unwrap(each).named_parameters()}
    groups = state.get("param_groups", ()) if isinstance(state, Mapping) else ()  # the rest is torch's to refuse
    pairs = zip(optimizer.param_groups, groups, strict=False)
    for index, (group, saved) in enumerate(pairs):
        for place, (parameter, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            for kind, value in state["state"].get(key, {}).items():
                if not _LIKE_ITS_PARAMETER.fullmatch(str(kind)) or not torch.is_tensor(value):
                    continue
                if value.shape != parameter.shape:
                    name = names.get(parameter, f"parameter {place} of group {index}")
                    raise CheckpointError(
                        f"the optimizer's state in {source} belongs to a different model: {kind} of {name} has shape "
                        f"{list(value.shape)} and the parameter {list(parameter.shape)}. Give the optimizer the same "
                        f"parameters in the same order, or begin with a new one. {advice}"
                    )


def apply_states(objects: Mapping[str, Any], states: Mapping[str, Any], source: str) -> Callable[[], str]:
    """Loads each object's state, checked before, into it; when one fails, all get back what they had, and it is raised.

    Returns:
        A function that takes it all back (another rank has failed), and returns how that went.
    """
    before: dict[str, Callable[[], None]] = {}  # each puts back a copy of what an object held on this rank

    def undo() -> str:
        stuck = []
        for name, put_back in reversed(before.items()):
            try:
                put_back()
            except Exception as error:  # noqa: BLE001 - the others have to be put back all the same; it is told
                stuck.append(f"{name} ({type(error).__name__}: {error})")
        before.clear()
        if stuck:
            return f"What it had before could not be put back in {', '.join(stuck)}; all else was."
        return "Nothing was changed."

    for name, target in objects.items():
        if isinstance(target, (nn.Module, torch.optim.Optimizer)):
            part = inside(target) if isinstance(target, nn.Module) else target
            before[name] = strategy_of(part).keep(part)
        elif _has_state(target):
            before[name] = partial(target.load_state_dict, copy_state(target.state_dict(), _CPU))
        try:
            load_into(target, states[name])
        except Exception as error:
            raise CheckpointError(
                f"{name} ({type(target).__name__}) does not take its state from {source}: {type(error).__name__}: "
                f"{error}. {undo()}"
            ) from error
    return undo


def load_into(target: Any, state: Any) -> None:
    """Gives an object a whole state; every rank keeps its part. Nothing of `state` is shared with the object then."""
    if isinstance(target, nn.Module):
        module = inside(target)
        state = plain_names(state, module.state_dict().keys())
        copied = _names_copied_by_torch(module)
        state.update(copy_state({name: value for name, value in state.items() if name not in copied}))
        strategy_of(module).load(module, state)
    elif isinstance(target, torch.optim.Optimizer):
        # What its own constructor gave: torch adds a name to the defaults while it loads, and not to the groups.
        needed = [[name for name in group if name in target.defaults] for group in target.param_groups]
        strategy_of(target).load(target, state)
        _check_options(target, needed)
    else:
        target.load_state_dict(copy_state(state))


def _names_copied_by_torch(module: nn.Module) -> set[str]:
    """Return the names in a state that `load_state_dict` copies; a module with a way of its own may keep all others."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return set()
    names = set[str]()
    for path, each in module.named_modules(remove_duplicate=False):
        if type(each)._load_from_state_dict is nn.Module._load_from_state_dict:
            own = {**each._parameters, **each._buffers}
            names |= {f"{path}.{name}" if path else name for name, tensor in own.items() if tensor is not None}
    return names


def _check_options(optimizer: torch.optim.Optimizer, needed: list[list[str]]) -> None:
    """Refuses the state of another optimizer, which torch loads, but which lacks what this one's next step reads."""
    for group, names in zip(optimizer.param_groups, needed, strict=True):
        lacking = [name for name in names if name not in group]
        if lacking:
            held = [name for name in group if name != "params"]
            raise ValueError(
                f"the state belongs to a different optimizer: its groups have {', '.join(held)}, and "
                f"{type(optimizer).__name__} needs {', '.join(lacking)}, too. Give the optimizer that was saved, or "
                f"begin with a new one"
            )


def _check_module(name: str, module: nn.Module, state: Any, source: str, advice: str) -> None:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{name} in {source} is a {type(state).__name__}, not the state of a model")
    wanted = module.state_dict()
    found = plain_names(state, wanted.keys())
    told = []
    missing = [key for key in wanted if key not in found]
    unexpected = [key for key in found if key not in wanted]
    if missing:
        told.append(f"it lacks {_some(missing)}")
    if unexpected:
        told.append(f"the model has no {_some(unexpected)}")
    for key in wanted:
        ours, theirs = wanted[key], found.get(key)
        if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)) or is_lazy(ours):
            continue
        if ours.shape != theirs.shape:
            told.append(f"{key} has shape {list(theirs.shape)} and the model's {list(ours.shape)}")
    if told:
        raise CheckpointError(f"{name} in {source} belongs to a different model: {'; '.join(told[:6])}. {advice}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
