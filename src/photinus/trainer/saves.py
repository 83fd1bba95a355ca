"""A loop's checkpoints: what goes into one, and how all ranks come back from it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError
from ..parallel.exchange.agreement import from_rank_0, gather_per_rank, together
from .checkpoint.folder import Checkpoint
from .checkpoint.position import Length, Position
from .checkpoint.states import PlainState, check_optimizer_state, load_into, state_of
from .data import rng
from .record.resume import RUN_SPEC, check_fits
from .record.run_folder import RunFolder
from .record.settings import Settings
from .session.progress import say
from .session.session import Session

_NEEDED = frozenset({"model", "optimizer", "position", "run", "rng"})


class Saves:
    """Saves and loads what training changes; some of it may be split over the ranks. All ranks call it together.

    The model's state has plain, unprefixed names, so that it loads in any strategy and in plain torch.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        others: Mapping[str, Any],
        options: Mapping[str, Any],
        length: Length,
    ) -> None:
        self._session = session
        self._model, self._optimizer, self._scheduler, self._others = model, optimizer, scheduler, others
        self._options = options
        self._length = length
        self._beside = {"scheduler": scheduler, **{f"state[{name!r}]": item for name, item in others.items()}}
        models = [model, *(each for each in others.values() if isinstance(each, nn.Module))]
        self._settings = Settings({"optimizer": optimizer, **self._beside}, models)
        self._rows_saved = 0

    def check(self) -> None:
        """Refuses what could not be saved or put back, before there is work to lose. All ranks call it together.

        Of models, what `get_extra_state` gives is looked at, too; their tensors need not be.

        Raises:
            TypeError: says what, and what to do.
        """
        for name, item in {"model": self._model, **self._others}.items():
            for path, module in item.named_modules() if isinstance(item, nn.Module) else ():
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    PlainState(module.get_extra_state(), f"{name}: the extra state of {path or type(module).__name__}")
        for name, item in {"scheduler": self._scheduler, **self._others}.items():
            if isinstance(item, (nn.Module, torch.optim.Optimizer)) or (name == "scheduler" and item is None):
                continue
            if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
                raise TypeError(
                    f"{name} is a {type(item).__name__} without state_dict and load_state_dict, so it could not be put "
                    f"back: give an object that has them"
                )
            PlainState(state_of(item), name)

    def save(self, position: Position, out: Path, folder: RunFolder | None) -> Path:
        """Saves model, optimizer, position and each rank's random numbers, atomically; returns the checkpoint's path.

        Rank 0 writes, by its `folder`, which is None on the others.

        Raises:
            CheckpointError, OSError, ValueError: it could not be written; every rank raises.
        """
        step, options = position.step, self._options
        states = gather_per_rank(rng.capture())
        with together(f"gathering what to save at step {step}"):
            trained = {
                "model": state_of(self._model),
                "optimizer": state_of(self._optimizer),
                "scheduler": None if self._scheduler is None else state_of(self._scheduler),
                "others": {name: state_of(item) for name, item in self._others.items()},
            }

        def write() -> str:
            assert folder is not None
            content = {
                **trained,
                "position": position.to_dict(time.perf_counter() - self._session.aside_s),
                "run": {name: options[name] for name in RUN_SPEC if name in options} | {"given": self._settings.given},
                "rng": states,
            }
            # A row's checkpoint may have had to wait for the next step of the optimizer.
            rows = position.history
            is_rows = bool(rows) and (rows[-1]["step"] == step or len(rows) > self._rows_saved)
            self._rows_saved = len(rows)
            description = position.description(self._length.describe(position))
            return str(folder.save(step, content, description, rows[-1] if is_rows else None))

        return Path(from_rank_0(write, f"saving the checkpoint of step {step} in {out}", is_long=True))

    def load(self, checkpoint: Checkpoint, steps_per_epoch: int) -> tuple[Position, Mapping[str, Any]]:
        """Puts everything back to what the checkpoint holds. Every rank reads the files itself.

        Returns:
            Where the loop is, and the states of this rank's generators, to restore just before the first batch.

        Raises:
            CheckpointError: it is damaged, or does not fit what is trained.
            ValueError: it lies inside an epoch, whose rest could not be the same.
        """
        path, options = checkpoint.path, self._options
        with together(f"loading {path}", is_long=True):
            content = checkpoint.load("cpu", mapped=("model", "optimizer"))
            missing = _NEEDED - set(content)
            if missing:
                raise CheckpointError(f"{path} is no checkpoint of a Loop: it lacks {', '.join(sorted(missing))}")
            position = Position.from_dict(content["position"])
            samples_done = position.batches_done * content["run"]["batch_size"]
            changed = check_fits(content["run"], options, samples_done, steps_per_epoch)
            position.batches_done = samples_done // options["batch_size"]
            given = content["run"].get("given", self._settings.given)  # earlier versions did not save it
            content["optimizer"] = self._settings.in_our_order("optimizer", given, content["optimizer"])
            self._check_objects(content, path)
            states = {"scheduler": content.get("scheduler")}
            states |= {f"state[{name!r}]": item for name, item in content.get("others", {}).items()}
            states = {name: self._settings.in_our_order(name, given, state) for name, state in states.items()}
            changed += self._settings.load(given, states, partial(self._put_back, content, path))
            text = f"what the script changed replaces what the checkpoint holds: {', '.join(changed)}"
            notes = [text] if changed else []
            position.start += 1
            before = {**options, **content["run"]}
            if before.get("accumulate") != options.get("accumulate"):
                position.group_began = position.step
            counted_otherwise = (before["steps"] is None) != (options["steps"] is None)
            if (
                counted_otherwise or position.stopped_of < self._length.wanted
            ):  # stopped early, and now more is asked for
                position.stopped_of = 0
            if not self._length.reached(position):
                position.go_on()
            self._rows_saved = len(position.history)
            random_numbers = self._random_numbers(content["rng"], position.step, notes)
        if self._session.is_main:
            for note in notes:
                say(f"note: {note}")
        return position, random_numbers

    def _check_objects(self, content: Mapping[str, Any], path: Path) -> None:
        """Raises CheckpointError unless the loop was given the objects that were saved."""
        scheduler, others = content.get("scheduler"), content.get("others", {})
        if (self._scheduler is None) != (scheduler is None):
            held = "no scheduler" if scheduler is None else "the state of a scheduler"
            given = "none" if self._scheduler is None else "one"
            raise CheckpointError(f"{path} holds {held}, but the loop was given {given}")
        if set(others) != set(self._others):
            raise CheckpointError(
                f"{path} holds the states of {sorted(others) or 'no other objects'}, but the loop was given "
                f"state={sorted(self._others) or None}"
            )
        check_optimizer_state(self._optimizer, content["optimizer"], str(path), [self._model])

    def _put_back(self, content: Mapping[str, Any], path: Path, states: Mapping[str, Any]) -> None:
        """Gives the objects their states. Raises CheckpointError where they do not fit."""
        try:
            load_into(self._model, content["model"])
            load_into(self._optimizer, content["optimizer"])
            for name, item in self._beside.items():
                if item is not None:
                    load_into(item, states[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} does not fit what is trained here: {error}") from error

    def _random_numbers(self, saved: list[Mapping[str, Any]], step: int, notes: list[str]) -> Mapping[str, Any]:
        if len(saved) == self._session.world_size:
            return saved[self._session.rank]
        notes.append(
            f"saved by {len(saved)} ranks, resumed by {self._session.world_size}: the order of the samples "
            f"goes on exactly, dropout draws new numbers"
        )
        # Each rank's stream is new, but the same each time this checkpoint is resumed.
        seed = rng.derive_seed(self._options["seed"], "resumed at step", step)
        rng.seed_everything(seed, rank=self._session.rank)
        return rng.capture()
