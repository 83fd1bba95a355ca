"""`photinus run --nnodes`: the same command on several hosts; here several launchers on one, over its loopback."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent

import pytest

from tests.dist.test_run import DEADLINE_S, ONE_STEP, Ended, RunningJob, script
from tests.faults.test_run_end import descendants
from tests.faults.test_run_restart import store_of

NOTE = """
import json, os, sys, time
from pathlib import Path
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE PHOTINUS_WORLD_SIZE".split()
names += "PHOTINUS_ATTEMPT TORCHELASTIC_RUN_ID MASTER_ADDR PHOTINUS_JOB_SECRET".split()
folder = Path(sys.argv[1])
note = {name: os.environ.get(name) for name in names} | {"arguments": sys.argv[1:], "pid": os.getpid()}
partial = folder / f"{os.environ['RANK']}-{os.environ['PHOTINUS_ATTEMPT']}.partial"
partial.write_text(json.dumps(note))
partial.rename(partial.with_suffix(".json"))
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def launch(
    port: int, *words: object, nnodes: str = "2", workers: int = 1, stderr: int = subprocess.PIPE, **environ: str
) -> RunningJob:
    flags = ["--nnodes", nnodes, "--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", workers]
    return RunningJob([str(word) for word in (*flags, "--cpu", *words)], stderr=stderr, **environ)


def notes(folder: Path, attempt: int = 0) -> list[dict[str, object]]:
    found = [json.loads(file.read_text()) for file in folder.glob(f"*-{attempt}.json")]
    return sorted(found, key=lambda note: int(note["RANK"]))


def ended(*jobs: RunningJob) -> list[Ended]:
    return [job.end() for job in jobs]


def test_two_launchers_make_one_job_of_unequal_shares(tmp_path):
    path, port = script(tmp_path, NOTE), free_port()
    first = launch(port, "--rdzv-id", "mine", path, tmp_path, workers=2, PHOTINUS_JOB_SECRET="s")
    second = launch(port, "--rdzv-id", "mine", path, tmp_path, workers=1, PHOTINUS_JOB_SECRET="s")
    for end in ended(first, second):
        assert end.code == 0, end.err
    found = notes(tmp_path)
    assert [note["RANK"] for note in found] == ["0", "1", "2"]
    assert {note["WORLD_SIZE"] for note in found} == {note["PHOTINUS_WORLD_SIZE"] for note in found} == {"3"}
    shares = [(note["GROUP_RANK"], note["LOCAL_RANK"], note["LOCAL_WORLD_SIZE"]) for note in found]
    assert shares in (
        [("0", "0", "2"), ("0", "1", "2"), ("1", "0", "1")],
        [("0", "0", "1"), ("1", "0", "2"), ("1", "1", "2")],  # the second was faster, and leads
    )
    assert {note["TORCHELASTIC_RUN_ID"] for note in found} == {"mine"}
    assert {note["PHOTINUS_JOB_SECRET"] for note in found} == {None}


@pytest.mark.slow
def test_node_ranks_decide_who_leads_and_who_is_first(tmp_path):
    path, port = script(tmp_path, NOTE), free_port()
    second = launch(port, "--node-rank", 1, path, tmp_path, "second")
    first = launch(port, "--node-rank", 0, path, tmp_path, "first")
    ends = ended(first, second)
    assert [end.code for end in ends] == [0, 0], ends
    assert [note["arguments"][1] for note in notes(tmp_path)] == ["first", "second"]


def test_a_failure_is_told_whole_by_the_leader_and_in_short_by_the_others(tmp_path):
    fails = "raise RuntimeError(f'attempt {os.environ[\"PHOTINUS_ATTEMPT\"]}: the disk is full')"
    one_step = f"if os.environ['PHOTINUS_ATTEMPT'] == '0':\n{indent(ONE_STEP, '    ')}"
    text = f"{NOTE}\nif os.environ['RANK'] == '1':\n{indent(one_step, '    ')}\n    {fails}\ntime.sleep(60)"
    path, port = script(tmp_path, text), free_port()
    first = launch(port, "--node-rank", 0, path, tmp_path)
    second = launch(port, "--node-rank", 1, path, tmp_path)
    one, two = ended(first, second)
    assert (one.code, two.code) == (1, 1)
    host = socket.gethostname()
    assert one.err.count(": the disk is full\n") == 4  # of two attempts, each with its traceback
    assert one.err.count("Traceback (most recent call last)") == 2
    assert f"local rank 0 of host {host}, attempt 1" in one.err
    assert "photinus: restarting all 2 workers (restart 1 of 3)" in one.err
    for each in (one, two):
        assert "photinus: not restarting: RuntimeError happened again at " in each.err
    assert "photinus: rank 0 ended by the launcher" in one.err
    assert "Traceback" not in two.err
    assert f"raised RuntimeError: attempt 1: the disk is full (host {host})" in two.err
    last = f"the first cause was rank 1 of host {host}, see above (exit code 1)"
    assert one.err.rstrip().endswith(last)
    assert two.err.rstrip().endswith(last)
    assert len(notes(tmp_path, attempt=1)) == 2


@pytest.mark.slow
def test_one_host_too_many_is_sent_away_and_the_others_go_on(tmp_path):
    text = NOTE + f"\nwhile not Path(r'{tmp_path}', 'go').exists(): time.sleep(0.01)"
    path, port = script(tmp_path, text), free_port()
    jobs = [launch(port, path, tmp_path) for _ in range(2)]
    jobs[0].wait_for(tmp_path / "0-0.json", tmp_path / "1-0.json")
    third = launch(port, path, tmp_path).end()
    assert third.code == 2
    assert "this host cannot join: the job already has its 2 hosts" in third.err
    (tmp_path / "go").write_text("on")
    assert [end.code for end in ended(*jobs)] == [0, 0]


@pytest.mark.slow
def test_hosts_that_disagree_on_their_number_are_told_so(tmp_path):
    path, port = script(tmp_path, NOTE), free_port()
    first = launch(port, "--node-rank", 0, "--rdzv-conf", "join_timeout=20", path, tmp_path)
    other = launch(port, "--node-rank", 1, path, tmp_path, nnodes="3").end()
    assert other.code == 2
    assert "was started with --nnodes 3, the host that leads with 2" in other.err
    first.send(signal.SIGINT)
    one = first.end()
    assert one.code == 130
    assert one.err.endswith("photinus: ended by SIGINT: no worker was running\n")


@pytest.mark.slow
def test_a_leader_that_is_alone_says_for_whom_it_waits_and_ends_in_time(tmp_path):
    path, port = script(tmp_path, NOTE), free_port()
    end = launch(port, "--rdzv-conf", "join_timeout=4", path, tmp_path).end()
    assert end.code == 1
    host = socket.gethostname()
    assert f"photinus: waiting for 2 hosts, 1 s more at most; here: {host} (127.0.0.1)\n" in end.err
    assert "the job ended: only 1 of 2 hosts ready within 4 s" in end.err
    assert notes(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_at_one_host_ends_all_in_two_seconds_and_each_says_why(tmp_path):
    text = NOTE + "\ntime.sleep(60)"
    path, port = script(tmp_path, text), free_port()
    first = launch(port, "--node-rank", 0, path, tmp_path)
    second = launch(port, "--node-rank", 1, path, tmp_path)
    first.wait_for(tmp_path / "0-0.json", tmp_path / "1-0.json")
    begun = time.monotonic()
    second.send(signal.SIGINT)
    one, two = ended(first, second)
    assert time.monotonic() - begun < 2.5
    assert (one.code, two.code) == (1, 130)
    assert "the job ended: host " in one.err
    assert "exited because of SIGINT" in one.err


@pytest.mark.slow
def test_a_killed_leader_ends_the_others_with_its_address(tmp_path):
    text = NOTE + "\ntime.sleep(60)"
    path, port = script(tmp_path, text), free_port()
    first = launch(port, "--node-rank", 0, path, tmp_path)
    second = launch(port, "--node-rank", 1, path, tmp_path)
    first.wait_for(tmp_path / "0-0.json", tmp_path / "1-0.json")
    begun = time.monotonic()
    first.send(signal.SIGKILL)
    one, two = ended(first, second)
    assert time.monotonic() - begun < 10
    assert (one.code, two.code) == (-signal.SIGKILL, 1)
    assert (
        f"the host that leads the job (127.0.0.1 port {port}) was lost: its launcher closed the connection" in two.err
    )


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["leader", "other"])
def test_a_launcher_that_was_stopped_for_longer_than_the_heartbeat_costs_a_restart(tmp_path, stopped):
    text = NOTE + "\nwhile os.environ['PHOTINUS_ATTEMPT'] == '0': time.sleep(0.01)"
    path, port = script(tmp_path, text), free_port()
    words = ["--rdzv-conf", "heartbeat_timeout=2", "--max-restarts", 1, path, tmp_path]
    jobs = [launch(port, "--node-rank", rank, *words) for rank in (0, 1)]
    jobs[0].wait_for(tmp_path / "0-0.json", tmp_path / "1-0.json")
    index = ["leader", "other"].index(stopped)
    jobs[index].send(signal.SIGSTOP)
    time.sleep(9)  # the other host has dialled, and was not answered for longer than an unknown leader may take
    jobs[index].send(signal.SIGCONT)
    one, two = ended(*jobs)
    assert (one.code, two.code) == (0, 0), one.err + two.err
    assert len(notes(tmp_path, attempt=1)) == 2
    assert "(restart 1 of 1)" in one.err
    assert ("the launcher that leads the job did not run for 9 s" in one.err) == (stopped == "leader")


def test_a_paused_reader_of_the_leader_holds_up_no_sign_of_life(tmp_path):
    path, port = script(tmp_path, NOTE + "\ntime.sleep(3)"), free_port()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"\n" * 4096)
    os.set_blocking(writing, True)
    words = ["--rdzv-conf", "heartbeat_timeout=1.5", "--max-restarts", 0, path, tmp_path]
    first = launch(port, "--node-rank", 0, *words, stderr=writing)
    os.close(writing)
    two = launch(port, "--node-rank", 1, *words).end()
    assert two.code == 0, two.err
    with os.fdopen(reading, "rb") as reader:
        told = reader.read()
    assert first.process.wait(DEADLINE_S) == 0
    assert b"2 hosts, 2 workers" in told


@pytest.mark.parametrize("restarts", [1, 0])
def test_a_killed_store_of_the_leading_host_costs_all_hosts_a_restart(tmp_path, restarts):
    text = NOTE + "\nwhile os.environ['PHOTINUS_ATTEMPT'] == '0': time.sleep(0.01)"
    path, port = script(tmp_path, text), free_port()
    jobs = [launch(port, "--node-rank", rank, "--max-restarts", restarts, path, tmp_path) for rank in (0, 1)]
    jobs[0].wait_for(tmp_path / "0-0.json", tmp_path / "1-0.json")
    pid = store_of(jobs[0])
    os.kill(pid, signal.SIGKILL)
    one, two = ended(*jobs)
    assert (one.code, two.code) == ((0, 0) if restarts else (1, 1)), one.err
    told = f"the process that holds the workers' store (pid {pid}) was killed by SIGKILL"
    assert told + " (restart 1 of 1): the present hosts" * restarts in one.err
    assert len(notes(tmp_path, attempt=1)) == 2 * restarts


def test_a_leader_that_fails_tells_the_others_why(tmp_path):
    path, port = script(tmp_path, NOTE + "\ntime.sleep(60)"), free_port()
    (tmp_path / "torch.py").write_text("raise ImportError('half installed')")
    first = launch(port, "--node-rank", 0, path, tmp_path, PYTHONPATH=str(tmp_path))
    one, two = ended(first, launch(port, "--node-rank", 1, path, tmp_path))
    assert (one.code, two.code) == (1, 1)
    told = r"the process that holds the workers' store \(pid \d+\) exited with code 1: does `import torch` fail in "
    assert re.search("LaunchError: " + told, one.err), one.err
    assert re.search(r"LaunchError: the job ended: host \S+ \(127.0.0.1\) left: " + told, two.err), two.err


@contextmanager
def squatter(behaviour: Callable[[socket.socket], None]) -> Iterator[int]:
    """A process that listens on a port and behaves so with each caller: its port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        over = threading.Event()

        def serve() -> None:
            server.settimeout(0.1)
            kept = []
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                kept.append(connection)
                with suppress(OSError):
                    behaviour(connection)
            for connection in kept:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield port
        finally:
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("behaviour", "told"),
    [
        (lambda connection: None, "it accepts the connection and sends nothing for 3 s"),
        (lambda connection: connection.close(), "it closed the connection"),
        (lambda connection: connection.sendall(b"SSH-2.0-OpenSSH\r\n" * 9), "it answers 'SSH-2.0-OpenSSH"),
    ],
    ids=["silent", "closes", "garbage"],
)
def test_a_squatted_port_ends_all_hosts_in_five_seconds_with_the_port(tmp_path, behaviour, told):
    path = script(tmp_path, NOTE)
    with squatter(behaviour) as port:
        begun = time.monotonic()
        leader = launch(port, "--node-rank", 0, path, tmp_path)
        other = launch(port, "--node-rank", 1, path, tmp_path)
        one, two = ended(leader, other)
        took_s = time.monotonic() - begun
    assert (one.code, two.code) == (1, 1)
    assert f"port {port} of 127.0.0.1 is taken by " in one.err
    assert f"127.0.0.1 port {port} does not answer as the host that leads this job: {told}" in two.err
    assert took_s < 5, took_s


@pytest.mark.slow
def test_a_port_held_by_another_job_is_told_apart(tmp_path):
    text = NOTE + "\ntime.sleep(60)"
    path, port = script(tmp_path, text), free_port()
    other_job = launch(port, "--rdzv-id", "theirs", "--rdzv-conf", "join_timeout=60", path, tmp_path)
    wait_until_listening(port)
    ours = launch(port, "--rdzv-id", "ours", path, tmp_path).end()
    assert ours.code == 1
    assert (
        f"127.0.0.1 port {port} does not answer as the host that leads this job: this port belongs to a different job"
        in ours.err
    )
    other_job.send(signal.SIGINT)
    assert other_job.end().code == 130


def test_one_hosts_taken_port_is_found_before_anything_starts(tmp_path):
    with squatter(lambda connection: None) as port:
        job = RunningJob(
            ["--cpu", "--nproc-per-node", "1", "--master-port", str(port), script(tmp_path, NOTE), tmp_path]
        )
        end = job.end()
    assert end.code == 1
    assert f"port {port} of 127.0.0.1 is taken by " in end.err
    assert notes(tmp_path) == []


def wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


class Marker:
    """Leaves a trace where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.path),))


def listeners_of(pids: list[int]) -> list[tuple[str, int]]:
    """Addresses and ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(file).removeprefix("socket:[").rstrip("]"))
            except OSError:
                continue
    found = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                raw = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.append((socket.inet_ntop(family, raw), int(port, 16)))
    return found


def test_a_client_without_the_secret_reaches_no_unpickler_and_nothing_listens_for_the_world(tmp_path):
    text = (
        NOTE
        + """
import torch, torch.distributed as dist
dist.init_process_group("photinus")
(folder / f"met-{os.environ['RANK']}").write_text("yes")
while not (folder / "go").exists(): time.sleep(0.01)
total = torch.ones(3) * (dist.get_rank() + 1)
dist.all_reduce(total)
objects = [None, None]
dist.all_gather_object(objects, dist.get_rank())
assert total.tolist() == [3.0] * 3 and objects == [0, 1]
dist.destroy_process_group()
"""
    )
    path, port = script(tmp_path, text), free_port()
    jobs = [launch(port, path, tmp_path, PHOTINUS_JOB_SECRET="known to few") for _ in range(2)]
    jobs[0].wait_for(tmp_path / "met-0", tmp_path / "met-1")
    workers = [int(note["pid"]) for note in notes(tmp_path)]
    launchers = [job.process.pid for job in jobs]
    found = listeners_of([*launchers, *(child for pid in launchers for child in descendants(pid)), *workers])
    assert ("127.0.0.1", port) in found
    assert {address for address, _ in found} == {"127.0.0.1"}, found
    payload = pickle.dumps(Marker(tmp_path / "unpickled"))
    for _, each in found:
        for data in (payload, len(payload).to_bytes(4, "big") + payload, bytes(64) + b"\xff" + payload * 20):
            with socket.create_connection(("127.0.0.1", each), timeout=5) as stranger:
                stranger.sendall(data)
                stranger.settimeout(0.2)
                with suppress(OSError):
                    stranger.recv(1000)
    (tmp_path / "go").write_text("on")
    for end in ended(*jobs):
        assert end.code == 0, end.err
    assert not (tmp_path / "unpickled").exists()


@pytest.mark.slow
def test_no_process_sees_the_secret_on_a_command_line(tmp_path):
    text = NOTE + "\ntime.sleep(60)"
    path, port = script(tmp_path, text), free_port()
    jobs = [launch(port, path, tmp_path, PHOTINUS_JOB_SECRET="xyzzy-known-to-few") for _ in range(2)]
    jobs[0].wait_for(tmp_path / "0-0.json", tmp_path / "1-0.json")
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "xyzzy-known-to-few" not in shown
    jobs[0].send(signal.SIGINT)
    ended(*jobs)


def test_nnodes_without_a_leader_says_what_is_missing(tmp_path):
    path = script(tmp_path, NOTE)
    end = RunningJob(["--nnodes", "2", path, tmp_path]).end()
    assert end.code == 2
    assert "photinus: --nnodes 2 needs the leading host: give --master-addr HOST" in end.err


@pytest.mark.slow
def test_dry_run_of_several_hosts_starts_nothing_and_shows_the_ranks(tmp_path):
    command = [sys.executable, "-m", "photinus", "run", "--dry-run", "--nnodes", "2", "--node-rank", "1"]
    command += ["--master-addr", "nowhere.invalid", "--nproc-per-node", "2", "--cpu", str(script(tmp_path, NOTE))]
    told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert told.returncode == 0, told.stderr
    assert "2 hosts, which are numbered by --node-rank; this one as number 1" in told.stdout
    assert "RANK=2" in told.stdout
    assert "RANK=3" in told.stdout
    assert "WORLD_SIZE=4" in told.stdout
