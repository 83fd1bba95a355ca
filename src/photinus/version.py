"""The version of Photinus, in its one place: builds read it from here. And the PyTorch that it runs on."""

from __future__ import annotations

import functools
import re

from .errors import OldTorchError

__version__ = "0.2.0"

OLDEST = (2, 11)
"""The oldest release that is tested, major and minor; pyproject.toml declares the same."""


def is_too_old(version: str) -> bool:
    """Return whether a release ("2.13.0+cpu") is older than the oldest one; False for a version of a different form."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < OLDEST


@functools.cache  # each of our public names asks once
def check_torch(version: str | None = None) -> None:
    """Raises OldTorchError where PyTorch is too old.

    Args:
        version: default: that of the installed distribution, read without importing it; none installed is fine here.
    """
    if version is None:
        import importlib.metadata  # 20 ms that the command line need not spend

        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            return
    if is_too_old(version):
        oldest = ".".join(map(str, OLDEST))
        raise OldTorchError(
            f"Photinus needs torch {oldest} or newer, but torch {version} is installed: pip install --upgrade "
            f"'torch>={oldest}', in the build that pytorch.org gives for this machine"
        )
