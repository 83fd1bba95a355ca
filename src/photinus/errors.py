"""Every error that Photinus raises on purpose.

    PhotinusError (RuntimeError)
    ├── CollectiveError            an exchange between ranks did not complete
    │   ├── PeerLostError          a peer died, exited or failed; names the first cause
    │   ├── CollectiveTimeoutError (also TimeoutError) a timeout passed; names the ranks that are missing
    │   ├── MismatchError          ranks called different collectives at the same sequence number
    │   └── AbortedError           the communicator was aborted or closed
    ├── OldTorchError              (also ImportError) the installed PyTorch is too old
    ├── MissingLibraryError        (also ImportError) a library that Photinus needs is not installed
    ├── NotInitializedError        a session or process group was used before it was set up
    ├── ModelMismatchError         (also ValueError) ranks hold different models
    ├── UnsuitableModelError       (also ValueError) the model or an argument cannot be wrapped
    ├── MissingGradientError       a parameter that is averaged over the ranks got no gradient in backward
    ├── NonFiniteGradientError     a gradient holds NaN or infinity
    ├── FaultyHardwareError        an audit found that this rank computes wrong, or that one of two ranks does
    ├── LoaderTimeoutError         (also TimeoutError) the loader's workers gave no batch in time
    ├── WorldSizeError             the world size differs from the launcher's
    ├── HostError                  (also OSError) this host lacks or refuses memory, an address or CUDA
    ├── DeviceError                the device does not exist, or there are fewer devices than local ranks
    ├── LaunchError                workers could not start, or one failed and no restart was left
    └── CheckpointError            a checkpoint is missing, incomplete or corrupt, or could not be written

Wrong arguments raise ValueError or TypeError, as everywhere in Python. A message says what was given, what is
needed, which rank (host, parameter) it concerns, and what to do.
"""

from __future__ import annotations

import errno
import resource
import sys

__all__ = [
    "AbortedError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "DeviceError",
    "FaultyHardwareError",
    "HostError",
    "LaunchError",
    "LoaderTimeoutError",
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
]

# Part of each message by which a rank raises another rank's error. The launcher looks for it when it seeks the cause.
HAD_NO_ERROR = "had no error"


class UsageError(ValueError):
    """The command line cannot be carried out as typed; the message says why and what to type instead."""


class PhotinusError(RuntimeError):
    """Base of all errors that Photinus raises on purpose (besides ValueError and TypeError)."""


class CollectiveError(PhotinusError):
    """A collective did not complete. Do not use its output (after a mismatch it is unchanged)."""


class PeerLostError(CollectiveError):
    """A peer died, exited or failed while (or before) this rank needed it."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective reached its timeout. The message names the ranks that had not arrived."""


class MismatchError(CollectiveError):
    """Ranks called different collectives at the same sequence number. The group stays usable (not after a deadlock)."""


class AbortedError(CollectiveError):
    """The communicator was aborted or closed while the collective was queued or running."""


class OldTorchError(PhotinusError, ImportError):
    """The installed PyTorch is older than the oldest release that Photinus is tested with."""


class MissingLibraryError(PhotinusError, ModuleNotFoundError):
    """A library that Photinus needs is not installed (for example after `pip install --no-deps`).

    Args:
        what: part of Photinus that needs it, as the user typed it.
        library: name of the library on PyPI.
    """

    def __init__(self, what: str, library: str) -> None:
        hint = ", in the build for this machine (see pytorch.org). photinus.engine works without it"
        super().__init__(
            f"{what} needs {library}, which {sys.executable} does not have: pip install {library}"
            + hint * (library == "torch")
        )
        self.name = library


class NotInitializedError(PhotinusError):
    """A session or process group was used before it was set up."""


class ModelMismatchError(PhotinusError, ValueError):
    """The ranks of a group hold different models. The message shows the first difference on both sides."""


class MissingGradientError(PhotinusError):
    """A parameter that is averaged over the ranks got no gradient in backward. The message names it."""


class NonFiniteGradientError(PhotinusError):
    """A gradient holds NaN or infinity. Raised on every rank; the message names the first rank and parameter."""


class FaultyHardwareError(PhotinusError):
    """An audit (`audit_every`) found that this rank computes wrong, or that one of two ranks does.

    The other ranks raise PeerLostError with the same message.
    """


class UnsuitableModelError(PhotinusError, ValueError):
    """The model or an argument cannot be wrapped. (RuntimeError too, because torch's class raises that for some.)"""


class LoaderTimeoutError(PhotinusError, TimeoutError):
    """The workers of a `photinus.loader` gave no batch within its `timeout_s`."""


class WorldSizeError(PhotinusError):
    """The world size differs from the launcher's."""


class HostError(PhotinusError, OSError):
    """This host lacks or refuses what Photinus needs: memory, descriptors, an address, CUDA's driver."""


class DeviceError(PhotinusError):
    """The device does not exist here, or there are fewer devices than local ranks."""


class LaunchError(PhotinusError):
    """The launcher could not start the workers, or a worker failed and no restart was left.

    Attributes:
        exit_code: exit code of the launcher: that of the first cause, 128 + signal for a killed worker.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CheckpointError(PhotinusError):
    """A checkpoint is missing, incomplete or corrupt, and nothing was loaded from it; or it could not be written."""


def name_limit(error: OSError) -> str:
    """Return a sentence on the limit of this process that an error of the system shows to be reached, or ""."""
    limits = {
        errno.EMFILE: ("open files", resource.RLIMIT_NOFILE, "ulimit -n 65536"),
        errno.EAGAIN: ("processes and threads of this user", resource.RLIMIT_NPROC, "ulimit -u unlimited"),
        errno.ENOMEM: ("address space in bytes", resource.RLIMIT_AS, "ulimit -v unlimited"),
    }
    what, limit, advice = limits.get(error.errno or 0, ("", 0, ""))
    soft = resource.getrlimit(limit)[0] if what else resource.RLIM_INFINITY
    return "" if soft == resource.RLIM_INFINITY else f" The limit is {soft} {what}: raise it (`{advice}`)."
