"""`photinus doctor --hosts`: every pair is tried both ways, and what was found is reported with what to do."""

from __future__ import annotations

import itertools
import json

import pytest

from photinus.cli.main import main
from photinus.tools.doctor.host_rank import rounds
from photinus.tools.doctor.hosts import Pair, judge, print_pairs, troubles_of
from photinus.tools.doctor.plan import JobOutput, send

FACTS = {"photinus": "1.0", "python": "3.11.2", "torch": "2.13.0+cpu", "cores": 2, "clock_ahead_s": 0.2, "bad": []}


def facts(**by_host):
    return {name: {**FACTS, "address": f"10.0.0.{number}", **own} for number, (name, own) in enumerate(by_host.items())}


def pair(source, target, error="", rate=1e9):
    return Pair(source, target, error=error) if error else Pair(source, target, 1e-4, rate)


@pytest.mark.parametrize("count", range(1, 9))
def test_rounds_have_every_ordered_pair_once_and_no_host_twice_at_a_time(count):
    found = rounds(count)
    assert sorted(itertools.chain(*found)) == sorted(itertools.permutations(range(count), 2))
    for matches in found:
        taking_part = list(itertools.chain(*matches))
        assert len(taking_part) == len(set(taking_part))


# ---- a job


@pytest.mark.seconds
def test_two_names_of_this_host_are_examined_as_two_hosts_without_ssh(capsys):
    assert main(["doctor", "--hosts", "localhost,127.0.0.1", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(pair["source"], pair["target"]) for pair in told["pairs"]} == {
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "localhost"),
    }
    assert all(pair["bytes_per_s"] > 1e6 and not pair["error"] for pair in told["pairs"])
    assert [found["name"] for found in told["findings"]][:3] == ["localhost", "127.0.0.1", "all"]


def test_what_ranks_tell_is_found_between_other_output_however_it_is_cut(capsys):
    heard = []
    said = JobOutput(heard.append)
    send(rank=1, cores=4)
    for letter in f"photinus: 2 hosts\n[1] {capsys.readouterr().out}more\n":
        said.write(letter)
    assert heard == [{"rank": 1, "cores": 4}]
    assert said.rest == "2 hosts\nmore\n"


@pytest.mark.parametrize(
    ("said", "troubles"),
    [
        ("LaunchError: host b: ssh failed. Try it. Nothing was started.\n", {"b": "ssh failed. Try it."}),
        ("2 of 2 hosts cannot be used\n  host a: no.\n  host b: neither.\n", {"a": "no.", "b": "neither."}),
        ("host b: LaunchError: the leader was not there\n", {"b": "the leader was not there"}),
        ("host a (10.0.0.1) was lost: it left\n", {"a": "(10.0.0.1) was lost: it left"}),
        ("the job failed: host b was the first to end, see above\n", {"b": "was the first to end, see above"}),
        (
            "LaunchError: the job ended: only 1 of 2 hosts ready within 30 s; here: a (10.0.0.1)\n",
            {
                "b": "it does not reach a, where the hosts meet. Let TCP pass on all ports between the hosts (a "
                "firewall on a or between?), and name a by an address of a network that they share."
            },
        ),
        ("rank 0 left\nout of memory\n", dict.fromkeys("ab", "out of memory")),
        ("", dict.fromkeys("ab", "the job ended and said nothing")),
    ],
)
def test_a_job_that_fails_is_some_hosts_trouble_or_that_of_all(said, troubles):
    assert troubles_of("ab", said) == troubles


# ---- what it means


def told(findings):
    return {finding.name: (finding.state, finding.value, finding.advice) for finding in findings}


def test_all_well():
    found = judge(facts(a={}, b={}), {}, [pair("a", "b"), pair("b", "a")])
    assert {finding.state for finding in found} == {"good"}
    assert "2 of 2 directions work: round trip 0.10 to 0.10 ms, 8.00 to 8.00 Gbit/s" in told(found)["all"][1]


def test_a_direction_that_does_not_work_is_bad_and_says_if_the_other_does():
    found = told(judge(facts(a={}, b={}), {}, [pair("a", "b", "no answer"), pair("b", "a")]))
    state, value, advice = found["a to b"]
    assert (state, value) == ("bad", "not reached: no answer (b reaches a)")
    assert "a firewall on b" in advice
    found = told(judge(facts(a={}, b={}), {}, [pair("a", "b", "no answer"), pair("b", "a", "refused")]))
    assert [found[name][1] for name in ("a to b", "b to a")] == ["not reached: no answer", "not reached: refused"]


@pytest.mark.parametrize(
    ("own", "bad"),
    [
        ({"torch": "2.12.0+cpu"}, True),
        ({"torch": "2.13.0+cu126"}, False),
        ({"python": "3.11.9"}, False),
        ({"python": "3.12.0"}, True),
        ({"photinus": "0.9"}, True),
    ],
)
def test_a_host_with_another_version_is_named(own, bad):
    found = told(judge(facts(a={}, b={}, c=own), {}, []))
    assert (found["c"][0] == "bad") == bad
    assert found["a"][0] == "good"


def test_what_is_bad_on_a_host_is_named_with_the_host():
    little = {"name": "open files", "value": "16", "advice": "ulimit -n 4096"}
    assert told(judge(facts(a={"bad": [little]}), {}, []))["a: open files"] == ("bad", "16", "ulimit -n 4096")


def test_a_clock_that_is_off_is_worth_a_word_and_no_fault():
    found = told(judge(facts(a={}, b={"clock_ahead_s": -3600.0}), {}, []))
    assert found["b"][0] == "good"
    assert "its clock is 3600 s behind (nothing depends on it)" in found["b"][1]


def test_a_host_that_takes_no_part_is_bad_with_its_advice_and_named_as_not_measured():
    found = told(judge(facts(a={}), {"b": "ssh exited with code 255: No route to host. Try by hand: ssh b true"}, []))
    assert found["b"] == ("bad", "ssh exited with code 255: No route to host", "Try by hand: ssh b true")
    assert found["not measured"][1] == "to and from b"


def test_a_link_much_slower_than_the_others_is_noted():
    pairs = [pair(*both) for both in itertools.permutations("abc", 2)]
    pairs[0] = pair("a", "b", rate=1e8)
    found = told(judge(facts(a={}, b={}, c={}), {}, pairs))
    assert found["a to b"][0] == "note"
    assert "0.80 Gbit/s, where the hosts' usual pair has 8.00 Gbit/s" in found["a to b"][1]


@pytest.mark.parametrize("count", [2, 5, 9])
def test_the_matrix_fits_into_the_terminal(count, capsys):
    names = [f"a-host-with-a-long-name-{number}" for number in range(count)]
    pairs = [pair(*both) for both in itertools.permutations(names, 2)]
    pairs[0] = pair(names[0], names[1], "timed out")
    print_pairs(names, pairs, 80)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("✗") == 1
    assert text.count("0.10  8.00") == count * (count - 1) - 1
