"""Read and check the value of a flag: numbers, seconds, devices, hosts, and torchrun's small languages.

These are types for argparse: each takes the text, and raises ArgumentTypeError with what is needed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping
from typing import TypeVar

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
_RENDEZVOUS_IDLE = {
    *("close_timeout", "keep_alive_interval", "keep_alive_max_attempt", "rank", "read_timeout"),
    *("store_type", "use_libuv"),
}
_SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
# Hosts send a sign of life each second: a shorter timeout would lose hosts that are well.
_LEAST_HEARTBEAT_S = 1.5


_T = TypeVar("_T")


def _require(condition: object, needed: str) -> None:
    if not condition:
        raise ArgumentTypeError(needed)


def _value(convert: Callable[[str], _T], is_good: Callable[[_T], bool], needed: str) -> Callable[[str], _T]:
    """Return a reader that says what is needed where the text cannot be converted, or what comes of it is not good."""

    def read(text: str) -> _T:
        with contextlib.suppress(ValueError):
            if is_good(value := convert(text)):
                return value
        raise ArgumentTypeError(needed)

    return read


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers, `least` or more, and up to `most`."""
    needed = f"needs a whole number, {least} {'or more' if most is None else f'to {most}'}."
    return _value(int, lambda number: number >= least and (most is None or number <= most), needed)


def _decimal(text: str) -> int:
    if not text.isdecimal():  # int() takes signs, underscores and spaces too
        raise ValueError
    return int(text)


def _least_and_most(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    return _decimal(least), _decimal(most if colon else least)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_decimal(word.strip()) for word in text.split(","))


seconds = _value(float, lambda number: 0 <= number < math.inf, "needs a number of seconds, 0 or more.")
positive_seconds = _value(float, lambda number: 0 < number < math.inf, "needs a number of seconds above 0.")
port = _value(_decimal, lambda number: number <= 65535, "needs a port, 1 to 65535, or 0 for one that is free.")
start_method = _value(  # torchrun's third one, forkserver, is what we call fork
    lambda text: text.removesuffix("server"), lambda method: method in ("fork", "spawn"), "needs fork or spawn."
)
host_count = _value(  # LEAST:MOST, where hosts may come and go
    _least_and_most,
    lambda span: 1 <= span[0] <= span[1],
    "needs a number of hosts, like 2, or the least and the most, like 1:4.",
)
local_ranks = _value(
    lambda text: frozenset(_numbers(text)), lambda _: True, "needs numbers of ranks on the host, like 0 or 0,2."
)
_gpus = _value(_numbers, lambda _: True, "needs the numbers of GPUs, like 0 or 0,3 (--cpu trains without any).")


def devices(text: str) -> tuple[int, ...]:
    """Read numbers of GPUs, each once."""
    numbers = _gpus(text)
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    _require(twice is None, f"GPU {twice} is given twice; each worker needs its own.")
    return numbers


def worker_count(text: str) -> int | str:
    """Read a number above 0, or auto, gpu, xpu or cpu."""
    if text in ("auto", "gpu", "xpu", "cpu"):
        return text
    count = _value(int, lambda _: True, "needs a whole number above 0, or auto, gpu, xpu or cpu.")(text)
    _require(count >= 1, "needs at least 1 worker (or auto, gpu, xpu, cpu).")
    return count


def host(text: str) -> str:
    """Read a host's name or address; one of IPv6 may be in brackets."""
    name = text[1:-1] if re.fullmatch(r"\[[^\s/@]+\]", text) else text
    if ":" in name:
        try:
            ipaddress.IPv6Address(name)
        except ValueError:
            raise ArgumentTypeError(
                "needs only a host's name or address. Give the port with --master-port, or both with --rdzv-endpoint."
            ) from None
    try:
        name.encode("idna")  # the resolver does so too, and fails there with a worse message
    except UnicodeError:
        name = ""
    _require(re.fullmatch(r"[^\s/@]+", name), "needs the name or address of a host.")
    return name


def endpoint(text: str) -> tuple[str, int | None]:
    """Read HOST, HOST:PORT or [V6ADDRESS]:PORT."""
    matched = _ENDPOINT.fullmatch(text)
    if matched is None:
        raise ArgumentTypeError("needs HOST or HOST:PORT, like 10.0.0.1:29500 or [fd00::1]:29500.")
    number = matched[2] or matched[4]
    return matched[1] or matched[3] or matched[5], None if number is None else port(number)


def rendezvous(text: str) -> str:
    """Read the name of a torchrun rendezvous that does what ours does."""
    _require(
        text in ("c10d", "static"),
        f"photinus has its own rendezvous and does not need {text}. Remove the flag, and name the leading host with "
        f"--master-addr.",
    )
    return text


def rendezvous_options(text: str) -> Mapping[str, float | bool]:
    """Read torchrun's KEY=VALUE,KEY=VALUE, by our names, without those that have nothing to set here."""
    options: dict[str, float | bool] = {}
    for word in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = word.partition("=")
        is_known = equals and key in _RENDEZVOUS_OPTIONS.keys() | _RENDEZVOUS_IDLE
        _require(is_known, f"the options are {', '.join(sorted(_RENDEZVOUS_OPTIONS))}, each as NAME=VALUE.")
        if key == "is_host":
            _require(value.lower() in _SWITCH, "is_host needs true or false.")
            options["leads"] = _SWITCH[value.lower()]
        elif key in _RENDEZVOUS_OPTIONS:
            try:
                options[_RENDEZVOUS_OPTIONS[key]] = seconds(value)
            except ArgumentTypeError as error:
                raise ArgumentTypeError(f"{key} {error}") from None
            _require(
                key != "heartbeat_timeout" or float(value) >= _LEAST_HEARTBEAT_S,
                f"{key} needs {_LEAST_HEARTBEAT_S} s or more: hosts send a sign of life each second.",
            )
    return options


def streams(text: str) -> Mapping[int, frozenset[str]]:
    """Read torchrun's 0 none, 1 stdout, 2 stderr, 3 both, for all (under -1) or as LOCAL_RANK:CHOICE,..."""
    if text in _STREAMS:
        return {-1: _STREAMS[text]}
    _require(
        re.fullmatch(r"\s*\d+:[0-3]\s*(,\s*\d+:[0-3]\s*)*", text),
        "needs 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both), for all ranks, or for each by its number on the "
        "host, like 0:1,1:3.",
    )
    pairs = (word.strip().split(":") for word in text.split(","))
    return {-1: _STREAMS["0"], **{int(rank): _STREAMS[choice] for rank, choice in pairs}}


def variables(text: str) -> tuple[str, ...]:
    """Read names of environment variables, like A or A,B."""
    names = tuple(word.strip() for word in text.split(","))
    wrong = next((name for name in names if not VARIABLE_NAME.fullmatch(name)), None)
    _require(wrong is None, f"{wrong!r} is not a name of an environment variable.")
    return names
