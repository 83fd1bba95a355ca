"""What `_get_ddp_logging_data` answers: how the wrapper was made, and where its time goes.

The names are those of torch's class; times are in nanoseconds.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from ..exchange.collectives import backend_name
from .wrapper import Wrapper

_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
_GLOO_THREADS = 2  # torch makes its gloo groups with so many


def logging_data(ddp: Wrapper, *, hook_name: str | None, static_graph: bool) -> dict[str, str | int]:
    """The data of one wrapper, as strings and integers."""
    reducer, timeline = ddp.reducer, ddp.reducer.timeline
    backend = backend_name(ddp.process_group, ddp.device)
    parameters = [slot.parameter for slot in reducer.slots]
    sizes = _bucket_sizes(ddp) or str(sum(p.numel() * p.element_size() for p in parameters))
    data: dict[str, str | int] = {
        "world_size": reducer.world_size,
        "rank": reducer.rank,
        "module_name": type(ddp.module).__name__,
        "device_ids": "" if not ddp.device_ids else ", ".join(str(d.index) for d in ddp.device_ids),
        "output_device": -1 if ddp.output_device is None else int(ddp.output_device.index or 0),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(static_graph),
        "can_set_static_graph": int(reducer.used.always_the_same),
        "backend_name": backend,
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
        "iteration": timeline.iteration,
        "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "num_parameter_tensors": len(parameters),
        "bucket_sizes": sizes,
        "initial_bucket_size_limits": str(ddp.bucket_bytes_cap),
        "num_buckets_reduced": timeline.buckets_exchanged,
        "has_rebuilt_buckets": int(reducer.has_rebuilt_buckets),
        "join_uneven_inputs": int(ddp._join_config.enable),
        "torch_distributed_debug": os.environ.get("TORCH_DISTRIBUTED_DEBUG", "N/A"),
        "master_addr": os.environ.get("MASTER_ADDR", "N/A"),
        "master_port": os.environ.get("MASTER_PORT", "N/A"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES", "N/A"),
        "prev_iteration_grad_ready_order_indices": ", ".join(map(str, reducer.arrival_order)),
        **timeline.last,
        **timeline.averages,
    }
    if reducer.has_rebuilt_buckets:
        data["rebuilt_bucket_sizes"] = sizes
        data["rebuilt_per_bucket_param_indices"] = ", ".join(
            " ".join(str(slot.index) for slot in bucket.slots) for bucket in reducer.buckets
        )
    if backend == "gloo":
        data["gloo_socket_ifname"] = os.environ.get("GLOO_SOCKET_IFNAME", "N/A")
        data["gloo_device_transport"] = os.environ.get("GLOO_DEVICE_TRANSPORT", "N/A")
        data["gloo_num_threads"] = _GLOO_THREADS
    if hook_name is not None:
        data["comm_hook"] = hook_name
    if timeline.error:
        data["has_error"] = 1
        data["error"] = timeline.error
    if get_debug_level() != DebugLevel.OFF:
        data["unused_parameter_size"] = 0
    return data


def _bucket_sizes(ddp: Wrapper) -> str:
    """Bytes of gradients in each bucket, without padding."""
    totals = [
        sum(slot.parameter.numel() * slot.parameter.element_size() for slot in bucket.slots)
        for bucket in ddp.reducer.buckets
    ]
    return ", ".join(map(str, totals))
