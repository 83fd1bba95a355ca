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
    from .errors import AbortedError as AbortedError
    from .errors import CheckpointError as CheckpointError
    from .errors import CollectiveError as CollectiveError
    from .errors import CollectiveTimeoutError as CollectiveTimeoutError
    from .errors import DeviceError as DeviceError
    from .errors import LaunchError as LaunchError
    from .errors import MismatchError as MismatchError
    from .errors import MissingGradientError as MissingGradientError
    from .errors import MissingLibraryError as MissingLibraryError
    from .errors import ModelMismatchError as ModelMismatchError
    from .errors import NonFiniteGradientError as NonFiniteGradientError
    from .errors import NotInitializedError as NotInitializedError
    from .errors import OldTorchError as OldTorchError
    from .errors import PeerLostError as PeerLostError
    from .errors import PhotinusError as PhotinusError
    from .errors import UnsuitableModelError as UnsuitableModelError
    from .errors import WorldSizeError as WorldSizeError
    from .launcher.from_python import launch as launch
    from .parallel import DistributedDataParallel as DistributedDataParallel
    from .parallel import SyncBatchNorm as SyncBatchNorm
    from .parallel import trace as trace
    from .trainer import Loop as Loop
    from .trainer import Suspended as Suspended
    from .trainer import Trainer as Trainer
    from .trainer import backward as backward
    from .trainer import evaluate as evaluate
    from .trainer import init as init
    from .trainer import load as load
    from .trainer import loader as loader
    from .trainer import save as save
    from .trainer import suspend as suspend
    from .trainer import suspend_requested as suspend_requested
    from .trainer import unwrap as unwrap
    from .trainer import wrap as wrap
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
    "save": "photinus.trainer",
    "trace": "photinus.parallel",
    "Suspended": "photinus.trainer",
    "suspend": "photinus.trainer",
    "suspend_requested": "photinus.trainer",
    "unwrap": "photinus.trainer",
    "wrap": "photinus.trainer",
    "World": "photinus.world",
    **dict.fromkeys(
        (
            "AbortedError",
            "CheckpointError",
            "CollectiveError",
            "CollectiveTimeoutError",
            "DeviceError",
            "LaunchError",
            "MismatchError",
            "MissingGradientError",
            "MissingLibraryError",
            "ModelMismatchError",
            "NonFiniteGradientError",
            "NotInitializedError",
            "OldTorchError",
            "PeerLostError",
            "PhotinusError",
            "UnsuitableModelError",
            "WorldSizeError",
        ),
        "photinus.errors",
    ),
}

__all__ = ["__version__", *sorted(_HOMES)]

_LIBRARIES = ("torch", "cloudpickle")  # imported beside us; without the others of our dependencies less is shown


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'photinus' has no attribute {name!r}")
    from .errors import MissingLibraryError
    from .torch_version import check_torch

    if home != "photinus.errors":
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
