"""The network, and how to tell whether it is right."""

from __future__ import annotations

from torch import Tensor, nn


class DigitsNet(nn.Sequential):
    """Images [n, 1, 8, 8] to scores [n, 10].

    Args:
        width: channels of the first convolution; the others have twice as many. 58 474 parameters at 32.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            nn.AvgPool2d(2),  # [n, 2 width, 4, 4]
            nn.Conv2d(2 * width, 2 * width, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(2),  # [n, 2 width, 2, 2]
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )


def accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """For each sample whether the highest score is the right digit's: scores [n, 10], targets [n] -> [n]."""
    return scores.argmax(dim=1) == targets
