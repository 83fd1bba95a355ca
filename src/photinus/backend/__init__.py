"""The torch.distributed backend "photinus": the engine's collectives for every PyTorch program.

Importing this module registers the backend; so does `import torch` where Photinus is installed, through the
`torch.backends` entry point `photinus.backend:register`. Both are light: neither the engine nor a process group is
loaded before the first group is made.

    import torch.distributed as dist
    dist.init_process_group("photinus")

Floors inside: tensors (memory that the engine or gloo can take) < work, completer (handles of operations in flight)
< process_group (what torch sees of every group) < engine_group, engine_reductions, engine_moves, messages, sparse and
through_engine (the group of one host), beside through_gloo (the group of several) < joining (the wait for a new
group's ranks) < hosts (who shares memory with whom), device_map (other devices' backends beside ours), making (which
of them a new group is).
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from .process_group import ProcessGroup

__all__ = ["NAME", "ProcessGroup", "register"]

NAME = "photinus"

_registered = False


def register() -> None:
    """Makes `torch.distributed.init_process_group("photinus")` known; idempotent.

    Runs inside `import torch`, so it never raises: what goes wrong becomes a warning, and torch says later that it
    does not know the backend. Does nothing in a torch that is built without distributed.
    """
    global _registered
    if _registered:
        return
    try:
        import torch.distributed as dist

        if not _registered and dist.is_available():  # `import torch` may have called register() just now
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
            _registered = True
            if "PHOTINUS_STATUS_FILE" in os.environ:  # env.STATUS_FILE: a launcher's worker, whatever its script is
                from ..status import count_optimizer_steps

                count_optimizer_steps()
    except Exception as error:  # noqa: BLE001 - anything raised here would break `import torch`
        warnings.warn(
            f"the torch.distributed backend {NAME!r} is not available: {type(error).__name__}: {error}", stacklevel=2
        )


def _create(options: _DistributedBackendOptions, backend_options: object) -> ProcessGroup:
    """Called by torch for each new group. `backend_options` (pg_options) is for the other backends of a device map.

    Raises OldTorchError, and here, not in `register`: other programs of this Python have nothing to do with us.
    """
    import torch

    from ..torch_version import check_torch
    from .device_map import asked
    from .making import make

    check_torch(torch.__version__)

    return make(options, asked())


def __getattr__(name: str) -> Any:
    if name == "ProcessGroup":
        return importlib.import_module(".process_group", __name__).ProcessGroup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
