"""What stands behind a flag, read and checked: numbers, seconds, devices, hosts, and torchrun's small languages.

Each reader takes the flag as it was spelled and the text behind it, and raises UsageError with both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .usage import UsageError

__all__ = [
    "read_devices",
    "read_endpoint",
    "read_host",
    "read_host_count",
    "read_names",
    "read_port",
    "read_ranks",
    "read_rendezvous_options",
    "read_seconds",
    "read_streams",
    "read_whole_number",
    "read_worker_count",
]

# [address]:port, host:port, or a bare IPv6 address
_ENDPOINT = re.compile(
    r"\[([0-9a-fA-F:.%\w]+)\](?::(\d+))?|([^:\s]+)(?::(\d+))?|([0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F]*)"
)
_STREAMS = {0: frozenset[str](), 1: frozenset({"out"}), 2: frozenset({"err"}), 3: frozenset({"out", "err"})}
# torch elastic's options that mean something here, and those that have nothing to set here.
_RENDEZVOUS_OPTIONS = {"join_timeout", "timeout", "last_call_timeout", "heartbeat_timeout", "is_host"}
_RENDEZVOUS_IDLE = {
    "close_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "rank",
    "read_timeout",
    "store_type",
    "use_libuv",
}


def read_worker_count(spelling: str, text: str) -> int | str:
    """A number above 0, or auto, gpu or cpu."""
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"{spelling} {text}: needs a whole number above 0, or auto, gpu or cpu.") from None
    if count < 1:
        raise UsageError(f"{spelling} {text}: needs at least 1 worker (or auto, gpu, cpu).")
    return count


def read_whole_number(spelling: str, text: str, *, least: int) -> int:
    """A whole number, `least` or more."""
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{spelling} {text}: needs a whole number, {least} or more.") from None
    if number < least:
        raise UsageError(f"{spelling} {text}: needs a whole number, {least} or more.")
    return number


def read_seconds(spelling: str, text: str) -> float:
    """A time, 0 or more."""
    try:
        seconds = float(text)
    except ValueError:
        raise UsageError(f"{spelling} {text}: needs a number of seconds.") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{spelling} {text}: needs a number of seconds, 0 or more.")
    return seconds


def read_devices(spelling: str, text: str) -> tuple[int, ...]:
    """Numbers of GPUs, each once."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise UsageError(f"{spelling} {text}: needs the numbers of GPUs, like 0 or 0,3 (--cpu trains without any).")
    numbers = tuple(int(word) for word in words)
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise UsageError(f"{spelling} {text}: GPU {twice} is named twice; each worker needs one of its own.")
    return numbers


def read_host_count(spelling: str, text: str) -> tuple[int, int]:
    """N, or LEAST:MOST for a job whose hosts may come and go."""
    least_text, colon, most_text = text.partition(":")
    least = int(least_text) if least_text.isdigit() else 0
    most = int(most_text) if most_text.isdigit() else 0 if colon else least
    if not 1 <= least <= most:
        raise UsageError(f"{spelling} {text}: needs a number of hosts, like 2, or the least and the most, like 1:4.")
    return least, most


def read_port(spelling: str, text: str) -> int:
    """A TCP port; 0 stands for one that is free."""
    port = int(text) if text.isdigit() else -1
    if not 0 <= port <= 65535:
        raise UsageError(f"{spelling} {text}: needs a port, 1 to 65535, or 0 for one that is free.")
    return port


def read_host(spelling: str, text: str) -> str:
    """A host's name or address."""
    if not text or any(character.isspace() or character in "/@" for character in text):
        raise UsageError(f"{spelling} {text!r}: needs the name or address of a host.")
    return text


def read_endpoint(spelling: str, text: str) -> tuple[str, int | None]:
    """HOST, HOST:PORT, [V6ADDRESS]:PORT."""
    matched = _ENDPOINT.fullmatch(text)
    if matched is None:
        raise UsageError(f"{spelling} {text}: needs HOST or HOST:PORT, like 10.0.0.1:29500 or [fd00::1]:29500.")
    host = matched[1] or matched[3] or matched[5]
    port = matched[2] or matched[4]
    return host, None if port is None else read_port(spelling, port)


def read_rendezvous_options(spelling: str, text: str) -> Mapping[str, str]:
    """Torchrun's KEY=VALUE,KEY=VALUE; keys that are known there and have nothing to set here are left out."""
    options = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = word.partition("=")
        if not equals or key not in _RENDEZVOUS_OPTIONS | _RENDEZVOUS_IDLE:
            known = ", ".join(sorted(_RENDEZVOUS_OPTIONS))
            raise UsageError(f"{spelling} {word}: the options are {known}, each as NAME=VALUE.")
        if key == "is_host":
            if value.lower() not in ("1", "0", "true", "false", "yes", "no"):
                raise UsageError(f"{spelling} {word}: needs true or false.")
            value = "1" if value.lower() in ("1", "true", "yes") else ""
        elif key in _RENDEZVOUS_OPTIONS:
            read_seconds(f"{spelling} {key}", value)
        if key in _RENDEZVOUS_OPTIONS:
            options["join_timeout" if key == "timeout" else key] = value
    return options


def read_streams(spelling: str, text: str) -> Mapping[int, frozenset[str]]:
    """Torchrun's choice of streams: 0 none, 1 stdout, 2 stderr, 3 both, for all ranks or as LOCAL_RANK:CHOICE,...

    Returns:
        "out" and "err" by local rank; under -1 what holds for those that are not named.
    """
    chosen: dict[int, frozenset[str]] = {-1: _STREAMS[0]}
    words = text.split(",")
    for word in words:
        rank, colon, choice = word.strip().rpartition(":")
        if choice not in ("0", "1", "2", "3") or (colon and not rank.isdigit()) or (not colon and len(words) > 1):
            raise UsageError(
                f"{spelling} {text}: needs 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), for all ranks, or for "
                f"each by its number on the host, like 0:1,1:3."
            )
        chosen[int(rank) if colon else -1] = _STREAMS[int(choice)]
    return chosen


def read_ranks(spelling: str, text: str) -> frozenset[int]:
    """Local ranks, like 0 or 0,2."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise UsageError(f"{spelling} {text}: needs numbers of ranks on the host, like 0 or 0,2.")
    return frozenset(int(word) for word in words)


def read_names(spelling: str, text: str) -> tuple[str, ...]:
    """Names of environment variables, like A or A,B."""
    names = tuple(word.strip() for word in text.split(","))
    wrong = next((name for name in names if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)), None)
    if wrong is not None:
        raise UsageError(f"{spelling} {text}: {wrong!r} is no name of an environment variable.")
    return names
