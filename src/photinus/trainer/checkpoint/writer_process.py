"""Writes what another process has put into memory, in the formats of checkpoints and state files (see writer.py).

    python -m photinus.trainer.checkpoint.writer_process MEMORY PARENT_PID

It has a low priority. When its parent is gone, it finishes what it writes, unless it is asked to end, and ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .folder import CheckpointFolder
from .statefile import write_state_file
from .writer import Order

_NICER_BY = 10


def carry_out(order: Order, content: Mapping[str, Any]) -> str:
    """Writes the content where the order says, and returns the path. Raises what those who write do."""
    if order.step is None:
        write_state_file(Path(order.path), content)
        return order.path
    folder = CheckpointFolder(order.path, keep_last=order.keep_last, best=order.best)
    return str(folder.save(order.step, content, description=order.description, metric=order.metric))


def _serve(memory: str, parent: int) -> None:
    def end(*_: Any) -> None:
        # While the parent lives it waits for what is being written, and ends this process itself.
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    os.nice(_NICER_BY)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin.buffer:
        try:
            content = torch.load(f"/proc/self/fd/{memory}", map_location="cpu", weights_only=True, mmap=True)
            answer = {"path": carry_out(Order(**json.loads(line)), content)}
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = {"kind": type(error).__name__, "error": str(error)}
        try:
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
        except BrokenPipeError:
            return


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
