"""`photinus doctor --hosts a,b,c`: whether hosts can train together: versions, and every pair tried in both directions.

Pairs are tried in rounds, in which each host takes part once, so that no transfer shares a host with another.
"""

from __future__ import annotations

import json
import secrets
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...run.local.interrupts import handle_signals
from ...run.ssh.command import find_here, ssh_command
from ...run.ssh.host import Hosts, RemoteHost
from ...run.ssh.hostfile import Host
from .finding import Finding, as_json, exit_code, print_findings, terminal

_ByHost = dict[RemoteHost, dict[str, Any]]
_SECTION = "Hosts"
_PAIRS = "Between hosts"
_TRANSFER_BYTES = 64 << 20
_TRANSFER_S = 1.0
_CLOCK_S = 1.0
_SLOW = 0.5
_COLUMN = 12
_ADVICE = (
    "Let TCP pass on all ports between the hosts (a firewall on {target} or between?), and name {target} by an address "
    "of a network that they share."
)


@dataclass(frozen=True)
class Pair:
    """What one host found when it turned to another; `rtt_s`: for one byte there and back; `error`: why not reached."""

    source: str
    target: str
    rtt_s: float | None = None
    bytes_per_s: float | None = None
    error: str = ""


def examine_hosts(hosts: Sequence[Host], *, ssh: str, ssh_port: int | None, timeout_s: float, json_only: bool) -> int:
    """Examines the hosts and all their pairs, prints what was found, and returns 0 when all is well, else 1."""
    here = find_here(hosts)
    command = ssh_command(ssh, ssh_port, needed=not all(here))
    with handle_signals() as interrupts:
        remotes = Hosts(interrupts)
        try:
            for host, is_this in zip(hosts, here, strict=True):
                remotes.add(host, here=is_this, ssh=command, any_version=True)
            remotes.reach()
            findings, pairs = _examine(remotes, timeout_s)
        finally:
            remotes.leave()
        if interrupts.received:
            return 128 + interrupts.received[0]
    if json_only:
        print(json.dumps({**as_json(findings), "pairs": [asdict(pair) for pair in pairs]}, indent=1))
        return exit_code(findings)
    console = terminal()
    if pairs:
        matrix([remote.name for remote in remotes.all], pairs, console)
    print_findings(findings, console)
    return exit_code(findings)


def _examine(remotes: Hosts, timeout_s: float) -> tuple[list[Finding], list[Pair]]:
    facts: _ByHost = {}
    clocks: dict[str, float] = {}
    for remote in (remote for remote in remotes.all if remote.hello is not None):  # one after the other, for the clocks
        asked_s = time.time()
        for answer in _ask(remotes, {remote: {"do": "facts"}}, timeout_s).values():
            facts[remote] = answer["facts"]
            clocks[remote.name] = answer["facts"]["clock_s"] - (asked_s + time.time()) / 2
    secret = secrets.token_hex(32)
    orders = {
        remote: {"do": "serve", "secret": secret, "name": remote.name, **remotes.meeting_place(remote)}
        for remote in facts
    }
    serving = {remote: answer["serving"] for remote, answer in _ask(remotes, orders, timeout_s).items()}
    reached, pairs = list(serving), []
    probe = {"do": "probe", "secret": secret, "bytes": _TRANSFER_BYTES, "seconds": _TRANSFER_S}
    for matches in rounds(len(reached)):
        orders = {reached[source]: {**probe, **serving[reached[target]]} for source, target in matches}
        answers = _ask(remotes, orders, timeout_s)
        for source, target in matches:
            probed = answers.get(reached[source], {"probed": {"error": "did not answer"}})["probed"]
            measured = {name: probed[name] for name in ("rtt_s", "bytes_per_s", "error") if name in probed}
            pairs.append(Pair(reached[source].name, reached[target].name, **measured))
    troubles = {remote.name: remote.trouble or "it did not answer" for remote in remotes.all if remote not in serving}
    known = {remote.name: {**facts[remote], "address": serving[remote]["address"]} for remote in serving}
    return judge(known, clocks, troubles, pairs), pairs


def _ask(remotes: Hosts, orders: _ByHost, timeout_s: float) -> _ByHost:
    """The answers of those hosts that answer in time."""
    for remote, order in orders.items():
        remote.send(order)
    waiting = [remote for remote in orders if not remote.done]
    if not remotes.wait(lambda: all(remote.answers or remote.done for remote in waiting), timeout_s):
        for remote in waiting:
            if not remote.answers and not remote.done:
                remote.trouble = f"host {remote.name}: no answer within {timeout_s:g} s."
    return {remote: remote.answers.popleft() for remote in waiting if remote.answers}


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All ordered pairs of so many hosts, in rounds in which no host takes part twice: one sum of two for each."""
    found = []
    for total in range(count):
        matches = [(one, (total - one) % count) for one in range(count) if one < (total - one) % count]
        found += [matches, [(second, first) for first, second in matches]]
    return [matches for matches in found if matches]


def judge(
    facts: Mapping[str, Mapping[str, Any]],
    clocks: Mapping[str, float],
    troubles: Mapping[str, str],
    pairs: Sequence[Pair],
) -> list[Finding]:
    """What all this means, by host and by pair.

    Args:
        facts: versions, cores and address of each host that answered.
        clocks: seconds by which its clock is ahead of this one's.
        troubles: why the others did not.
        pairs: both directions of each pair.
    """
    findings = [_of_host(name, facts, clocks[name]) for name in facts]
    for name, said in troubles.items():
        what, _, advice = said.removeprefix(f"host {name}: ").partition(". ")
        findings.append(Finding(_SECTION, name, "bad", what, advice or "Log in there by hand and look."))
    reached = [pair for pair in pairs if not pair.error]
    if reached:
        trips, rates = (
            sorted(pair.rtt_s or 0.0 for pair in reached),
            sorted(pair.bytes_per_s or 0.0 for pair in reached),
        )
        value = f"{len(reached)} of {len(pairs)} directions work: round trip {trips[0] * 1e3:.2f} to "
        value += f"{trips[-1] * 1e3:.2f} ms, {_rate(rates[0]).split()[0]} to {_rate(rates[-1])}"
        findings.append(Finding(_PAIRS, "all", "good" if len(reached) == len(pairs) else "note", value))
    findings += _findings_of_unreached(pairs)
    rates = [pair.bytes_per_s or 0.0 for pair in reached]
    for pair, rate in zip(reached, rates, strict=True):
        if rate < _SLOW * (usual := statistics.median(rates)):
            value = f"{_rate(rate)}, where the hosts' usual pair has {_rate(usual)}"
            advice = "All wait for the slowest link: look at its cable, switch port and duplex, or leave the host out."
            findings.append(Finding(_PAIRS, f"{pair.source} to {pair.target}", "note", value, advice))
    return findings


def matrix(names: Sequence[str], pairs: Sequence[Pair], console: Console) -> None:
    """Prints what was found from each row to each column; as many columns at once as fit."""
    found = {(pair.source, pair.target): pair for pair in pairs}

    def cell(source: str, target: str) -> Text:
        pair = found.get((source, target))
        if pair is None:
            return Text("–" if source == target else "?")
        if pair.error or pair.rtt_s is None or pair.bytes_per_s is None:
            return Text(f"✗ {pair.error}", "red")
        return Text(f"{pair.rtt_s * 1e3:.2f} {pair.bytes_per_s * 8 / 1e9:5.2f}")

    console.print("From row to column: round trip in ms, bandwidth in Gbit/s", style="bold")
    at_once = max(1, (console.width - _COLUMN) // (_COLUMN + 1))
    for begin in range(0, len(names), at_once):
        targets = names[begin : begin + at_once]
        table = Table(box=None, header_style="", padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column("", width=_COLUMN, no_wrap=True)
        for target in targets:
            table.add_column(target, justify="right", width=_COLUMN, no_wrap=True)
        for source in names:
            table.add_row(source, *(cell(source, target) for target in targets))
        console.print()
        console.print(table)
    console.print()


def _of_host(name: str, facts: Mapping[str, Mapping[str, Any]], ahead_s: float) -> Finding:
    own = facts[name]
    value = (
        f"{own['address']}, {own['cores']} cores, Python {own['python']}, torch {own['torch'] or 'missing'}, "
        f"Photinus {own['photinus']}"
    )
    if abs(ahead_s) > _CLOCK_S:
        value += f"; its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'} (nothing depends on it)"
    if own["torch"] is None:
        advice = f"Install the torch of the other hosts in the same environment on {name}."
        return Finding(_SECTION, name, "bad", value, advice, dict(own))
    for what in ("Photinus", "torch", "Python"):
        versions = [each[what.lower()] for each in facts.values()]
        usual = max(dict.fromkeys(versions), key=versions.count)
        if _version_to_compare(what, own[what.lower()]) != _version_to_compare(what, usual):
            advice = f"The other hosts have {what} {usual}: ranks of one job need the same on all."
            return Finding(_SECTION, name, "bad", value, advice, dict(own))
    return Finding(_SECTION, name, "good", value, facts={**own, "clock_ahead_s": ahead_s})


def _version_to_compare(what: str, version: str | None) -> str | None:
    # A patch release of Python changes nothing between ranks; the build of torch (+cpu, +cu126) follows the devices.
    if version is None:
        return None
    return version.rpartition(".")[0] if what == "Python" else version.partition("+")[0]


def _findings_of_unreached(pairs: Sequence[Pair]) -> list[Finding]:
    unreached = {(pair.source, pair.target): pair for pair in pairs if pair.error}
    findings = []
    for (source, target), pair in unreached.items():
        back = unreached.get((target, source))
        if back is None:
            value = f"{target} reaches {source}, but {source} does not reach {target} ({pair.error})"
            advice = f"Connections are made from both sides. {_ADVICE.format(target=target)}"
            findings.append(Finding(_PAIRS, f"{source} to {target}", "bad", value, advice))
        elif source < target or back.error != pair.error:
            value = f"they do not reach each other ({pair.error})"
            name = f"{source}, {target}"
            if back.error != pair.error:
                name, value = f"{source} to {target}", f"not reached ({pair.error}), nor the other way round"
            findings.append(Finding(_PAIRS, name, "bad", value, _ADVICE.format(target=target)))
    return findings


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.2f} Gbit/s"
