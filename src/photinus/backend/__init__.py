"""The torch.distributed backend "photinus": the engine's collectives for every PyTorch program.

Importing this module registers the backend; so does `import torch` where Photinus is installed, through the
`torch.backends` entry point `photinus.backend:register`. Both are light: neither the engine nor a process group is
loaded before the first group is made.

    import torch.distributed as dist
    dist.init_process_group("photinus")

arguments          what torch passes to a call, brought to one form: options, and tensors as dense memory
device_map         groups that serve several kinds of devices: "cpu:photinus,cuda:nccl"
engine_group       how a group starts operations of the engine, and how it ends
engine_moves       what computes nothing, through the engine: collectives and messages from rank to rank
engine_reductions  all_reduce (sparse, too), reduce and reduce_scatter, and so the whole process group
hosts              how the ranks of a new group wait for and find one another in the store, and at which addresses
make_group         makes a process group with all its ranks: finds the hosts, and joins them through the engine
name               what `init_process_group` calls the backend
process_group      the face of a process group towards torch, the gloo inside it, and what its process leaves behind
torch_tools        CUDA's streams, torch.profiler's events, and a way past torch.compile
updates            how often the parameters that are reduced over a group were updated
work               handles of operations in flight, as torch.distributed expects them; the completer of their futures
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import importlib
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from .name import NAME

if TYPE_CHECKING:
    from torch._C._distributed_c10d import _DistributedBackendOptions

    from .arguments import Options
    from .process_group import ProcessGroup

__all__ = ["NAME", "Options", "ProcessGroup", "register"]

_registered = False


def register() -> None:
    """Makes `torch.distributed.init_process_group("photinus")` known; idempotent.

    Runs inside `import torch`, so it never raises: what goes wrong becomes a warning, and torch says later that it
    does not know the backend. Does nothing in a torch that is built without distributed.
    """
    global _registered
    try:
        import torch.distributed as dist

        if not _registered and dist.is_available():  # `import torch` may have called register() just now
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
            _registered = True
            if sys.version_info < (3, 14):
                atexit.register(_let_gloo_finish)
            if "PHOTINUS_WORKER_FILES" in os.environ:  # env.WORKER_FILES: a launcher's worker, whatever its script is
                from ..job.status import count_optimizer_steps

                count_optimizer_steps()
    except Exception as error:  # noqa: BLE001 - anything raised here would break `import torch`
        warnings.warn(
            f"the torch.distributed backend {NAME!r} is not available: {type(error).__name__}: {error}", stacklevel=2
        )


def _let_gloo_finish(timeout_s: float = 1.0) -> None:
    """Wait until gloo's threads have let go of their last tensors: the interpreter ends.

    A thread that frees a tensor of Python's needs the interpreter. Python before 3.14 makes it exit in the middle when
    the interpreter has ended, and the C++ around it then ends the process: "terminate called without an active
    exception", SIGABRT. With torch 2.13 that befell half of the scripts that ended right behind a collective of gloo,
    under torchrun as well; `destroy_process_group` leaves gloo's threads there.
    """
    deadline, quiet = time.monotonic() + timeout_s, 0
    while quiet < 2 and time.monotonic() < deadline:
        states = _gloo_states()
        if not states:
            return
        quiet = quiet + 1 if states == {"S"} else 0  # one that waits for the interpreter sleeps, until we do
        time.sleep(0.001)


def _gloo_states() -> set[str]:
    """Return what the kernel says of gloo's threads: S for one that sleeps, R or D for one at work."""
    states = set()
    for file in glob.glob("/proc/self/task/*/stat"):
        with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as stat:
            name, _, rest = stat.read().partition("(")[2].rpartition(")")
            if name.startswith("pt_gloo"):
                states.add(rest.split()[0])
    return states


def _create(options: _DistributedBackendOptions, backend_options: object) -> ProcessGroup:
    """Called by torch for each new group.

    Args:
        backend_options: pg_options: ours, or those of another backend of the device map.

    Raises OldTorchError, and here, not in `register`: other programs of this Python have nothing to do with us.
    """
    import torch

    # Imported here, so that `import torch` stays fast in programs that make no group of ours.
    from ..process_memory import reuse_memory
    from ..version import check_torch
    from .arguments import Options
    from .device_map import find_request
    from .make_group import make

    check_torch(torch.__version__)
    reuse_memory()
    return make(options, find_request(), backend_options if isinstance(backend_options, Options) else Options())


def __getattr__(name: str) -> Any:
    # Loaded when first asked for, as above.
    if name == "ProcessGroup":
        return importlib.import_module(".process_group", __name__).ProcessGroup
    if name == "Options":
        return importlib.import_module(".arguments", __name__).Options
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
