"""A loop's checkpoints: what goes into one, and how all ranks come back from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..parallel import is_replicated, strategy_of, unwrap_compiled
from ..parallel.exchange.agreement import from_rank_0, gather_per_rank, together
from ..parallel.zero.split_states import copy_state, own_part
from ..runlog.units import size
from .checkpoint import copies
from .checkpoint.copies import Copied
from .checkpoint.folder import Checkpoint
from .checkpoint.image import Content
from .checkpoint.kept import Kept
from .checkpoint.manifest import ENTRY
from .checkpoint.position import Position
from .checkpoint.states import (
    PlainState,
    bytes_held,
    check_optimizer_state,
    load_into,
    local_states,
    state_of,
    unwrap,
    whole_stream,
)
from .checkpoint.writer import WRITER
from .data import rng
from .data.loader import Loader
from .optimizer_modes import is_training, switching
from .record.run_folder import RunFolder
from .record.settings import Settings
from .record.spec import RunSpec
from .session.progress import say
from .session.session import Session

_OWN = frozenset({"model", "optimizer", "position", "run", "rng"})  # all other entries are objects of `state`
_STREAM = "stream"  # but this one: the place in data without a length


class Saves:
    """Saves and loads what training changes; some of it may be split over the ranks. All ranks call it together.

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
        self._beside = {_shown(name): item for name, item in others.items()}
        modules = {f"{name}.": each for name, each in self._beside.items() if isinstance(each, nn.Module)}
        self._settings = Settings({"optimizer": optimizer, **self._beside}, {"": model, **modules})
        self._is_parted = False
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
        for name, item in {"model": self._model, **self._others}.items():
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

    def save(self, position: Position, folder: RunFolder) -> Path | None:
        """Saves model, optimizer, position and each rank's random numbers, atomically.

        Returns:
            The checkpoint's path; None: a copy of it is being written, and `collect` has to follow before another one.

        Raises:
            CheckpointError, OSError, ValueError: it could not be written; every rank raises.
        """
        step = position.step
        with together("waiting for the checkpoint of another loop", is_long=True):
            folder.settle()
        mine: dict[str, Any] = {
            "rng": rng.capture(),
            "bytes": bytes_held([self._model, self._optimizer, *self._others.values()]),
        }
        everyone = gather_per_rank(mine)
        numbers = {"rng": [each["rng"] for each in everyone]}
        whole_bytes = sum(each["bytes"] for each in everyone) if self.splits() else everyone[0]["bytes"]
        copied, trained = None, dict[str, Any]()
        if whole_bytes >= copies.LEAST_BYTES:
            image = partial(self._image, position, self.whole_streams(position), numbers)
            copied = WRITER.copies.take(image, folder.checkpoints, step)
        if copied is None:
            stream = whole_stream(self._batches.stream_state(position.epochs_done, position.batches_done))
            with together(f"gathering what to save at step {step}"):
                trained = {
                    "model": state_of(self._model),
                    "optimizer": state_of(self._optimizer),
                    **{name: state_of(item) for name, item in self._others.items()},
                    **({} if stream is None else {_STREAM: stream}),
                }

        def write() -> str | None:
            state: Mapping[str, Any] | Copied | None = copied
            if state is None:
                state = {**trained, **self._facts(position), **numbers}
                if whole_bytes >= copies.LEAST_BYTES:
                    state = WRITER.copies.alone(Content(state, {})) or state
            row = position.history[-1] if position.history and position.history[-1]["step"] == step else None
            description = position.description(self._spec.length.describe(position))
            path = folder.save(step, state, description, row)
            return None if path is None else str(path)

        path = from_rank_0(write, f"saving the checkpoint of step {step} in {folder.path}", is_long=True)
        self._is_parted = copied is not None and copied.hosts > 1
        if copied is not None and self._is_parted:
            with together(f"saving parts of the checkpoint of step {step} in {folder.path}"):
                if copied.host and copied.files:
                    folder.join_in(step, copied)
        return None if path is None else Path(path)

    def collect(self, folder: RunFolder) -> Path | None:
        """Waits for the checkpoint that is being written; returns its path. Raises as `save` does, on all ranks."""
        doing = f"writing a checkpoint in {folder.path}"
        if self._is_parted:  # all that write wait
            with together(doing, is_long=True):
                folder.collect()
        path = from_rank_0(lambda: str(folder.collect() or ""), doing, is_long=True)
        return Path(path) if path else None

    def whole_streams(self, position: Position) -> dict[str, Any]:
        """Gather the places in data without a length, for `image`. All ranks call it."""
        stream = whole_stream(self._batches.stream_state(position.epochs_done, position.batches_done))
        loaders = {name: state_of(item) for name, item in self._others.items() if isinstance(item, Loader)}
        return {**loaders, **({} if stream is None else {_STREAM: stream})}

    def image(self, position: Position, streams: Mapping[str, Any]) -> Content:
        """Return what `save` saves, as this rank sees it, without a copy and without an exchange.

        Args:
            streams: from `whole_streams`.
        """
        return self._image(position, streams, {}, {"rng": {self._session.rank: rng.capture()}})

    def _image(
        self,
        position: Position,
        streams: Mapping[str, Any],
        common: Mapping[str, Any],
        own: Mapping[str, Any] = MappingProxyType({}),
    ) -> Content:
        parts = {"model": self._model, "optimizer": self._optimizer, **self._others}
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
        common = {**streams, **self._facts(position), **common, **whole}
        return Content(common, {**own, **split}, equal)

    def describe(self) -> str:
        """Return the memory that copies for saves take; "" for none."""
        host_bytes = WRITER.copies.host_bytes
        return f"a copy for saves, in {size(host_bytes)} of memory on each host" if host_bytes else ""

    def splits(self) -> bool | None:
        """Return whether a strategy splits what is trained; None: ranks hold different whole models on purpose."""
        parts = [self._model, self._optimizer, *self._others.values()]
        parts = [each for each in parts if isinstance(each, (nn.Module, torch.optim.Optimizer))]
        wrapped = [unwrap_compiled(each) for each in parts if isinstance(each, nn.Module)]
        if any(strategy_of(m).replicates and not is_replicated(m, self._session.world_size) for m in wrapped):
            return None
        return any(strategy_of(each).splits(each) for each in parts)

    def _facts(self, position: Position) -> dict[str, Any]:
        run: dict[str, Any] = {**self._spec.to_dict(), "given": self._settings.given, "frozen": _frozen(self._model)}
        run["now"] = {"parameters": self._settings.parameters()}
        run["training"] = [*map(is_training, self._switching)]
        return {"position": position.to_dict(time.perf_counter() - self._session.aside_s), "run": run}

    def load(self, checkpoint: Checkpoint | Kept, batches_per_epoch: int) -> tuple[Position, Mapping[str, Any]]:
        """Puts everything back to what the checkpoint holds. Every rank reads the files itself.

        Returns:
            Where the loop is, and the states of this rank's generators, to restore just before the first batch.

        Raises:
            CheckpointError: it is damaged, or does not fit what is trained.
            ValueError: it lies inside an epoch, whose rest could not be the same.
        """
        path = checkpoint.path
        with together(f"loading {path}", is_long=True):
            content = checkpoint.load("cpu", mapped=("model", "optimizer"))
            missing = _OWN - set(content)
            if missing:
                raise CheckpointError(f"{path} is not a checkpoint of a Loop: it lacks {', '.join(sorted(missing))}")
            position = Position.from_dict(content["position"])
            before, given = content["run"], {**content["run"]["given"], **content["run"].get("now", {})}
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
            check_optimizer_state(self._optimizer, content["optimizer"], str(path), [self._model])
            states = {name: self._settings.in_our_order(name, given, state) for name, state in states.items()}
            changed += self._settings.load(given, states, partial(self._put_back, content, path))
            for optimizer, mode in zip(self._switching, before.get("training", ()), strict=False):
                if isinstance(getattr(optimizer, "train_mode", None), bool):  # else the state has it
                    optimizer.train_mode = mode
            text = f"what the script changed replaces what the checkpoint holds: {', '.join(changed)}"
            notes = [text] if changed else []
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
        notes.append(
            f"saved by {len(saved)} ranks, resumed by {self._session.world_size}: the order of the samples "
            f"goes on exactly, dropout draws new numbers"
        )
        # Each rank's stream is new, but the same each time this checkpoint is resumed.
        seed = rng.derive_seed(self._spec.seed, "resumed at step", step)
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
