"""Slurm's node lists and tasks per node, as it writes them into the environment."""

from __future__ import annotations

import pytest

from photinus.job.slurm import expand_hosts, tasks_per_host


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("node[01-03,7],gpu-a", "node01 node02 node03 node7 gpu-a"),
        ("node[08-11]", "node08 node09 node10 node11"),
        ("n[099-101]x", "n099x n100x n101x"),
        ("a,b[2],c.example.org", "a b2 c.example.org"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        (" a , b ", "a b"),
        ("[1-2]", "1 2"),
    ],
)
def test_a_node_list_is_expanded_in_its_order(text: str, hosts: str) -> None:
    assert expand_hosts(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "'' is not a name like a or node[1-3,7]"),
        ("a,,b", "'' is not a name"),
        ("node[1-3", "'node[1-3' is not a name"),
        ("node1-3]", "is not a name"),
        ("node[[1]]", "is not a name"),
        ("node[]", "is not a name"),
        ("a,node[2,1-x]", "'node[2,1-x]' is not a name"),
        ("node[3-1]", "an empty range"),
        ("node[1-999999999999]", "more than 100000 hosts"),
        ("r[1-1000]n[1-1000]", "more than 100000 hosts"),
    ],
)
def test_what_is_no_node_list_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="host list") as refused:
        expand_hosts(text)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("text", "counts"), [("4", (4,)), ("2(x3),1", (2, 2, 2, 1)), ("1,2", (1, 2)), ("16(x2)", (16, 16))]
)
def test_tasks_per_node_are_expanded(text: str, counts: tuple[int, ...]) -> None:
    assert tasks_per_host(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "2(x99999999)", "-1"])
def test_what_is_no_number_of_tasks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of tasks"):
        tasks_per_host(text)
