"""An asyncio loop in a thread of its own: the sockets of a host, while its main thread watches processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["Background", "splice"]

T = TypeVar("T")
_READ_BYTES = 64 * 1024


class Background:
    """The thread and its loop, from construction to `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Begins `work` and does not wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def do(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Carries out `work` and returns what it returns.

        Raises:
            TimeoutError: it took longer.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def call(self, function: Callable[[], object]) -> None:
        """Calls a function in the loop's thread, soon."""
        self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancels what is under way and ends the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)


async def splice(
    first: tuple[asyncio.StreamReader, asyncio.StreamWriter], second: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Carries bytes both ways until either side closes; closes both."""
    ways = [
        asyncio.ensure_future(_pump(first[0], second[1])),
        asyncio.ensure_future(_pump(second[0], first[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (first, second):
            writer.close()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # either end went away: the other is closed by `splice`
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
