"""The keys of DeepSpeed's JSON: what value each takes; which have no effect here, which are refused, and why."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..words import hint

Kind = Callable[[Any], Any]
"""Returns a value as it is used here. Raises ValueError with what is needed."""


class Noted(str):
    """Why a key has no effect here."""


class Refused(str):
    """Why a key is not supported."""


Table = Mapping[str, Kind | Noted | Refused]


def _kind(needed: str, fits: Callable[[Any], bool], use: Kind = lambda value: value) -> Kind:
    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"{needed} is needed")
        return use(value)

    return check


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf


_FLAG = _kind("true or false", lambda v: isinstance(v, bool))
_COUNT = _kind("a whole number above 0", lambda v: _is_number(v) and v >= 1 and v == int(v), int)
NUMBER = _kind("a number", _is_number)
_POSITIVE = _kind("a number above 0", lambda v: _is_number(v) and v > 0)
_TEXT = _kind("text", lambda v: isinstance(v, str))
_PAIR = _kind("two numbers [..., ...]", lambda v: isinstance(v, (list, tuple)) and len(v) == 2, tuple)
_OBJECT = _kind("an object {...}", lambda v: isinstance(v, Mapping), dict)


def _object_or_flag(use: Kind) -> Kind:
    return _kind(
        "an object {...}",
        lambda v: isinstance(v, (bool, Mapping)),
        lambda v: use(v) if isinstance(v, bool) else dict(v),
    )


_NO_EFFECT, _ALWAYS_ON = "has no effect here", "is always on here"
_NOTED = {
    "steps_per_print": "has no effect here: progress is shown for every step, and losses.csv holds each of them",
    "wall_clock_breakdown memory_breakdown": f"{_ALWAYS_ON}: see `photinus top` and `photinus report`",
    "zero_allow_untested_optimizer": "has no effect here: every optimizer of torch.optim is allowed",
    "zero_force_ds_cpu_optimizer dump_state disable_allgather use_node_local_storage timers": _NO_EFFECT,
    "prescale_gradients gradient_predivide_factor": f"{_NO_EFFECT}: gradients are averaged in one way on every rank",
    "sparse_gradients": "has no effect here: sparse gradients are exchanged as such by themselves",
    """
    communication_data_type seq_parallel_communication_data_type data_types fp32_allreduce
    """: f"{_NO_EFFECT}: gradients are exchanged in their own type, and narrow ones added in float32",
    "activation_checkpointing": "concerns only models that call deepspeed.checkpointing; use torch.utils.checkpoint",
    "flops_profiler comms_logger": "has no effect here: see photinus.trace and `photinus bench`",
    "tensorboard": "has no effect here: give the Trainer report=photinus.Reporting(loggers=[photinus.TensorBoard()])",
    "wandb": "has no effect here: give the Trainer report=photinus.Reporting(loggers=[photinus.Wandb(...)])",
    "comet": "has no effect here: log in a callback of the Trainer",
    "csv_monitor": f"{_ALWAYS_ON}: metrics.csv and losses.csv",
    "aio": "has no effect here: nothing is moved to a disk",
    "checkpoint load_universal_checkpoint": "has no effect here: see `photinus.Loop` for when and where checkpoints "
    "are saved; each loads at any world size and strategy",
}
_REFUSED = {
    "amp torch_autocast": 'take "bf16": {"enabled": true}, which is torch.autocast here; NVIDIA apex is not used',
    "autotuning": "nothing tunes the configuration by itself; write down the numbers that it found",
    "compression_training quantize_training": "take it out, or compress the model before training",
    "elasticity": "`photinus run --nnodes LEAST:MOST` is elastic by itself: batch sizes are global; take it out",
    "sparse_attention progressive_layer_drop": "attention and dropping layers are the model's affair",
    "data_efficiency curriculum_learning": "curricula and data routing have no counterpart; sample in the data set",
    "eigenvalue hybrid_engine nebula graph_harvesting": "it has no counterpart here",
    "pipeline tensor_parallel sequence_parallel_size": "ranks share batches here, not layers or sequences",
    "compile": "compile the model yourself: torch.compile(model)",
    "zenflow": "all states stay on their device",
}
_ZERO_NOTED = {
    """
    allgather_partitions allgather_bucket_size overlap_comm reduce_scatter contiguous_gradients round_robin_gradients
    sub_group_size ignore_unused_parameters legacy_stage1 stage3_prefetch_bucket_size stage3_max_live_parameters
    stage3_max_reuse_distance stage3_param_persistence_threshold stage3_model_persistence_threshold
    stage3_use_all_reduce_for_fetch_params stage3_module_granularity_threshold load_from_fp32_weights
    elastic_checkpoint memory_efficient_linear use_multi_rank_bucket_allreduce override_module_apply
    log_trace_cache_warnings use_all_reduce_for_fetch_params prefetch_bucket_size param_persistence_threshold
    max_live_parameters max_reuse_distance model_persistence_threshold module_granularity_threshold allgather_sequential
    """: "has no effect on the results: when what is exchanged is the strategy's affair here",
    """
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    gather_16bit_weights_on_model_save
    """: "is not needed: checkpoints hold whole tensors in plain names",
}
_ZERO_REFUSED = {
    "offload_optimizer offload_param cpu_offload cpu_offload_params cpu_offload_use_pin_memory": "parameters and "
    "optimizer states stay on their device here. Split them further (stage 3), use more processes, or take it out (or "
    'give it "device": "none")',
    "zero_hpz_partition_size": "a second partition inside a host (ZeRO++) is not supported",
    """
    zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param
    """: "quantised exchange (ZeRO++) is not supported",
    "mics_shard_size mics_hierarchical_params_gather": "sharding in groups smaller than the world (MiCS) is not "
    "supported",
    "leaf_module": "blocks that are gathered whole are the strategy's `shard` option here",
}


def _table(kinds: Mapping[str, Kind], noted: Mapping[str, str], refused: Mapping[str, str]) -> Table:
    found: dict[str, Kind | Noted | Refused] = {**kinds}
    found |= {name: Noted(why) for names, why in noted.items() for name in names.split()}
    return found | {name: Refused(why) for names, why in refused.items() for name in names.split()}


BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
ROOT = _table(
    {
        **dict.fromkeys(BATCHES, _COUNT),
        **dict.fromkeys(("optimizer", "scheduler"), _OBJECT),
        **dict.fromkeys(("fp16", "bf16", "bfloat16"), _object_or_flag(lambda flag: {"enabled": flag})),
        "gradient_clipping": _kind("a number above 0 (or 0 for none)", lambda v: _is_number(v) and v >= 0, float),
        "zero_optimization": _object_or_flag(lambda flag: {"stage": int(flag)}),  # as very old files have it
        "dataloader_drop_last": _FLAG,
    },
    _NOTED,
    _REFUSED,
)
ZERO = _table(
    {
        "stage": _kind("0, 1, 2 or 3", lambda v: _is_number(v) and v in range(4), int),
        "reduce_bucket_size": _kind("a number of elements", lambda v: _is_number(v) and v >= 1),
    },
    _ZERO_NOTED,
    _ZERO_REFUSED,
)
BF16 = _table(
    {"enabled": _FLAG},
    {"immediate_grad_update check_grad_overflow": _NO_EFFECT},
    {"bf16_master_weights_and_grads bf16_optimizer_states": "parameters and optimizer states stay float32"},
)
_POWER = _kind("a whole number, 0 or more", lambda v: _is_number(v) and v >= 0 and v == int(v), int)
FP16 = _table(
    {"enabled": _FLAG, "loss_scale": _kind("a number, 0 or more", lambda v: _is_number(v) and v >= 0, float)}
    | dict.fromkeys(("initial_scale_power", "loss_scale_window"), _POWER),
    {
        "hysteresis consecutive_hysteresis min_loss_scale": f"{_NO_EFFECT}: the scale is halved at once",
        "auto_cast": f"{_ALWAYS_ON}: forward and loss run under torch.autocast",
    },
    {"fp16_master_weights_and_grads": "parameters and optimizer states stay float32"},
)
CHOICE = _table({"type": _TEXT, "params": _OBJECT}, {"legacy_fusion": _NO_EFFECT}, {})
ADAM = dict.fromkeys(("torch_adam", "bias_correction", "adam_w_mode"), _FLAG)
SCHEDULE = _table({}, {}, {"cycle_first_stair_count cycle_second_stair_count last_batch_iteration": "leave it out"})
_BY_NAME = {
    "warmup_type": _kind('"log" or "linear"', lambda v: v in ("log", "linear")),
    "cycle_first_step_size": _POSITIVE,
    "lr_range_test_step_size": _POSITIVE,
}
_BY_DEFAULT = ((bool, _FLAG), ((int, float), NUMBER), (tuple, _PAIR), (str, _TEXT))
_OFF = {"zero_hpz_partition_size": 1, "sequence_parallel_size": 1, "mics_shard_size": -1, "last_batch_iteration": -1}


def kinds_of(function: Callable[..., Any], none: Kind = lambda value: value) -> dict[str, Kind]:
    """Return the kind of value of each argument of a function, by its default; `none` if it has no default."""
    return {
        name: _BY_NAME.get(name) or next((kind for cls, kind in _BY_DEFAULT if isinstance(each.default, cls)), none)
        for name, each in inspect.signature(function).parameters.items()
        if name != "params"
    }


def read(
    section: Mapping[str, Any], where: str, table: Table, auto: Mapping[str, Any], notes: list[str]
) -> dict[str, Any]:
    """The values of a section that count here, as they are used. A null stands for the default.

    Args:
        where: the section's place, such as "zero_optimization.".
        auto: what stands for "auto", by key.
        notes: takes a line for each key in force that has no effect, and for each flag that is off without one.

    Raises:
        ValueError: names the key, what is needed, the reason or the closest known key, and what to do.
    """
    found = {}
    for name, value in section.items():
        if name not in table:
            keys = sorted(table)
            those = f" Known here: {', '.join(keys)}." * (len(keys) < 15)
            suggestion = hint(str(name), keys, those, show=repr)
            raise ValueError(f"{where}{name}: DeepSpeed's configuration has no such key.{suggestion}")
        entry = table[name]
        if value == "auto":
            if name not in auto and (name in (*BATCHES, "reduce_bucket_size") or isinstance(entry, Noted)):
                continue  # batch sizes follow from each other, and the strategy chooses the size of its buckets
            if name not in auto:
                ask = f'deepspeed_config(..., auto={{"{name}": ...}})'
                raise ValueError(f'{where}{name} is "auto": say what it is with {ask}')
            value = auto[name]
        if isinstance(entry, Refused) and _in_force(name, value):
            raise ValueError(f"{where}{name} is not supported: {entry}.")
        if isinstance(entry, str) or value is None:
            notes += [f"{where}{name} {entry}"] * (_in_force(name, value) or _is_unheard(entry, value))
            continue
        try:
            found[name] = entry(value)
        except ValueError as error:
            quoted = ", without quotes" * (isinstance(value, str) and entry is not _TEXT)
            raise ValueError(f"{where}{name}: {value!r}, but {error}{quoted}") from None
    return found


def _is_unheard(entry: object, value: Any) -> bool:
    """Return whether a key switches off what nothing switches here. (What is refused is off anyway.)"""
    is_off = value is False or (isinstance(value, Mapping) and value.get("enabled") is False)
    return isinstance(entry, Noted) and is_off and (value is False or entry.startswith(_ALWAYS_ON))


def _in_force(name: str, value: Any) -> bool:
    """Return whether a key asks for something: not null, false, 0, {}, {"enabled": false} or {"device": "none"}."""
    if isinstance(value, Mapping):
        if "device" in value and str(value["device"]).lower() == "none":
            return False
        if name == "tensor_parallel":
            return value.get("autotp_size") not in (None, 0, 1)
        return bool(value) and value.get("enabled", True) is not False
    return bool(value) and value != _OFF.get(name)
