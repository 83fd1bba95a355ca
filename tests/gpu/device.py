"""The device that the tests in this folder compute on, and whether it is a stand-in."""

from __future__ import annotations

import os

import torch

FAKE = bool(os.environ.get("GPU_FAKE"))
"""CPU tensors take the place of the GPU's: every line runs, nothing is learned of a GPU."""
HAS_GPU = torch.cuda.is_available() and not FAKE
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
NAME = DEVICE.type
TIMEOUT_S = 20.0 if HAS_GPU else 240.0  # less than a stage of `make gpu` has (tools/gpu.py)


def settle() -> None:
    """Waits for everything that was queued."""
    if HAS_GPU:
        torch.cuda.synchronize()
