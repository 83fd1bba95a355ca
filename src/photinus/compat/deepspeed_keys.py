"""The keys of DeepSpeed's JSON: which are read, which have no effect here and why, which are refused and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..spelling import hint

READ = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "optimizer",
        "scheduler",
        "fp16",
        "bf16",
        "bfloat16",
        "gradient_clipping",
        "zero_optimization",
        "dataloader_drop_last",
    }
)
_NO_EFFECT = "has no effect here"
NOTED: dict[str, str] = {
    "steps_per_print": "has no effect here: progress is shown for every step, and losses.csv holds each of them",
    "wall_clock_breakdown": "is always on here: `photinus top` and `photinus report` show where a step's time goes",
    "zero_allow_untested_optimizer": "has no effect here: every optimizer of torch.optim is allowed",
    "zero_force_ds_cpu_optimizer": _NO_EFFECT,
    "dump_state": _NO_EFFECT,
    "memory_breakdown": "has no effect here: `photinus top` shows memory",
    "prescale_gradients": "has no effect here: gradients are averaged in one way on every rank",
    "gradient_predivide_factor": "has no effect here: gradients are averaged in one way on every rank",
    "sparse_gradients": "has no effect here: sparse gradients are exchanged as such by themselves",
    "fp32_allreduce": "has no effect here: narrow types are added in float32 anyway",
    "disable_allgather": _NO_EFFECT,
    "communication_data_type": "has no effect here: gradients are exchanged in their own type",
    "seq_parallel_communication_data_type": _NO_EFFECT,
    "data_types": "has no effect here: gradients add up in the parameters' type",
    "activation_checkpointing": "concerns only models that call deepspeed.checkpointing; use torch.utils.checkpoint",
    "flops_profiler": "has no effect here: see photinus.trace",
    "comms_logger": "has no effect here: see photinus.trace and `photinus bench`",
    "tensorboard": "has no effect here: give the Trainer tensorboard=True",
    "wandb": "has no effect here: log in a callback of the Trainer",
    "comet": "has no effect here: log in a callback of the Trainer",
    "csv_monitor": "is always on here: metrics.csv and losses.csv",
    "aio": "has no effect here: nothing is moved to a disk",
    "checkpoint": "has no effect here: see `photinus.Loop` for when and where checkpoints are saved",
    "load_universal_checkpoint": "has no effect here: every checkpoint loads at any world size and strategy",
    "use_node_local_storage": _NO_EFFECT,
    "timers": _NO_EFFECT,
}
REFUSED: dict[str, str] = {
    "amp": 'NVIDIA apex is not used; take "bf16": {"enabled": true}',
    "autotuning": "nothing tunes the configuration by itself; write down the numbers that it found",
    "compression_training": "compression is not supported; take it out, or compress the model before training",
    "quantize_training": "quantised training is not supported",
    "elasticity": "`photinus run --nnodes LEAST:MOST` is elastic by itself: batch sizes are global; take it out",
    "sparse_attention": "attention is the model's affair",
    "data_efficiency": "curricula and data routing are not supported; sample in the data set",
    "curriculum_learning": "curricula are not supported; sample in the data set",
    "progressive_layer_drop": "dropping layers is the model's affair",
    "eigenvalue": "eigenvalues of the Hessian are not computed",
    "hybrid_engine": "the engine for RLHF has no counterpart",
    "nebula": "checkpoints are written to folders",
    "pipeline": "pipeline parallelism is not supported",
    "tensor_parallel": "tensor parallelism is not supported",
    "sequence_parallel_size": "sequence parallelism is not supported",
    "torch_autocast": 'take "bf16": {"enabled": true}, which is torch.autocast here',
    "compile": "compile the model yourself: torch.compile(model)",
    "graph_harvesting": "CUDA graphs of the optimizer are not supported",
    "zenflow": "offloading is not supported: all states stay on the device",
}
ZERO_READ = frozenset({"stage", "reduce_bucket_size"})
_SPEED_ONLY = """
    allgather_partitions allgather_bucket_size overlap_comm reduce_scatter contiguous_gradients
    round_robin_gradients sub_group_size ignore_unused_parameters legacy_stage1
    stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance
    stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_use_all_reduce_for_fetch_params stage3_module_granularity_threshold load_from_fp32_weights
    elastic_checkpoint memory_efficient_linear use_multi_rank_bucket_allreduce override_module_apply
    log_trace_cache_warnings use_all_reduce_for_fetch_params prefetch_bucket_size
    param_persistence_threshold max_live_parameters max_reuse_distance
"""
ZERO_NOTED: dict[str, str] = dict.fromkeys(
    _SPEED_ONLY.split(),
    "has no effect on the results: when what is exchanged is the strategy's affair here",
) | {
    f"{name}_weights_on_model_save": "is not needed: checkpoints hold whole tensors in plain names"
    for name in ("stage3_gather_16bit", "stage3_gather_fp16", "gather_16bit")
}
_OFFLOAD = (
    "parameters and optimizer states stay on their device here. Split them further (stage 3), use more processes, or "
    'take it out (or give it "device": "none")'
)
ZERO_REFUSED: dict[str, str] = {
    "offload_optimizer": _OFFLOAD,
    "offload_param": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "cpu_offload_params": _OFFLOAD,
    "cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_hpz_partition_size": "a second partition inside a host (ZeRO++) is not supported",
    "zero_quantized_weights": "quantised exchange (ZeRO++) is not supported",
    "zero_quantized_nontrainable_weights": "quantised exchange (ZeRO++) is not supported",
    "zero_quantized_gradients": "quantised exchange (ZeRO++) is not supported",
    "mics_shard_size": "sharding in groups smaller than the world (MiCS) is not supported",
    "mics_hierarchical_params_gather": "sharding in groups smaller than the world (MiCS) is not supported",
    "zeropp_loco_param": "quantised exchange (ZeRO++) is not supported",
    "leaf_module": "blocks that are gathered whole are the strategy's `shard` option here",
}
_OFF_NUMBERS = {"zero_hpz_partition_size": 1, "sequence_parallel_size": 1, "mics_shard_size": -1}


def in_force(name: str, value: Any) -> bool:
    """Whether a key asks for something: not null, false, 0, {}, {"enabled": false} or {"device": "none"}."""
    if isinstance(value, Mapping):
        if "device" in value and str(value["device"]).lower() == "none":
            return False
        if name == "tensor_parallel":
            return int(value.get("autotp_size", 0)) > 1
        return bool(value) and value.get("enabled", True) is not False
    return bool(value) and value != _OFF_NUMBERS.get(name)


def sort_out(
    section: Mapping[str, Any],
    where: str,
    *,
    read: Iterable[str],
    noted: Mapping[str, str],
    refused: Mapping[str, str],
) -> list[str]:
    """Refuses what is unknown or not supported; returns a line for each key in force that has no effect.

    Raises:
        ValueError: names the key, the closest known one or the reason, and what to do.
    """
    check_keys(section, where, {*read, *noted, *refused})
    for name, reason in refused.items():
        if name in section and in_force(name, section[name]):
            raise ValueError(f"{where}{name} is not supported: {reason}.")
    return [f"{where}{name} {noted[name]}" for name in section if name in noted and in_force(name, section[name])]


def check_keys(section: Mapping[str, Any], where: str, known: Iterable[str]) -> None:
    """Refuses unknown keys, and what is no object with keys."""
    if not isinstance(section, Mapping):
        raise ValueError(f"{where.rstrip('.')}: {section!r}, but an object {{...}} is needed")
    known = sorted(known)
    for name in section:
        if name not in known:
            those = f" Known here: {', '.join(known)}." * (len(known) < 15)
            meant = hint(str(name), known, those, show=repr)
            raise ValueError(f"{where}{name}: DeepSpeed's configuration has no such key.{meant}")
