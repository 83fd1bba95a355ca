"""What the hosts of a job say to each other: JSON objects, each behind its length. Nothing here can run code.

Times travel as ages: the clocks of two hosts may differ by hours, and each reckons with its own alone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..cgroup import OomKills
from ..report import Death, Raised

__all__ = ["MessageError", "Report", "read", "report_from_json", "report_to_json", "write"]

_LENGTH_BYTES = 4
_LIMIT_BYTES = 16 << 20  # the tracebacks of a host's ranks


class MessageError(Exception):
    """The other end of a proved connection sent something that is no message."""


@dataclass(frozen=True)
class Report:
    """How the workers of one host ended in an attempt that failed.

    Attributes:
        deaths: of those that did not end well; empty when the host's workers only had to be stopped.
        finished: the ranks that ended with exit code 0.
        steps, saved: the most that one of the workers told of (see status.py).
        oom_before, oom_after: kills for want of memory, counted before and after the attempt.
    """

    deaths: tuple[Death, ...]
    finished: tuple[int, ...]
    steps: int = 0
    saved: int = -1
    oom_before: OomKills | None = None
    oom_after: OomKills | None = None


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


def report_to_json(report: Report) -> dict[str, Any]:
    """The report with ages in place of this host's times."""
    now = time.monotonic()
    deaths = []
    for death in report.deaths:
        fields = asdict(death)
        fields["seen_at_s"] = now - death.seen_at_s
        if death.raised is not None and death.raised.raised_at_s is not None:
            fields["raised"]["raised_at_s"] = now - death.raised.raised_at_s
        deaths.append(fields)
    return {**asdict(report), "deaths": deaths}


def report_from_json(fields: Mapping[str, Any]) -> Report:
    """The report in the times of this host.

    Raises:
        MessageError: fields are missing or of other types.
    """
    now = time.monotonic()
    try:
        deaths = []
        for each in fields["deaths"]:
            raised = each["raised"]
            if raised is not None:
                at_s = raised["raised_at_s"]
                chain = tuple((str(name), str(text)) for name, text in raised["chain"])
                raised_at_s = None if at_s is None else now - at_s
                raised = Raised(
                    chain, str(raised["traceback"]), int(raised["exit_code"]), raised_at_s, str(raised["place"])
                )
            last_lines = tuple(str(line) for line in each["last_lines"])
            at_s = now - each["seen_at_s"]
            deaths.append(Death(**{**each, "seen_at_s": at_s, "raised": raised, "last_lines": last_lines}))
        before, after = (
            None if fields[name] is None else OomKills(**fields[name]) for name in ("oom_before", "oom_after")
        )
        finished = tuple(int(rank) for rank in fields["finished"])
        return Report(tuple(deaths), finished, int(fields["steps"]), int(fields["saved"]), before, after)
    except (KeyError, TypeError, ValueError) as error:
        raise MessageError(f"no report: {type(error).__name__}: {error}") from None
