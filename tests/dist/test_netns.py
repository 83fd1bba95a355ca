"""The hosts that tests make out of network namespaces behave like hosts, and nothing of them is left."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.delayed_network import delayed
from tests.netns import network_hosts

pytestmark = pytest.mark.slow
MIB = 1 << 20

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


FAR = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=10) as connection:
    begin = time.monotonic()
    connection.sendall(b"?")
    connection.recv(1)
    print(time.monotonic() - begin)
    begin = time.monotonic()
    connection.sendall(bytes(2 << 20))
    connection.recv(1)
    print(time.monotonic() - begin)
"""
FAR_ANSWER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        for size in (1, 2 << 20):
            while size:
                size -= len(connection.recv(size))
            connection.sendall(b"!")
"""


def test_on_a_delayed_network_answers_take_the_round_trip_and_bytes_the_rate():
    with network_hosts(2) as (first, second):
        with delayed((first, second), bits_per_s=100e6, round_trip_s=0.05):
            server = first.start([sys.executable, "-c", FAR_ANSWER], stdout=subprocess.PIPE, text=True)
            assert server.stdout is not None
            server.stdout.readline()
            round_trip_s, carried_s = map(float, second.run([sys.executable, "-c", FAR, first.address]).split())
            server.communicate(timeout=20)
        assert round_trip_s >= 0.05
        # What a token bucket holds goes at once; headers take as much again as that.
        assert carried_s >= 2 * MIB * 8 / 100e6
        back = first.start([sys.executable, "-c", ANSWER], stdout=subprocess.PIPE, text=True)
        assert back.stdout is not None
        back.stdout.readline()
        assert second.run([sys.executable, "-c", ASK, first.name, "5"]) == "host-1 asks host-0\n"
        back.communicate(timeout=20)
