"""Training on any number of ranks: session, data, loop, evaluation, checkpoints and the Trainer made of them."""

from __future__ import annotations

from . import preemption
from .checkpoint import CheckpointFolder, load, save
from .config import dataset_folder
from .data import loader
from .deepspeed import DeepSpeedConfig, deepspeed_config
from .evaluation import evaluate
from .loop import Loop
from .loss import backward
from .session import Session, init
from .trainer import Result, Trainer
from .wrapping import unwrap, wrap

__all__ = [
    "CheckpointFolder",
    "DeepSpeedConfig",
    "Loop",
    "Result",
    "Session",
    "Trainer",
    "backward",
    "dataset_folder",
    "deepspeed_config",
    "evaluate",
    "init",
    "load",
    "loader",
    "preemption",
    "save",
    "unwrap",
    "wrap",
]
