"""`photinus doctor --hosts a,b,c`: whether hosts can train together: versions, and every pair tried in both directions.

One rank a host is started as `photinus run --hostfile` starts any job, so what keeps a job from starting is found too.
The hosts that are to blame for it are left out, and the others start again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...run.from_python import run_launcher
from ...run.local.worker import python_command
from ...run.ssh.hostfile import Host
from .finding import Finding, as_json, assess, exit_code, print_findings, terminal
from .host_rank import MARK

_SECTION = "Hosts"
_PAIRS = "Between hosts"
_JOIN_S = 30.0
_ENDED_BY_THE_USER = (130, 143)
_CLOCK_S = 1.0
_SLOW = 0.5
_COLUMN = 12
_ADVICE = (
    "Let TCP pass on all ports between the hosts (a firewall on {target} or between?), and name {target} by an address "
    "of a network that they share."
)


@dataclass(frozen=True)
class Pair:
    """What one host found when it turned to another: `rtt_s`, there and back (0: not known), or `error`: why not."""

    source: str
    target: str
    rtt_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""


class Heard(io.StringIO):
    """What the job prints. `facts`: what the ranks say, by rank; `pairs`: what they measured; `rest`: all else."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.facts: dict[str, dict[str, Any]] = {}
        self.pairs: list[Pair] = []
        self.rest = ""
        self._names, self._open = names, ""

    def write(self, text: str) -> int:
        """Takes in what has come."""
        *lines, self._open = (self._open + text).split("\n")
        for line in lines:
            _, mark, told = line.partition(MARK)
            if not mark:
                self.rest += line + "\n"
            elif "pair" in (facts := json.loads(told)):
                source, target = (self._names[rank] for rank in facts.pop("pair"))
                self.pairs.append(Pair(source, target, **facts))
            else:
                facts["clock_ahead_s"] = facts.pop("clock_s") - time.time()
                self.facts[self._names[facts.pop("rank")]] = facts
        return len(text)

    def troubles(self) -> dict[str, str]:
        """What the launcher says of hosts because of which the job failed; of all of them, where it blames none."""
        found = {}
        for name in self._names:
            said = re.search(rf"\bhost {re.escape(name)}(?:: (?:\w+: )?| (?=\(.*\) was |was ))(.*)", self.rest)
            if said is not None:
                found[name] = said[1].removesuffix(" Nothing was started.")
        last = (self.rest.strip().splitlines() or ["the job ended and said nothing"])[-1]
        return found or dict.fromkeys(self._names, last)


def examine_hosts(hosts: Sequence[Host], *, ssh: str, ssh_port: int | None, timeout_s: float, json_only: bool) -> int:
    """Examines the hosts and all their pairs, prints what was found, and returns 0 when all is well, else 1."""
    facts: dict[str, dict[str, Any]] = {}
    troubles: dict[str, str] = {}
    left = list(hosts)
    while left:
        heard = Heard([host.name for host in left])
        with contextlib.redirect_stdout(heard):
            code = _start_ranks(left, ssh, ssh_port, timeout_s)
        if code in _ENDED_BY_THE_USER:
            return code
        facts |= heard.facts
        if code == 0:
            break
        troubles |= (new := heard.troubles())
        left = [host for host in left if host.name not in new]
    names = [host.name for host in hosts]
    findings = judge({name: facts[name] for name in names if name in facts}, troubles, heard.pairs)
    if json_only:
        print(json.dumps({**as_json(findings), "pairs": [asdict(pair) for pair in heard.pairs]}, indent=1))
        return exit_code(findings)
    console = terminal()
    if heard.pairs:
        matrix(names, heard.pairs, console)
    print_findings(findings, console)
    return exit_code(findings)


def _start_ranks(hosts: Sequence[Host], ssh: str, ssh_port: int | None, timeout_s: float) -> int:
    """Runs a rank on each of the hosts, and returns the job's exit code."""
    with open(os.memfd_create("photinus-hosts"), "w") as file:
        file.writelines(f"{host.destination} slots=1\n" for host in hosts)
        file.flush()
        command = [*python_command(), "-m", "photinus", "run", "--hostfile", f"/proc/{os.getpid()}/fd/{file.fileno()}"]
        command += ["--ssh", ssh, *(["--ssh-port", str(ssh_port)] if ssh_port is not None else [])]
        command += ["--cpu", "--max-restarts", "0", "--rdzv-conf", f"join_timeout={min(_JOIN_S, timeout_s):g}"]
        return run_launcher([*command, "-m", "photinus.tools.doctor.host_rank", f"{timeout_s:g}"])


def judge(
    facts: Mapping[str, Mapping[str, Any]],
    troubles: Mapping[str, str],
    pairs: Sequence[Pair],
) -> list[Finding]:
    """What all this means, by host and by pair.

    Args:
        facts: what each host said of itself.
        troubles: why others cannot take part.
        pairs: both directions of each pair that could be tried.
    """
    findings = [finding for name in facts for finding in _of_host(name, facts)]
    for name, said in troubles.items():
        what, _, advice = said.partition(". ")
        findings.append(Finding(_SECTION, name, "bad", what, advice or "Log in there by hand and look."))
    if troubles:
        advice = "Fix what is said of them, and look again."
        findings.append(Finding(_PAIRS, "not measured", "bad", f"to and from {', '.join(troubles)}", advice))
    reached = [pair for pair in pairs if not pair.error]
    if reached:
        trips, rates = sorted(pair.rtt_s for pair in reached), sorted(pair.bytes_per_s for pair in reached)
        value = f"{len(reached)} of {len(pairs)} directions work: round trip {trips[0] * 1e3:.2f} to "
        value += f"{trips[-1] * 1e3:.2f} ms, {_rate(rates[0]).split()[0]} to {_rate(rates[-1])}"
        findings.append(Finding(_PAIRS, "all", "good" if len(reached) == len(pairs) else "note", value))
    for pair in pairs:
        if pair.error:
            back = any((each.source, each.target) == (pair.target, pair.source) for each in reached)
            value = f"not reached: {pair.error}" + (f" ({pair.target} reaches {pair.source})" if back else "")
            advice = _ADVICE.format(target=pair.target)
            findings.append(Finding(_PAIRS, f"{pair.source} to {pair.target}", "bad", value, advice))
    for pair in reached:
        if pair.bytes_per_s < _SLOW * (usual := statistics.median(rates)):
            value = f"{_rate(pair.bytes_per_s)}, where the hosts' usual pair has {_rate(usual)}"
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
        if pair.error:
            return Text("✗", "red")
        trip = f"{pair.rtt_s * 1e3:.2f}" if pair.rtt_s else "?"
        return Text(f"{trip} {pair.bytes_per_s * 8 / 1e9:5.2f}")

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


def _of_host(name: str, facts: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    own = facts[name]
    ahead_s = own["clock_ahead_s"]
    value = (
        f"{own['address']}, {own['cores']} cores, Python {own['python']}, torch {own['torch']}, "
        f"Photinus {own['photinus']}"
    )
    if abs(ahead_s) > _CLOCK_S:
        value += f"; its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'} (nothing depends on it)"
    advice = ""
    for what in ("Photinus", "torch", "Python"):
        versions = [each[what.lower()] for each in facts.values()]
        usual = max(dict.fromkeys(versions), key=versions.count)
        if _version_to_compare(what, own[what.lower()]) != _version_to_compare(what, usual):
            advice = advice or f"The other hosts have {what} {usual}: ranks of one job need the same on all."
    limits = [Finding(_SECTION, f"{name}: {each['name']}", "bad", each["value"], each["advice"]) for each in own["bad"]]
    return [assess(_SECTION, name, value, bad=advice, facts=dict(own)), *limits]


def _version_to_compare(what: str, version: str) -> str:
    # A patch release of Python changes nothing between ranks; the build of torch (+cpu, +cu126) follows the devices.
    return version.rpartition(".")[0] if what == "Python" else version.partition("+")[0]


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / 1e9:.2f} Gbit/s"
