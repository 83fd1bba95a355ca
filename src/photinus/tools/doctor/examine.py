"""`photinus doctor`: looks at everything, shows a table, and says with its exit code whether all is well."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

from ...cli.flag_values import port, positive_seconds
from ...cli.parser import Parser
from .finding import report, terminal
from .gpus import look_at_gpus
from .host import look_at_host
from .software import ask_engine, ask_torch, look_at_backends, look_at_software

_TIMEOUT_S = 120.0

_ABOUT = """\
Check this machine and show what works: processors, memory, limits and name, the
engine, torch, GPUs and their links, and every backend of torch.distributed, by
running each in two processes.

With --hosts or --hostfile, check several hosts over ssh: versions, clocks, and
whether every host reaches every other, with latency and bandwidth."""
_MORE = """\
examples:
  photinus doctor
  photinus doctor --json | python -m json.tool
  photinus doctor --hosts node1,node2

exit code: 0 when all is well; 1 when something needs attention; 2 for wrong
use."""


def parser() -> Parser:
    """Return the parser of the command line."""
    several = "--hosts a,b,c [--json] [--ssh COMMAND] [--ssh-port PORT]"
    made = Parser(
        "doctor",
        "[--json] [--timeout SECONDS]",
        several,
        about=_ABOUT,
        more=_MORE,
        exclusive=[("--hosts", "--hostfile")],
    )
    made.add("--json", "print the findings as JSON")
    made.add("--timeout SECONDS", "timeout of each check. default: 120", positive_seconds, default=_TIMEOUT_S)
    made.add("--hosts a,b,c", "hosts to check (root@a: as a different user)")
    made.add("--hostfile FILE", "file with the hosts, as for `photinus run`")
    reached = ("--hosts", "--hostfile")
    made.add("--ssh COMMAND", "ssh command. default: ssh", default="ssh", only_with=reached)
    made.add("--ssh-port PORT", "port of the ssh servers", port, only_with=reached)
    return made


def main(arguments: Sequence[str]) -> int:
    """Examine this machine, or several hosts. Return 0 if all is well, else 1. Raise UsageError."""
    asked = parser().parse(arguments)
    if asked.hosts is not None or asked.hostfile is not None:
        return _examine_hosts(asked)
    torch, error = ask_torch(asked.timeout)
    findings = look_at_host() + look_at_software((torch, error), ask_engine(asked.timeout))
    findings += look_at_gpus(torch, asked.timeout) + look_at_backends(torch, asked.timeout)
    return report(findings, as_json=asked.json)


def _examine_hosts(asked: Namespace) -> int:
    from ...run.ssh.hostfile import parse_hostfile, read_hostfile
    from .hosts import look_at_hosts, print_pairs

    if asked.hostfile is not None:
        hosts = read_hostfile(asked.hostfile)
    else:
        hosts = parse_hostfile("\n".join(dict.fromkeys(asked.hosts.replace(",", " ").split())), "--hosts")
    findings, pairs = look_at_hosts(hosts, asked.ssh, asked.ssh_port, asked.timeout)
    if pairs and not asked.json:
        print_pairs([host.name for host in hosts], pairs, terminal().width)
    return report(findings, as_json=asked.json, pairs=[asdict(pair) for pair in pairs])
