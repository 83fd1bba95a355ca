"""Plans of measurements for the ranks that a command starts, and the messages that these ranks send back."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COPY = "copy"
"""Not a backend. All ranks copy their tensors at the same time: within memory, or from the GPU to the host and back. An
all_reduce cannot be much faster."""
_MARK = "\x00message: "  # libraries print on the same stream, and the launcher puts a rank's number in front of a line


@dataclass(frozen=True)
class Plan:
    """The measurements that ranks make.

    Attributes:
        contestants: backends and COPY; the first is a backend, over which the ranks also agree.
        calls: operations, each with the bytes of the whole tensor.
        seconds: approximate time of a contestant's turns for each call.
        timeout_s: seconds after which a rank that makes no progress is killed.
    """

    contestants: tuple[str, ...]
    calls: tuple[tuple[str, int], ...]
    dtype: str = "float32"
    device: str = "cpu"
    seconds: float = 0.3
    timeout_s: float = 120.0


def send(**facts: Any) -> None:
    """Send facts from a rank to the command's `JobOutput`."""
    print(_MARK + json.dumps(facts), flush=True)


class JobOutput(io.StringIO):
    """Output of a job, in place of sys.stdout.

    Args:
        receive: called with the facts that ranks `send`.

    Attributes:
        rest: all other lines.
    """

    def __init__(self, receive: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self.rest = ""
        self._receive, self._open = receive, ""

    def write(self, text: str) -> int:
        """Take the next piece of output, which may end anywhere in a line."""
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            _, mark, message = line.partition(_MARK)
            if mark:
                self._receive(json.loads(message))
            else:
                self.rest += line.removeprefix("photinus: ") + "\n"
        return len(text)
