"""The description of a run in one value: in config.json and each checkpoint, and compared when a run is resumed.

Saving and Reporting are what users choose of it as values of their own, which refuse what is wrong where they are made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ...parallel.exchange.agreement import JSON
from ..checkpoint.position import Length
from ..data.arguments import check_flag, checking, whole_number
from ..data.sampler import ORDER
from .config import user_options
from .loggers import Logger
from .settings import show

_ORDER = ("batch_size", "seed", "samples", "shuffle")  # of these the rest of an epoch follows: another repeats or skips


@dataclass(frozen=True)
class Saving:
    """When a run with `out` saves, and which checkpoints it keeps: `save=photinus.Saving(best="accuracy")`.

    The end of a run is always saved.

    Args:
        every_steps: also save every N steps. Default: when the last checkpoint is ten minutes old (older, if a save
            takes longer than 12 s: 2 % of the time at most), so that a kill costs no more than that.
        every_epochs: save at the end of every Nth epoch. Default: 1.
        keep_last: number of the newest checkpoints to keep. Default: 2.
        best: name of a logged metric; the checkpoint of the row where it was highest (with "-" before the name:
            lowest) stays too. Each row gets a checkpoint then (where gradients add up, after the next step).
        snapshot_every: keep a snapshot in the memory of each host every N steps, from which `photinus run` restarts
            after a failure of workers. 1 loses at most one finished step. It takes the memory of two copies of what
            the ranks of a host train. 0: none. Default: as often as should cost 1 % of the time.

    Raises:
        TypeError, ValueError: a number is not whole, or below 1; `best` is not a name.
    """

    every_steps: int | None = None
    every_epochs: int = 1
    keep_last: int = 2
    best: str | None = None
    snapshot_every: int | None = None

    def __post_init__(self) -> None:
        numbers = {"every_epochs": self.every_epochs, "keep_last": self.keep_last}
        numbers |= {} if self.every_steps is None else {"every_steps": self.every_steps}
        with checking() as check:
            for name, value in numbers.items():
                check.call(whole_number, name, value, least=1)
            check.call(whole_number, "snapshot_every", self.snapshot_every or 0)
            metric = f'best={self.best!r}: needs the name of a metric that is logged, such as "accuracy" or "-loss"'
            is_name = self.best is None or (isinstance(self.best, str) and self.best.removeprefix("-"))
            check(is_name, metric, TypeError)
        numbers |= {} if self.snapshot_every is None else {"snapshot_every": self.snapshot_every}
        for name, value in numbers.items():  # numpy's numbers are not JSON's
            object.__setattr__(self, name, int(value))


@dataclass(frozen=True)
class Reporting:
    """The display and records of a run: `report=photinus.Reporting(config=args)`. Files in `out` are always written.

    Args:
        progress: show a progress bar, and a line per epoch. Default: True.
        curves: draw `curves.png` in `out` at the end. Default: True.
        loggers: also send the numbers to `photinus.TensorBoard()`, `photinus.Wandb(...)`, `photinus.MLflow(...)`, or to
            objects of yours with a method `log(step, row)`: `row` has numbers by name. If they have them,
            `start(config)`, `picture(name, path)` and `end(status)` are called too; the status is "finished",
            "stopped", "suspended", "left" or "error". Only rank 0 calls loggers, each in a thread of its own. If one
            raises an error, or takes longer than 60 s for one call, a line names it, and the run continues without it.
            Except in `start`, it must not draw from the global random generators. Default: none.
        digest_every: with `out`, write digests of parameters and optimizer states every N steps, for `photinus verify`.
            They also show a rank whose memory or processor went wrong. 0: none. Default: as often as costs 0.5 % of the
            time: after 1, 2, 4, 8, ... steps.
        config: the script's own options (a dict or an argparse.Namespace), recorded in config.json.

    Raises:
        TypeError: `progress` or `curves` is neither True nor False; `loggers` or `config` is something else.
    """

    progress: bool = True
    curves: bool = True
    loggers: Sequence[Logger] = ()
    digest_every: int | None = None
    config: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("progress", "curves"):
            check_flag(name, getattr(self, name))
        loggers: Any = self.loggers if isinstance(self.loggers, Sequence) else [None]
        wrong = [each for each in loggers if isinstance(each, type) or not callable(getattr(each, "log", None))]
        if wrong:
            needed = "needs a list of objects with log(step, row), such as [photinus.TensorBoard()]"
            raise TypeError(f"loggers={self.loggers!r}: {needed}")
        if self.digest_every is not None:
            whole_number("digest_every", self.digest_every)
        user_options(self.config)


_KINDS: dict[str, tuple[Any, str]] = {
    "out": ((str, os.PathLike), "the path of the run's folder, or None"),
    "resume": ((str, os.PathLike), '"auto", "never", or the path of a checkpoint or of a run\'s folder'),
    "state": (Mapping, "a dict: objects to save, by name"),
    "save": (Saving, "a photinus.Saving, such as photinus.Saving(every_steps=500)"),
    "report": (Reporting, "a photinus.Reporting, such as photinus.Reporting(progress=False)"),
}


def check_options(**options: Any) -> None:
    """Refuses options of a Loop that cannot be right, all at once, and before model and data set are looked at."""
    every, report, audit = options["validate_every_steps"], options["report"], options["audit_every"]
    with checking() as check:
        check.call(Length, options["epochs"], options["steps"])
        check.call(whole_number, "accumulate", options["accumulate"], least=1)
        check.call(whole_number, "validate_every_steps", 1 if every is None else every, least=1)
        check.call(whole_number, "audit_every", 1 if audit in (None, "auto") else audit, least=1)
        for name, (kind, text) in _KINDS.items():
            value = options[name]
            check(value is None or isinstance(value, kind), f"{name}={value!r}: needs {text}", TypeError)
        folder = "loggers=[...] need the run's folder, for the id of the run or its files: give out=..., too"
        check(options["out"] is not None or not getattr(report, "loggers", ()), folder)


@dataclass(frozen=True)
class RunSpec:
    """The settings that decide a run beside model, optimizer and data; equal on all ranks.

    Attributes:
        batch_size, seed, samples, shuffle, drop_last: which samples each step has.
        length: after which the run ends.
        validate_every_steps: None for the end of each epoch.
        saving: when it saves.
        training: how a step is made: `accumulate`, the options of `wrap`, and those of the Trainer.
    """

    batch_size: int
    seed: int
    samples: int
    shuffle: bool | int
    drop_last: bool
    length: Length
    validate_every_steps: int | None
    saving: Saving
    training: Mapping[str, JSON]

    def to_dict(self) -> dict[str, JSON]:
        """All of it by flat names, as JSON carries it."""
        order: dict[str, JSON] = {name: getattr(self, name) for name in (*_ORDER, "drop_last")}
        saving = {f"save_{name}": value for name, value in asdict(self.saving).items()}
        every: dict[str, JSON] = {"validate_every_steps": self.validate_every_steps}
        order |= {"sample_order": ORDER} if self.samples else {}
        return {**order, **asdict(self.length), **self.training, **every, **saving}

    def changes_since(self, saved: Mapping[str, Any], samples_done: int, batches_per_epoch: int) -> list[str]:
        """Compares with the run that saved a checkpoint; returns `name=now (was then)` of each option that changed.

        Args:
            saved: what `to_dict` of that run was.
            samples_done: samples of the running epoch that the checkpoint has seen, 0 between epochs.

        Raises:
            ValueError: inside an epoch, and the rest of it could not be the same.
        """
        now = self.to_dict()
        if samples_done and self.samples and saved.get("sample_order", 1) != ORDER:
            raise ValueError(
                f"cannot go on inside an epoch: the checkpoint is of a version of Photinus with another order of "
                f"samples, and {samples_done} samples of the epoch are done, so its rest would repeat or skip samples. "
                f'Resume from a checkpoint at the end of an epoch, or start over with resume="never".'
            )
        both = [name for name in (*_ORDER, "drop_last", *self.training) if name in saved]
        changed = [name for name in both if saved[name] != now[name]]
        batches, rest = divmod(samples_done, self.batch_size)
        for name in changed if samples_done else ():
            repeats = name in _ORDER and (name != "batch_size" or rest)
            if repeats or (name in ("batch_size", "drop_last") and batches >= batches_per_epoch):
                raise ValueError(
                    f"cannot go on inside an epoch: {name} was {saved[name]} when the checkpoint was saved and is "
                    f"{now[name]} now, and {samples_done} samples of the epoch are done, so its rest would "
                    f"{'repeat or skip samples' if repeats else 'have no batch'}. Set it back to {saved[name]}, resume "
                    f'from a checkpoint at the end of an epoch, or start over with resume="never".'
                )
        return [f"{name}={show(now[name])} (was {show(saved[name])})" for name in changed]
