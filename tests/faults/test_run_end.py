"""However a job is ended, nothing of it is left, and soon."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from photinus.job.restart_policy import backoff_s
from tests.dist.test_run import DEADLINE_S, RunningJob, run_job, script

# Each rank starts a child that does not listen to SIGTERM (as a data loader that hangs), and notes both.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
rank = os.environ["RANK"]
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(1000)"
child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
child.stdout.readline()
Path(sys.argv[1], f"pids-{rank}").write_text(f"{os.getpid()} {child.pid} {os.getppid()}")
try:
    time.sleep(1000)
except KeyboardInterrupt:
    Path(sys.argv[1], f"interrupted-{rank}").write_text("yes")
    raise
"""


def start_family(folder: Path, *flags: str, world_size: int = 2) -> tuple[RunningJob, list[int]]:
    """A running job, and the pids of its workers and their children."""
    # Where launcher and guard are killed together, nobody is left to remove the job's folder.
    words = ["--nproc-per-node", str(world_size), *flags, script(folder, FAMILY), folder]
    job = RunningJob(words, TMPDIR=str(folder))
    files = [folder / f"pids-{rank}" for rank in range(world_size)]
    job.wait_for(*files)
    pids = []
    for file in files:
        worker, child, launcher = map(int, file.read_text().split())
        assert launcher == job.process.pid
        pids += [worker, child]
    return job, pids


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def assert_gone_within(pids: list[int], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"left: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.005)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupted_launcher_ends_all_in_two_seconds(tmp_path, number, code):
    job, pids = start_family(tmp_path)
    pids += descendants(job.process.pid)
    begun = time.monotonic()
    job.send(number)
    ended = job.end()
    assert time.monotonic() - begun < 2.0
    assert not any(map(alive, pids))
    assert ended.code == code
    killed, told = ended.err.splitlines()
    assert killed.startswith("photinus: killed processes that the workers left running: ")  # children deaf to SIGTERM
    assert told == f"photinus: ended by {number.name}: 2 workers were ended"
    assert ended.out == ""
    # Ctrl-C is the script's to notice (to save, say); SIGTERM ends it unless it has a handler.
    assert (tmp_path / "interrupted-0").exists() == (number == signal.SIGINT)


SAVES_AT_SIGTERM = """
import os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), os.environ["RANK"]
def save(*_):
    time.sleep(3)
    with open(folder / f"saved-{rank}", "a") as file:
        file.write("once")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
(folder / f"ready-{rank}").write_text("yes")
while True:
    time.sleep(1)
"""


def test_a_scripts_own_handler_of_sigterm_has_the_time_to_save(tmp_path):
    job = RunningJob(["--nproc-per-node", "2", script(tmp_path, SAVES_AT_SIGTERM), tmp_path])
    job.wait_for(tmp_path / "ready-0", tmp_path / "ready-1")
    job.send(signal.SIGTERM)
    assert job.end().code == 143
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == ["once", "once"]


FAILS_BESIDE_A_DEAF_RANK = """
import atexit, os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "deaf").write_text("yes")
    time.sleep(1000)
while not (folder / "deaf").exists():
    time.sleep(0.01)
atexit.register((folder / "failed").write_text, "yes")
raise ValueError("there is no class 11")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_interrupt_while_the_launcher_waits_for_another_rank_does_not_hide_an_error(tmp_path, number):
    words = [
        "--nproc-per-node",
        "2",
        "--log-dir",
        tmp_path / "logs",
        script(tmp_path, FAILS_BESIDE_A_DEAF_RANK),
        tmp_path,
    ]
    job = RunningJob(["--stop-grace", "5", *words])
    job.wait_for(tmp_path / "failed")
    time.sleep(0.5)
    job.send(number)
    ended = job.end()
    assert ended.code == 128 + number
    assert ended.err.count("raised ValueError: there is no class 11") == 1
    assert ended.err.count("ValueError: there is no class 11") == 2  # with the traceback
    assert ended.err.endswith(f"photinus: the job ends\nphotinus: ended by {number.name}: 2 workers were ended\n")
    (log,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert log.read_text().endswith("ValueError: there is no class 11\n")


CANNOT_SAVE = """
import signal, sys, time
from pathlib import Path
def save(*_):
    raise OSError("the disk is full")
signal.signal(signal.SIGTERM, save)
Path(sys.argv[1], "ready").write_text("yes")
try:
    time.sleep(1000)
except KeyboardInterrupt:
    save()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_an_error_of_a_script_that_saves_when_it_is_ended_is_shown(tmp_path, number):
    job = RunningJob(["--nproc-per-node", "1", script(tmp_path, CANNOT_SAVE), tmp_path])
    job.wait_for(tmp_path / "ready")
    job.send(number)
    ended = job.end()
    assert ended.code == 128 + number
    assert "photinus: rank 0 " in ended.err
    assert "raised OSError: the disk is full" in ended.err
    assert ended.err.endswith(f"photinus: ended by {number.name}: its worker was ended\n")


def test_a_killed_launcher_leaves_no_worker_no_child_and_no_guard(tmp_path):
    job, pids = start_family(tmp_path)
    others = [pid for pid in descendants(job.process.pid) if pid not in pids]
    assert len(others) >= 2  # the guard, the workers' store, and the process from which they are forked, if they are
    job.send(signal.SIGKILL)
    assert_gone_within(pids + others, 5.0)
    assert job.end().code == -signal.SIGKILL


def test_a_store_whose_launcher_was_killed_before_it_began_ends_at_once():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        command = [sys.executable, "-m", "photinus.run.local.store", "1"]
        assert subprocess.run(command, stdin=theirs, timeout=30).returncode == 128 + signal.SIGKILL


LOADS = """
import os, sys, tempfile, time
from pathlib import Path
import torch
loader = torch.utils.data.DataLoader([torch.zeros(4)] * 10_000, num_workers=1)
batches = iter(loader)
next(batches)
Path(sys.argv[1], "pid").write_text(f"{os.getpid()} {tempfile.gettempdir()}")
time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_a_data_loader_leaves_nothing_in_the_temporary_folder_when_it_is_killed(tmp_path_factory, victim):
    tmp_path = tmp_path_factory.mktemp("loader")  # a short name, as sockets' paths must be
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = script(tmp_path, LOADS)
    job = RunningJob(["--cpu", "--nproc-per-node", "1", "--max-restarts", "0", path, tmp_path], TMPDIR=str(temporary))
    job.wait_for(tmp_path / "pid")
    pid, seen = (tmp_path / "pid").read_text().split()
    assert seen == str(temporary)  # the script's own things go where they always went
    assert [each.name[:9] for each in temporary.iterdir()] == ["photinus-"]
    if sys.version_info >= (3, 11, 1):  # multiprocessing's sockets have no file in older ones
        assert list(temporary.glob("photinus-*/listener-*"))
    os.kill(job.process.pid if victim == "launcher" else int(pid), signal.SIGKILL)
    job.end()
    deadline = time.monotonic() + 10.0
    while left := list(temporary.iterdir()):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_workers_die_with_the_launcher_even_when_the_guard_is_killed_with_it(tmp_path):
    job, pids = start_family(tmp_path, world_size=1)
    worker, child = pids
    others = [pid for pid in descendants(job.process.pid) if pid != worker]
    [guard] = [pid for pid in others if Path(f"/proc/{pid}/comm").read_text() == "photinus-guard\n"]
    os.kill(guard, signal.SIGKILL)
    job.send(signal.SIGKILL)
    try:
        assert_gone_within([worker, *others], 5.0)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
    job.end()


def test_children_of_a_killed_worker_are_ended_before_the_restart(tmp_path):
    job, pids = start_family(tmp_path, "--max-restarts", "1", "--stop-grace", "1")
    for file in tmp_path.glob("pids-*"):
        file.unlink()
    os.kill(pids[0], signal.SIGKILL)
    job.wait_for(tmp_path / "pids-0", tmp_path / "pids-1")
    assert not any(map(alive, pids))
    job.send(signal.SIGTERM)
    assert job.end().code == 143


LEAVES = """
import subprocess, sys
subprocess.Popen(["sh", "-c", sys.argv[1]])
"""


def test_what_a_job_left_running_at_its_good_end_may_finish_within_the_grace(tmp_path):
    path = script(tmp_path, LEAVES)
    ended = run_job("--nproc-per-node", "1", "--cpu", path, f"sleep 2; echo copied > {tmp_path}/file")
    assert (ended.code, (tmp_path / "file").read_text()) == (0, "copied\n")
    assert "photinus: all workers exited with code 0; waiting up to 30 s (--stop-grace) for sh -c sleep 2" in ended.err
    ended = run_job("--nproc-per-node", "1", "--cpu", "--stop-grace", "0.1", path, "trap '' TERM; sleep 100; true")
    assert ended.code == 0
    assert (
        "photinus: killed processes that the workers left running: sh -c trap '' TERM; sleep 100; true (pid "
        in ended.err
    )


def test_a_daemon_that_a_job_started_outlives_its_good_end(tmp_path):
    text = """
import subprocess, sys
nowhere = subprocess.DEVNULL
kid = subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=nowhere, stderr=nowhere)
with open(sys.argv[1], "w") as file:
    file.write(str(kid.pid))
"""
    ended = run_job("--nproc-per-node", "1", "--cpu", script(tmp_path, text), tmp_path / "pid")
    daemon = int((tmp_path / "pid").read_text())
    assert (ended.code, ended.err, alive(daemon)) == (0, "", True)
    os.kill(daemon, signal.SIGKILL)


def test_what_a_shell_had_left_that_became_the_launcher_is_not_touched(tmp_path):
    path = script(
        tmp_path, f"import os, time\nwhile not os.path.exists({str(tmp_path / 'pid')!r}):\n    time.sleep(0.01)\n"
    )
    text = f'(sleep 1; sleep 100 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid) & exec "$@"'
    command = [sys.executable, "-m", "photinus", "run", "--cpu", "--nproc-per-node", "1", str(path)]
    quiet = subprocess.DEVNULL
    done = subprocess.run(
        ["sh", "-c", text, "sh", *command], stdin=quiet, stdout=quiet, stderr=quiet, timeout=DEADLINE_S
    )
    left = int((tmp_path / "pid").read_text())
    assert (done.returncode, alive(left)) == (0, True)
    os.kill(left, signal.SIGKILL)


WAITS_FOR_A_NEW_SIZE = """
import os, signal, sys, time
signal.signal(signal.SIGWINCH, lambda *_: sys.exit(0))
with open(sys.argv[1] + "/new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + "/new", sys.argv[1] + "/pid")
time.sleep(100)
"""


@pytest.mark.parametrize("shell_waits", [True, False])
def test_ctrl_z_and_a_new_size_of_the_terminal_reach_the_workers(tmp_path, shell_waits):
    words = ["--nproc-per-node", "1", "--cpu", script(tmp_path, WAITS_FOR_A_NEW_SIZE), tmp_path]
    job = RunningJob(words, prepare=os.setpgrp if shell_waits else os.setsid)
    job.wait_for(tmp_path / "pid")
    worker = int((tmp_path / "pid").read_text())

    def wait_for(stopped: bool) -> None:
        deadline = time.monotonic() + DEADLINE_S
        states = [Path(f"/proc/{pid}/stat") for pid in (worker, job.process.pid)]
        while any((state.read_text().rpartition(")")[2].split()[0] == "T") != stopped for state in states):
            assert time.monotonic() < deadline
            time.sleep(0.005)

    job.send(signal.SIGTSTP)
    if shell_waits:  # else nobody could make it go on (`ssh -t host photinus run`, the first process of a container)
        wait_for(stopped=True)
        job.send(signal.SIGCONT)
        wait_for(stopped=False)
    job.send(signal.SIGWINCH)
    assert job.end().code == 0


def test_ctrl_c_in_a_terminal_during_a_wait_before_the_next_attempt(tmp_path):
    path = script(tmp_path, "import os\nos.abort()\n")
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "photinus", "run", "--max-restarts", "50", "--cpu", str(path)])
    shown = b""
    deadline = time.monotonic() + DEADLINE_S
    try:
        while b"in 1 s" not in shown:  # the third attempt waits; a storm of attempts would be over by now
            assert time.monotonic() < deadline
            shown += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        begun = time.monotonic()
        while True:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the terminal's other side is closed: everything has ended
                break
        assert time.monotonic() - begun < 2.0
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    finally:
        os.close(terminal)
    assert b"\x1b[1;31mphotinus: rank 0" in shown or b"\x1b[1;31mphotinus: rank 1" in shown
    assert b"photinus: ended by SIGINT" in shown
    assert b"was killed by SIGABRT" in shown


def test_the_wait_between_attempts_grows_to_a_limit():
    assert [backoff_s(number) for number in range(8)] == [0, 0, 1, 2, 4, 5, 5, 5]


@pytest.mark.slow
def test_fifty_jobs_killed_at_any_moment_leave_nothing(tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    path = script(tmp_path, FAMILY)
    shared_before = set(os.listdir("/dev/shm"))
    for number in range(50):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = RunningJob(["--nproc-per-node", "2", path, folder], TMPDIR=str(temporary))
        time.sleep(0.06 * number)  # from before the first import to long after the start of the workers
        family = descendants(job.process.pid)
        job.send(signal.SIGKILL if number % 2 else signal.SIGTERM)
        job.end()
        for file in folder.glob("pids-*"):
            family += map(int, file.read_text().split()[:2])
        assert_gone_within(family, 5.0)
    assert list(temporary.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared_before
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert left.stdout == ""


@pytest.mark.parametrize("files", [16, 24])
def test_a_limit_of_open_files_is_named(tmp_path: Path, files: int) -> None:
    """A launcher that cannot open more says so by the limit's name, and leaves nothing."""
    command = f'ulimit -n {files}; exec "$@"'
    words = [sys.executable, "-m", "photinus", "run", "--nproc-per-node", "2", script(tmp_path, "")]
    ended = subprocess.run(
        ["bash", "-c", command, "bash", *words], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert ended.returncode != 0
    assert f"The limit is {files} open files: raise it (`ulimit -n 65536`)." in ended.stderr
    assert "Traceback" not in ended.stderr
