"""A loop's checkpoints: what goes into one, and how all ranks come back from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..parallel.exchange.agreement import from_rank_0, gather_per_rank, together
from .checkpoint.folder import Checkpoint
from .checkpoint.position import Position
from .checkpoint.snapshot import Trained, check_is_snapshot
from .data import rng
from .record.resume import check_fits
from .record.run_folder import RunFolder
from .session.length import Length
from .session.progress import say
from .session.session import Session

__all__ = ["Loaded", "Saves"]

_DECIDES_THE_ORDER = ("batch_size", "seed", "samples", "shuffle")  # of the samples: they must fit inside an epoch


@dataclass(frozen=True)
class Loaded:
    """What a loop goes on with.

    Attributes:
        position: where it is.
        random_numbers: the state of this rank's generators, to restore just before the first batch.
    """

    position: Position
    random_numbers: Mapping[str, Any]


class Saves:
    """Saves and loads. All ranks call its methods together.

    Args:
        session: of this rank.
        trained: whose states training changes.
        options: of the loop; "batch_size", "seed", "samples" and "shuffle" are needed.
        length: of the run.
    """

    def __init__(self, session: Session, trained: Trained, options: Mapping[str, Any], length: Length) -> None:
        self._session = session
        self._trained = trained
        self._options = options
        self._length = length

    def save(self, position: Position, out: Path, folder: RunFolder | None) -> Path:
        """Saves model, optimizer, position and each rank's random numbers, atomically; returns the checkpoint's path.

        Args:
            position: where the loop is.
            out: the run's folder.
            folder: the same on rank 0, which writes; None on the others.

        Raises:
            CheckpointError, OSError, ValueError: it could not be written; every rank raises.
        """
        step = position.step
        states = gather_per_rank(rng.capture())
        with together(f"gathering what to save at step {step}"):
            trained = self._trained.contents()

        def write() -> str:
            assert folder is not None
            content = {
                **trained,
                "position": position.to_dict(),
                "run": {name: self._options[name] for name in _DECIDES_THE_ORDER},
                "rng": states,
            }
            ends_epoch = bool(position.history) and position.history[-1]["step"] == step
            description = position.description(self._length.describe(position))
            return str(folder.save(step, content, description, position.history[-1] if ends_epoch else None))

        return Path(from_rank_0(write, f"saving the checkpoint of step {step} in {out}"))

    def load(self, checkpoint: Checkpoint, steps_per_epoch: int) -> Loaded:
        """Puts everything back to what the checkpoint holds. Every rank reads the files itself.

        Raises:
            CheckpointError: it is damaged, or does not fit what is trained.
            ValueError: it lies inside an epoch, whose rest could not be the same.
        """
        path, options = checkpoint.path, self._options
        with together(f"loading {path}"):
            content = checkpoint.load("cpu", mapped=("model", "optimizer"))
            check_is_snapshot(content, path)
            position = Position.from_dict(content["position"])
            samples_done = position.batches_done * content["run"]["batch_size"]
            notes = check_fits(content["run"], options, samples_done)
            position.batches_done = samples_done // options["batch_size"]
            if position.batches_done >= steps_per_epoch:
                raise ValueError(
                    f"cannot go on inside an epoch: {samples_done} of {options['samples']} samples are done, and "
                    f"no batch of batch_size={options['batch_size']} is left; it was "
                    f"{content['run']['batch_size']} when the checkpoint was saved"
                )
            self._trained.put_back(content, path)
            position.start += 1
            if position.stopped_of < self._length.wanted:  # stopped early, and now more is asked for
                position.stopped_of = 0
            if not self._length.reached(position):
                position.go_on()
            random_numbers = self._random_numbers(content["rng"], position.step, notes)
        if self._session.is_main:
            for note in notes:
                say(f"note: {note}")
        return Loaded(position, random_numbers)

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
