"""Points in four clouds, to be told apart: the data of all five scripts."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

FEATURES, CLASSES = 8, 4


def clouds(samples: int, seed: int = 0) -> TensorDataset:
    """(float32 [8], int64 []) pairs; the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (samples,), generator=generator)
    centres = 2 * torch.eye(CLASSES, FEATURES)
    return TensorDataset(torch.randn(samples, FEATURES, generator=generator) + centres[targets], targets)
