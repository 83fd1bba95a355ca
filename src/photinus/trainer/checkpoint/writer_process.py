"""Writes what the ranks of a host have put into memory, in the formats of checkpoints and state files (see writer.py).

    python -m photinus.trainer.checkpoint.writer_process PARENT_PID

Orders come over the socket that is its standard input. It has a low priority. When its parent is gone, it finishes what
it writes, unless it is asked to end, and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...job.worker_files import USE_AT, Head
from .durable import failure_of_first
from .folder import CheckpointFolder
from .image_reader import File, Reader, load, read_skeleton
from .statefile import IN_PARTS, write_state_file
from .writer import Order

_NICER_BY = 10
_MOST_DESCRIPTORS = 253  # the kernel's limit for a message


def carry_out(request: Mapping[str, Any], images: Sequence[str], is_wanted: Callable[[], bool]) -> str:
    """Writes what the images hold where the order says, and returns the path. Raises what those who write do.

    Args:
        request: from `Writer.write`.
        is_wanted: whether the job that saves still runs.
    """
    order = Order(**request["order"])
    path, parts, token = Path(order.path), None, request["token"]
    files = [File(image, Head(**head)) for image, head in zip(images, request["heads"], strict=True)]
    if request["is_parted"]:
        from .parts import Parts  # of torch, it needs what takes a second to import

        skeletons = {rank: read_skeleton(data, "a rank's copy") for rank, data in request["skeletons"].items()}
        skeletons = skeletons or {file.head.rank: (file.common, file.own) for file in files}
        one_file = IN_PARTS if order.step is None else None
        parts = Parts(files, skeletons, request["host"], request["hosts"], is_wanted, one_file)
        if request["host"]:
            parts.join_in(Path(request["folder"]), token)
            return ""
        content = {} if one_file else Reader(files).join([files[0].common])
    else:
        content = load(files)
    try:
        if order.step is None:
            write_state_file(path, content, parts, token)
            return order.path
        folder = CheckpointFolder(order.path, keep_last=order.keep_last, best=order.best)
        facts: dict[str, Any] = {"description": order.description, "metric": order.metric}
        check = partial(_check_unchanged, images, request["uses"])
        return str(folder.save(order.step, content, **facts, parts=parts, token=token, check=check))
    except Exception:
        if request["hosts"] > 1:
            with contextlib.suppress(OSError):
                Path(request["folder"], failure_of_first(token)).touch()
        raise


def _check_unchanged(images: Sequence[str], uses: Sequence[int]) -> None:
    """Raises CheckpointError where the memory holds another state by now: its ranks were killed, and others came."""
    for image, use in zip(images, uses, strict=True):
        with open(image, "rb", buffering=0) as file:
            if os.pread(file.fileno(), 8, USE_AT) != use.to_bytes(8, "little"):
                raise CheckpointError("the state in memory was overwritten while it was being written to disk")


def _serve(parent: int) -> None:
    def end(*_: Any) -> None:
        # While the parent lives it waits for what is being written, and ends this process itself.
        if os.getppid() != parent:
            os._exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # some schedulers send it to all processes
    os.nice(_NICER_BY)
    with socket.socket(fileno=os.dup(0)) as orders:
        while True:
            message, descriptors, _, _ = socket.recv_fds(orders, 1, _MOST_DESCRIPTORS)
            if not message:
                return
            request, *images = [f"/proc/self/fd/{descriptor}" for descriptor in descriptors]
            try:
                order = torch.load(request, weights_only=True)
                answer = {"path": carry_out(order, images, lambda: os.getppid() == parent)}
            except Exception as error:  # noqa: BLE001 - the parent raises it
                answer = {"kind": type(error).__name__, "error": str(error)}
            for descriptor in descriptors:
                os.close(descriptor)
            try:
                orders.sendall(json.dumps(answer).encode() + b"\n")
            except (BrokenPipeError, ConnectionResetError):
                return


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
