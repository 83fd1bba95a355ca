"""By which address and interface a host is known to others, whatever its own name means to it."""

from __future__ import annotations

import ipaddress
import shutil
import socket
import subprocess
import sys

import pytest

from photinus.job import own_address as module
from photinus.job.own_address import addresses_of_interfaces, interface_of, outside_addresses, own_address


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reaches_from", lambda target: {"other": "10.0.0.7"}.get(target, "127.0.0.1"))
    monkeypatch.setattr(module, "outside_addresses", lambda: ["10.1.0.7"])


def test_loopback_is_an_interface_and_another_hosts_address_is_none():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.1.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert all(interface_of(address) not in (None, "lo") for address in outside_addresses())


def test_addresses_of_ipv6_that_mean_something_on_one_cable_only_are_left_out(monkeypatch):
    listed = [("lo", ipaddress.ip_address(address), 0x49) for address in ("2001:db8::5", "fe80::5", "10.0.0.7")]
    monkeypatch.setattr(module, "_all_addresses", lambda: listed)
    assert interface_of("2001:db8::5") == "lo"
    assert interface_of("fe80::5") is None
    assert interface_of("fe80::5%eth7") == "eth7"
    assert [str(address) for _, address, _ in module.interfaces()] == ["10.0.0.7", "2001:db8::5"]


ASK = """
from photinus.job.own_address import local_addresses_of
from photinus.job.own_address import interface_of, outside_addresses
print(outside_addresses(), [interface_of(each) for each in ("10.1.1.1", "10.1.1.2", "::ffff:10.1.1.2", "10.1.1.3")])
print(local_addresses_of("10.1.1.2"), local_addresses_of("10.9.9.9"), local_addresses_of("127.0.0.9"))
"""


def test_all_addresses_of_a_card_are_its_own_and_a_bind_that_works_proves_nothing():
    card = "ip link add d0 type veth peer name d1 && ip addr add 10.1.1.1/24 dev d0 && ip addr add 10.1.1.2/24 dev d0"
    nonlocal_bind = "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind"
    command = f'ip link set lo up && {card} && ip link set d0 up && ip link set d1 up && {nonlocal_bind} && exec "$@"'
    words = ["unshare", "-n", "sh", "-c", command, "sh"]
    if shutil.which("ip") is None or subprocess.run([*words, "true"], capture_output=True).returncode != 0:
        pytest.skip("network namespaces cannot be made here")
    ended = subprocess.run([*words, sys.executable, "-c", ASK], capture_output=True, text=True, timeout=60)
    assert ended.stdout.splitlines() == [
        "['10.1.1.1', '10.1.1.2'] ['d0', 'd0', 'd0', None]",
        "['10.1.1.2'] [] ['127.0.0.9']",
    ], ended.stderr


def test_a_card_without_an_ipv4_address_goes_by_its_ipv6_one_and_a_wrong_one_is_told_with_those_there_are(monkeypatch):
    parts = [("eth0", "10.0.0.7"), ("eth0", "2001:db8::7"), ("eth1", "2001:db8::8")]
    cards = [(name, ipaddress.ip_address(address), 0x40) for name, address in parts]
    monkeypatch.setattr(module, "interfaces", lambda: cards)
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "eth0"), (2, "eth1"), (3, "eth2")])
    assert addresses_of_interfaces(["eth1", "eth0"]) == ["2001:db8::8", "10.0.0.7"]
    assert outside_addresses() == ["10.0.0.7"]
    there = r"cards with one: eth0 \(10.0.0.7\), eth1 \(2001:db8::8\)"
    with pytest.raises(ValueError, match=rf"eth2 of host .* has no address .*{there}"):
        addresses_of_interfaces(["eth0", "eth2"])
    with pytest.raises(ValueError, match=rf"ib0 of host .* does not exist.*{there}"):
        addresses_of_interfaces(["ib0"])
    del cards[0]
    assert outside_addresses() == ["2001:db8::7", "2001:db8::8"]


@pytest.mark.parametrize("name", ["127.0.0.1", "127.0.1.1", "localhost"])
def test_an_address_is_meant_as_it_stands(outside, name):
    assert own_address(name, ["other"]) in ("127.0.0.1", "127.0.1.1", "::1")


def test_a_name_that_is_only_loopback_gives_way_to_what_others_reach(outside, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 1, 6, "", ("127.0.1.1", 0))])
    assert own_address("node1", ["other"]) == "10.0.0.7"
    assert own_address("node1") == "10.1.0.7"


def test_a_host_that_does_not_know_its_own_name_has_an_address_and_another_name_is_an_error(outside, monkeypatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert own_address(socket.gethostname()) == "10.1.0.7"
    with pytest.raises(socket.gaierror):
        own_address("no-such-host")
