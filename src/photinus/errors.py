"""Every error that Photinus raises on purpose.

    PhotinusError (RuntimeError)
    ├── CollectiveError            an exchange between ranks did not complete
    │   ├── PeerLostError          a peer died, left or failed; names the first cause
    │   ├── CollectiveTimeoutError (also TimeoutError) a deadline passed; names the ranks that are missing
    │   ├── MismatchError          ranks called different collectives at the same sequence number
    │   └── AbortedError           the communicator was aborted or closed
    ├── OldTorchError              (also ImportError) the installed PyTorch is older than what Photinus runs on
    ├── MissingLibraryError        (also ImportError) a library that Photinus needs is not installed
    ├── NotInitializedError        a collective or session was used before it was set up
    ├── ModelMismatchError         (also ValueError) ranks hold different models
    ├── UnsuitableModelError       (also ValueError) a model or an argument that cannot be wrapped
    ├── MissingGradientError       a backward brought no gradient to a parameter that is reduced over the ranks
    ├── NonFiniteGradientError     a gradient holds NaN or infinity
    ├── LoaderTimeoutError         (also TimeoutError) no batch came from the loader's workers in time
    ├── WorldSizeError             the world is not the one that the launcher meant
    ├── HostError                  (also OSError) this host lacks or refuses what we need: memory, an address, CUDA
    ├── DeviceError                the device asked for is absent, or too few devices for the local ranks
    ├── LaunchError                workers could not be started, or a worker failed for good
    └── CheckpointError            no checkpoint, or one that is incomplete or corrupt

Wrong arguments raise ValueError or TypeError, as everywhere in Python. A message says what was given, what was
needed, which rank (host, parameter) it concerns, and what to do.
"""

from __future__ import annotations

import sys

__all__ = [
    "AbortedError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "DeviceError",
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


class PhotinusError(RuntimeError):
    """Base of all errors that Photinus raises on purpose (besides ValueError and TypeError)."""


class CollectiveError(PhotinusError):
    """A collective did not complete; do not use its output (after a mismatch it is unchanged)."""


class PeerLostError(CollectiveError):
    """A peer died, left or failed while (or before) this rank needed it."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective passed its deadline; the message names the ranks that had not arrived."""


class MismatchError(CollectiveError):
    """Ranks called different collectives at the same sequence number. The group stays usable (not after a deadlock)."""


class AbortedError(CollectiveError):
    """The communicator was aborted or closed while the collective was queued or running."""


class OldTorchError(PhotinusError, ImportError):
    """The installed PyTorch is older than the oldest release that Photinus is tested with."""


class MissingLibraryError(PhotinusError, ModuleNotFoundError):
    """A library that Photinus needs is not installed: it was installed without its dependencies, or not by pip.

    Args:
        what: needs it, as the user typed it.
        library: its name on PyPI.
    """

    def __init__(self, what: str, library: str) -> None:
        hint = ", in the build that pytorch.org gives for this machine (photinus.engine works without)"
        super().__init__(
            f"{what} needs {library}, which {sys.executable} does not have: pip install {library}"
            + hint * (library == "torch")
        )
        self.name = library


class NotInitializedError(PhotinusError):
    """Something that needs a session or a process group was used before there was one."""


class ModelMismatchError(PhotinusError, ValueError):
    """The ranks of a group hold different models; the message names the first difference and both sides."""


class MissingGradientError(PhotinusError):
    """A backward brought no gradient to a parameter that is reduced over the ranks; the message names it."""


class NonFiniteGradientError(PhotinusError):
    """A gradient holds NaN or infinity; the message names the first rank and parameter. Raised on every rank."""


class UnsuitableModelError(PhotinusError, ValueError):
    """A model or an argument that cannot be wrapped. (RuntimeError too, because torch's class raises that for some.)"""


class LoaderTimeoutError(PhotinusError, TimeoutError):
    """No batch came from the workers of a `photinus.loader` within its `timeout_s`."""


class WorldSizeError(PhotinusError):
    """The world size differs from the one that the launcher meant."""


class HostError(PhotinusError, OSError):
    """This host lacks or refuses what Photinus needs: memory, descriptors, an address, CUDA's driver."""


class DeviceError(PhotinusError):
    """The device that was asked for does not exist here, or there are fewer devices than local ranks."""


class LaunchError(PhotinusError):
    """The launcher could not start the workers, or a worker failed more often than it may.

    Attributes:
        exit_code: what the launcher exits with: the first cause's own code, 128 + signal for a killed worker.
    """

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CheckpointError(PhotinusError):
    """A checkpoint is absent, incomplete or corrupt, and nothing was loaded from it; or it could not be written."""
