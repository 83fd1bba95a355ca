"""Interfaces, addresses and names: what several hosts would meet over."""

from __future__ import annotations

import socket
from pathlib import Path

from ...world.own_address import interfaces
from ..workers.cgroup import text_of
from .finding import Finding, assess

_SECTION = "Network"
_VIRTUAL = ("lo", "docker", "veth", "br-", "virbr", "ifb", "dummy", "tun", "tap", "cni", "flannel", "cali")


def look_at_network(root: Path = Path("/")) -> list[Finding]:
    """All findings of the network. `root` is where /sys and /proc are looked for (for tests)."""
    return [_loopback(), *_interfaces(root), _own_name(), _congestion(root), _rdma(root)]


def _loopback() -> Finding:
    """Workers of one host meet over 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=2) as client, server.accept()[0] as accepted:
                client.sendall(b"x")
                assert accepted.recv(1) == b"x"
    except OSError as error:
        advice = "Workers of one host meet there. Bring it up (ip link set lo up), or let the firewall pass it."
        return assess(_SECTION, "loopback", f"127.0.0.1 cannot be reached: {error.strerror or error}", bad=advice)
    return assess(_SECTION, "loopback", "127.0.0.1 answers")


def _interfaces(root: Path) -> list[Finding]:
    found: list[Finding] = []
    addresses = {name: str(address) for name, address, _ in reversed(interfaces())}  # IPv4 before IPv6
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name.startswith(_VIRTUAL):
            continue
        address, speed = addresses.get(folder.name, ""), text_of(folder / "speed").strip()
        up = text_of(folder / "operstate").strip() in ("up", "unknown")
        parts = [address or "no address", "up" if up else "down"]
        if speed.lstrip("-").isdigit() and int(speed) > 0:
            parts.append(f"{int(speed) / 1000:g} Gbit/s")
        facts = {"address": address, "up": up, "speed_mbit": speed, "mtu": text_of(folder / "mtu").strip()}
        state = "good" if up and address else "absent"
        found.append(Finding(_SECTION, folder.name, state, ", ".join(parts), facts=facts))
    return found or [Finding(_SECTION, "interfaces", "absent", "none but loopback: this host cannot meet others")]


def _own_name() -> Finding:
    """gloo and torch look up the host's own name; where it does not resolve, gloo fails or listens elsewhere."""
    name = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)})
    except OSError as error:
        advice = "One host needs nothing: `photinus run` sets GLOO_SOCKET_IFNAME=lo. For several, name the interface "
        advice += "(GLOO_SOCKET_IFNAME=eth0) or add the name to /etc/hosts."
        return assess(_SECTION, "host name", f"{name} does not resolve: {error.strerror}", note=advice)
    value = f"{name} is {', '.join(addresses)}"
    if all(address.startswith("127.") for address in addresses):
        advice = "Several hosts over gloo: set GLOO_SOCKET_IFNAME to the interface between them."
        return assess(_SECTION, "host name", f"{value}, which other hosts cannot reach", note=advice)
    return assess(_SECTION, "host name", value)


def _congestion(root: Path) -> Finding:
    control = text_of(root / "proc/sys/net/ipv4/tcp_congestion_control").strip()
    if control == "bbr":
        value = "bbr, which paces traffic inside the host too and slows gloo by a third or so"
        advice = "sysctl -w net.ipv4.tcp_congestion_control=reno (or cubic), unless the hosts are far apart."
        return assess(_SECTION, "TCP congestion", value, note=advice)
    return Finding(_SECTION, "TCP congestion", "good" if control else "absent", control or "not told by the kernel")


def _rdma(root: Path) -> Finding:
    devices = sorted(folder.name for folder in (root / "sys/class/infiniband").glob("*"))
    if devices:
        return Finding(_SECTION, "RDMA", "good", ", ".join(devices), facts={"devices": devices})
    return Finding(_SECTION, "RDMA", "absent", "no InfiniBand or RoCE device; hosts meet over TCP")
