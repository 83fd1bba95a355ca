"""The state of a loop: which entries a checkpoint has, who gives each, and who takes it back.

| entry | given by | taken by |
|---|---|---|
| model, optimizer, objects of `state` | `state_of` (whole), `local_states` (as a rank has it) | `load_into` |
| stream: the place in data without a length | `Loader.stream_state` | `Loader.load_stream` |
| position | `Position.to_dict` | `Position.from_dict` |
| run: its options | `RunSpec.to_dict`, `Settings` | `RunSpec.changes_since`, `Settings.load` |
| rng: random numbers of each rank | `rng.capture` | `rng.restore`, before the first batch |

Checkpoints on disk and snapshots in memory have the same entries.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..parallel import is_replicated, strategy_of, unwrap_compiled
from ..parallel.exchange.agreement import together
from ..parallel.zero.split_states import copy_state, own_part
from .checkpoint.folder import Checkpoint
from .checkpoint.image import Content
from .checkpoint.image_reader import MemorySnapshot
from .checkpoint.manifest import ENTRY
from .checkpoint.position import Position
from .checkpoint.states import (
    PlainState,
    bytes_held,
    check_states,
    load_into,
    local_states,
    state_of,
    unwrap,
    whole_stream,
)
from .data import rng
from .data.loader import Loader
from .optimizer_modes import is_training, switching
from .record.config import describe_arithmetic
from .record.settings import Settings
from .record.spec import RunSpec
from .session.progress import say
from .session.session import Session

_OWN = frozenset({"model", "optimizer", "position", "run", "rng"})  # all other entries are objects of `state`
_START_OVER = 'To train this model from the start, give another `out`, or resume="never"; nothing was loaded.'
_STREAM = "stream"  # but this one: the place in data without a length


class LoopState:
    """The state that training changes; some of it may be split over the ranks. All ranks call its methods together.

    The model's state has plain, unprefixed names, so that it loads in any strategy and in plain torch.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        others: Mapping[str, Any],
        spec: RunSpec,
        batches: Loader,
    ) -> None:
        self._session, self._spec, self._batches = session, spec, batches
        self._model, self._optimizer, self._others = model, optimizer, others
        self._objects = {"model": model, "optimizer": optimizer, **others}
        self._beside = {_shown(name): item for name, item in others.items()}
        modules = {f"{name}.": each for name, each in self._beside.items() if isinstance(each, nn.Module)}
        self._settings = Settings({"optimizer": optimizer, **self._beside}, {"": model, **modules})
        self._switching = switching([optimizer, *others.values()])

    def check(self) -> None:
        """Refuses what could not be saved or put back, before there is work to lose. All ranks call it together.

        Of models, what `get_extra_state` gives is looked at, too; their tensors need not be.

        Raises:
            TypeError, ValueError: says what, and what to do.
        """
        for name in self._others:  # of files, by which `photinus.load` finds them, too
            if name in {*_OWN, _STREAM} or not ENTRY.fullmatch(str(name)):
                raise ValueError(f"state={{{name!r}: ...}}: take another name, of letters, digits and _, for its file")
        for name, item in self._objects.items():
            for path, module in item.named_modules() if isinstance(item, nn.Module) else ():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    PlainState(module.get_extra_state(), f"{name}: the extra state of {path or type(module).__name__}")
        for name, item in self._others.items():
            if isinstance(item, (nn.Module, torch.optim.Optimizer)):
                continue
            if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
                raise TypeError(
                    f"{name} is a {type(item).__name__} without state_dict and load_state_dict, so it could not be put "
                    f"back: give an object that has them"
                )
            PlainState(state_of(item), name)

    @property
    def bytes_held(self) -> int:
        """Return about how much of the state this rank has."""
        return bytes_held(self._objects.values())

    def whole(self, position: Position, streams: Mapping[str, Any], numbers: Sequence[Any]) -> dict[str, Any]:
        """Return the state, by entry; what strategies split is gathered, for rank 0. All ranks call it.

        Args:
            streams: from `whole_streams`.
            numbers: the random numbers of all ranks.
        """
        objects = {name: item for name, item in self._objects.items() if name not in streams}
        return {**{name: state_of(item) for name, item in objects.items()}, **self._facts(position, streams, numbers)}

    def whole_streams(self, position: Position) -> dict[str, Any]:
        """Gather the places in data without a length. All ranks call it."""
        stream = whole_stream(self._batches.stream_state(position.epochs_done, position.batches_done))
        loaders = {name: state_of(item) for name, item in self._others.items() if isinstance(item, Loader)}
        return {**loaders, **({} if stream is None else {_STREAM: stream})}

    def image(
        self, position: Position, streams: Mapping[str, Any], numbers: Sequence[Any] | None, saved_step: int
    ) -> Content:
        """Return the same as this rank sees it, without a copy and without an exchange.

        Args:
            numbers: None: each rank's piece has its own.
            saved_step: step of the checkpoint that was begun last.
        """
        parts = self._objects
        whole, split = local_states({name: part for name, part in parts.items() if name not in streams})
        modules = [each for each in parts.values() if isinstance(each, nn.Module)]
        optimizers = [each for each in parts.values() if isinstance(each, torch.optim.Optimizer)]
        equal = set[int]()
        for module in map(unwrap_compiled, modules):
            if self._session.world_size > 1 and is_replicated(module, self._session.world_size):
                ignored = getattr(module, "parameters_to_ignore", ())
                equal |= {_address(p) for name, p in unwrap(module).named_parameters() if name not in ignored}
        for optimizer in optimizers:
            # Others may keep what differs on each rank, such as the errors of compressed gradients.
            is_known = type(optimizer).__module__.startswith("torch.optim.")
            for parameter, state in optimizer.state.items():
                if is_known and _address(parameter) in equal:
                    equal |= {_address(each) for each in state.values() if isinstance(each, torch.Tensor)}
        facts = self._facts(position, streams, numbers)
        facts["position"]["saved_step"] = saved_step
        own = {"rng": {self._session.rank: rng.capture()}} if numbers is None else {}
        return Content({**facts, **whole}, {**own, **split}, equal)

    def splits(self) -> bool | None:
        """Return whether a strategy splits what is trained; None: ranks hold different whole models on purpose."""
        parts = [each for each in self._objects.values() if isinstance(each, (nn.Module, torch.optim.Optimizer))]
        wrapped = [unwrap_compiled(each) for each in parts if isinstance(each, nn.Module)]
        if any(strategy_of(m).replicates and not is_replicated(m, self._session.world_size) for m in wrapped):
            return None
        return any(strategy_of(each).splits(each) for each in parts)

    def _facts(self, position: Position, streams: Mapping[str, Any], numbers: Sequence[Any] | None) -> dict[str, Any]:
        run: dict[str, Any] = {**self._spec.to_dict(), "given": self._settings.given, "frozen": _frozen(self._model)}
        run["now"] = {"parameters": self._settings.parameters()}
        run["training"] = [*map(is_training, self._switching)]
        if self._session.logical_shards:
            run["arithmetic"] = describe_arithmetic(self._session.device)
        facts = {**streams, "position": position.to_dict(time.perf_counter() - self._session.aside_s), "run": run}
        return facts if numbers is None else {**facts, "rng": [*numbers]}

    def load(
        self, checkpoint: Checkpoint | MemorySnapshot, batches_per_epoch: int
    ) -> tuple[Position, Mapping[str, Any]]:
        """Puts everything back to what the checkpoint holds. Every rank reads the files itself.

        Returns:
            Where the loop is, and the states of this rank's generators, to restore just before the first batch.

        Raises:
            CheckpointError: it is damaged, or does not fit what is trained.
            ValueError: it lies inside an epoch, whose rest could not be the same.
        """
        path = checkpoint.path.absolute()  # as other ranks have it
        with together(f"loading {path}", is_long=True):
            content = checkpoint.load("cpu", mapped=("model", "optimizer"))
            missing = _OWN - set(content)
            if missing:
                raise CheckpointError(f"{path} is not a checkpoint of a Loop: it lacks {', '.join(sorted(missing))}")
            position = Position.from_dict(content["position"])
            before, given = content["run"], {**content["run"]["given"], **content["run"].get("now", {})}
            notes = self._arithmetic(before, path)
            samples_done = position.batches_done * before["batch_size"]
            changed = self._spec.changes_since(before, samples_done, batches_per_epoch)
            position.batches_done = samples_done // self._spec.batch_size
            stream = copy_state(content.get(_STREAM))  # what is loaded may be kept by reference
            self._batches.load_stream(stream, position.epochs_done, position.batches_done)
            others = {name: state for name, state in content.items() if name not in {*_OWN, _STREAM}}
            if set(others) != set(self._others):
                raise CheckpointError(
                    f"{path} holds the states of {sorted(others) or 'no other objects'}, but the loop was given "
                    f"state={sorted(self._others) or None}. Give the same, or begin another run with its weights: "
                    f"photinus.load({str(path)!r}, model=model)"
                )
            states = {_shown(name): item for name, item in others.items()}
            self._settings.add_groups(given, {"optimizer": content["optimizer"], **states})
            content["optimizer"] = self._settings.in_our_order("optimizer", given, content["optimizer"])
            check_states({"model": self._model, "optimizer": self._optimizer}, content, str(path), _START_OVER)
            states = {name: self._settings.in_our_order(name, given, state) for name, state in states.items()}
            changed += self._settings.load(given, states, partial(self._put_back, content, path))
            for optimizer, mode in zip(self._switching, before.get("training", ()), strict=False):
                if isinstance(getattr(optimizer, "train_mode", None), bool):  # else the state has it
                    optimizer.train_mode = mode
            text = f"changed since the checkpoint: {', '.join(changed)}"
            notes += [text] if changed else []
            if differing := sorted({*before["frozen"]} ^ {*_frozen(self._model)}):
                which = ", ".join(differing[:4]) + ", ..." * (len(differing) > 4)
                notes.append(
                    f"requires_grad is no part of a checkpoint, and was another one when it was saved: {which}"
                )
            position.start += 1
            length = self._spec.length
            counted_otherwise = (before["steps"] is None) != (length.steps is None)
            if counted_otherwise or position.stopped_of < length.wanted:  # stopped early, and now more is asked for
                position.stopped_of = 0
            if not length.reached(position):
                position.go_on()
            random_numbers = self._random_numbers(content["rng"], position.step, notes)
        if self._session.is_main:
            for note in notes:
                say(f"note: {note}")
        return position, random_numbers

    def _arithmetic(self, before: Mapping[str, Any], path: Path) -> list[str]:
        """With logical shards: compute as the run did, and return what cannot be the same.

        Raises:
            CheckpointError: the run has another number of logical shards.
        """
        shards, saved = self._session.logical_shards, before.get("logical_shards", 0)
        if shards != saved:
            of = f"logical_shards={saved}" if saved else "no logical_shards"
            raise CheckpointError(
                f"{path} is of a run with {of}, and this one has {f'logical_shards={shards}' if shards else 'none'}: "
                f"its steps would be others. Set photinus.init(logical_shards={saved or None}), or begin another run "
                f"with its weights: photinus.load({str(path)!r}, model=model)"
            )
        if not shards:
            return []
        torch.set_num_threads(before["arithmetic"]["threads"])
        now, then = describe_arithmetic(self._session.device), before["arithmetic"]
        changed = [
            f"{name} {now[name] or 'none'} (was {then[name] or 'none'})" for name in now if now[name] != then[name]
        ]
        if not changed:
            return []
        return [
            f"other hardware or software may round in another way, so that bits may differ from here on from those of "
            f"a run without interruption: {', '.join(changed)}"
        ]

    def _put_back(self, content: Mapping[str, Any], path: Path, states: Mapping[str, Any]) -> None:
        """Gives the objects their states. Raises CheckpointError where they do not fit."""
        try:
            load_into(self._model, content["model"])
            load_into(self._optimizer, content["optimizer"])
            for name, item in self._beside.items():
                load_into(item, states[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} does not fit what is trained here: {error}") from error

    def _random_numbers(self, saved: list[Mapping[str, Any]], step: int, notes: list[str]) -> Mapping[str, Any]:
        if len(saved) == self._session.world_size:
            own: Mapping[str, Any] = copy_state(saved[self._session.rank])  # another loop may write over a snapshot
            return own
        if self._session.logical_shards:  # each shard has its own
            return rng.capture()
        notes.append(
            f"saved by {len(saved)} ranks, resumed by {self._session.world_size}: the order of the samples "
            f"goes on exactly, dropout draws new numbers"
        )
        # Each rank's stream is new, but the same each time this checkpoint is resumed.
        seed = rng.derive_seed(self._batches.seed, "resumed at step", step)
        rng.seed_everything(seed, rank=self._session.rank)
        return rng.capture()


def _address(tensor: torch.Tensor) -> int:
    tensor = own_part(tensor)
    address: int = tensor.data_ptr() if tensor.layout is torch.strided else 0
    return address


def _frozen(model: nn.Module) -> list[str]:
    return [name for name, parameter in unwrap(model).named_parameters() if not parameter.requires_grad]


def _shown(name: str) -> str:
    """Return the name of an object of `state` in messages; for a scheduler, the name that the Trainer gives it."""
    return name if name == "scheduler" else f"state[{name!r}]"
