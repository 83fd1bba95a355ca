"""Calling the host that leads: a connection that has been proved, or what is wrong with the port."""

from __future__ import annotations

import asyncio
import contextlib
import time

from ...errors import LaunchError
from ..workers.ports import holder_of, local_addresses_of
from .handshake import HandshakeError, RefusedError, prove

__all__ = ["dial", "look"]

_CONNECT_S = 5.0
_HANDSHAKE_S = 3.0
_STRANGER_S = 1.5  # so long may the leader of the last job on this port take to go away
_PAUSE_S = 0.2


async def dial(address: str, port: int, key: bytes, purpose: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the leader, proved on both sides.

    Raises:
        LaunchError: something else is behind that port; says what it does, and who holds it where that can be known.
        OSError, asyncio.TimeoutError: nobody is there (yet).
    """
    begun_s = time.monotonic()
    while True:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), _CONNECT_S)
        try:
            await prove(reader, writer, key, purpose, timeout_s=_HANDSHAKE_S)
            return reader, writer
        except HandshakeError as error:
            writer.close()
            if time.monotonic() - begun_s > _STRANGER_S:
                raise LaunchError(_stranger(address, port, error), exit_code=1) from None
        await asyncio.sleep(_PAUSE_S)


async def look(address: str, port: int, key: bytes) -> None:
    """Looks once who is behind the port: nobody yet, or the leader, is well.

    Raises:
        LaunchError: something else is.
    """
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        _, writer = await dial(address, port, key, "look")
        writer.close()


def _stranger(address: str, port: int, error: HandshakeError) -> str:
    holder = ""
    with contextlib.suppress(OSError):
        if local_addresses_of(address):
            holder = f" It is held by {holder_of(port)}."
    advice = (
        "Give all hosts the same --rdzv-id, and the same PHOTINUS_JOB_SECRET if there is one; or this job another "
        "--master-port."
        if isinstance(error, RefusedError)
        else "Give all hosts another --master-port."
    )
    return f"{address} port {port} is not where this job is led: {error}.{holder} {advice}"
