"""What a command asks of the ranks that it starts, and what it hears of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COPY, HOST_COPY = COPIES = ("copy", "copy in host memory")
"""No backends: what all ranks take to copy their tensor at once (those on GPUs: to the host and back); and to copy as
much in the host's memory, where tensors lie on GPUs."""
_MARK = "\x00told: "


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        contestants: backends and COPIES; the first is a backend, over which the ranks also agree.
        calls: operations, each with the bytes of the whole tensor.
        seconds: how long a contestant's turns last for each of them, about.
        timeout_s: until a rank that does not get on is ended.
    """

    contestants: tuple[str, ...]
    calls: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    device: str = "cpu"
    seconds: float = 0.3
    timeout_s: float = 120.0


def tell(**facts: Any) -> None:
    """Prints, in a rank, what a `JobOutput` hears."""
    print(_MARK + json.dumps(facts), flush=True)


class JobOutput(io.StringIO):
    """What a job prints: `hear` gets what ranks `tell`, and `rest` is all else."""

    def __init__(self, hear: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.rest = ""
        self._hear, self._open = hear, ""

    def write(self, text: str) -> int:
        """Takes in what has come."""
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            _, mark, told = line.partition(_MARK)
            if mark:
                self._hear(json.loads(told))
            else:
                self.rest += line.removeprefix("photinus: ") + "\n"
        return len(text)
