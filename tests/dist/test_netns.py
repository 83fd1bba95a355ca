"""The hosts that tests make out of network namespaces behave like hosts, and nothing of them is left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.netns import network_hosts

pytestmark = pytest.mark.slow

ANSWER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        connection.sendall(socket.gethostname().encode())
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as connection:
    print(socket.gethostname(), "asks", connection.recv(100).decode())
"""


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_hosts_have_names_find_each_other_and_are_removed():
    with network_hosts(3) as (first, second, third):
        assert all(host.namespace in namespaces() for host in (first, second, third))
        server = third.start([sys.executable, "-c", ANSWER], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        assert third.pids() == [server.pid]
        assert first.run([sys.executable, "-c", ASK, third.name, "5"]) == "host-0 asks host-2\n"
        server.communicate(timeout=20)
        assert server.returncode == 0
        # Each has a loopback of its own, and the same port is free on the others.
        own = second.run([sys.executable, "-c", "import socket; socket.create_server(('127.0.0.1', 5000)); print(1)"])
        assert own == "1\n"
    assert first.namespace not in namespaces()


def test_a_host_that_is_cut_off_is_not_reached_and_comes_back():
    with network_hosts(2) as (first, second):
        server = second.start([sys.executable, "-c", ANSWER], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        server.stdout.readline()
        second.cut_off()
        with pytest.raises(AssertionError, match="ended with 1"):
            first.run([sys.executable, "-c", ASK, second.name, "1"])
        second.connect()
        assert first.run([sys.executable, "-c", ASK, second.name, "10"]) == "host-0 asks host-1\n"
        server.communicate(timeout=20)


def test_a_process_that_is_left_on_a_host_fails_the_test_and_is_killed():
    with pytest.raises(AssertionError, match=r"processes are left on the hosts:\nhost-1: \d+ sleep 1000"):
        with network_hosts(2) as (_, second):
            left = second.start(["sleep", "1000"])
    assert left.wait(timeout=5) == -9
