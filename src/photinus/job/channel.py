"""Connections within a job: both ends prove that they know its secret, before either believes a word.

    server -> caller   "PHOTINUS-JOB/1\\n", nonce (32 bytes)
    caller -> server   nonce (32), proof (32), purpose: its length (1) and text
    server -> caller   "+" and proof (32), or "-" and the reason: its length (1) and text

A proof is HMAC-SHA256 under the secret over the side's name, both nonces and the purpose. So nobody can replay
what was sent, and nobody can use one side to make the proof of the other. What follows is not encrypted. Nothing that
comes before the proof is interpreted: it is of fixed length, or at most 255 bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

BANNER = b"PHOTINUS-JOB/1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32


class HandshakeError(Exception):
    """The other end is no Photinus process, or went away; the message says what it did instead."""


class RefusedError(HandshakeError):
    """The other end is Photinus and does not want this caller: another job, or an earlier attempt."""


def key_of(secret: str, job_id: str) -> bytes:
    """The key of the proofs: of the secret and the job's name, so that each keeps jobs apart."""
    return hashlib.sha256(b"\0".join([b"photinus-job", secret.encode(), job_id.encode()])).digest()


def _proof(key: bytes, side: bytes, first: bytes, second: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"\0".join([side, first, second, purpose]), "sha256")


async def prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, purpose: str, *, timeout_s: float
) -> None:
    """The caller's side; `purpose` (255 bytes at most) says what it wants.

    Raises:
        HandshakeError: the other end speaks otherwise, closes, or (from a TimeoutError) says nothing for `timeout_s`.
        RefusedError: it knows another secret, or refuses the purpose; the message is its own.
    """
    greeting = bytearray()
    try:
        await asyncio.wait_for(_prove(reader, writer, key, purpose.encode(), greeting), timeout_s)
    except asyncio.TimeoutError as error:
        more = f" after {_excerpt(greeting)}" if greeting else ""
        raise HandshakeError(f"it accepts the connection and sends nothing{more} for {timeout_s:g} s") from error
    except asyncio.IncompleteReadError:
        raise HandshakeError("it closed the connection during the handshake") from None
    except OSError as error:
        raise HandshakeError(f"the connection broke: {error.strerror or error}") from None


async def _prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, purpose: bytes, greeting: bytearray
) -> None:
    greeting_bytes = len(BANNER) + _NONCE_BYTES
    while len(greeting) < greeting_bytes and BANNER.startswith(greeting[: len(BANNER)]):
        part = await reader.read(greeting_bytes - len(greeting))
        if not part:
            raise HandshakeError("it closed the connection" + (f" after {_excerpt(greeting)}" if greeting else ""))
        greeting += part
    if not greeting.startswith(BANNER):
        raise HandshakeError(f"it answers {_excerpt(greeting)}, which is not Photinus")
    theirs, own = bytes(greeting[len(BANNER) :]), secrets.token_bytes(_NONCE_BYTES)
    writer.write(own + _proof(key, b"caller", theirs, own, purpose) + bytes([len(purpose)]) + purpose)
    verdict = await reader.readexactly(1)
    if verdict == b"-":
        length = await reader.readexactly(1)
        raise RefusedError((await reader.readexactly(length[0])).decode("utf-8", "replace"))
    proof = await reader.readexactly(_PROOF_BYTES)
    if verdict != b"+" or not hmac.compare_digest(proof, _proof(key, b"server", theirs, own, purpose)):
        raise HandshakeError("it claims to belong to this job, but cannot prove it")


class Caller(NamedTuple):
    """A caller that waits for an answer: `accept`, if it has proved itself, or `refuse`."""

    purpose: str
    writer: asyncio.StreamWriter
    proof: bytes

    def accept(self) -> None:
        """Lets it in."""
        self.writer.write(b"+" + self.proof)

    async def refuse(self, reason: str) -> None:
        """Sends it away with a reason, of which 255 bytes arrive."""
        words = reason.encode()[:255]
        self.writer.write(b"-" + bytes([len(words)]) + words)
        await self.writer.drain()


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, *, timeout_s: float
) -> Caller | None:
    """The server's side: the caller, or None for one that has not proved itself within the time."""
    own = secrets.token_bytes(_NONCE_BYTES)
    writer.write(BANNER + own)
    try:
        theirs, proof, purpose = await asyncio.wait_for(_claim(reader), timeout_s)
        caller = Caller(purpose.decode("utf-8", "replace"), writer, _proof(key, b"server", own, theirs, purpose))
        if hmac.compare_digest(proof, _proof(key, b"caller", own, theirs, purpose)):
            return caller
        await caller.refuse("this port belongs to a different job, or to this job with a different secret")
    except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):
        pass  # a stranger, a scanner, or a caller that has gone: there is nobody to tell
    return None


async def _claim(reader: asyncio.StreamReader) -> tuple[bytes, bytes, bytes]:
    head = await reader.readexactly(_NONCE_BYTES + _PROOF_BYTES + 1)
    return head[:_NONCE_BYTES], head[_NONCE_BYTES:-1], await reader.readexactly(head[-1])


def _excerpt(data: bytes | bytearray) -> str:
    """The beginning of what a stranger said, printable."""
    return repr(data[:40].decode("ascii", "backslashreplace").rstrip()) + (" ..." if len(data) > 40 else "")


BEAT_S = 1.0
SAY_AFTER_S, _STEP_S = 3.0, 0.5
_RTO_MAX_MS, _SOON_MS = 44, 1000  # TCP_RTO_MAX_MS, since Linux 6.15; Python has no name for it yet
_ATTEMPTS = 8

_LENGTH_BYTES = 4
_LIMIT_BYTES = 16 << 20  # the tracebacks of a host's ranks


class MessageError(Exception):
    """The other end of a proved connection sent something that is no message."""


def write(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Sends a message."""
    data = json.dumps(message).encode()
    writer.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


async def read(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message.

    Raises:
        asyncio.IncompleteReadError: the connection ended.
        MessageError: what came is none.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > _LIMIT_BYTES:
        raise MessageError(f"a message of {length} bytes")
    try:
        message = json.loads(await reader.readexactly(length))
    except ValueError as error:
        raise MessageError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise MessageError("not a JSON object")
    return message


async def hear(reader: asyncio.StreamReader, who: str, grace_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """The next message, like `read`; a line says when it is silent for some seconds, and when that ends.

    Raises:
        asyncio.TimeoutError: nothing came for `grace_s` seconds.
        asyncio.IncompleteReadError, MessageError: see `read`.
    """
    begun_s, say_after_s, step_s = time.monotonic(), min(SAY_AFTER_S, grace_s), min(_STEP_S, grace_s)
    coming, silent_s, has_warned = asyncio.ensure_future(read(reader)), 0.0, False
    try:
        while not (await asyncio.wait({coming}, timeout=step_s))[0]:
            silent_s += step_s  # a time in which this process itself was stopped counts as one step
            if silent_s >= grace_s:
                raise asyncio.TimeoutError
            if silent_s >= say_after_s and not has_warned:
                has_warned = True
                say(f"no sign of life from {who} for {say_after_s:g} s; it counts as lost after {grace_s:g} s")
        message = await coming
        if has_warned:
            say(f"{who} is back after {time.monotonic() - begun_s:.0f} s")
        return message
    finally:
        coming.cancel()


def retry_soon(writer: asyncio.StreamWriter, grace_s: float) -> None:
    """Lets TCP try a cut link soon again, beyond `grace_s`: its own pauses grow to as long as the cut.

    Some attempts are counted (tcp_retries2, 15 by default), so that shorter pauses would give up before.
    """
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * grace_s))
    with contextlib.suppress(OSError):  # an older kernel
        connection.setsockopt(socket.IPPROTO_TCP, _RTO_MAX_MS, max(_SOON_MS, int(grace_s * 1000 / _ATTEMPTS)))
