"""Brings this host's workers to the store on the leader's host.

Workers know nothing of secrets: they dial a plain torch store. Theirs is a port on the loopback interface here, and
each connection to it is carried on to the leader behind a proof that this host belongs to the job, and for which
attempt. A worker of an earlier attempt finds its port closed, and its connection refused by the leader.
"""

from __future__ import annotations

import asyncio
import contextlib

from .channel import HandshakeError, prove

_READ_BYTES = 64 * 1024
_DIAL_S = 10.0


class Relay:
    """One attempt's way to the store. All its methods run in one asyncio loop."""

    def __init__(self, address: str, port: int, key: bytes, token: str) -> None:
        self._address = address
        self._port = port
        self._key = key
        self._purpose = f"store {token}"
        self._server: asyncio.Server | None = None
        self._carried: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        """Listens on 127.0.0.1 and returns the port."""
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Closes the port and what is connected to it."""
        if self._server is not None:
            self._server.close()
        for task in self._carried:
            task.cancel()
        await asyncio.gather(*self._carried, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carried.add(task)
        try:
            # A worker whose call cannot be brought there sees a closed connection, as if the store had gone.
            with contextlib.suppress(OSError, asyncio.TimeoutError, HandshakeError):
                there = await asyncio.wait_for(asyncio.open_connection(self._address, self._port), _DIAL_S)
                try:
                    await prove(*there, self._key, self._purpose, timeout_s=_DIAL_S)
                    await splice((reader, writer), there)
                finally:
                    there[1].close()
        except asyncio.CancelledError:
            pass  # by `close`; Python 3.10 and 3.11 would print a traceback for a server's task
        finally:
            writer.close()
            self._carried.discard(task)


async def splice(
    first: tuple[asyncio.StreamReader, asyncio.StreamWriter], second: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Carries bytes both ways until either side closes; closes both."""
    ways = [asyncio.ensure_future(_pump(first[0], second[1])), asyncio.ensure_future(_pump(second[0], first[1]))]
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
