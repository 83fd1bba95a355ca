"""A small convolutional network with BatchNorm, and how to tell whether it is right."""

from __future__ import annotations

from torch import Tensor, nn


class DigitsNet(nn.Sequential):
    """Images [n, 1, 8, 8] to scores [n, 10]; 58 474 parameters.

    Smooth on purpose (SiLU and mean pooling, not ReLU and max): 1, 2 and 4 processes add in different orders, and
    where a function has a kink or a tie, a rounding error of 1e-7 can become a difference of 1e-3 within a few steps.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.SiLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.SiLU(),
            nn.AvgPool2d(2),  # [n, 64, 4, 4]
            nn.Conv2d(64, 64, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),  # [n, 64, 2, 2]
            nn.Flatten(),
            nn.Linear(256, 10),
        )


def accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """For each sample whether the highest score is the right digit's: scores [n, 10], targets [n] -> [n]."""
    return scores.argmax(dim=1) == targets
