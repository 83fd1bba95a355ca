"""`photinus doctor --hosts`: every pair is tried both ways, and what was found is told so that it can be mended."""

from __future__ import annotations

import itertools
import socket
import time

import pytest
from rich.console import Console

from photinus.run.ssh.remote_probe import answer
from photinus.tools.doctor.hosts import Pair, judge, matrix, rounds

FACTS = {"photinus": "1.0", "python": "3.11.2", "torch": "2.13.0+cpu", "cores": 2}


def facts(**by_host):
    return {name: {**FACTS, "address": f"10.0.0.{number}", **own} for number, (name, own) in enumerate(by_host.items())}


def pair(source, target, error="", rate=1e9):
    return Pair(source, target, error=error) if error else Pair(source, target, 1e-4, rate)


@pytest.mark.parametrize("count", range(2, 9))
def test_rounds_have_every_ordered_pair_once_and_no_host_twice_at_a_time(count):
    found = rounds(count)
    assert sorted(itertools.chain(*found)) == sorted(itertools.permutations(range(count), 2))
    for matches in found:
        taking_part = list(itertools.chain(*matches))
        assert len(taking_part) == len(set(taking_part))


def test_one_host_has_no_pairs():
    assert rounds(1) == []


def told(findings):
    return {finding.name: (finding.state, finding.value, finding.advice) for finding in findings}


def test_all_well():
    found = judge(facts(a={}, b={}), {"a": 0.0, "b": 0.2}, {}, [pair("a", "b"), pair("b", "a")])
    assert {finding.state for finding in found} == {"good"}
    assert "2 of 2 directions work: round trip 0.10 to 0.10 ms, 8.00 to 8.00 Gbit/s" in told(found)["all"][1]


def test_a_host_that_is_reached_but_does_not_reach_is_told_so():
    found = told(judge(facts(a={}, b={}), {"a": 0, "b": 0}, {}, [pair("a", "b", "timed out"), pair("b", "a")]))
    state, value, advice = found["a to b"]
    assert state == "bad"
    assert value == "b reaches a, but a does not reach b (timed out)"
    assert "a firewall on b" in advice


def test_hosts_that_do_not_reach_each_other_are_told_once():
    pairs = [pair("a", "b", "refused"), pair("b", "a", "refused")]
    found = told(judge(facts(a={}, b={}), {"a": 0, "b": 0}, {}, pairs))
    assert found["a, b"][:2] == ("bad", "they do not reach each other (refused)")
    assert len(found) == 3


def test_both_directions_are_named_where_they_fail_differently():
    pairs = [pair("a", "b", "refused"), pair("b", "a", "timed out")]
    found = told(judge(facts(a={}, b={}), {"a": 0, "b": 0}, {}, pairs))
    assert "(refused)" in found["a to b"][1]
    assert "(timed out)" in found["b to a"][1]


@pytest.mark.parametrize(
    ("own", "bad"),
    [
        ({"torch": "2.12.0+cpu"}, True),
        ({"torch": "2.13.0+cu126"}, False),
        ({"torch": None}, True),
        ({"python": "3.11.9"}, False),
        ({"python": "3.12.0"}, True),
        ({"photinus": "0.9"}, True),
    ],
)
def test_a_host_with_another_version_is_named(own, bad):
    found = told(judge(facts(a={}, b={}, c=own), {"a": 0, "b": 0, "c": 0}, {}, []))
    assert (found["c"][0] == "bad") == bad
    assert found["a"][0] == "good"


def test_a_clock_that_is_off_is_worth_a_word_and_no_fault():
    found = told(judge(facts(a={}, b={}), {"a": 0.0, "b": -3600.0}, {}, []))
    assert found["b"][0] == "good"
    assert "its clock is 3600 s behind (nothing depends on it)" in found["b"][1]


def test_a_host_that_was_not_started_is_bad_with_its_advice():
    said = "host b: ssh exited with code 255: No route to host. Try by hand: ssh b true"
    found = told(judge(facts(a={}), {"a": 0}, {"b": said}, []))
    assert found["b"] == ("bad", "ssh exited with code 255: No route to host", "Try by hand: ssh b true")


def test_a_link_much_slower_than_the_others_is_noted():
    pairs = [pair(*both) for both in itertools.permutations("abc", 2)]
    pairs[0] = pair("a", "b", rate=1e8)
    found = told(judge(facts(a={}, b={}, c={}), {"a": 0, "b": 0, "c": 0}, {}, pairs))
    assert found["a to b"][0] == "note"
    assert "0.80 Gbit/s, where the hosts' usual pair has 8.00 Gbit/s" in found["a to b"][1]


@pytest.mark.parametrize("count", [2, 5, 9])
def test_the_matrix_fits_into_the_terminal(count):
    names = [f"a-host-with-a-long-name-{number}" for number in range(count)]
    pairs = [pair(*both) for both in itertools.permutations(names, 2)]
    pairs[0] = pair(names[0], names[1], "timed out")
    console = Console(width=80, highlight=False)
    with console.capture() as printed:
        matrix(names, pairs, console)
    text = printed.get()
    assert max(map(len, text.splitlines())) <= 80
    assert "✗ timed out" in text
    assert text.count("0.10  8.00") == count * (count - 1) - 1


@pytest.fixture
def serving():
    told = answer({"do": "serve", "name": "127.0.0.1", "otherwise": None, "alone": True, "secret": "s"})
    return told["serving"]


def test_a_probe_measures_round_trip_and_bandwidth(serving):
    begun = time.monotonic()
    found = answer({"do": "probe", "secret": "s", "bytes": 8 << 20, "seconds": 0.2, **serving})["probed"]
    assert time.monotonic() - begun < 3.0
    assert 0 < found["rtt_s"] < 0.5
    assert found["bytes"] > 0
    assert found["bytes_per_s"] > 0


def test_a_probe_without_the_secret_is_cut_off(serving):
    found = answer({"do": "probe", "secret": "other", "bytes": 1, "seconds": 0.1, **serving})["probed"]
    assert found == {"error": "cut off"}


def test_a_probe_of_a_closed_port_says_that_it_was_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = answer({"do": "probe", "secret": "s", "bytes": 1, "seconds": 0.1, "address": "127.0.0.1", "port": port})
    assert found == {"probed": {"error": "refused"}}
