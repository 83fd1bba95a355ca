"""However a job over ssh is ended, nothing of it is left on any host, and soon."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.test_run import script
from tests.over_ssh import (
    STAY,
    Place,
    alive,
    assert_gone_within,
    assert_only_the_server_is_left,
    finish,
    start_staying,
    two_hosts,
    words_of,
)

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with two_hosts(tmp_path) as made:
        yield made


def test_ctrl_c_ends_all_hosts_in_two_seconds(place):
    process, pids = start_staying(place)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    took = time.monotonic() - begun
    assert not any(map(alive, pids)), ended.err
    assert ended.code == 130
    assert ended.err.count("ended by SIGINT") == 1
    assert "photinus: ended by SIGINT: the job on 2 hosts was ended" in ended.err
    assert took < 2.5, took


def test_a_second_ctrl_c_ends_at_once(place):
    process, pids = start_staying(place, "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + STAY)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert time.monotonic() - begun < 1.5
    assert ended.code == 130
    assert_gone_within(pids, 1.0)


def test_a_killed_command_leaves_nothing_on_any_host(place):
    process, pids = start_staying(place)
    begun = time.monotonic()
    process.kill()
    finish(process)
    assert_gone_within(pids, 8.0)
    assert_only_the_server_is_left(place, 8.0)
    print(f"gone after {time.monotonic() - begun:.1f} s")


def test_a_command_killed_at_any_moment_leaves_nothing(place):
    hosts = place.hostfile("host-0 slots=1\nhost-1 slots=1\n")
    moments = random.Random(5)
    for number in range(12):
        process = place.start("--hostfile", hosts, script(place.folder, STAY), place.folder)
        time.sleep(moments.uniform(0.05, 6.0))
        process.kill()
        finish(process)
        assert_only_the_server_is_left(place, 12.0)
        print(f"{number + 1} of 12: nothing left")


def test_a_host_that_is_cut_off_ends_the_job_within_ten_seconds(tmp_path):
    alive_checks = "ClientAliveInterval 3\nClientAliveCountMax 2"  # so that the server there notices as well
    with two_hosts(tmp_path, alive_checks) as place:
        process, pids = start_staying(place, STAY, "--rdzv-conf", "heartbeat_timeout=6")
        place.second.cut_off()
        begun = time.monotonic()
        ended = finish(process)
        assert time.monotonic() - begun < 10.5
        assert ended.code == 1
        assert "host host-1 (192.168.78.2) was lost: no sign of life" in ended.err
        assert_gone_within(pids, 30.0)
        assert_only_the_server_is_left(place, 30.0)


def test_a_killed_launcher_ends_the_job_and_names_the_host(place):
    process, pids = start_staying(place)
    # The guard is a fork of the launcher, and younger.
    launcher = min(pid for pid in place.second.pids() if "photinus.run.remote" in words_of(pid))
    os.kill(launcher, signal.SIGKILL)
    ended = finish(process)
    assert ended.code != 0
    assert "host host-1: ssh lost the connection" in ended.err
    assert_gone_within(pids, 8.0)
