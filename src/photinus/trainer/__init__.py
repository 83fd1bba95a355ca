"""Training on any number of ranks: session, data, loop, evaluation, checkpoints and the Trainer made of them.

data/        from a data set to the batches of this rank
checkpoint/  complete or absent, verified before use, without pickle
session/     this process in its job: device, group, wrapped models, preemption
record/      what a run measures and leaves in its folder
averages     averages of the weights, and the statistics of their batch norms
step_ledger  the backwards, losses and optimizer steps of a loop's step; and backward in a loop of your own
weighted_means  losses that are means over tokens or class weights, which differ in number on each rank
logical_shards  the steps of a loop whose batches are cut into logical shards
audit        a batch of another rank computed again, to find hardware that computes wrong
shard_checks  the checks of the bodies of logical shards
shard_statistics  the buffers of models in a step of logical shards
objective    from a batch to its loss, and the weight of that
optimizer_modes  optimizers that train other weights than those to use (schedule-free)
state        the state of a loop: which entries a checkpoint has, who gives each, and who takes it back
checkpointer  a loop's checkpoints and snapshots: from a rank's state to memory and disk, and back
snapshots    a loop's state in the memory of its hosts, from which workers come back after a failure
early_stopping  the end of a run before its last epoch, by what its rows say
forwards     blocks of a data set, each computed once, by one rank
evaluation   validation on all ranks, every sample exactly once
prediction   a model's outputs for a data set, in its order
loop         one iterator over epochs and batches that owns position, checkpoint and resume
trainer      the whole training in one call
"""

from __future__ import annotations

from .averages import Average, update_bn
from .checkpoint.folder import CheckpointFolder
from .checkpoint.statefile import load, save
from .checkpoint.states import unwrap
from .data.loader import loader
from .early_stopping import EarlyStopping
from .evaluation import evaluate
from .loop import Loop
from .prediction import predict
from .record.config import dataset_folder
from .record.loggers import MLflow, TensorBoard, Wandb
from .record.spec import Reporting, Saving
from .session.preemption import Suspended, suspend, suspend_requested
from .session.session import Session, init
from .session.wrapping import wrap
from .step_ledger import backward
from .trainer import Result, Trainer

__all__ = [
    "Average",
    "CheckpointFolder",
    "EarlyStopping",
    "Loop",
    "MLflow",
    "Reporting",
    "Result",
    "Saving",
    "Session",
    "Suspended",
    "TensorBoard",
    "Trainer",
    "Wandb",
    "backward",
    "dataset_folder",
    "evaluate",
    "init",
    "load",
    "loader",
    "predict",
    "save",
    "suspend",
    "suspend_requested",
    "unwrap",
    "update_bn",
    "wrap",
]
