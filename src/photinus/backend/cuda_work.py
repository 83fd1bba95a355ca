"""Handles of operations on CUDA tensors: whoever waits gets his stream ordered behind the result, and runs on.

- `wait` blocks until the engine has queued the last copy to the tensors, then orders the current stream behind it.
- Results for tensors that are not dense are copied to them on a stream of ours, which is behind the engine's copies.
- A future is completed there, too, so that torch orders everybody who waits for it behind that stream.
- The tensors' memory may be given back, and reused, only behind the engine's copies, which no allocator knows of. So
  the call's memory is held until somebody's stream is ordered behind them, which then is told to the allocator, or,
  if nobody waits, until a later call of any group finds that they have landed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.futures import Future

from ..engine import Work
from . import cuda
from .completer import Submit
from .outside_dynamo import outside_dynamo
from .tensors import Memory
from .work import EngineWork


@outside_dynamo
class CudaWork(EngineWork):
    """See the module."""

    def __init__(self, handle: Work, outputs: Sequence[Tensor], submit: Submit, memory: Memory | None) -> None:
        super().__init__(handle, outputs, submit)
        assert memory is not None
        assert memory.device is not None
        self._device = memory.device
        self._memory = self._finish = memory
        self._finishing = threading.Lock()
        self._copies = bool(memory)
        self._copied: cuda.Event | None = None

    def _copy_back(self) -> None:
        """Orders the current stream behind the result, which is queued."""
        copied = self._bring_back()
        if copied is None:
            self._handle.order(cuda.streams.current(self._device))
        else:
            cuda.streams.follow(copied, self._device)
        cuda.streams.keep_for(self._memory.tensors(), self._device)
        self._memory.release()

    def _bring_back(self) -> cuda.Event | None:
        """Queues the copies to tensors that are not dense, once; what is behind them, None where there are none."""
        if not self._copies:
            return None
        with self._finishing:
            if self._copied is None:
                with cuda.streams.beside(self._device) as stream:
                    self._handle.order(stream)
                    tensors = self._memory.tensors()
                    self._memory()
                    cuda.streams.keep_for(tensors, self._device)
                    self._copied = cuda.streams.record(self._device)
            return self._copied

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not, and its outputs hold the result."""
        if not self._handle.is_completed():
            return False
        if self._handle.error(sees=False) is not None:
            return True
        copied = self._bring_back()
        return self._handle.has_landed() if copied is None else copied.query()

    def _wait_and_finish(self) -> None:
        self._handle.wait()

    def _new_future(self) -> Future[Any]:
        return cuda.streams.future([self._device])

    def _complete(self, ended: Future[Any], error: BaseException | None) -> None:
        try:
            with cuda.streams.beside(self._device) as stream:
                if error is None and self._bring_back() is None:
                    self._handle.order(stream)
                super()._complete(ended, error)
        except Exception as raised:  # noqa: BLE001 - handed on
            if not ended.done():
                super()._complete(ended, raised)
