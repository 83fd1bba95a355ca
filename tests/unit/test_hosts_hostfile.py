"""The file of hosts: DeepSpeed's and Open MPI's spellings, and a word with file and line for what is wrong."""

from __future__ import annotations

import pytest

from photinus.errors import UsageError
from photinus.run.ssh.hostfile import parse_hostfile, read_hostfile


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("worker-0 slots=16\nworker-1 slots=16\n", [("worker-0", 16), ("worker-1", 16)]),
        ("\n# all of them\n  a   slots=2   # the old one\n\tb slots=1", [("a", 2), ("b", 1)]),
        ("a slots = 4 max-slots=8\nb max_slots=8 slots=4", [("a", 4), ("b", 4)]),
        ("a\n10.0.0.2 slots=3\nfd00::1 slots=1", [("a", None), ("10.0.0.2", 3), ("fd00::1", 1)]),
        ("a slots=2\r\nb slots=2\r\n", [("a", 2), ("b", 2)]),
    ],
    ids=["DeepSpeed", "comments", "Open MPI", "addresses", "Windows"],
)
def test_hosts_and_slots_in_the_order_of_the_file(text, hosts):
    assert [(host.name, host.slots) for host in parse_hostfile(text)] == hosts


def test_another_account_is_for_ssh_and_not_part_of_the_name():
    (host,) = parse_hostfile("root@node1 slots=2")
    assert (host.name, host.user, host.destination) == ("node1", "root", "root@node1")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a slots=2\nb slots=two\n", "hosts:2: slots=two needs a whole number"),
        ("a slots=²", "hosts:1: slots=² needs a whole number"),
        ("a slots=0", "hosts:1: slots=0 needs a whole number, 1 or more"),
        ("a slots=-1", "hosts:1: slots=-1 needs a whole number"),
        ("a slot=2", "hosts:1: 'slot=2' is not valid. Only slots=N may follow"),
        ("a 4", "hosts:1: '4' is not valid"),
        ("slots=4", "hosts:1: 'slots=4' is not a host name"),
        ("a slots=1 slots=2", "hosts:1: slots is given twice, 1 and 2"),
        ("a slots=1\n\na slots=2", "hosts:3: a is already listed at hosts:1"),
        ("a slots=1\nroot@a slots=2", "hosts:2: a is already listed at hosts:1"),
        ("a:4", "hosts:1: a:4 is MPICH's spelling; write `a slots=4`"),
        ("-oProxyCommand=x slots=1", "hosts:1: '-oProxyCommand=x' is not a host name"),
        ("-v slots=1", "it starts with a dash"),
        ("# nothing\n", "hosts names no host"),
        ("", "hosts names no host"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number(text, told):
    with pytest.raises(UsageError) as caught:
        parse_hostfile(text, "hosts")
    assert told in str(caught.value)


def test_a_missing_file_is_an_error_and_not_a_run_on_this_host_alone(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere cannot be read: No such file"):
        read_hostfile(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"~nobody-of-that-name/hosts cannot be read: No such file"):
        read_hostfile("~nobody-of-that-name/hosts")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="is not a text file"):
        read_hostfile(str(tmp_path / "binary"))
