"""What stands behind a flag, read and checked: numbers, seconds, devices, hosts, and torchrun's small languages.

These are types for argparse: each takes the text, and raises ArgumentTypeError with what is needed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import Any

from ..env import VARIABLE_NAME

# [address]:port, host:port, or a bare IPv6 address
_ENDPOINT = re.compile(
    r"\[([0-9a-fA-F:.%\w]+)\](?::(\d+))?|([^:\s]+)(?::(\d+))?|([0-9a-fA-F]*:[0-9a-fA-F:]*:[0-9a-fA-F]*)"
)
_STREAMS = {"0": frozenset[str](), "1": frozenset({"out"}), "2": frozenset({"err"}), "3": frozenset({"out", "err"})}
# torch elastic's options that mean something here (with our names for them), and those that have nothing to set here.
_RENDEZVOUS_OPTIONS = {
    "heartbeat_timeout": "heartbeat_timeout_s",
    "is_host": "leads",
    "join_timeout": "join_timeout_s",
    "last_call_timeout": "last_call_s",
    "timeout": "join_timeout_s",
}
_LEAST_HEARTBEAT_S = 1.5
_RENDEZVOUS_IDLE = {
    *("close_timeout", "keep_alive_interval", "keep_alive_max_attempt", "rank", "read_timeout"),
    *("store_type", "use_libuv"),
}


def _worker_count(text: str) -> int | str:
    """A number above 0, or auto, gpu, xpu or cpu."""
    if text in ("auto", "gpu", "xpu", "cpu"):
        return text
    try:
        count = int(text)
    except ValueError:
        raise ArgumentTypeError("needs a whole number above 0, or auto, gpu, xpu or cpu.") from None
    if count < 1:
        raise ArgumentTypeError("needs at least 1 worker (or auto, gpu, xpu, cpu).")
    return count


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """A reader of whole numbers, `least` or more, and up to `most`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least or (most is not None and number > most):
            raise ArgumentTypeError(f"needs a whole number, {least} {'or more' if most is None else f'to {most}'}.")
        return number

    return read


def seconds(text: str) -> float:
    """A time, 0 or more."""
    try:
        read = float(text)
    except ValueError:
        read = -1.0
    if not 0 <= read < float("inf"):
        raise ArgumentTypeError("needs a number of seconds, 0 or more.")
    return read


def positive_seconds(text: str) -> float:
    """A time above 0."""
    with contextlib.suppress(ArgumentTypeError):
        if read := seconds(text):
            return read
    raise ArgumentTypeError("needs a number of seconds above 0.")


def _devices(text: str) -> tuple[int, ...]:
    """Numbers of GPUs, each once."""
    numbers = _numbers(text, "needs the numbers of GPUs, like 0 or 0,3 (--cpu trains without any).")
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise ArgumentTypeError(f"GPU {twice} is named twice; each worker needs one of its own.")
    return numbers


def _host_count(text: str) -> tuple[int, int]:
    """N, or LEAST:MOST for a job whose hosts may come and go."""
    matched = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    least, most = (int(matched[1]), int(matched[2] or matched[1])) if matched else (0, 0)
    if not 1 <= least <= most:
        raise ArgumentTypeError("needs a number of hosts, like 2, or the least and the most, like 1:4.")
    return least, most


def port(text: str) -> int:
    """A TCP port; 0 stands for one that is free."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= 65535:
        raise ArgumentTypeError("needs a port, 1 to 65535, or 0 for one that is free.")
    return number


def _host(text: str) -> str:
    """A host's name or address; one of IPv6 may stand in brackets."""
    name = text[1:-1] if re.fullmatch(r"\[[^\s/@]+\]", text) else text
    if ":" in name:
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            raise ArgumentTypeError(
                "needs the name or address of a host alone; its port is --master-port, or both are --rdzv-endpoint."
            ) from None
    try:
        name.encode("idna")  # as whoever looks it up does
    except UnicodeError:
        name = ""
    if not re.fullmatch(r"[^\s/@]+", name):
        raise ArgumentTypeError("needs the name or address of a host.")
    return name


def _endpoint(text: str) -> tuple[str, int | None]:
    """HOST, HOST:PORT, [V6ADDRESS]:PORT."""
    matched = _ENDPOINT.fullmatch(text)
    if matched is None:
        raise ArgumentTypeError("needs HOST or HOST:PORT, like 10.0.0.1:29500 or [fd00::1]:29500.")
    number = matched[2] or matched[4]
    return matched[1] or matched[3] or matched[5], None if number is None else port(number)


def rendezvous(text: str) -> str:
    """The name of a rendezvous of torchrun's: ours does what these do."""
    if text not in ("c10d", "static"):
        raise ArgumentTypeError(
            f"photinus has a rendezvous of its own, which needs no {text}. Leave the flag out, and name the host that "
            f"leads with --master-addr."
        )
    return text


def _rendezvous_options(text: str) -> Mapping[str, float | bool]:
    """Torchrun's KEY=VALUE,KEY=VALUE, by our names; what is known there and has nothing to set here is left out."""
    options: dict[str, float | bool] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = word.partition("=")
        if not equals or key not in _RENDEZVOUS_OPTIONS.keys() | _RENDEZVOUS_IDLE:
            raise ArgumentTypeError(f"the options are {', '.join(sorted(_RENDEZVOUS_OPTIONS))}, each as NAME=VALUE.")
        if key == "is_host":
            if value.lower() not in ("1", "0", "true", "false", "yes", "no"):
                raise ArgumentTypeError("is_host needs true or false.")
            options["leads"] = value.lower() in ("1", "true", "yes")
        elif key in _RENDEZVOUS_OPTIONS:
            try:
                options[_RENDEZVOUS_OPTIONS[key]] = seconds(value)
            except ArgumentTypeError as error:
                raise ArgumentTypeError(f"{key} {error}") from None
            if key == "heartbeat_timeout" and float(value) < _LEAST_HEARTBEAT_S:
                raise ArgumentTypeError(
                    f"{key} needs {_LEAST_HEARTBEAT_S} s or more: hosts send a sign of life each second."
                )
    return options


def _streams(text: str) -> Mapping[int, frozenset[str]]:
    """Torchrun's 0 none, 1 stdout, 2 stderr, 3 both, for all (under -1) or as LOCAL_RANK:CHOICE,...: "out", "err"."""
    if text in _STREAMS:
        return {-1: _STREAMS[text]}
    if not re.fullmatch(r"\s*\d+:[0-3]\s*(,\s*\d+:[0-3]\s*)*", text):
        raise ArgumentTypeError(
            "needs 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), for all ranks, or for each by its number on the "
            "host, like 0:1,1:3."
        )
    pairs = (word.strip().split(":") for word in text.split(","))
    return {-1: _STREAMS["0"], **{int(rank): _STREAMS[choice] for rank, choice in pairs}}


def _ranks(text: str) -> frozenset[int]:
    """Local ranks, like 0 or 0,2."""
    return frozenset(_numbers(text, "needs numbers of ranks on the host, like 0 or 0,2."))


def _numbers(text: str, needed: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ArgumentTypeError(needed)
    return tuple(map(int, words))


def _names(text: str) -> tuple[str, ...]:
    """Names of environment variables, like A or A,B."""
    found = tuple(word.strip() for word in text.split(","))
    wrong = next((name for name in found if not VARIABLE_NAME.fullmatch(name)), None)
    if wrong is not None:
        raise ArgumentTypeError(f"{wrong!r} is no name of an environment variable.")
    return found


TYPES: dict[str, Callable[[str], Any]] = {
    "N|auto|gpu|cpu": _worker_count,
    "N|LEAST:MOST": _host_count,
    "N": whole_number(1),
    "K": whole_number(0),
    "R": whole_number(0),
    "SECONDS": seconds,
    "0,3": _devices,
    "0,2": _ranks,
    "0..3": _streams,
    "HOST": _host,
    "ADDRESS": _host,
    "PORT": port,
    "HOST:PORT": _endpoint,
    "NAME,...": _names,
    "KEY=VALUE,...": _rendezvous_options,
}
"""What stands for a value in help -> how it is read; text, where nothing is said."""
