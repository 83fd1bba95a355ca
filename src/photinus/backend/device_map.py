"""Groups that serve several kinds of devices: "cpu:photinus,cuda:nccl".

torch makes the backends of such a map one by one and collects them in a group of its own. A backend that is a group
itself, as ours has to be, replaces that one, and torch drops the rest of the map without a word. So the rest is made
here, into a plain torch group, and `ByDevice` hands each call to the group of its tensors' device.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions

from .. import engine
from .arguments import Options
from .name import NAME
from .process_group import ProcessGroup
from .torch_tools import outside_dynamo

_TYPES = dist.ProcessGroup.BackendType


@dataclass(frozen=True)
class DeviceRequest:
    """The group that torch is about to make.

    Attributes:
        ours: the device types that we serve.
        devices: the other device types and the names of their backends, {"cuda": "nccl"}.
        torch_group: torch's own group, with the backends of the devices that stand before ours in the map.
        store: of the whole group.
        device: the accelerator that the group is bound to (init_process_group's device_id).
        split_from: the backend that NCCL may split off, if any.
        options: init_process_group's pg_options, if they are not ours.
    """

    ours: Sequence[str] = ("cpu", "cuda")
    devices: Mapping[str, str] = field(default_factory=dict)
    torch_group: dist.ProcessGroup | None = None
    store: Store | None = None
    device: torch.device | None = None
    split_from: Any = None
    options: Any = None

    def for_a_part(self, subset: Sequence[torch.device] | None) -> DeviceRequest:
        """The same for a part of the group, on some of the devices (None: on all)."""
        if subset is None:
            return DeviceRequest(self.ours, self.devices, device=self.device, options=self.options)
        types = {device.type for device in subset}
        devices = {device: name for device, name in self.devices.items() if device in types}
        # The CPU stays, because calls without tensors, like barriers, go over it.
        ours = [device for device in self.ours if device in types or device == "cpu"]
        return DeviceRequest(ours, devices, device=self.device, options=self.options)


def locals_of_torch() -> Mapping[str, Any]:
    """Returns what torch's function that makes a group knows while it calls us; empty where it looks different."""
    frame: FrameType | None = sys._getframe(1)
    # By the name of the function: how many frames lie between depends on the version of torch.
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def find_request() -> DeviceRequest:
    """Find the group that torch is about to make, while it calls us to make our part.

    It tells a backend's maker everything but the map, so the map is read where torch itself has it: in the frame of the
    function that calls. Where that looks different, there are no other devices.
    """
    local = locals_of_torch().get
    config = local("backend_config")
    if config is None:
        return DeviceRequest()
    names = {device: str(name) for device, name in config.get_device_backend_map().items()}
    ours = [device for device, name in names.items() if name == NAME]
    devices = {device: name for device, name in names.items() if name != NAME}
    options = local("backend_options")
    # Our own options mean nothing to another backend.
    if isinstance(options, Options):
        options = None
    return DeviceRequest(
        ours, devices, local("pg"), local("prefix_store"), local("device_id"), local("split_from"), options
    )


def others(description: _DistributedBackendOptions, request: DeviceRequest) -> tuple[dist.ProcessGroup, dict[str, str]]:
    """A torch group with the backends of all other devices, and for those that cannot be had, why.

    Raises:
        ValueError: a backend that cannot share a group with ours.
    """
    store = request.store or description.store
    group = dist.ProcessGroup(store, description.group_rank, description.group_size)
    missing: dict[str, str] = {}
    for device, name in request.devices.items():
        backend = None
        if request.torch_group is not None and any(each.type == device for each in request.torch_group._device_types):
            # It stands before ours in the map, so torch has made it already.
            backend = request.torch_group._get_backend(torch.device(device))
            kind = dist.Backend.backend_type_map.get(name, _TYPES.CUSTOM)
        elif name == "nccl" and not dist.is_nccl_available():
            # The same script may run on a machine without GPUs, so only a tensor on that device is an error.
            missing[device] = "this PyTorch is built without NCCL"
            continue
        else:
            kind, backend = _make(name, PrefixStore(f"{device}/", store), description, request)
        group._register_backend(torch.device(device), kind, backend)
        group._set_default_backend(kind)
    return group, missing


def _make(name: str, store: Store, description: _DistributedBackendOptions, request: DeviceRequest) -> tuple[Any, Any]:
    """A backend as torch itself would make it, and its type."""
    rank, size = description.group_rank, description.group_size
    backend: Any
    if name == "gloo":
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=description.timeout)
        backend._set_sequence_number_for_group()
        return _TYPES.GLOO, backend
    if name == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        # A copy, because torch may pass the same options for several groups.
        options = nccl.Options() if request.options is None else copy.deepcopy(request.options)
        options._timeout = description.timeout
        options.global_ranks_in_group = description.global_ranks_in_group
        options.group_name = description.group_id
        if request.split_from:
            options.split_from = request.split_from
            options.split_color = dist.distributed_c10d._process_group_color(description.global_ranks_in_group)
        backend = nccl(store, rank, size, options)
        backend._set_sequence_number_for_group()
        return _TYPES.NCCL, backend
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None:
        raise ValueError(
            f"backend {name!r} cannot share a process group with {NAME!r}; create a separate group for it: "
            f"torch.distributed.new_group(backend={name!r})"
        )
    if not plugin.extended_api:
        backend = plugin.creator_fn(store, rank, size, description.timeout)
    else:
        # The same description with another store, for which the class has no copy method.
        copied = _DistributedBackendOptions()
        for attribute in ("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"):
            setattr(copied, attribute, getattr(description, attribute))
        copied.store = store
        backend = plugin.creator_fn(copied, request.options)
    return dist.Backend.backend_type_map.get(name, _TYPES.CUSTOM), backend  # torch's own are plugins, too, since 2.14


class ByDevice(ProcessGroup):
    """A group of ours beside a group of torch's for the devices that the map gives to other backends.

    Args:
        ours: serves all other tensors, and whatever has no tensor.
        missing: devices that were asked for and cannot be served, with the reasons.
    """

    def __init__(
        self, ours: ProcessGroup, others: dist.ProcessGroup, missing: Mapping[str, str], device: torch.device | None
    ) -> None:
        super().__init__(ours._gloo, ours._store, ours._limit, ours._label, ours._device_types, ours._parts)
        self._ours = ours
        self._others: dist.ProcessGroup = others
        self._missing = missing
        # Missing ones too: a tensor there must not reach ours by default.
        self._theirs = {device.type for device in others._device_types} | set(missing)
        if device is not None:
            self.bound_device_id = device

    @property
    def communicator(self) -> engine.Communicator | None:
        """The engine's, which serves our part."""
        return self._ours.communicator

    def _group_for(self, device: torch.device | None) -> Any:
        """The group for a device."""
        if device is None or device.type not in self._theirs:
            return self._ours
        if device.type in self._missing:
            raise ValueError(
                f"process group {self._label} cannot take tensors on {device}: {self._missing[device.type]}. Its CPU "
                f"tensors go through {NAME}. Move the tensor with .cpu(), or install what is missing. If {NAME} should "
                f"take CUDA tensors too, give the name without a map: init_process_group({NAME!r})."
            )
        return self._others

    @property
    def _device_types(self) -> list[torch.device]:
        return [*self._ours._device_types, *self._others._device_types]

    def _get_backend(self, device: torch.device) -> Any:
        return self._group_for(torch.device(device))._get_backend(device)

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._group_for(device)._start_coalescing(device)

    def _end_coalescing(self, device: torch.device | None = None) -> dist.Work:
        work: dist.Work = self._group_for(device)._end_coalescing(device)
        return work

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Done when every rank has called it. On the accelerator if the options say so, else on the CPU."""
        device = getattr(opts, "device", None)
        work: dist.Work = (
            self._group_for(device).barrier(opts) if timeout is None else self._ours.barrier(opts, timeout)
        )
        return work

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not come; on the CPU."""
        # Only our engine says which ranks are missing.
        self._ours.monitored_barrier(timeout, wait_all_ranks)

    def allocate_tensor(
        self, size: Any, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Uninitialised memory from which the device's backend exchanges fastest; see ProcessGroup."""
        where = torch.device("cpu" if device is None else device)
        if where.type not in self._theirs:
            return self._ours.allocate_tensor(size, dtype, where)
        memory: torch.Tensor = self._get_backend(where).allocate_tensor(
            size, dtype=dtype or torch.get_default_dtype(), device=where
        )
        return memory

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations that are given none, on all devices."""
        self._ours.set_timeout(timeout)
        for device in self._others._device_types:
            # torch has no method for it on a group, only on some backends.
            set_it = getattr(self._others._get_backend(device), "_set_default_timeout", None)
            if set_it is not None:  # some backends know no timeouts
                set_it(timeout)

    def abort(self) -> None:
        """Ends what is in flight on all devices and refuses everything later."""
        self._ours.abort()
        if self._others._device_types:
            self._others.abort()
        super().abort()

    def shutdown(self) -> None:
        """Leaves the group in order; `destroy_process_group` calls it. Idempotent."""
        self._ours.shutdown()
        if self._others._device_types:
            self._others.shutdown()
        super().shutdown()


_FORWARDED = """
    allreduce broadcast allgather all_gather_single reduce_scatter reduce_scatter_single all_to_all_single
    send recv recv_anysource reduce gather scatter alltoall allreduce_coalesced all_gather_single_coalesced
    reduce_scatter_single_coalesced allgather_coalesced alltoall_base _allgather_base _reduce_scatter_base
    allgather_into_tensor_coalesced reduce_scatter_tensor_coalesced all_reduce_as
"""


def _forward(name: str) -> Callable[..., dist.Work]:
    def method(self: ByDevice, *args: Any, **kwargs: Any) -> dist.Work:
        # The first tensor decides: those of one call lie on one device.
        device = _device(args) or _device(list(kwargs.values()))
        work: dist.Work = getattr(self._group_for(device), name)(*args, **kwargs)
        return work

    method.__name__ = name
    method.__doc__ = f"{name} of the group that serves the tensors' device."
    return method


for _name in _FORWARDED.split():
    setattr(ByDevice, _name, _forward(_name))
outside_dynamo(ByDevice)


def _device(value: Any) -> torch.device | None:
    """Of the first tensor in lists and lists of lists."""
    if isinstance(value, torch.Tensor):
        return value.device
    # Calls pass lists of tensors, and all_gather a list of lists.
    if isinstance(value, (list, tuple)):
        for item in value:
            device = _device(item)
            if device is not None:
                return device
    return None
