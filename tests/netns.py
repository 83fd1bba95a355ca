"""Several hosts on one machine: network namespaces joined by a switch, each with a name, an address and a loopback.

    with network_hosts(2) as (first, second):
        process = first.start(["photinus", "run", "--nnodes", "2", ...], stdout=subprocess.PIPE)

Needs root and iproute2; `network_hosts` skips the test, with the reason, where it cannot make them. The switch lies in
a namespace of its own, so the machine's own network is not touched. A host's name (host-0, host-1, ...) is what a
process there sees as its own, and all other hosts find it by that; to the host itself it means 127.0.1.1, as a fresh
Debian has it. Namespaces are removed at the end. A process that is still in one of them then is an error of the test:
it is named, and killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["BURST_BYTES", "NetworkHost", "ip", "limit_card", "network_hosts"]

BURST_BYTES = 128 << 10
"""What a limited card carries at once after a pause, up to 1 Gbit/s; from there on a millisecond's worth. No less than
two of the largest packets that are cut up by the card."""
_LEAVE_S = 3.0
_numbers = itertools.count()
# Its own name, and a hosts file in which all are found; the mounts are private to what `ip netns exec` starts.
_ENTER = 'mount --bind "$1" /etc/hosts && hostname "$2" && shift 2 && exec "$@"'


@dataclass(frozen=True)
class NetworkHost:
    """One of the hosts: the namespace, the name that processes there have, and its address."""

    namespace: str
    name: str
    address: str
    hosts_file: str

    def command(self, words: Sequence[str | Path]) -> list[str]:
        """The command that runs these words on this host; the process that it starts becomes theirs."""
        enter = ["unshare", "--uts", "sh", "-c", _ENTER, "enter", self.hosts_file, self.name]
        return ["ip", "netns", "exec", self.namespace, *enter, *map(str, words)]

    def start(self, words: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Starts a process on this host; options are those of Popen."""
        return subprocess.Popen(self.command(words), **options)

    def run(self, words: Sequence[str | Path], *, timeout_s: float = 60.0) -> str:
        """Runs a command on this host to its end and returns what it printed; it must end well."""
        ended = subprocess.run(self.command(words), capture_output=True, text=True, timeout=timeout_s)
        assert ended.returncode == 0, f"{list(words)} on {self.name} ended with {ended.returncode}\n{ended.stderr}"
        return ended.stdout

    def pids(self) -> list[int]:
        """The processes that run on this host."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace).split()]

    def cut_off(self) -> None:
        """Takes the host off the network, without a word to anybody (a cable that is pulled)."""
        ip("-n", self.namespace, "link", "set", "eth0", "down")

    def connect(self) -> None:
        """Puts it back."""
        ip("-n", self.namespace, "link", "set", "eth0", "up")

    def slow_down_what_goes_to(self, other: NetworkHost, rate: str) -> None:
        """What this host sends to the other one is limited to a rate, like 200mbit; all else is not."""
        tc = ["netns", "exec", self.namespace, "tc"]
        ip(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1", "r2q", "10000")
        ip(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:1", "htb", "rate", "10gbit")
        limit = ["rate", rate, "burst", "64kb", "cburst", "64kb"]
        ip(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", "1:2", "htb", *limit)
        match = ["u32", "match", "ip", "dst", f"{other.address}/32", "flowid", "1:2"]
        ip(*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", *match)

    def lose_what_goes_to(self, other: NetworkHost) -> None:
        """What this host sends to the other one gets lost, without a word; the way back stays whole."""
        nobody = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"]
        ip("-n", self.namespace, "neigh", "replace", other.address, *nobody, "dev", "eth0")

    def deliver_to(self, other: NetworkHost) -> None:
        """Puts an end to that."""
        ip("-n", self.namespace, "neigh", "del", other.address, "dev", "eth0")


@contextlib.contextmanager
def network_hosts(
    count: int, *, own_name: str | None = "127.0.1.1", cards: int = 1, other_network: bool = False
) -> Iterator[tuple[NetworkHost, ...]]:
    """So many hosts that reach each other, for the duration of the block.

    Args:
        own_name: what a host's own name means to itself; None: nothing.
        cards: how many each has (eth0, eth1, ...), each in a network of its own with a switch of its own.
        other_network: whether each has a second interface, with the default route, on which none reaches another.
    """
    _skip_where_impossible()
    mark = f"ph{os.getpid()}x{next(_numbers)}"
    switch = f"{mark}sw"
    with tempfile.TemporaryDirectory(prefix="photinus-hosts-") as folder, contextlib.ExitStack() as stack:
        hosts = tuple(
            NetworkHost(f"{mark}h{i}", f"host-{i}", f"192.168.78.{i + 1}", f"{folder}/hosts-{i}") for i in range(count)
        )
        for host in hosts:
            lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
            lines += [f"{own_name} {host.name}"] * (own_name is not None)
            lines += [f"{other.address} {other.name}" for other in hosts if other is not host]
            Path(host.hosts_file).write_text("\n".join(lines) + "\n")
        _add_namespace(switch, stack)
        for card in range(cards):
            ip("-n", switch, "link", "add", f"br{card}", "type", "bridge", "stp_state", "0", "forward_delay", "0")
            ip("-n", switch, "link", "set", f"br{card}", "up")
        for index, host in enumerate(hosts):
            _add_namespace(host.namespace, stack)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            for card in range(cards):
                port = f"p{index}" if card == 0 else f"p{index}x{card}"
                _add_card(host, f"eth{card}", f"192.168.{78 - card}.{index + 1}", switch, port)
                ip("-n", switch, "link", "set", port, "master", f"br{card}")
            if other_network:
                _add_card(host, "away0", f"192.168.79.{index + 1}", switch, f"q{index}")
                ip("-n", host.namespace, "route", "add", "default", "via", "192.168.79.254")
        yield hosts
        left = _left_on(hosts)
        assert not left, "processes are left on the hosts:\n" + "\n".join(left)


def _add_card(host: NetworkHost, name: str, address: str, switch: str, port: str) -> None:
    ip("-n", host.namespace, "link", "add", name, "type", "veth", "peer", "name", port, "netns", switch)
    ip("-n", host.namespace, "link", "set", name, "up")
    ip("-n", host.namespace, "addr", "add", f"{address}/24", "dev", name)
    ip("-n", switch, "link", "set", port, "up")


def _add_namespace(name: str, stack: contextlib.ExitStack) -> None:
    ip("netns", "add", name)
    stack.callback(_remove_namespace, name)


def _remove_namespace(name: str) -> None:
    # A namespace lives on, without its name, as long as a process is in it.
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", name)


def _left_on(hosts: Sequence[NetworkHost]) -> list[str]:
    deadline = time.monotonic() + _LEAVE_S
    while True:
        left = [f"{host.name}: {_told(pid)}" for host in hosts for pid in host.pids() if _alive(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def _told(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')}"
    return str(pid)


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _skip_where_impossible() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for program in ("ip", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (iproute2, util-linux)")
    name = f"ph{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if tried.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {tried.stderr.strip()}")
    try:
        inside = subprocess.run(
            ["ip", "netns", "exec", name, "unshare", "--uts", "true"], capture_output=True, text=True, timeout=20
        )
    finally:
        ip("netns", "del", name)
    if inside.returncode != 0:
        pytest.skip(f"processes cannot be put into namespaces here: {inside.stderr.strip()}")


def limit_card(namespace: str, card: str, bits_per_s: float) -> None:
    """Limits what leaves through a card; to be taken away with `tc qdisc del dev CARD root`."""
    bucket = ["rate", f"{bits_per_s:.0f}bit", "burst", str(max(BURST_BYTES, int(bits_per_s / 8 / 1000)))]
    tc = ["netns", "exec", namespace, "tc"]
    ip(*tc, "qdisc", "add", "dev", card, "root", "tbf", *bucket, "latency", "20ms")


def ip(*words: str) -> str:
    """What `ip` says to these words; it must end well."""
    ended = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 0, f"ip {' '.join(words)}: {ended.stderr.strip()}"
    return ended.stdout
