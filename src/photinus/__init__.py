"""Photinus trains one PyTorch model on many devices in unison.

Same script, one device or many; same mathematics. The names below are loaded when first used, so that the
command line starts without torch and the engine works where torch is not installed.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compat.deepspeed import deepspeed_config as deepspeed_config
    from .job.world import World as World
    from .parallel import DistributedDataParallel as DistributedDataParallel
    from .parallel import SyncBatchNorm as SyncBatchNorm
    from .parallel import trace as trace
    from .run.from_python import launch as launch
    from .trainer import Average as Average
    from .trainer import EarlyStopping as EarlyStopping
    from .trainer import Loop as Loop
    from .trainer import MLflow as MLflow
    from .trainer import Reporting as Reporting
    from .trainer import Saving as Saving
    from .trainer import Session as Session
    from .trainer import Suspended as Suspended
    from .trainer import TensorBoard as TensorBoard
    from .trainer import Trainer as Trainer
    from .trainer import Wandb as Wandb
    from .trainer import backward as backward
    from .trainer import evaluate as evaluate
    from .trainer import init as init
    from .trainer import load as load
    from .trainer import loader as loader
    from .trainer import predict as predict
    from .trainer import save as save
    from .trainer import suspend as suspend
    from .trainer import suspend_requested as suspend_requested
    from .trainer import unwrap as unwrap
    from .trainer import update_bn as update_bn
    from .trainer import wrap as wrap

from . import errors
from .errors import *  # noqa: F403 - the whole tree; the module is small, and needs nothing
from .version import __version__

_HOMES = {
    name: f"photinus.{home}"
    for home, names in {
        "compat.deepspeed": ("deepspeed_config",),
        "run.from_python": ("launch",),
        "parallel": ("DistributedDataParallel", "SyncBatchNorm", "trace"),
        "trainer": (
            *("Average", "EarlyStopping", "Loop", "MLflow", "Reporting", "Saving", "Suspended", "TensorBoard"),
            *("Session", "Trainer", "Wandb", "backward", "evaluate", "init", "load", "loader", "predict", "save"),
            *("suspend", "suspend_requested", "unwrap", "update_bn", "wrap"),
        ),
        "job.world": ("World",),
    }.items()
    for name in names
}

__all__ = ["__version__", *sorted([*errors.__all__, *_HOMES])]

_LIBRARIES = ("torch", "cloudpickle")  # imported beside us; without the others of our dependencies less is shown


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'photinus' has no attribute {name!r}")
    from .version import check_torch

    check_torch()
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES:
            raise
        raise errors.MissingLibraryError(f"photinus.{name}", error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A script that imports torch first gets the backend registered at once; one that imports torch later gets it through
# the torch.backends entry point.
if "torch" in sys.modules:
    importlib.import_module("photinus.backend")
