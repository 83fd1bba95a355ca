"""A host file whose hosts are all this machine: all that `--hostfile` does, except for ssh."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.test_run import RunningJob, run_job, script

REPORT = """
import argparse
import json, os, sys, time
from pathlib import Path
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK PHOTINUS_WORLD_SIZE"
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--lr")
assert str(parser.parse_args().local_rank) == os.environ["LOCAL_RANK"]
print(json.dumps({**{name: os.environ[name] for name in names.split()}, "argv": sys.argv[1:]}), flush=True)
print("a line on stderr", file=sys.stderr, flush=True)
Path(f"told-{os.environ['RANK']}").touch()
if os.environ["RANK"] == "2":
    while len(list(Path().glob("told-*"))) < 3:  # the others have told all before they are ended
        time.sleep(0.01)
    sys.exit(7)
time.sleep(1000)
"""


def test_two_hosts_with_their_slots_are_one_job_and_its_first_failure_ends_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    words = ["--hostfile", tmp_path / "hosts", "--master-port", "0", "--max-restarts", "0", "--cpu"]
    ended = run_job(*words, script(tmp_path, REPORT), "--lr", "0.1", cwd=tmp_path)
    found = {}
    for line in ended.out.splitlines():
        mark, text = re.fullmatch(r"(\[\S+:\d\] )?(\{.*\})", line).groups()
        report = json.loads(text)
        host = "localhost" if report["GROUP_RANK"] == "0" else "127.0.0.1"
        assert mark == (None if report["RANK"] == "0" else f"[{host}:{report['RANK']}] ")
        found[int(report["RANK"])] = report
    assert sorted(found) == [0, 1, 2], ended.err
    assert [found[rank]["GROUP_RANK"] for rank in range(3)] == ["0", "0", "1"]
    assert [found[rank]["LOCAL_RANK"] for rank in range(3)] == ["0", "1", "0"]
    for report in found.values():
        assert report["WORLD_SIZE"] == report["PHOTINUS_WORLD_SIZE"] == "3"
        assert sorted(report["argv"]) == sorted(["--lr", "0.1", f"--local_rank={report['LOCAL_RANK']}"])
    assert ended.code == 7, ended.err
    assert "a line on stderr\n" in ended.err
    assert "\n[127.0.0.1:2] a line on stderr\n" in ended.err
    assert "photinus: rank 2 " in ended.err
    assert ended.err.count("the job failed") == 1
    assert ended.err.count("takes --local_rank") == 1  # by one launcher for all


def test_a_host_file_with_this_host_alone_is_a_plain_run(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=4\nelsewhere slots=4\n")
    words = ["--hostfile", tmp_path / "hosts", "--num-nodes", "1", "--nproc-per-node", "1", "--dry-run"]
    ended = run_job(*words, script(tmp_path, REPORT), cwd=tmp_path)
    assert ended.code == 0, ended.err
    assert ended.out.startswith("1 worker on ")
    assert "elsewhere" not in ended.out


STAY = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1], f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
while "flood" in sys.argv:
    print("x" * 1000, flush=True)
time.sleep(1000)
"""


def start_staying(folder: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A job of one rank on each of two hosts (both this one), whose output nobody reads, and the pids of the ranks."""
    (folder / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    command = [sys.executable, "-m", "photinus", "run", "--hostfile", str(folder / "hosts"), "--master-port", "0"]
    command += ["--max-restarts", "0", "--stop-grace", "2", str(script(folder, STAY)), str(folder), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    files = [folder / f"pid-{rank}" for rank in range(2)]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.stat().st_size for file in files):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process, [int(file.read_text()) for file in files]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_all_hosts_and_is_told_once(tmp_path: Path, number: signal.Signals) -> None:
    process, pids = start_staying(tmp_path)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert err.decode().count(f"photinus: ended by {number.name}: the job on 2 hosts was ended\n") == 1
    assert err.decode().count("ended by") == 1
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_a_reader_that_does_not_go_on_holds_up_no_signal(tmp_path: Path) -> None:
    process, pids = start_staying(tmp_path, "flood")
    time.sleep(1.0)  # until all pipes are full
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    out, err = process.communicate(timeout=30)
    assert len(out) > 1 << 15
    assert b"photinus: ended by SIGINT" in err


def test_a_reader_that_has_gone_ends_no_job(tmp_path: Path) -> None:
    process, pids = start_staying(tmp_path, "flood")
    assert process.stdout is not None
    process.stdout.close()
    time.sleep(1.0)
    assert process.poll() is None
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 143


SSH = """#!/bin/bash
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
for command; do :; done
echo $$ > ssh.pid
bash -c "$command"
exit $?
"""
WAITS = """
import os, time
from pathlib import Path
Path(f"began-{os.environ['RANK']}").write_text("yes")
while not Path("go").exists():
    time.sleep(0.01)
"""


def test_a_signal_to_all_processes_of_a_job_leaves_ssh_to_its_launcher(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\nother slots=1\n")
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    words = ["--hostfile", "hosts", "--ssh", tmp_path / "ssh", "--master-port", "0", "--max-restarts", "0", "--cpu"]
    job = RunningJob([*words, script(tmp_path, WAITS)], cwd=tmp_path)
    job.wait_for(*(tmp_path / name for name in ("ssh.pid", "began-0", "began-1")))
    os.kill(int((tmp_path / "ssh.pid").read_text()), signal.SIGUSR1)
    time.sleep(0.5)
    (tmp_path / "go").write_text("on")
    ended = job.end()
    assert ended.code == 0, ended.err


STOPS_ITS_LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
stopped = Path(sys.argv[1], "stopped")
if os.environ["RANK"] == "1":
    os.kill(os.getppid(), signal.SIGSTOP)
    stopped.write_text("yes")
    time.sleep(1000)
while not stopped.exists():
    time.sleep(0.01)
sys.exit(7)
"""


@pytest.mark.slow
def test_a_host_that_does_not_end_after_a_failure_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    words = ["--hostfile", tmp_path / "hosts", "--master-port", "0", "--rdzv-conf", "heartbeat_timeout=2"]
    path = script(tmp_path, STOPS_ITS_LAUNCHER)
    ended = run_job(*words, "--max-restarts", "0", "--stop-grace", "1", path, tmp_path, cwd=tmp_path)
    assert ended.code != 0
    assert ended.err.endswith("; 127.0.0.1 did not confirm in time\n")


def test_a_host_that_fails_before_it_joins_ends_those_that_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=100\n")
    words = ["--hostfile", tmp_path / "hosts", "--include", "localhost@127.0.0.1:99", "--master-port", "0"]
    begun_s = time.monotonic()
    ended = run_job(*words, script(tmp_path, REPORT), cwd=tmp_path)
    assert time.monotonic() - begun_s < 30  # they would wait for 600 s
    assert ended.code == 2
    assert "photinus: host 127.0.0.1: DeviceError: --include localhost@127.0.0.1:99 asks for GPUs: " in ended.err
    assert "the job failed: host 127.0.0.1 was the first to end, with exit code 2; see above" in ended.err


def test_where_both_streams_end_in_one_place_their_order_is_kept(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=1\n127.0.0.1 slots=1\n")
    text = "import os\nfor n in range(200 * (os.environ['RANK'] == '0')):\n    os.write(1 + n % 2, b'%d\\n' % n)\n"
    command = [sys.executable, "-m", "photinus", "run", "--hostfile", str(tmp_path / "hosts"), "--master-port", "0"]
    said = subprocess.run(
        [*command, str(script(tmp_path, text))], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
    )
    assert said.returncode == 0
    assert [int(line) for line in said.stdout.splitlines() if line.isdigit()] == list(range(200))
