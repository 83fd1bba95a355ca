"""A record of what each rank did around its optimizer steps, so that none does in silence what others do not.

Where the ranks split the work of a step, its result shows nothing of that: under "zero1" the ranks send each other
what they have stepped, and are equal again; under "zero2" and "zero3" no part is held twice. So each rank keeps a
digest of what it did, of all its steps so far. It covers, of each step:

    options       of the optimizer's groups
    clips         the bounds given to torch's clip_grad_norm_ and clip_grad_value_ since the step before
    gradients     absent, made by hand, or changed (torch counts changes in place) since they were averaged
    parameters    those that something changed since the step before
    states        what the optimizer remembers and something changed since
    values        "zero1" on CPUs, which holds all on each rank: of a part of the gradients and parameters, in turn, in
                  every eighth step and where something was changed

Once ranks differ, their digests do for good, so comparing them may wait: under "zero1" every few exchanges of gradients
compare them (see `reducer.checks`), under "zero2" and "zero3" every few forwards, and `photinus.save` and a Loop, too.
Only where they differ do the ranks tell each other what they did.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ...errors import ModelMismatchError, PhotinusError
from ..exchange.agreement import JSON, check_alike, gather_per_rank
from ..exchange.collectives import control_device, gather_numbers
from ..exchange.verify_models import digest_of
from .split_states import is_split, own_part

AVERAGED = "photinus_averaged"  # on a gradient: (its version when it was averaged, a number for the backwards in it)
_MASK = (1 << 20) - 1
_STEPS_KEPT = 128  # for the message
_WINDOW_ELEMS = 128 * 1024  # of gradients, and of parameters, whose values are looked at in one step
_STEPS_PER_VALUES = 8  # and in each step before which something was changed
_FORWARDS_PER_EXCHANGE = 8
_FORWARDS_PER_EXCHANGE_ON_GPU = 64  # where reading the answer makes the host wait for the device

_OF_SOME = " of some parameters"
_PLAIN = frozenset({bool, int, float, str, type(None)})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes

_all: weakref.WeakSet[StepFacts] = weakref.WeakSet()
_numbers = itertools.count()


class StepFacts:
    """Keeps what this rank does to one model and its optimizers, and compares it with the other ranks'.

    Args:
        named: (name, parameter), as they are trained: split ones under "zero2" and "zero3".
        group: the ranks.
        unaveraged: returns the names of those whose gradients come from a backward that no exchange has averaged.
        memory: returns tensors of one dimension in which averaged gradients lie; values are compared where it is given.

    Attributes:
        digest: of all steps so far, 48 bits; equal on ranks that did the same.
        is_split: whether the parameters are parts.
        is_deferred: a Loop compares, with its losses.
        compares_states: False where a rank steps no parameter: it could not tell of changes of all that optimizers
            remember.
        number: of all that this process made, which all ranks make in one order.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, Tensor]],
        group: dist.ProcessGroup,
        unaveraged: Callable[[Sequence[Tensor]], Sequence[str]] = lambda _: (),
        memory: Callable[[], Sequence[Tensor]] | None = None,
    ) -> None:
        pairs = [(name, p) for name, p in named if p.requires_grad or is_split(p)]
        self._names = [name for name, _ in pairs]
        self._parameters = [parameter for _, parameter in pairs]
        self._group, self._unaveraged = group, unaveraged
        self.number = next(_numbers)
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self.is_split = any(map(is_split, self._parameters))
        # A right script may leave out a part without elements, and gradients of a unit count their changes together.
        self._counts_parts = all(_all_ranks_have_some(each, group.size()) for each in self._parameters)
        on_cpu = all(each.device.type == "cpu" for each in self._parameters)
        self._memory = memory if on_cpu else None
        self._bits: dict[int, tuple[int, Tensor]] = {}  # of parameters, by index: address, and the whole as integers
        self.compares_states, self.is_deferred = True, False
        self._forwards = 0
        on_gpu = control_device(group).type != "cpu"
        self._every = _FORWARDS_PER_EXCHANGE_ON_GPU if on_gpu else _FORWARDS_PER_EXCHANGE
        self.restart()
        for other in facts_of(self._parameters):  # of a wrapper that is gone: when it is collected, nobody knows
            _all.discard(other)
        _all.add(self)
        _watch_clips()

    def restart(self) -> None:
        """All ranks are together again, whatever each has done."""
        self.digest, self._steps = 0, 0
        self._last: tuple[Any, ...] = ()
        self._last_hash = 0
        self._calls: list[dict[str, JSON]] = []
        self._marks: list[tuple[int, int] | None] = [None for _ in self._parameters]  # of averages: address, version
        self._log: deque[tuple[Any, ...]] = deque(maxlen=_STEPS_KEPT)
        self._versions = [self._version(each) for each in self._parameters]
        # By optimizer: of each tensor that it remembers, by parameter and name, the tensor and its version.
        self._states: weakref.WeakKeyDictionary[Optimizer, dict[tuple[int, str], tuple[weakref.ref[Tensor], int]]]
        self._states = weakref.WeakKeyDictionary()  # not by `id`, which an optimizer may have from one that is gone

    # ---- what is noted

    def note_averaged(self, parameters: Iterable[Tensor] | None = None) -> None:
        """The gradients of these, or of all, are averages now."""
        if not self.is_split:
            # Where they lie tells them from others: their memory is not freed.
            grads = [each.grad for each in self._parameters]
            dense = [each if each is not None and each.layout == torch.strided else None for each in grads]
            self._marks = [None if each is None else (each.data_ptr(), each._version) for each in dense]
            return
        for gradient in [each.grad for each in parameters or ()]:
            if gradient is not None:
                version, before = self._version(gradient), vars(gradient).get(AVERAGED)
                code = 0
                if before is not None:  # added to one that was not cleared
                    code = (31 * before[1] + version - before[0] + 1) & _MASK
                vars(gradient)[AVERAGED] = (version, code)

    def note_call(self, call: str, **arguments: JSON) -> None:
        """A call has changed gradients, which all ranks have to make with the same arguments before their step."""
        self._calls.append({f"{call}, {name}": value for name, value in arguments.items()})

    def gradient_versions(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return how often the gradients of these were changed, for `forgive_changes`."""
        return [0 if each.grad is None else self._version(each.grad) for each in parameters]

    def forgive_changes(self, parameters: Sequence[Tensor], before: Sequence[int]) -> None:
        """Forget how the gradients of these were changed since `gradient_versions`: that is noted otherwise."""
        for parameter, version in zip(parameters, before, strict=True):
            gradient, index = parameter.grad, self._index.get(id(parameter))
            if gradient is None or index is None:
                continue
            mark, changes = self._marks[index], self._version(gradient) - version
            if self.is_split and AVERAGED in vars(gradient):
                old, code = vars(gradient)[AVERAGED]
                vars(gradient)[AVERAGED] = (old + changes, code)
            elif mark is not None and mark[0] == gradient.data_ptr():
                self._marks[index] = (mark[0], mark[1] + changes)

    def forget(self) -> None:
        """All ranks have done the same up to now."""
        self._log.clear()

    def begin_step(self, optimizer: Optimizer) -> None:
        """Notes what is to be stepped with.

        Raises:
            PhotinusError: gradients that no exchange has averaged; on all ranks where all have some.
        """
        own = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._index]
        if unaveraged := self._unaveraged(own):
            self._check_unaveraged(unaveraged, optimizer)
        places = [self._index[id(each)] for each in own]
        code = self._code_of_part if self.is_split else self._code_of_whole
        gradients = [code(i, each.grad) for i, each in zip(places, own, strict=True)]
        changed = [i for i, each in zip(places, own, strict=True) if self._version(each) != self._versions[i]]
        options = [
            [(k, v if v.__class__ in _PLAIN else _plain(v)) for k, v in group.items() if k != "params"]
            for group in optimizer.param_groups
        ]
        is_noted = bool(self._calls or changed or any(gradients))
        is_due = is_noted or self._steps % _STEPS_PER_VALUES == 0
        values = self._values(own, gradients) if is_due and self._memory is not None else (0, 0)
        states = self._changed_states(optimizer)
        fact = (type(optimizer).__name__, places, options, self._calls, gradients, changed, states)
        self._calls = []
        self._steps += 1
        self._log.append((self._steps, *fact, values))
        if fact != self._last:  # it seldom is another one than that of the step before
            self._last, self._last_hash = fact, _hash(fact)
        self.digest = (1000003 * self.digest + self._last_hash + 31 * values[0] + 17 * values[1]) % 2**48

    def end_step(self, optimizer: Optimizer) -> None:
        """The step is done: what changes from now on, something else has changed."""
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            index = self._index.get(id(parameter))
            if index is not None:
                self._versions[index] = self._version(parameter)
        try:
            states = self._remembered(optimizer)
            self._states[optimizer] = {key: (weakref.ref(value), value._version) for key, value in states}
        except RuntimeError:  # a step in inference mode made some, and torch counts no changes of these
            self._states.pop(optimizer, None)

    def _remembered(self, optimizer: Optimizer) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """Yield the tensors that the optimizer remembers of these parameters, by parameter and name."""
        for parameter, state in optimizer.state.items():
            index = self._index.get(id(parameter))
            for name, value in state.items() if index is not None else ():
                if isinstance(value, Tensor):
                    yield (cast(int, index), name), value

    def _code_of_whole(self, index: int, gradient: Tensor | None) -> tuple[int, int] | int | None:
        """None: absent. -1: made by hand. 0: as averaged. Else how often it was changed since, and its backwards."""
        if gradient is None:
            return None
        mark = self._marks[index]
        if mark is None or gradient.layout != torch.strided or mark[0] != gradient.data_ptr():
            return -1
        changes = gradient._version - mark[1]
        return (changes, 0) if changes else 0

    def _code_of_part(self, index: int, gradient: Tensor | None) -> tuple[int, int] | int | None:
        if gradient is None:
            return None
        mark = vars(gradient).get(AVERAGED)
        if mark is None:
            return -1
        changes = self._version(gradient) - mark[0]
        return (changes, mark[1]) if changes or mark[1] else 0

    def _changed_states(self, optimizer: Optimizer) -> list[Any]:
        """Return what the optimizer remembers and something else than a step has changed: (parameter, name).

        Where each rank remembers other parameters: names alone, and a mark where only some of this rank's changed.
        """
        before = self._states.get(optimizer)
        if before is None or not self.compares_states:
            return []
        now = dict(self._remembered(optimizer))
        changed = before.keys() - now.keys()
        for key, value in now.items():
            reference, version = before.get(key, (None, 0))
            if reference is None or reference() is not value or value._version != version:
                changed.add(key)
        if self.is_split:
            return sorted(changed)
        others = {name for _, name in before.keys() - changed}
        return sorted(name + _OF_SOME * (name in others) for name in {name for _, name in changed})

    def _version(self, tensor: Tensor) -> int:
        part = getattr(tensor, "_local_tensor", None) if self.is_split and self._counts_parts else None
        return tensor._version if part is None else tensor._version + part._version

    def _values(self, own: Sequence[Tensor], codes: Sequence[Any]) -> tuple[int, int]:
        """Digests of the part of the gradients and parameters whose turn it is, and of gradients made by hand."""
        assert self._memory is not None
        step = self._steps // _STEPS_PER_VALUES
        gradients = _turn([_bits(each) for each in self._memory()], step)
        gradients += [
            _bits(each.grad)[:_WINDOW_ELEMS]
            for each, code in zip(own, codes, strict=True)
            if code == -1 and each.grad is not None and each.grad.layout == torch.strided
        ]
        return _digest(gradients), _digest(_turn(self._parameter_bits(), step))

    def _parameter_bits(self) -> list[Tensor]:
        flats = []
        for index, parameter in enumerate(self._parameters):
            address = parameter.data_ptr()
            bits = self._bits.get(index)
            if bits is None or bits[0] != address or not parameter.is_contiguous():
                bits = self._bits[index] = (address, _bits(parameter))
            flats.append(bits[1])
        return flats

    def _check_unaveraged(self, names: Sequence[str], optimizer: Optimizer) -> None:
        """Refuses gradients of `no_sync` that nothing has averaged: unless they are equal, as averaged by hand."""
        waiting = set(names)
        own = [_flat(p.grad) for p, name in zip(self._parameters, self._names, strict=True) if name in waiting]
        if not self._is_alike(int(sum(digest_of(each) for each in own)) % 2**62):
            raise unaveraged_error(optimizer, names)

    # ---- comparing

    def begin_forward(self) -> None:
        """Compares every few forwards, which all ranks make equally often."""
        if self._group.size() == 1 or torch._C._current_graph_task_id() != -1:  # activation checkpoints repeat forwards
            return
        self._forwards += 1
        if self._forwards % self._every == 0 and not self.is_deferred:
            self.compare()

    def compare(self, *, saving: bool = False) -> None:
        """Compares what the ranks did; every rank calls it.

        Args:
            saving: compare also what was changed since the last step.

        Raises:
            ModelMismatchError: they did different things; on all ranks, names what, and the ranks.
        """
        if self._group.size() == 1:
            return
        pending = self.pending if saving else []
        if not self._is_alike(_hash((self.digest, pending))):
            self.explain({f"changed after step {self._steps}": [*pending]})
        self.forget()

    @property
    def pending(self) -> list[str]:
        """Names of what something has changed since the last step: parameters, and what optimizers remember."""
        now = zip(self._names, self._parameters, self._versions, strict=True)
        states = [state for each in self._states for state in self._changed_states(each)]
        found = [name for name, parameter, version in now if self._version(parameter) != version]
        return found + [each for each in self._named(states) if _OF_SOME not in each]  # some lie on one rank alone

    def explain(self, pending: dict[str, JSON] | None = None) -> None:
        """The digests of the ranks differ: all ranks call this. Raises ModelMismatchError, says what differs,
        unless it is right."""
        found: dict[str, JSON] = {"optimizer steps": self._steps}
        for entry in self._log:
            found |= self._readable(entry)
        # What ranks remember of some parameters may be on one rank only, though all ran the script that changed it.
        of_some = [key for key, value in found.items() if not self.is_split and _OF_SOME in str(value)]
        forgiven = {key for keys in gather_per_rank(of_some, self._group) for key in keys}
        found = {key: value for key, value in found.items() if key not in forgiven}
        text = "the ranks made different optimizer steps, and each rank steps a part of the model"
        advice = (
            f"Set options, clip, and change gradients, weights and optimizer states on all ranks alike. Seen from rank "
            f"{self._group.rank()}. To let ranks differ: check_ranks=False in photinus.wrap."
        )
        try:
            check_alike({**found, **(pending or {})}, text, self._group)
        except ValueError as error:
            raise ModelMismatchError(f"{error} {advice}") from None
        if forgiven:
            self.digest = 0  # on all ranks
            return
        raise ModelMismatchError(f"{text}; what differs is more than {len(self._log)} steps old. {advice}")

    def _readable(self, entry: tuple[Any, ...]) -> dict[str, JSON]:
        step, kind, places, options, calls, gradients, changed, states, values = entry
        where = f"{kind}.step() {step}, "
        found: dict[str, JSON] = {
            f"{where}{f'group {number}, ' * (len(options) > 1)}{name}": value
            for number, group in enumerate(options)
            for name, value in group
        }
        for number, call in enumerate(calls):
            found |= {f"before {where}{f'call {number + 1}, ' * (number > 0)}{name}": v for name, v in call.items()}
        for index, code in zip(places, gradients, strict=True):
            found[f"{where}gradient of {self._names[index]}"] = _describe(code)
        found[f"{where}parameters changed before it"] = [self._names[index] for index in changed]
        found[f"{where}state changed before it"] = [*self._named(states)]
        for name, value in zip(("gradients", "parameters"), values, strict=True):
            found[f"{where}digest of {name}"] = f"{value % 2**32:08x}"
        return found

    def _named(self, states: Iterable[Any]) -> list[str]:
        return [each if isinstance(each, str) else f"{each[1]} of {self._names[each[0]]}" for each in states]

    def _is_alike(self, number: int) -> bool:
        return len({each for (each,) in gather_numbers([number], self._group)}) == 1


def facts_of(parameters: Iterable[Tensor]) -> list[StepFacts]:
    """Return those of the models that have any of these parameters, in the order in which they were wrapped."""
    ids = set(map(id, parameters))
    return sorted((facts for facts in _all if not ids.isdisjoint(facts._index)), key=lambda facts: facts.number)


def unaveraged_error(optimizer: Optimizer, names: Sequence[str]) -> PhotinusError:
    """Return the error of a step whose gradients no exchange has averaged."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return PhotinusError(
        f"{type(optimizer).__name__}.step() found gradients that no exchange has averaged over the ranks (of "
        f"{', '.join(names[:3])}{more}): the last backward of this step ran inside no_sync(), or none followed it. Run "
        f"the last forward and backward before each step outside of no_sync(), on all ranks, also where its batch is "
        f"left out (with a loss times 0); or drop the gradients by optimizer.zero_grad(), and leave the step out."
    )


def _hash(fact: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(fact).encode(), digest_size=6).digest(), "little")


def _describe(code: Any) -> str:
    if code is None:
        return "absent"
    if code == -1:
        return "made by hand"
    if code == 0:
        return "as averaged"
    changes, backwards = code
    text = f"changed {changes} times since it was averaged" if changes else "as averaged"
    return text + f", added to an earlier one ({backwards})" * bool(backwards)


def _plain(value: Any) -> Any:
    """An option as numbers and text, whose repr is equal on all ranks where it is."""
    if isinstance(value, Tensor):  # reading one on a GPU would make the host wait
        return value.tolist() if value.device.type == "cpu" else "on a device"
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    kind = next((each for each in (bool, int, float, str) if isinstance(value, each)), None)
    return None if value is None else type(value).__name__ if kind is None else kind(value)


def _all_ranks_have_some(parameter: Any, size: int) -> bool:
    """Return whether no rank's part of a parameter is empty: rows are cut as torch.chunk cuts them."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return not is_split(parameter) or (rows > 0 and -(-rows // -(-rows // size)) == size)


def _turn(flats: Sequence[Tensor], step: int) -> list[Tensor]:
    """The pieces of these that are looked at in a step: up to _WINDOW_ELEMS elements."""
    sizes = [each.numel() for each in flats]
    total = sum(sizes)
    if total <= _WINDOW_ELEMS:
        return [*flats]
    begin = step % -(-total // _WINDOW_ELEMS) * _WINDOW_ELEMS
    pieces = []
    for flat, size in zip(flats, sizes, strict=True):
        if begin < size and begin > -_WINDOW_ELEMS:
            pieces.append(flat[max(0, begin) : begin + _WINDOW_ELEMS])
        begin -= size
    return pieces


def _flat(tensor: Any) -> Tensor:
    flat: Tensor = own_part(tensor).detach()
    return (flat.to_dense() if flat.layout != torch.strided else flat).reshape(-1)


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    flat = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    return flat.view(_INTEGERS[flat.element_size()])


def _digest(pieces: Sequence[Tensor]) -> int:
    """The sum of the integers, as `digest_of`; one call for many small tensors."""
    if len(pieces) > 1 and len({each.dtype for each in pieces}) == 1:
        pieces = [torch.cat([*pieces])]
    return sum(int(each.sum(dtype=torch.int64)) for each in pieces)


# ---- torch's clipping, whose bounds are the same on all ranks


_clipping: list[str] = []  # the outermost call that runs: one of these functions calls another


@cache
def _watch_clips() -> None:
    """Notes the bounds of torch's functions, by whatever name a script has imported them: each is a wrapper that holds
    the function itself in a cell."""
    from torch.nn.utils import clip_grad

    arguments = {
        "clip_grad_norm_": ("max_norm", "norm_type"),
        "clip_grad_value_": ("clip_value",),
        "_clip_grads_with_norm_": ("max_norm",),
    }
    for name, names in arguments.items():
        for cell in getattr(getattr(clip_grad, name, None), "__closure__", None) or ():
            if callable(cell.cell_contents):
                cell.cell_contents = partial(_clip, cell.cell_contents, name.strip("_"), names)


def _clip(function: Callable[..., Any], name: str, names: Sequence[str], parameters: Any, *args: Any, **kw: Any) -> Any:
    if torch.compiler.is_compiling() or _clipping:
        return function(parameters, *args, **kw)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    before = [(facts, facts.gradient_versions(parameters)) for facts in facts_of(parameters)]
    _clipping.append(name)
    try:
        result = function(parameters, *args, **kw)
    finally:
        _clipping.clear()
    bounds = {k: v for k, v in {**dict(zip(names, args, strict=False)), **kw}.items() if k in names}
    bounds = {k: float(v) for k, v in bounds.items() if not (isinstance(v, Tensor) and v.device.type != "cpu")}
    for facts, versions in before:
        if bounds.get("max_norm", 0.0) < math.inf:  # without a bound it only looks
            facts.note_call(name, **bounds)
        facts.forgive_changes(parameters, versions)
    return result
