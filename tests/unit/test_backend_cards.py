"""At which addresses a rank is reached by those of other hosts."""

from __future__ import annotations

import pytest

from photinus.backend import hosts
from photinus.backend.hosts import RankInfo, choose_addresses


@pytest.fixture(autouse=True)
def this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with two cards, of which the second has the way to 10.0.0.x."""
    addresses = {"eth0": "192.168.1.7", "eth1": "10.0.0.7", "lo": "127.0.0.1"}
    monkeypatch.setattr(hosts, "_addresses", [])
    monkeypatch.setattr(hosts, "addresses_of_interfaces", lambda names: [addresses[name] for name in names])
    monkeypatch.setattr(hosts, "outside_addresses", lambda: ["192.168.1.7", "10.0.0.7"])
    monkeypatch.setattr(hosts, "reaches_from", lambda target: "10.0.0.7" if target.startswith("10.") else "192.168.1.7")
    monkeypatch.delenv("PHOTINUS_INTERFACE", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


def _far(*addresses: str | None) -> list[RankInfo]:
    """Two ranks on this host, beside the store, and one on another for each address."""
    here = [RankInfo("a", "a", pid, "net-a", "127.0.1.1") for pid in (1, 2)]
    return here + [RankInfo(f"b{i}", f"b{i}", 9, f"net-b{i}", address) for i, address in enumerate(addresses)]


def test_a_rank_beside_the_store_is_reached_where_it_reaches_the_other_hosts() -> None:
    assert choose_addresses(_far("10.0.0.8"), 0) == ["10.0.0.7"]


def test_a_rank_whose_store_is_elsewhere_is_reached_where_it_reaches_that() -> None:
    members = [RankInfo("a", "a", 1, "net-a", "10.0.0.7"), *_far("192.168.1.8")[2:]]
    assert choose_addresses(members, 0) == ["10.0.0.7"]


def test_without_a_server_the_first_address_is_taken_and_none_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "outside_addresses", list)
    with pytest.raises(OSError, match=r"host a has no network card.*PHOTINUS_INTERFACE"):
        choose_addresses(_far(None), 0)
    monkeypatch.setattr(hosts, "outside_addresses", lambda: ["192.168.1.7", "10.0.0.7"])
    assert choose_addresses(_far(None), 0) == ["192.168.1.7"]


def test_hosts_that_are_one_machine_meet_on_loopback_unless_a_card_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    members = [RankInfo(host, host, 1, "net", "127.0.0.1") for host in ("a", "b")]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert choose_addresses(members, 1) == ["127.0.0.1"]
    monkeypatch.setattr(hosts, "_addresses", [])
    monkeypatch.setenv("PHOTINUS_INTERFACE", "eth1")
    assert choose_addresses(members, 1) == ["10.0.0.7"]


def test_named_cards_win_over_the_launchers_and_that_over_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert choose_addresses(_far("10.0.0.8"), 0) == ["192.168.1.7"]
    monkeypatch.setattr(hosts, "_addresses", [])
    monkeypatch.setenv("PHOTINUS_INTERFACE", "eth1, eth0")
    assert choose_addresses(_far("10.0.0.8"), 0) == ["10.0.0.7", "192.168.1.7"]


def test_a_process_keeps_the_addresses_of_its_first_group_over_hosts_unless_these_are_loopback() -> None:
    one_machine = [RankInfo(host, host, 1, "net-a") for host in ("a", "a2")]
    assert choose_addresses(one_machine, 0) == ["127.0.0.1"]
    assert choose_addresses(_far("10.0.0.8"), 0) == ["10.0.0.7"]
    assert choose_addresses(_far("192.168.1.8"), 0) == ["10.0.0.7"]
    assert choose_addresses(one_machine, 0) == ["10.0.0.7"]
