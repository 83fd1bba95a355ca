"""DeepSpeed's JSON configuration, read into what `wrap`, `loader` and `Trainer` take. Nothing is ignored in silence.

config = photinus.deepspeed_config("ds_config.json")
optimizer = config.make_optimizer(model.parameters())
scheduler = config.make_scheduler(optimizer)
model, optimizer = photinus.wrap(model, optimizer, **config.wrap_options())
trainer = photinus.Trainer(model, optimizer, loss_fn, epochs=3, scheduler=scheduler, **config.trainer_options())
trainer.fit(photinus.loader(data, **config.loader_options()))
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..job.world import World
from ..trainer.data.arguments import whole_number
from ..trainer.session.progress import say
from ..trainer.session.session import current_session
from ..words import hint
from .deepspeed_keys import ADAM, BATCHES, BF16, CHOICE, FP16, NUMBER, ROOT, SCHEDULE, ZERO, kinds_of, read
from .deepspeed_schedules import SCHEDULES, Schedule, make_schedule

_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
# DeepSpeed's own defaults: torch's AdamW decays by 0.01, and so does DeepSpeed with torch_adam.
_ADAM = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
_OWN_OPTIMIZERS = {
    "lamb": "FusedLamb", "lion": "FusedLion", "onebitadam": "1-bit Adam", "onebitlamb": "1-bit LAMB",
    "zerooneadam": "0/1 Adam", "muadam": "muP's Adam", "muadamw": "muP's AdamW", "musgd": "muP's SGD",
    "muon": "Muon, which needs some parameters stepped by another optimizer",
}  # fmt: skip
_BYTES_OF_A_GRADIENT = 4


@dataclass(frozen=True)
class DeepSpeedConfig:
    """The settings of a DeepSpeed configuration, as `deepspeed_config` reads them.

    Attributes:
        train_batch_size: samples of one step of the optimizer, over all ranks.
        micro_batch_size: samples of one forward and backward on one rank; some ranks may have one less.
        accumulation: backwards per step of the optimizer.
        world_size: for which the three fit together.
        strategy: "ddp" for stage 0, "zero1", "zero2", "zero3".
        strategy_options: `bucket_cap_mb`, where reduce_bucket_size is given and the strategy has buckets.
        precision: "float32", "bfloat16", or a torch.amp.GradScaler for fp16 (parameters stay float32; forward and loss
            run under torch.autocast).
        clip_norm: None leaves the gradients.
        drop_last: whether the last, short batch of an epoch is left out; None where it is not said.
        optimizer: (class of torch.optim, its arguments), None where the configuration names none.
        scheduler: (DeepSpeed's name, its parameters), None where it names none.
        notes: a line for each key in force that has no effect here, and why; for flags that are off, too.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    world_size: int
    strategy: str = "ddp"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    precision: str | torch.amp.GradScaler = "float32"
    clip_norm: float | None = None
    drop_last: bool | None = None
    optimizer: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None
    scheduler: tuple[str, Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int:
        """Samples of one forward over all ranks: `batch_size` of the loader."""
        return self.train_batch_size // self.accumulation

    def make_optimizer(self, parameters: Iterable[Any]) -> torch.optim.Optimizer:
        """The optimizer that the configuration names, over `parameters`.

        Raises:
            ValueError: it names none.
        """
        if self.optimizer is None:
            raise ValueError('the configuration has no "optimizer": make one yourself, or add it')
        kind, arguments = self.optimizer
        return kind(parameters, **arguments)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Schedule | None:
        """The scheduler over `optimizer`, None where the configuration names none.

        It makes one step after each step of the optimizer, not of the epoch.
        """
        return None if self.scheduler is None else make_schedule(optimizer, *self.scheduler)

    def trainer_options(self) -> dict[str, Any]:
        """Keyword arguments for `Trainer`, beside the optimizer, the scheduler and `epochs`."""
        return {
            "accumulate": self.accumulation,
            "precision": self.precision,
            "clip_norm": self.clip_norm,
            "strategy": self.strategy,
            "scheduler_every": "step",
        }

    def loader_options(self) -> dict[str, Any]:
        """Keyword arguments for the `loader` of a Trainer or Loop."""
        return {"batch_size": self.batch_size, "drop_last": self.drop_last}

    def wrap_options(self) -> dict[str, Any]:
        """Keyword arguments for `wrap`: the strategy, and its bucket size, which the Trainer alone does not know."""
        return {"strategy": self.strategy, **self.strategy_options}


def deepspeed_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> DeepSpeedConfig:
    """Read a DeepSpeed configuration. Rank 0 logs which keys have no effect here.

    Args:
        source: path of the JSON file, or its content: a dict, or the text.
        world_size: number of ranks. Default: the session's, else the launcher's.
        auto: values for "auto" in the file, by key: {"lr": 3e-5, "train_micro_batch_size_per_gpu": 8,
            "total_num_steps": 1000, "bf16": True}. Without a value, a warm-up goes from 0 to `lr`, batch sizes follow
            from each other, fp16 and bf16 are off, and bucket sizes are the strategy's.

    Raises:
        ValueError: a key is unknown, not supported, wrong, or "auto" without a value; the message says what to do.
        TypeError: the source is neither a path nor a mapping.
        OSError: the file cannot be read.
    """
    content = _content(source)
    session = current_session()
    if world_size is None:
        world_size = session.world_size if session is not None else World.from_env().world_size
    whole_number("world_size", world_size, least=1)
    auto = _check_auto({name: value for name, value in (auto or {}).items() if value is not None})
    notes: list[str] = []
    keys = read(content, "", ROOT, auto, notes)
    zero = read(keys.get("zero_optimization", {}), "zero_optimization.", ZERO, auto, notes)
    strategy = _zero(zero, notes)
    config = DeepSpeedConfig(
        *_batch_sizes(keys, world_size),
        world_size,
        *strategy,
        precision=_precision(keys, auto, notes),
        clip_norm=keys.get("gradient_clipping") or None,
        drop_last=keys.get("dataloader_drop_last"),
        optimizer=_optimizer(keys["optimizer"], auto, notes) if keys.get("optimizer") else None,
        scheduler=_scheduler(keys["scheduler"], auto, notes) if keys.get("scheduler") else None,
        notes=tuple(notes),
    )
    if config.notes and (session.is_main if session is not None else World.from_env().rank == 0):
        say("\n".join(f"DeepSpeed's configuration: {note}" for note in config.notes))
    return config


def _content(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"deepspeed_config needs a path or a dict, got {type(source).__name__}")
    is_text = isinstance(source, str) and source.lstrip().startswith("{")
    where = "the text given" if is_text else source
    try:
        text = str(source) if is_text else Path(source).read_text(encoding="utf-8-sig")  # with an editor's mark
        content = json.loads(text, object_pairs_hook=_object)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}, but an object {{...}} is needed")
    return content


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"an object has the key {twice[0]!r} {len(twice)} times. Leave it there once.")
    return dict(pairs)


def _check_auto(auto: dict[str, Any]) -> dict[str, Any]:
    names = {*ROOT, *ZERO, *ADAM, *FP16} - {"enabled"}
    names = names.union(*map(kinds_of, (*_optimizers().values(), *SCHEDULES.values())))
    for name in auto:
        if name not in names:
            near = hint(str(name), names, show=repr)
            raise ValueError(f"auto={{{name!r}: ...}}: DeepSpeed's configuration has no such key.{near}")
    top = {"warmup_max_lr": auto["lr"]} if "lr" in auto else {}
    return {"warmup_min_lr": 0.0, **top, **auto}


def _optimizers() -> dict[str, Any]:
    """Return torch's optimizers by name, without those that do not train every model."""
    names = [name for name in dir(torch.optim) if name[:1].isupper() and name not in ("Optimizer", "Muon")]
    return {name: getattr(torch.optim, name) for name in names}


# -- the parts -------------------------------------------------------------------------------------------------------


def _batch_sizes(keys: Mapping[str, Any], world_size: int) -> tuple[int, int, int]:
    """Return the batch sizes of a step over all ranks and of a forward on one rank, and the forwards of a step."""
    sizes = {name: keys[name] for name in BATCHES if name in keys}
    train, micro, times = (sizes.get(name) for name in BATCHES)
    if train is None:
        if micro is None:
            neither = "train_batch_size or train_micro_batch_size_per_gpu is needed"
            raise ValueError(f'{neither}; if both are "auto", give one in auto={{...}}')
        return micro * (times or 1) * world_size, micro, times or 1
    if times is None:  # as few as the memory of a micro batch allows
        fits = (n for n in range(1, train + 1) if train % n == 0 and train // n <= (micro or train) * world_size)
        times = next(fits, train)
    if micro is None or len(sizes) < 3:
        micro = -(-train // (times * world_size))
    exact = len(sizes) < 3 or train == micro * times * world_size
    if train % times or train // times < world_size or not exact:
        text = ", ".join(f"{name} {value}" for name, value in sizes.items())
        raise ValueError(
            f"{text} and {world_size} rank{'s' * (world_size > 1)} do not fit together: "
            f"train_batch_size {train} must be train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{times} x {world_size} = {micro * times * world_size}"
        )
    return train, micro, times


def _zero(keys: Mapping[str, Any], notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Strategy, and its options."""
    stage, elements = keys.get("stage", 0), keys.get("reduce_bucket_size")
    options = {} if elements is None else {"bucket_cap_mb": elements * _BYTES_OF_A_GRADIENT / 2**20}
    if options and stage >= 2:
        options = {}
        notes.append("zero_optimization.reduce_bucket_size has no effect here: gradients are exchanged block by block")
    return _STRATEGIES[stage], options


def _precision(keys: Mapping[str, Any], auto: Mapping[str, Any], notes: list[str]) -> str | torch.amp.GradScaler:
    on: dict[str, dict[str, Any]] = {}
    for name in ("fp16", "bf16", "bfloat16"):
        section = keys.get(name, {})
        if section and "enabled" not in section:
            raise ValueError(f'{name} does not say whether it is on: add "enabled": true or false')
        is_on = auto.get(name, auto.get("bf16", False) if name == "bfloat16" else False)
        substitutes = {**auto, "enabled": is_on}
        settings = read(section, f"{name}.", FP16 if name == "fp16" else BF16, substitutes, notes)
        if settings.get("enabled"):
            on[name] = settings
    if len(on) > 1:
        raise ValueError(f"{' and '.join(on)} are on, but a training has one precision: switch one off")
    if "fp16" not in on:
        return "bfloat16" if on else "float32"
    fixed, power = on["fp16"].get("loss_scale", 0.0), on["fp16"].get("initial_scale_power", 16)
    if fixed:
        notes.append("fp16.loss_scale is where the scale begins: it is halved where gradients overflow, not fixed")
    # 2,000 steps is torch's default, 1,000 DeepSpeed's.
    window = 2**31 - 1 if fixed else on["fp16"].get("loss_scale_window", 1000) or 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.amp.GradScaler(device, init_scale=fixed or 2.0**power, growth_interval=window)


def _choice(section: Any, where: str, auto: Mapping[str, Any], notes: list[str]) -> tuple[str, dict[str, Any]]:
    """Type and parameters."""
    keys = read(section, f"{where}.", CHOICE, auto, notes)
    if "type" not in keys:
        raise ValueError(f'{where} needs a "type", the name of the {where}')
    return keys["type"], keys.get("params", {})


def _optimizer(
    section: Any, auto: Mapping[str, Any], notes: list[str]
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name, raw_params = _choice(section, "optimizer", auto, notes)
    lower = name.lower()
    if lower in _OWN_OPTIMIZERS:
        raise ValueError(
            f"optimizer.type {name!r} is not supported: it is {_OWN_OPTIMIZERS[lower]} of DeepSpeed. Take AdamW or "
            f"SGD, or leave the optimizer out and make your own in the script."
        )
    kind: Any = next((kind for each, kind in _optimizers().items() if each.lower() == lower), None)
    if kind is None:
        raise ValueError(f"optimizer.type {name!r}: torch has no such optimizer.{hint(name, _optimizers(), show=repr)}")
    is_adam = lower in ("adam", "adamw")
    params = read(raw_params, "optimizer.params.", {**kinds_of(kind), **(ADAM if is_adam else {})}, auto, notes)
    if is_adam:
        defaults = {} if params.pop("torch_adam", False) else _ADAM
        if not params.pop("bias_correction", True):
            raise ValueError("optimizer.params.bias_correction false is not supported: torch's Adam always corrects")
        # By default "Adam" is AdamW, too, as in DeepSpeed.
        kind = torch.optim.AdamW if params.pop("adam_w_mode", True) or lower == "adamw" else torch.optim.Adam
        params = defaults | params
    try:
        kind([torch.zeros(1, requires_grad=True)], **params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"optimizer.params: {kind.__name__} does not take them: {error}") from None
    return kind, params


def _scheduler(section: Any, auto: Mapping[str, Any], notes: list[str]) -> tuple[str, dict[str, Any]]:
    name, raw_params = _choice(section, "scheduler", auto, notes)
    if name not in SCHEDULES:
        near = hint(name, SCHEDULES, " Leave it out, and make a torch scheduler in the script.", show=repr)
        raise ValueError(f"scheduler.type {name!r} is not one of {', '.join(SCHEDULES)}.{near}")
    needed = inspect.signature(SCHEDULES[name]).parameters
    params = read(raw_params, "scheduler.params.", {**kinds_of(SCHEDULES[name], NUMBER), **SCHEDULE}, auto, notes)
    missing = [key for key, each in needed.items() if each.default is each.empty and key not in params]
    if missing:
        raise ValueError(f"scheduler {name} needs {' and '.join(missing)} in its params")
    return name, params
