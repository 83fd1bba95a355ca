"""What the hosts of a job say to each other: JSON objects, each behind its length. Nothing here can run code.

Times travel beside the sender's time: the clocks of two hosts may differ by hours, and each reckons with its own alone.
Each side sends a sign of life every BEAT_S, so silence tells of a link that is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..workers.deaths import Death, Raised
from .restart_policy import Report

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
        raise MessageError(f"no JSON: {error}") from None
    if not isinstance(message, dict):
        raise MessageError("no JSON object")
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
                say(f"nothing was heard of {who} for {say_after_s:g} s; it counts as lost after {grace_s:g} s")
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


def report_to_json(report: Report) -> dict[str, Any]:
    """The report, with the time on this host's clock."""
    return {**asdict(report), "now_s": time.monotonic()}


def report_from_json(fields: Mapping[str, Any]) -> Report:
    """The report in the times of this host. MessageError: fields are missing or of other types."""
    try:
        report = dict(fields)
        later_s = time.monotonic() - report.pop("now_s")
        deaths = []
        for death in report["deaths"]:
            raised = death["raised"]
            if raised is not None:
                at_s = None if raised["raised_at_s"] is None else raised["raised_at_s"] + later_s
                chain = tuple((str(name), str(text)) for name, text in raised["chain"])
                raised = Raised(**{**raised, "raised_at_s": at_s, "chain": chain, "by": tuple(raised["by"])})
            own = {"seen_at_s": death["seen_at_s"] + later_s, "raised": raised}
            deaths.append(Death(**{**death, **own, "last_lines": tuple(death["last_lines"])}))
        return Report(**{**report, "deaths": tuple(deaths), "finished": tuple(report["finished"])})
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"no report: {type(error).__name__}: {error}") from None
