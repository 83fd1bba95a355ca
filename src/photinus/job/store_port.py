"""The port of the store of ranks that srun or mpirun started: rank 0 tells it to those that prove that they belong.

Both ends prove it, by the channel. `purpose` is what a rank wants, like "store of 4 ranks": another one is refused.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from . import channel


class StorePort:
    """Rank 0's end: tells the port to each rank of the job that asks; see `server.serve_in_thread`."""

    def __init__(self, key: bytes, purpose: str, port: int, *, timeout_s: float) -> None:
        self._key, self._purpose, self._port, self._timeout_s = key, purpose, port, timeout_s

    async def open(self, listener: socket.socket) -> None:
        """Begins to answer on a listening socket."""
        self._server = await asyncio.start_server(self._answer, sock=listener)

    async def close(self) -> None:
        """Closes the port."""
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):  # the caller has gone, or all have come
            caller = await channel.answer(reader, writer, self._key, timeout_s=self._timeout_s)
            if caller is not None and caller.purpose == self._purpose:
                caller.accept()
                channel.write(writer, {"port": self._port})
            elif caller is not None:
                await caller.refuse(f"rank 0 has the {self._purpose}, and this rank wants the {caller.purpose}")
        writer.close()


async def ask_port(connection: socket.socket, key: bytes, purpose: str, *, timeout_s: float) -> int:
    """Another rank's end: what rank 0 tells over a connection to it.

    Raises:
        HandshakeError, RefusedError, MessageError, OSError, EOFError, asyncio.TimeoutError: see `channel`.
    """
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await channel.prove(reader, writer, key, purpose, timeout_s=timeout_s)
        return int((await asyncio.wait_for(channel.read(reader), timeout_s))["port"])
    finally:
        writer.close()
