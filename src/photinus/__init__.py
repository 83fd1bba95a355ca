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
    from .launcher.from_python import launch as launch
    from .parallel import DistributedDataParallel as DistributedDataParallel
    from .parallel import SyncBatchNorm as SyncBatchNorm
    from .parallel import trace as trace
    from .trainer import Loop as Loop
    from .trainer import Trainer as Trainer
    from .trainer import backward as backward
    from .trainer import evaluate as evaluate
    from .trainer import init as init
    from .trainer import load as load
    from .trainer import loader as loader
    from .trainer import save as save
    from .trainer import wrap as wrap
    from .trainer.session import preemption as preemption
    from .world import World as World

from .version import __version__

_HOMES = {
    "DistributedDataParallel": "photinus.parallel",
    "SyncBatchNorm": "photinus.parallel",
    "Loop": "photinus.trainer",
    "Trainer": "photinus.trainer",
    "backward": "photinus.trainer",
    "deepspeed_config": "photinus.compat.deepspeed",
    "evaluate": "photinus.trainer",
    "launch": "photinus.launcher.from_python",
    "init": "photinus.trainer",
    "load": "photinus.trainer",
    "loader": "photinus.trainer",
    "preemption": "photinus.trainer",
    "save": "photinus.trainer",
    "trace": "photinus.parallel",
    "wrap": "photinus.trainer",
    "World": "photinus.world",
}

__all__ = ["__version__", *sorted(_HOMES)]

_LIBRARIES = ("torch", "cloudpickle")  # imported beside us; without the others of our dependencies less is shown


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'photinus' has no attribute {name!r}")
    from .errors import MissingLibraryError
    from .torch_version import check_torch

    check_torch()
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name not in _LIBRARIES:
            raise
        raise MissingLibraryError(f"photinus.{name}", error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# A script that imports torch first gets the backend registered at once; one that imports torch later gets it through
# the torch.backends entry point.
if "torch" in sys.modules:
    importlib.import_module("photinus.backend")
