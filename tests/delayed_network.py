"""A network between hosts that are far from each other: what they send arrives late.

    with network_hosts(2) as hosts, delayed(hosts, bits_per_s=100e6, round_trip_s=0.02):
        ...

For kernels without netem. While the block lasts each host's eth0 is a TAP device with the same address, whose rate tc's
token bucket limits, so that a host's own packets wait in its sockets, as before a real card. A process of Python is the
switch: what it carries arrives half of the round trip later, at the rate of its host's card, unless a queue there is
full. A packet has 1,500 bytes at most, and takes time and place with its headers; but TCP hands over up to 64 KiB of
them in one piece (TSO), and so they travel and get lost, which keeps the switch under a fifth of a core at 100 Mbit/s
both ways. A machine on which it waits for a processor for some 30 ms loses packets.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE))

from tests.netns import BURST_BYTES, NetworkHost, ip, limit_card  # noqa: E402

__all__ = ["delayed"]

Packet = tuple[float, int, int, bytes]
"""When it has to be looked at next, its number, the host that it goes to, and its bytes."""
_START_S = 20.0
_VNET_BYTES = 10  # struct virtio_net_hdr, before each packet
_ADDRESS_BYTES = 6
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP_NO_INFORMATION_VNET = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
_CHECKSUMS_TSO = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def delayed(hosts: Sequence[NetworkHost], *, bits_per_s: float, round_trip_s: float) -> Iterator[None]:
    """Puts the hosts' eth0 on such a network for the duration of the block; connections do not outlive the change.

    Args:
        bits_per_s: of each card, in each direction.
        round_trip_s: of a small packet and its answer, where nothing else is under way. What waits for a host's card
            may be what the rate carries in that time and a burst (BURST_BYTES).
    """
    words = [sys.executable, __file__, repr(bits_per_s), repr(round_trip_s), *(host.namespace for host in hosts)]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.callback(_to_wire, host)
            ip("-n", host.namespace, "link", "set", "eth0", "down")
            ip("-n", host.namespace, "link", "set", "eth0", "name", "wired0")
            ip("-n", host.namespace, "addr", "flush", "dev", "wired0")
        process = stack.enter_context(subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL))
        stack.callback(process.kill)
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], _START_S)[0] and process.stdout.readline() == b"ready\n"
        assert ready, f"the switch did not start within {_START_S:g} s: {' '.join(words)}"
        for host in hosts:
            ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
            limit_card(host.namespace, "eth0", bits_per_s)
        yield
        assert process.poll() is None, f"the switch has ended with {process.returncode}"


def _to_wire(host: NetworkHost) -> None:
    ip("-n", host.namespace, "link", "set", "wired0", "name", "eth0")
    ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    ip("-n", host.namespace, "link", "set", "eth0", "up")


# --- the switch


@dataclass
class Switch:
    """Packets that are under way, and those that wait for the card of their host.

    Attributes:
        files: of the hosts' devices.
        free_at: when all that came for a host will have gone through its card.
        hosts: the host of an address of Ethernet, as far as one has sent.
    """

    files: Sequence[int]
    bytes_per_s: float
    queue_bytes: float
    one_way_s: float
    free_at: list[float]
    hosts: dict[bytes, int] = field(default_factory=dict)
    under_way: list[Packet] = field(default_factory=list)
    arrived: list[Packet] = field(default_factory=list)
    count: int = 0

    def take(self, source: int, packet: bytes, now: float) -> None:
        """What a host has sent begins its way."""
        to, by = (packet[_VNET_BYTES + at :][:_ADDRESS_BYTES] for at in (0, _ADDRESS_BYTES))
        self.hosts[by] = source
        everybody = [host for host in range(len(self.files)) if host != source]
        for host in [self.hosts[to]] if to in self.hosts else everybody:
            self.count += 1
            heapq.heappush(self.under_way, (now + self.one_way_s, self.count, host, packet))

    def deliver(self, now: float) -> None:
        """What has come goes through the cards of its hosts, and from there to these."""
        while self.under_way and self.under_way[0][0] <= now:
            when, number, to, packet = heapq.heappop(self.under_way)
            if (self.free_at[to] - when) * self.bytes_per_s > self.queue_bytes:
                continue
            # Its first bit was there long before its last, so alone it takes no time here.
            self.free_at[to] = max(when, self.free_at[to] + _wire_bytes(packet) / self.bytes_per_s)
            heapq.heappush(self.arrived, (self.free_at[to], number, to, packet))
        while self.arrived and self.arrived[0][0] <= now:
            _, _, to, packet = heapq.heappop(self.arrived)
            with contextlib.suppress(OSError):  # the host is down, or takes no more
                os.write(self.files[to], packet)

    def next_at(self) -> float:
        """When deliver() has something to do."""
        return min((queue[0][0] for queue in (self.under_way, self.arrived) if queue), default=float("inf"))

    def run(self) -> None:
        """Carries packets for ever."""
        sources = {file: host for host, file in enumerate(self.files)}
        while True:
            wait_s = self.next_at() - time.monotonic()
            for file in select.select(self.files, [], [], min(max(wait_s, 0.0), 1.0))[0]:
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self.take(sources[file], os.read(file, 1 << 17), time.monotonic())
            self.deliver(time.monotonic())


def _wire_bytes(packet: bytes) -> int:
    """Of all packets that this becomes on a wire."""
    _, kind, _, segment_bytes, tcp_at = struct.unpack_from("<BBHHH", packet)
    length = len(packet) - _VNET_BYTES
    if kind == 0:
        return length
    header_bytes = tcp_at + (packet[_VNET_BYTES + tcp_at + 12] >> 4) * 4
    segments = -(-(length - header_bytes) // segment_bytes)
    return int(length + (segments - 1) * header_bytes)


def _open_card(namespace: str) -> int:
    """A new TAP device eth0 there, without an address."""
    _enter(f"/run/netns/{namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _TAP_NO_INFORMATION_VNET))
    fcntl.ioctl(file, _TUNSETOFFLOAD, _CHECKSUMS_TSO)
    return file


def _enter(path: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"entering the network namespace {path}")


def _main(bits_per_s: float, round_trip_s: float, namespaces: Sequence[str]) -> None:
    bytes_per_s = bits_per_s / 8
    queue_bytes = bytes_per_s * round_trip_s + BURST_BYTES
    with open("/proc/self/ns/net") as home:
        files = [_open_card(namespace) for namespace in namespaces]
        _enter(f"/proc/self/fd/{home.fileno()}")
    os.setpriority(os.PRIO_PROCESS, 0, -10)  # a network does not wait for processors
    print("ready", flush=True)
    Switch(files, bytes_per_s, queue_bytes, round_trip_s / 2, [0.0] * len(files)).run()


if __name__ == "__main__":
    _main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
