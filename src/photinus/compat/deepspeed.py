"""DeepSpeed's JSON configuration, read into what `wrap`, `Loop` and `Trainer` take. Nothing is ignored in silence.

config = photinus.deepspeed_config("ds_config.json")
optimizer = config.make_optimizer(model.parameters())
scheduler = config.make_scheduler(optimizer)
photinus.Trainer(model, optimizer, loss_fn, epochs=3, scheduler=scheduler, **config.trainer_options()).fit(data)
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

from ..spelling import hint
from ..trainer.data.arguments import whole_number
from ..trainer.session.progress import say
from ..trainer.session.session import current_session
from ..world import World
from .deepspeed_keys import NOTED, READ, REFUSED, ZERO_NOTED, ZERO_READ, ZERO_REFUSED, check_keys, in_force, sort_out
from .deepspeed_schedules import SCHEDULES, Schedule, make_schedule

_STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
_ADAM = {
    "lr": 0.001,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
}  # DeepSpeed's own defaults: torch's AdamW decays by 0.01
_OWN_OPTIMIZERS = {
    "lamb": "FusedLamb",
    "onebitadam": "1-bit Adam",
    "onebitlamb": "1-bit LAMB",
    "zerooneadam": "0/1 Adam",
    "lion": "FusedLion",
    "muon": "Muon, which needs some parameters stepped by another optimizer",
    "muadam": "muP's Adam",
    "muadamw": "muP's AdamW",
    "musgd": "muP's SGD",
}
_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_BYTES_OF_A_GRADIENT = 4


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration asks for. Made by `deepspeed_config`.

    Attributes:
        train_batch_size: samples of one step of the optimizer, over all ranks.
        micro_batch_size: samples of one forward and backward on one rank; some ranks may have one less.
        accumulation: backwards per step of the optimizer.
        world_size: for which the three fit together.
        strategy: "ddp" for stage 0, "zero1", "zero2", "zero3".
        strategy_options: `bucket_cap_mb`, where reduce_bucket_size is given and the strategy has buckets.
        precision: "float32" or "bfloat16" (parameters stay float32; forward and loss run under torch.autocast).
        clip_norm: None leaves the gradients.
        drop_last: whether the last, short batch of an epoch is left out; None where it is not said.
        optimizer: (class of torch.optim, its arguments), None where the configuration names none.
        scheduler: (DeepSpeed's name, its parameters), None where it names none.
        notes: a line for each key in force that has no effect here, and why.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    world_size: int
    strategy: str = "ddp"
    strategy_options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "float32"
    clip_norm: float | None = None
    drop_last: bool | None = None
    optimizer: tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | None = None
    scheduler: tuple[str, Mapping[str, Any]] | None = None
    notes: tuple[str, ...] = ()

    @property
    def batch_size(self) -> int:
        """Samples of one forward over all ranks: `batch_size` of Loop and Trainer."""
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
            **self.loop_options(),
            "accumulate": self.accumulation,
            "precision": self.precision,
            "clip_norm": self.clip_norm,
            "strategy": self.strategy,
            "strategy_options": dict(self.strategy_options),
            "scheduler_every": "step",
        }

    def loop_options(self) -> dict[str, Any]:
        """Keyword arguments for `Loop`. Accumulation, precision and clipping are then your body's affair."""
        return {"batch_size": self.batch_size} | ({} if self.drop_last is None else {"drop_last": self.drop_last})

    def wrap_options(self) -> dict[str, Any]:
        """Keyword arguments for `wrap`."""
        return {"strategy": self.strategy, **self.strategy_options}


def deepspeed_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world_size: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> DeepSpeedConfig:
    """Reads a DeepSpeed configuration. Rank 0 says in a line what of it has no effect here.

    Args:
        source: path of the JSON file, or its content.
        world_size: number of ranks; default: the session's, else the launcher's.
        auto: what stands for "auto", as Hugging Face's files have it, by key: {"lr": 3e-5,
            "train_micro_batch_size_per_gpu": 8, "total_num_steps": 1000, "bf16": True}. The maximum of a warm-up is
            `lr`, its minimum 0, batch sizes follow from each other, fp16 and bf16 are off, and bucket sizes are the
            strategy's, unless they are given.

    Raises:
        ValueError: a key is unknown, not supported, wrong, or "auto" and not given; says which, and what to do.
        TypeError: the source is neither a path nor a mapping.
        OSError: the file cannot be read.
    """
    content = _content(source)
    session = current_session()
    if world_size is None:
        world_size = session.world_size if session is not None else World.from_env().world_size
    whole_number("world_size", world_size, least=1)
    filled = _fill(content, dict(auto or {}))
    notes = sort_out(filled, "", read=READ, noted=NOTED, refused=REFUSED)
    strategy, strategy_options, zero_notes = _zero(filled.get("zero_optimization") or {})
    train, micro, accumulation = _batch_sizes(filled, world_size)
    config = DeepSpeedConfig(
        train_batch_size=train,
        micro_batch_size=micro,
        accumulation=accumulation,
        world_size=world_size,
        strategy=strategy,
        strategy_options=strategy_options,
        precision=_precision(filled),
        clip_norm=_clip_norm(filled.get("gradient_clipping")),
        drop_last=filled.get("dataloader_drop_last"),
        optimizer=_optimizer(filled["optimizer"]) if filled.get("optimizer") else None,
        scheduler=_scheduler(filled["scheduler"]) if filled.get("scheduler") else None,
        notes=(*notes, *zero_notes),
    )
    if config.notes and (session.is_main if session is not None else World.from_env().rank == 0):
        say("\n".join(f"DeepSpeed's configuration: {note}" for note in config.notes))
    return config


def _content(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"deepspeed_config needs a path or a dict, got {type(source).__name__}")
    try:
        content = json.loads(Path(source).read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{source} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{source} holds a {type(content).__name__}, but an object {{...}} is needed")
    return content


# -- "auto" ----------------------------------------------------------------------------------------------------------


def _fill(content: Mapping[str, Any], auto: dict[str, Any]) -> dict[str, Any]:
    """The content without the word "auto"."""
    auto.setdefault("warmup_min_lr", 0.0)
    if "lr" in auto:
        auto.setdefault("warmup_max_lr", auto["lr"])
    left_out = object()

    def fill(value: Any, name: str, path: str) -> Any:
        if isinstance(value, Mapping):
            inner = {key: fill(each, key, f"{path}.{key}" if path else key) for key, each in value.items()}
            return {key: each for key, each in inner.items() if each is not left_out}
        if value != "auto":
            return value
        if path in ("fp16.enabled", "bf16.enabled", "bfloat16.enabled"):
            section = path.partition(".")[0]  # "bfloat16" is the older name of "bf16"
            return bool(auto.get(section) or (section == "bfloat16" and auto.get("bf16")))
        if name in auto:
            return auto[name]
        if name in _BATCHES or path.startswith("zero_optimization."):
            return left_out
        raise ValueError(f'{path} is "auto": say what it is with deepspeed_config(..., auto={{"{name}": ...}})')

    filled: dict[str, Any] = fill(dict(content), "", "")
    return filled


# -- the parts -------------------------------------------------------------------------------------------------------


def _batch_sizes(content: Mapping[str, Any], world_size: int) -> tuple[int, int, int]:
    """Samples of a step over all ranks, samples of a forward on one, forwards of a step: two make the third."""
    given = {name: content[name] for name in _BATCHES if content.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {value!r}, but a whole number above 0 is needed")
    train, micro, times = (given.get(name) for name in _BATCHES)
    if train is None and micro is None:
        raise ValueError(
            'train_batch_size or train_micro_batch_size_per_gpu is needed; if both are "auto", give one in auto={...}'
        )
    if train is None:
        assert micro is not None
        return micro * (times or 1) * world_size, micro, times or 1
    if times is None:  # as few as the memory of a micro batch allows
        fits = (n for n in range(1, train + 1) if train % n == 0 and train // n <= (micro or train) * world_size)
        times = next(fits, train)
    if micro is None or len(given) < 3:
        micro = -(-train // (times * world_size))
    exact = len(given) < 3 or train == micro * times * world_size
    if train % times or train // times < world_size or not exact:
        shown = ", ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(
            f"{shown} and {world_size} rank{'s' * (world_size > 1)} do not fit together: "
            f"train_batch_size {train} must be train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
            f"{times} x {world_size} = {micro * times * world_size}"
        )
    return train, micro, times


def _zero(section: Any) -> tuple[str, dict[str, Any], list[str]]:
    """Strategy, its options, notes."""
    if isinstance(section, bool):  # as very old files have it
        section = {"stage": int(section)}
    notes = sort_out(section, "zero_optimization.", read=ZERO_READ, noted=ZERO_NOTED, refused=ZERO_REFUSED)
    stage = section.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_optimization.stage: {stage!r}, but 0, 1, 2 or 3 is needed")
    strategy, options = _STRATEGIES[stage], {}
    elements = section.get("reduce_bucket_size")
    if elements is not None:
        if isinstance(elements, bool) or not isinstance(elements, (int, float)) or not elements >= 1:
            raise ValueError(f"zero_optimization.reduce_bucket_size: {elements!r}, but a number of elements is needed")
        if stage < 2:
            options["bucket_cap_mb"] = elements * _BYTES_OF_A_GRADIENT / 2**20
        else:
            notes.append(
                "zero_optimization.reduce_bucket_size has no effect here: gradients are exchanged block by block"
            )
    return strategy, options, notes


def _precision(content: Mapping[str, Any]) -> str:
    sections = {name: content.get(name) or {} for name in ("fp16", "bf16", "bfloat16")}
    for name, section in sections.items():
        enabled = section.get("enabled", False) if isinstance(section, Mapping) else section
        if enabled and not isinstance(enabled, bool):
            raise ValueError(f'{name}: {section!r}, but {{"enabled": true}} or {{"enabled": false}} is needed')
        if isinstance(section, Mapping) and in_force(name, section) and "enabled" not in section:
            raise ValueError(f'{name} does not say whether it is on: add "enabled": true or false')
    on = [name for name, section in sections.items() if section is True or dict(section or {}).get("enabled")]
    if "fp16" in on:
        raise ValueError(
            "fp16 is not supported: the Trainer has no loss scaler. Take bf16, which needs none; or keep a loop of "
            'your own, with a torch.amp.GradScaler given to Loop(..., state={"scaler": scaler}), and take fp16 out.'
        )
    if isinstance(sections["bf16"], Mapping):
        wider = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
        check_keys(sections["bf16"], "bf16.", {"enabled", "immediate_grad_update", "check_grad_overflow", *wider})
        for name in wider:
            if sections["bf16"].get(name):
                raise ValueError(f"bf16.{name} is not supported: parameters and optimizer states stay float32")
    return "bfloat16" if on else "float32"


def _clip_norm(value: Any) -> float | None:
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(f"gradient_clipping: {value!r}, but a number above 0 (or 0 for none) is needed")
    return float(value)


def _type_and_params(section: Any, where: str) -> tuple[str, dict[str, Any]]:
    check_keys(section, f"{where}.", {"type", "params", "legacy_fusion"})
    name = section.get("type")
    if not isinstance(name, str):
        raise ValueError(f'{where} needs a "type", the name of the {where}')
    params = section.get("params") or {}
    check_keys(params, f"{where}.params.", params)
    for key, value in params.items():
        if isinstance(value, str) and _is_number(value):  # as "1e-4", which YAML takes for text
            raise ValueError(
                f"{where}.params.{key}: {value!r} is text, but a number is needed: write it without quotes"
            )
    return name, dict(params)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _optimizer(section: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    name, params = _type_and_params(section, "optimizer")
    lower = name.lower()
    if lower in _OWN_OPTIMIZERS:
        raise ValueError(
            f"optimizer.type {name!r} is not supported: it is {_OWN_OPTIMIZERS[lower]} of DeepSpeed. Take AdamW or "
            f"SGD, or leave the optimizer out and make your own in the script."
        )
    if lower in ("adam", "adamw"):
        params.pop("torch_adam", None)
        if params.pop("bias_correction", True) is not True:
            raise ValueError("optimizer.params.bias_correction false is not supported: torch's Adam always corrects")
        decoupled = params.pop("adam_w_mode", True) or lower == "adamw"  # true also for "Adam": DeepSpeed's default
        kind: Any = torch.optim.AdamW if decoupled else torch.optim.Adam
        params = _ADAM | params
    else:
        names = [each for each in dir(torch.optim) if each[:1].isupper() and each not in ("Optimizer", "Muon")]
        found = next((each for each in names if each.lower() == lower), None)
        if found is None:
            near = hint(name, names, show=repr)
            raise ValueError(f"optimizer.type {name!r}: torch.optim has no such optimizer.{near}")
        kind = getattr(torch.optim, found)
    accepted = set(inspect.signature(kind).parameters) - {"params", "model", "closure"}
    check_keys(params, f"optimizer.params.{name}.", accepted)
    if "betas" in params:
        if not isinstance(params["betas"], (list, tuple)):
            raise ValueError(f"optimizer.params.betas: {params['betas']!r}, but two numbers [..., ...] are needed")
        params["betas"] = tuple(params["betas"])
    return kind, params


def _scheduler(section: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    name, params = _type_and_params(section, "scheduler")
    if name not in SCHEDULES:
        near = hint(name, SCHEDULES, " Leave it out, and make a torch scheduler in the script.", show=repr)
        raise ValueError(f"scheduler.type {name!r} is not one of {', '.join(SCHEDULES)}.{near}")
    for key in ("cycle_first_stair_count", "cycle_second_stair_count", "last_batch_iteration"):
        if name == "OneCycle" and key in params and params.pop(key) not in (0, None, -1):
            raise ValueError(f"scheduler.params.{key} is not supported: leave it out")
    if params.get("last_batch_iteration") == -1:
        del params["last_batch_iteration"]
    known = inspect.signature(SCHEDULES[name]).parameters
    check_keys(params, f"scheduler.params.{name}.", known)
    missing = [key for key, each in known.items() if each.default is each.empty and params.get(key) is None]
    if missing:
        raise ValueError(f"scheduler {name} needs {' and '.join(missing)} in its params")
    if params.get("warmup_type", "log") not in ("log", "linear"):
        raise ValueError(f'scheduler.params.warmup_type: {params["warmup_type"]!r}, but "log" or "linear" is needed')
    for key, value in params.items():
        if key in ("cycle_first_step_size", "lr_range_test_step_size") and value == 0:
            raise ValueError(f"scheduler.params.{key}: 0, but a number above 0 is needed")
        if isinstance(value, (list, tuple)):
            raise ValueError(
                f"scheduler.params.{key}: {value!r}, but one number for all parameter groups is needed; make a torch "
                f"scheduler in the script for one per group"
            )
    return name, params
