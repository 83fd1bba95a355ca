"""The file of hosts, as DeepSpeed and Open MPI have it: a host on each line, and how many workers it takes."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from ...errors import UsageError

_NAME = re.compile(r"(?:(?P<user>[^\s@:=]+)@)?(?P<name>[^\s@=]+)")
_MPICH = re.compile(r"([^:\s]+):(\d+)")
_IGNORED = ("max-slots",)  # Open MPI's: how many it may be at most, were more asked for than there are slots


class Host(NamedTuple):
    """A host as its line in the file says it: how many workers it takes, whose account is used there, FILE:LINE."""

    name: str
    slots: int | None = None
    user: str | None = None
    where: str = ""

    @property
    def destination(self) -> str:
        """The destination for ssh: NAME or USER@NAME."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read_hostfile(path: str) -> tuple[Host, ...]:
    """The hosts of a file, in its order. UsageError: it cannot be read, or as for `parse_hostfile`."""
    like = "needs one line per host, like `node1 slots=4`."
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--hostfile {path} cannot be read: {error.strerror}. It {like}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--hostfile {path} is not a text file. It {like}") from None
    return parse_hostfile(text, path)


def parse_hostfile(text: str, path: str = "hostfile") -> tuple[Host, ...]:
    """The hosts that a text names, in its order. UsageError: a line is wrong, a host stands there twice, or none."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = re.sub(r"\s*=\s*", "=", line.partition("#")[0]).split()
        if not words:
            continue
        host = _host(words, f"{path}:{number}")
        if host.name in hosts:
            raise UsageError(
                f"{host.where}: {host.name} is already listed at {hosts[host.name].where}. Use one line per host, "
                f"with the total slots."
            )
        hosts[host.name] = host
    if not hosts:
        raise UsageError(f"{path} names no hosts. It needs one line per host, like `node1 slots=4`.")
    return tuple(hosts.values())


def _host(words: list[str], where: str) -> Host:
    match = _NAME.fullmatch(words[0])
    if match is None:
        raise UsageError(f"{where}: {words[0]!r} is not a host name. Write `node1 slots=4`.")
    mpich = _MPICH.fullmatch(words[0])
    if mpich is not None:
        raise UsageError(f"{where}: {words[0]} is MPICH's spelling; write `{mpich[1]} slots={mpich[2]}`.")
    if match["name"].startswith("-"):  # ssh would take it for an option
        raise UsageError(f"{where}: {words[0]!r} is not a host name: it starts with a dash.")
    slots: int | None = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.replace("_", "-")
        if not equals or key not in ("slots", *_IGNORED):
            raise UsageError(f"{where}: {word!r} is not valid. Only slots=N may follow the host name.")
        if not value.isdecimal() or (key == "slots" and int(value) < 1):
            raise UsageError(
                f"{where}: {word} needs a whole number, 1 or more. (To skip the host, start its line with #.)"
            )
        if key == "slots":
            if slots is not None:
                raise UsageError(f"{where}: slots is given twice, {slots} and {value}.")
            slots = int(value)
    return Host(match["name"], slots, match["user"], where)
