"""`photinus doctor --hosts a,b,c`: whether hosts can train together: versions, and every pair tried in both directions.

One rank a host is started as `photinus run --hostfile` starts any job, so causes that keep a job from starting are
found too. Hosts that cause that are left out, and the others start again.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...run.from_python import run_launcher
from ...run.local.worker import python_command
from ...run.ssh.hostfile import Host
from .finding import Finding, assess
from .plan import JobOutput

_SECTION = "Hosts"
_PAIRS = "Between hosts"
_JOIN_S = 30.0
_CLOCK_S = 1.0
_SLOW = 0.5
_COLUMN = 12
_ADVICE = (
    "Let TCP pass on all ports between the hosts (a firewall on {target} or between?), and name {target} by an address "
    "of a network that they share."
)


@dataclass(frozen=True)
class Pair:
    """A host's connection to another: round trip (0: unknown) and bandwidth, or the error that prevents it."""

    source: str
    target: str
    rtt_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


def troubles_of(names: Sequence[str], output: str) -> dict[str, str]:
    """Return why the job failed, by host: the reason that the launcher prints for a host, or its last line for all.

    Args:
        names: hosts of the job; the rendezvous is at the first.
        output: output of the launcher.
    """
    found = {}
    for name in names:
        blamed = re.search(rf"\bhost {re.escape(name)}(?:: (?:\w+: )?| (?=\(.*\) was |was ))(.*)", output)
        if blamed is not None:
            found[name] = blamed[1].removesuffix(" Nothing was started.")
    # A host that cannot reach the first is not named, but the first lists the hosts that joined.
    here = re.search(r"hosts ready within .*; here: (.*)", output)
    if here is not None and not found:
        absent = [name for name in names if name not in re.split(r"[ (),]+", here[1])]
        advice = _ADVICE.format(target=names[0])
        found = dict.fromkeys(absent, f"it does not reach {names[0]}, where the hosts meet. {advice}")
    return found or dict.fromkeys(names, (output.strip().splitlines() or ["the job ended and said nothing"])[-1])


def look_at_hosts(
    hosts: Sequence[Host], ssh: str, ssh_port: int | None, timeout_s: float
) -> tuple[list[Finding], list[Pair]]:
    """Return all findings of the hosts, and what was measured between them."""
    facts: dict[str, dict[str, Any]] = {}
    troubles: dict[str, str] = {}
    pairs: list[Pair] = []
    remaining = list(hosts)

    def receive(message: dict[str, Any]) -> None:
        if "pair" in message:
            source, target = (remaining[rank].name for rank in message.pop("pair"))
            pairs.append(Pair(source, target, **message))
        else:
            message["clock_ahead_s"] = message.pop("clock_s") - time.time()
            facts[remaining[message.pop("rank")].name] = message

    while remaining:  # a job needs all of its hosts, so hosts that cannot take part are left out
        pairs.clear()
        output = JobOutput(receive)
        with contextlib.redirect_stdout(output):
            if _start_ranks(remaining, ssh, ssh_port, timeout_s) == 0:
                break
        troubles |= (new := troubles_of([host.name for host in remaining], output.rest))
        remaining = [host for host in remaining if host.name not in new]
    return judge({host.name: facts[host.name] for host in hosts if host.name in facts}, troubles, pairs), pairs


def _start_ranks(hosts: Sequence[Host], ssh: str, ssh_port: int | None, timeout_s: float) -> int:
    """Run a rank on each of the hosts and return the job's exit code."""
    # The host file is memory of this process: nothing is left behind, however it ends.
    with open(os.memfd_create("photinus-hosts"), "w") as file:
        file.writelines(f"{host.destination} slots=1\n" for host in hosts)
        file.flush()
        command = [*python_command(), "-m", "photinus", "run", "--hostfile", f"/proc/{os.getpid()}/fd/{file.fileno()}"]
        command += ["--ssh", ssh, *(["--ssh-port", str(ssh_port)] if ssh_port is not None else [])]
        command += ["--cpu", "--max-restarts", "0", "--rdzv-conf", f"join_timeout={min(_JOIN_S, timeout_s):g}"]
        return run_launcher([*command, "-m", "photinus.tools.doctor.host_rank", f"{timeout_s:g}"])


def judge(facts: Mapping[str, Mapping[str, Any]], troubles: Mapping[str, str], pairs: Sequence[Pair]) -> list[Finding]:
    """Return findings of hosts and pairs.

    Args:
        facts: what the rank on each host sent.
        troubles: why other hosts cannot take part.
        pairs: both directions of each pair that could be tried.
    """
    findings = [finding for name in facts for finding in _of_host(name, facts)]
    for name, trouble in troubles.items():
        what, _, advice = trouble.partition(". ")
        findings.append(assess(_SECTION, name, what, bad=advice or "Log in there by hand and look."))
    if troubles:
        advice = "Fix what is said of them, and look again."
        findings.append(assess(_PAIRS, "not measured", f"to and from {', '.join(troubles)}", bad=advice))
    reached = [pair for pair in pairs if not pair.error]
    trips = sorted(pair.rtt_s * 1e3 for pair in reached if pair.rtt_s)
    rates = sorted(pair.bytes_per_s for pair in reached)
    if reached:
        value = f"{len(reached)} of {len(pairs)} directions work: "
        value += f"round trip {trips[0]:.2f} to {trips[-1]:.2f} ms, " if trips else ""
        value += f"{_gigabits(rates[0])} to {_gigabits(rates[-1])} Gbit/s"
        findings.append(Finding(_PAIRS, "all", "good" if len(reached) == len(pairs) else "note", value))
    for pair in pairs:
        name = f"{pair.source} to {pair.target}"
        if pair.error:
            back = any((each.source, each.target) == (pair.target, pair.source) for each in reached)
            value = f"not reached: {pair.error}" + (f" ({pair.target} reaches {pair.source})" if back else "")
            findings.append(assess(_PAIRS, name, value, bad=_ADVICE.format(target=pair.target)))
        elif pair.bytes_per_s < _SLOW * (usual := statistics.median(rates)):
            value = f"{_gigabits(pair.bytes_per_s)} Gbit/s, where the hosts' usual pair has {_gigabits(usual)} Gbit/s"
            advice = "All wait for the slowest link: look at its cable, switch port and duplex, or leave the host out."
            findings.append(assess(_PAIRS, name, value, note=advice))
    return findings


def _of_host(name: str, facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    own, advice = facts[name], ""
    value = f"{own['address']}, {own['cores']} cores, Python {own['python']}, torch {own['torch']}, "
    value += f"Photinus {own['photinus']}"
    ahead_s = own["clock_ahead_s"]
    if abs(ahead_s) > _CLOCK_S:
        value += f"; its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'} (nothing depends on it)"
    # Ranks may have different patch releases of Python, and builds of torch (+cpu, +cu126) for different devices.
    for what, of_interest in (("Photinus", r".*"), ("torch", r"[^+]*"), ("Python", r"\d+\.\d+")):
        versions = [re.match(of_interest, each[what.lower()])[0] for each in facts.values()]  # type: ignore[index]
        usual = max(dict.fromkeys(versions), key=versions.count)
        if not advice and versions[list(facts).index(name)] != usual:
            advice = f"The other hosts have {what} {usual}: ranks of one job need the same on all."
    limits = [assess(_SECTION, f"{name}: {each['name']}", each["value"], bad=each["advice"]) for each in own["bad"]]
    return [assess(_SECTION, name, value, bad=advice, facts=dict(own)), *limits]


def print_pairs(names: Sequence[str], pairs: Sequence[Pair], width: int) -> None:
    """Print a table of connections from the hosts of rows to those of columns, in parts that fit the width."""
    cells = {(name, name): "–" for name in names}
    for pair in pairs:
        trip = f"{pair.rtt_s * 1e3:.2f}" if pair.rtt_s else "?"
        cells[pair.source, pair.target] = "✗" if pair.error else f"{trip} {_gigabits(pair.bytes_per_s):>5}"
    print("From row to column: round trip in ms, bandwidth in Gbit/s")
    at_once = max(1, (width - _COLUMN) // (_COLUMN + 1))
    for begin in range(0, len(names), at_once):
        targets = names[begin : begin + at_once]
        print("\n" + " " * _COLUMN, *(f"{target[:_COLUMN]:>{_COLUMN}}" for target in targets))
        for source in names:
            row = (cells.get((source, target), "?") for target in targets)
            print(f"{source[:_COLUMN]:<{_COLUMN}}", *(f"{cell:>{_COLUMN}}" for cell in row))
    print()


def _gigabits(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.2f}"
