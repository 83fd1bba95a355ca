"""Messages from one rank to another through the engine: send, recv, and recv from whoever sends first."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from .. import engine
from . import options
from .engine_group import EngineGroup
from .outside_dynamo import outside_dynamo
from .tensors import Memory

_SEND = engine.OPERATIONS["send"]
_RECV = engine.OPERATIONS["recv"]


@outside_dynamo
class Messages(EngineGroup):
    """Messages are in order for each peer and tag. Both ranks must name the same size and element type."""

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Sends a tensor to a rank of the group; done when that rank has it."""
        tensor = options.one_tensor(tensors, "send")
        memory = Memory()
        return self._run_message("send", _SEND, memory.input(tensor), dstRank, tag, tensor, memory)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receives a tensor from a rank of the group."""
        return self._receive("recv", options.one_tensor(tensors, "recv"), srcRank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Receives a tensor from whichever rank sends first; the work's source_rank() tells which."""
        return self._receive("recvAnySource", options.one_tensor(tensors, "recv"), engine.ANY_RANK, tag)

    def _receive(self, event_name: str, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        memory = Memory()
        values = memory.output(tensor, load=False)
        return self._run_message(event_name, _RECV, values, peer, tag, tensor, memory)
