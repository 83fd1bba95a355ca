"""`photinus doctor`: looks at everything, shows a table, and says with its exit code whether all is well.

With --hosts or --hostfile it looks at several hosts and their network instead (see `hosts`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import dataclass

from ..command_line.flag_values import port
from ..command_line.usage import UsageError, closest
from .backends import look_at_backends
from .finding import Finding, as_json, exit_code, table
from .host import look_at_host
from .load import look_at_load, read_load
from .network import look_at_network
from .software import ask_engine, ask_torch, look_at_software

__all__ = ["FLAGS", "HELP", "main"]

FLAGS = ("--json", "--timeout", "--hosts", "--hostfile", "--ssh", "--ssh-port", "--help")

_WIDEST = 100
_TIMEOUT_S = 60.0

HELP = """\
usage: photinus doctor [--json] [--timeout SECONDS]
       photinus doctor --hosts a,b,c [--json] [--ssh COMMAND] [--ssh-port PORT]

Looks at this machine and says what works: processors, memory and limits, the
engine, torch and GPUs, network interfaces, and every backend of
torch.distributed, really tried in two processes.

With --hosts, looks at several hosts, which it reaches over ssh: versions,
clocks, and whether every host reaches every other, how soon and how fast.

flags:
  --json             the findings as JSON, for programs
  --timeout SECONDS  for each thing that is tried. default: 60, and up to five
                     times as long on a busy machine
  --hosts a,b,c      these hosts (root@a uses another account)
  --hostfile FILE    the hosts of a file, as for `photinus run`
  --ssh COMMAND      how to reach them. default: ssh
  --ssh-port PORT    the port of their ssh
  --help             this text

examples:
  photinus doctor
  photinus doctor --json | python -m json.tool
  photinus doctor --hosts node1,node2

exit code: 0 when all is well; 1 when something needs attention or could not be
judged, on a busy machine say; 2 for wrong use."""


@dataclass
class _Flags:
    as_text: bool = True
    timeout_s: float | None = None
    help: bool = False
    hosts: str | None = None
    hostfile: str | None = None
    ssh: str = "ssh"
    ssh_port: int | None = None


def main(arguments: Sequence[str]) -> int:
    """Examines this machine, or several hosts; returns 0 when all is well, else 1.

    Raises:
        UsageError: words that are no flags of this command, or a host file with faults.
    """
    flags = _flags(list(arguments))
    if flags.help:
        print(HELP)
        return 0
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    if flags.hosts is not None or flags.hostfile is not None:
        return _examine_hosts(flags, width, colour)
    load = read_load()
    timeout_s = flags.timeout_s or load.allow(_TIMEOUT_S)
    if load.is_busy and flags.as_text:
        print(f"photinus doctor: {load}: this may take a while.", file=sys.stderr, flush=True)
    findings: list[Finding] = [look_at_load(load), *look_at_host(), *look_at_network()]
    torch = ask_torch(timeout_s)
    findings += look_at_software(torch, ask_engine(timeout_s), timeout_s)
    findings += look_at_backends(torch.facts, timeout_s)
    # Sections in the order of their first appearance, each together.
    order = {section: index for index, section in enumerate(dict.fromkeys(each.section for each in findings))}
    findings.sort(key=lambda each: order[each.section])
    if flags.as_text:
        print(table(findings, width=width, colour=colour))
    else:
        print(json.dumps(as_json(findings), indent=1))
    return exit_code(findings)


def _examine_hosts(flags: _Flags, width: int, colour: bool) -> int:
    from ..ssh.hostfile import parse_hostfile, read_hostfile
    from .hosts import examine_hosts

    if flags.hosts is not None and flags.hostfile is not None:
        raise UsageError(
            f"--hosts {flags.hosts} and --hostfile {flags.hostfile} contradict each other: leave out one of them."
        )
    if flags.hostfile is not None:
        hosts = read_hostfile(flags.hostfile)
    else:
        names = dict.fromkeys((flags.hosts or "").replace(",", " ").split())
        hosts = parse_hostfile("\n".join(names), "--hosts")
    return examine_hosts(
        hosts,
        ssh=flags.ssh,
        ssh_port=flags.ssh_port,
        timeout_s=flags.timeout_s or _TIMEOUT_S,
        as_text=flags.as_text,
        width=width,
        colour=colour,
    )


def _flags(words: list[str]) -> _Flags:
    flags = _Flags()
    while words:
        spelling, equals, value = words.pop(0).partition("=")
        name = spelling.replace("_", "-") if spelling.startswith("--") else spelling
        if name in ("--help", "-h"):
            return _Flags(help=True)
        if name == "--json" and not equals:
            flags.as_text = False
            continue
        if name not in FLAGS or name == "--json":
            near = closest(name, FLAGS)
            hint = f" Did you mean {near}?" if near and near != name else " See `photinus doctor --help`."
            raise UsageError(f"photinus doctor does not know {spelling}{equals}{value}.{hint}")
        text = value if equals else words.pop(0) if words else ""
        if name == "--timeout":
            flags.timeout_s = _seconds(text)
        elif not text:
            raise UsageError(f"{spelling} needs a value.")
        elif name == "--hosts":
            flags.hosts = text
        elif name == "--hostfile":
            flags.hostfile = text
        elif name == "--ssh":
            flags.ssh = text
        else:
            try:
                flags.ssh_port = port(text)
            except ArgumentTypeError as error:
                raise UsageError(f"{spelling} {text}: {error}") from None
    return flags


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--timeout {text}".rstrip() + ": needs a number of seconds above 0.")
    return seconds
