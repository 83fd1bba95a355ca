"""Emulated hosts: network namespaces whose cards have a rate; what went over these, and what processors did."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SOURCE))

from tests.delayed_network import delayed  # noqa: E402
from tests.netns import BURST_BYTES, NetworkHost, ip, limit_card, network_hosts  # noqa: E402

__all__ = [
    "BURST_BYTES",
    "CARDS",
    "Counters",
    "Layout",
    "NetworkHost",
    "add_where",
    "begin",
    "bits_per_s",
    "layout",
    "ranks_of",
]

CARDS = ("eth0", "eth1")
"""Those of each host; all but one contestant use the first alone."""

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def ranks_of(case: str) -> list[int]:
    """How many ranks each host has: 2x4 are two hosts with four ranks each, 3+1 two hosts with three and one."""
    try:
        if "x" in case:
            hosts, ranks = map(int, case.split("x"))
            counts = [ranks] * hosts
        else:
            counts = [int(word) for word in case.split("+")]
    except ValueError:
        counts = []
    if len(counts) < 2 or min(counts) < 1:
        raise ValueError(f"{case!r} is no case: HOSTSxRANKS, like 2x4, or the ranks of each host, like 3+1; two hosts")
    return counts


def bits_per_s(rate: str) -> float:
    """A rate in tc's words (100mbit, 1gbit, 100mbit+20ms) as a number; infinite for none."""
    return _rate(rate)[0]


def _rate(text: str) -> tuple[float, float]:
    """Bits a second, and seconds that are added to a round trip."""
    if text == "none":
        return float("inf"), 0.0
    found = re.fullmatch(r"([\d.]+)([kmg]bit)(?:\+([\d.]+)ms)?", text)
    if found is None:
        raise ValueError(
            f"{text!r} is no rate: a number with kbit, mbit or gbit, and maybe what a round trip is to take, like "
            "1gbit+20ms; or none"
        )
    return float(found[1]) * _UNITS[found[2]], float(found[3] or 0) / 1e3


def add_where(parser: argparse.ArgumentParser, cases: Sequence[str], rates: Sequence[str]) -> None:
    """The options that say which hosts there are, and for how long."""
    case, rate = _known(ranks_of), _known(bits_per_s)
    parser.add_argument("--cases", nargs="+", type=case, default=list(cases), help="hosts, like 2x4 or 3+1")
    parser.add_argument("--rates", nargs="+", type=rate, default=list(rates), help="of a card, like 300mbit, or none")
    parser.add_argument("--limit-s", type=int, default=6 * 3600, help="give the whole run up after so long (6 hours)")


def _known(check: Callable[[str], object]) -> Callable[[str], str]:
    """An option's type: the texts that the check takes."""

    def text_of(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return text_of


def begin(limit_s: int) -> None:
    """To be called first: sees to root's rights, and to hosts and ranks being taken away when this program is ended.

    Args:
        limit_s: it ends itself after so long.
    """
    if os.geteuid() != 0:
        sys.exit("network namespaces need root: run this with sudo")
    for number in _ENDINGS:
        signal.signal(number, _end)
    signal.alarm(limit_s)


_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


def _end(number: int, _: object) -> None:
    for other in _ENDINGS:
        signal.signal(other, signal.SIG_IGN)  # what is done on the way out is done to its end
    sys.exit(f"given up: {signal.Signals(number).name}")


@dataclass(frozen=True)
class Layout:
    """Hosts and where the ranks are: blocks of ranks, host by host."""

    case: str
    hosts: tuple[NetworkHost, ...]
    counts: tuple[int, ...]

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """For each rank its host, and its number there."""
        return [(host, local) for host, count in enumerate(self.counts) for local in range(count)]

    @contextlib.contextmanager
    def limited(self, rate: str) -> Iterator[None]:
        """Limits what each card sends and receives, for the duration of the block; with a delay, the first alone."""
        bits, round_trip_s = _rate(rate)
        with contextlib.ExitStack() as stack:
            if round_trip_s:
                stack.enter_context(delayed(self.hosts, bits_per_s=bits, round_trip_s=round_trip_s))
            elif rate != "none":
                for host in self.hosts:
                    for card in CARDS:
                        port, switch = _other_end(host, card)
                        for namespace, device in ((host.namespace, card), (switch, port)):
                            limit_card(namespace, device, bits)
                            unlimited = ["netns", "exec", namespace, "tc", "qdisc", "del", "dev", device, "root"]
                            stack.callback(ip, *unlimited)
            yield


@contextlib.contextmanager
def layout(case: str) -> Iterator[Layout]:
    """The hosts of a case, with congestion control reno (see README.md), for the duration of the block."""
    counts = ranks_of(case)
    with network_hosts(len(counts), cards=len(CARDS)) as hosts:
        for host in hosts:
            host.run(["sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"])
        yield Layout(case, hosts, tuple(counts))


class Counters:
    """What the hosts have done up to now.

    Attributes:
        processor_s: of all threads that are on the hosts.
    """

    def __init__(self, where: Layout) -> None:
        self.processor_s = sum(_processor_s(pid) for host in where.hosts for pid in host.pids())
        read = [ip("netns", "exec", host.namespace, "sh", "-c", _COUNTERS) for host in where.hosts]
        self._cards = [_cards(text) for text in read]
        self._connections = [_connections(text) for text in read]

    def on_cards(self, before: Counters) -> int:
        """Bytes since then by the cards' counters: of the host and direction that had most."""
        pairs = zip(before._cards, self._cards, strict=True)
        return max(now - earlier for old, new in pairs for earlier, now in zip(old, new, strict=True))

    def payload(self, before: Counters) -> int:
        """Bytes of payload since then on the TCP connections that are still there, without what was sent again."""
        received: dict[str, int] = {}
        sent: dict[str, int] = {}
        # What a host sends is what others have received: the kernel's count of sent bytes has some twice.
        for old, new in zip(before._connections, self._connections, strict=True):
            for (own, peer), count in new.items():
                more = count - old.get((own, peer), 0)
                to, by = _address(own), _address(peer)
                if to != by:
                    received[to] = received.get(to, 0) + more
                    sent[by] = sent.get(by, 0) + more
        return max([*received.values(), *sent.values()], default=0)


_FILES = [f"/sys/class/net/{card}/statistics/{way}_bytes" for card in CARDS for way in ("tx", "rx")]
_COUNTERS = f"cat {' '.join(_FILES)}; ss -tinHO"


def _cards(text: str) -> tuple[int, int]:
    """Bytes sent and received, of all cards."""
    counts = [int(line) for line in text.splitlines()[: len(_FILES)]]
    return sum(counts[::2]), sum(counts[1::2])


def _connections(text: str) -> dict[tuple[str, str], int]:
    """Bytes received on each connection, by its two ends."""
    found = {}
    for line in text.splitlines()[len(_FILES) :]:
        words, received = line.split(), re.search(r"\bbytes_received:(\d+)", line)
        found[words[3], words[4]] = int(received[1]) if received else 0
    return found


def _address(end: str) -> str:
    """Without its port; an IPv4 address in digits of IPv6 as what it is."""
    return end.rpartition(":")[0].removeprefix("[::ffff:").removesuffix("]")


def _processor_s(pid: int) -> float:
    total = 0.0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            total += int(file.read_text().split()[0]) * 1e-9
    return total


def _other_end(host: NetworkHost, card: str) -> tuple[str, str]:
    """The switch's port that a host's card is joined to, and the namespace of the switch."""
    found = re.search(rf"{card}@if(\d+):.* link-netns (\S+)", ip("-o", "-n", host.namespace, "link", "show", card))
    assert found is not None, f"{host.name}: {card} is joined to nothing"
    index, switch = found.groups()
    port = re.search(rf"^{index}: ([^@:]+)", ip("-o", "-n", switch, "link"), re.MULTILINE)
    assert port is not None, f"{switch} has no port of index {index}"
    return port[1], switch
