"""What workers say under `photinus run`: in files, on a terminal, and in the report of a failure."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.test_run import DEADLINE_S, Ended, run_job, script

TALKS_AND_DIES = """
import os, signal, sys, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("out of", rank, "in", attempt)
print("err of", rank, "in", attempt, file=sys.stderr)
open(f"{sys.argv[0]}.{rank}.{attempt}", "w").close()
while not os.path.exists(f"{sys.argv[0]}.0.{attempt}"):
    time.sleep(0.01)
if rank == "1" and attempt == "0":
    for number in range(2000):
        print("a long line of output " * 5, number)
    sys.stdout.write("last words, without an end")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1":
    raise KeyError("the second failure")
time.sleep(60)
"""


def test_files_are_whole_and_end_with_the_failure_and_the_report_has_the_last_lines(tmp_path: Path) -> None:
    path = script(tmp_path, TALKS_AND_DIES)
    logs = tmp_path / "logs"
    ended = run_job(
        "--nproc-per-node", "2", "--max-restarts", "1", "--log-dir", logs, "--redirects", "1", "--tee", "2", path
    )
    assert ended.code == 1
    [folder] = logs.iterdir()
    assert f"photinus: logs in {folder}\n" in ended.err
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*.log")) == [
        f"attempt_{attempt}/{rank}/std{name}.log" for attempt in "01" for rank in "01" for name in ("err", "out")
    ]
    killed = (folder / "attempt_0/1/stdout.log").read_text()
    lines = [f"{'a long line of output ' * 5} {number}" for number in range(2000)]
    assert killed.splitlines() == ["out of 1 in 0", *lines, "last words, without an end"]
    assert (folder / "attempt_0/0/stdout.log").read_text() == "out of 0 in 0\n"
    stderr = (folder / "attempt_0/1/stderr.log").read_text().splitlines()
    assert stderr[0] == "err of 1 in 0"
    assert stderr[-1].startswith("photinus: rank 1 (pid ")
    assert stderr[-1].endswith(" was killed by SIGKILL")
    raised = (folder / "attempt_1/1/stderr.log").read_text()
    assert "Traceback (most recent call last)" in raised
    assert "KeyError: 'the second failure'" in raised
    # On the terminal: stderr of both ranks, and the end of what rank 1 wrote.
    assert ended.out == ""
    assert "[1] err of 1 in 0\n" in ended.err
    assert "\nerr of 0 in 1\n" in ended.err
    block = ended.err[ended.err.index("was killed by SIGKILL") :]
    assert f"photinus:   its log is {folder}/attempt_0/1/stderr.log\n" in block
    assert "photinus:   its last output:\n" in block
    assert f"    {lines[-1]}\n    last words, without an end\n" in block
    assert lines[1980] not in block


def test_what_a_worker_said_before_it_left_stands_in_the_report_without_log_files_too(tmp_path: Path) -> None:
    text = "import os\nif os.environ['RANK'] == '1':\n    print('the licence has expired')\n    os._exit(7)\n"
    ended = run_job("--nproc-per-node", "2", "--max-restarts", "0", script(tmp_path, text))
    assert ended.code == 7
    assert "rank 1 (pid" in ended.err
    assert "photinus:   its last output:\n\n    the licence has expired\n\n" in ended.err


def on_a_terminal(*words: str | Path) -> Ended:
    """`photinus run` on a terminal of 80 columns, and what it showed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(OMP_NUM_THREADS="1", TERM="xterm", COLUMNS="")
        os.execv(sys.executable, [sys.executable, "-m", "photinus", "run", *map(str, words)])
    shown, deadline = b"", time.monotonic() + DEADLINE_S
    try:
        while time.monotonic() < deadline:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # EIO: everybody has gone
                break
            if not piece:
                break
            shown += piece
        else:
            os.kill(pid, signal.SIGKILL)
        return Ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode(), "")
    finally:
        os.close(terminal)


COLOURS = """
import os, sys
for stream in (sys.stdout, sys.stderr):
    print("\\x1b[32mgreen\\x1b[0m" if stream.isatty() else "grey", file=stream)
sys.stderr.write("\\r10%\\r100%\\n")
"""


@pytest.mark.slow
def test_rank_0_has_the_terminal_and_a_pipe_while_it_is_logged(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    path = script(tmp_path, COLOURS)
    plain = on_a_terminal("--nproc-per-node", "1", path)
    assert plain.code == 0, plain.out
    assert plain.out.count("\x1b[32mgreen\x1b[0m") == 2
    logged = on_a_terminal("--nproc-per-node", "1", "--log-dir", logs, path)
    assert logged.code == 0, logged.out
    [folder] = logs.iterdir()
    assert (folder / "attempt_0/0/stdout.log").read_text() == "grey\n"
    with open(folder / "attempt_0/0/stderr.log", newline="") as file:
        assert file.read() == "grey\n\r10%\r100%\n"
    assert "\r10%\r100%" in logged.out  # passed on as it is


TALKS_AND_NOTES = """
import sys, time
from pathlib import Path
print("begun", flush=True)
deadline = time.monotonic() + 60.0  # a test that was killed says nothing
while not Path(f"{sys.argv[0]}.go").exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
for number in range(1000):
    print("a line", number, flush=True)
Path(f"{sys.argv[0]}.done").touch()
"""


@pytest.mark.parametrize("gone", ["reader", "terminal"])
def test_a_job_goes_on_without_the_reader_or_terminal_of_rank_0(tmp_path: Path, gone: str) -> None:
    path = script(tmp_path, TALKS_AND_NOTES)
    command = [
        "sh",
        "-c",
        'trap "" HUP; exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "photinus",
        "run",
        "--nproc-per-node",
        "1",
        path,
    ]
    reading, writing = pty.openpty() if gone == "terminal" else os.pipe()
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writing, stderr=writing)
    os.close(writing)
    try:
        assert b"begun" in os.read(reading, 100)
        os.close(reading)
        Path(f"{path}.go").touch()
        assert job.wait(DEADLINE_S) == 0
        assert Path(f"{path}.done").exists()
    finally:
        job.kill()
        job.wait()


OLD_STYLE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--lr", type=float)
print(parser.parse_args())
"""


def test_a_script_that_takes_local_rank_is_given_it_and_the_user_is_told_once(tmp_path: Path) -> None:
    path = script(tmp_path, OLD_STYLE)
    ended = run_job("--nproc-per-node", "2", path, "--lr", "0.5")
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == ["Namespace(local_rank=0, lr=0.5)", "[1] Namespace(local_rank=1, lr=0.5)"]
    assert ended.err == f"photinus: {path} takes --local_rank: each worker gets it (to omit it: --use-env)\n"


@pytest.mark.slow
def test_a_dry_run_tells_of_files_and_local_ranks_and_makes_nothing(tmp_path: Path) -> None:
    path = script(tmp_path, OLD_STYLE)
    ended = run_job("--nproc-per-node", "2", "--dry-run", "--log-dir", tmp_path / "logs", path, "--lr", "0.5")
    assert ended.code == 0, ended.err
    assert f"{path} --local_rank=LOCAL_RANK --lr 0.5\n" in ended.out
    assert f"all output also in {tmp_path}/logs\n" in ended.out
    assert sorted(file.name for file in tmp_path.iterdir()) == [path.name]


@pytest.mark.slow
def test_with_use_env_no_local_rank_is_given(tmp_path: Path) -> None:
    ended = run_job("--nproc-per-node", "2", "--use_env", script(tmp_path, OLD_STYLE), "--lr", "0.5")
    assert (ended.code, ended.err) == (0, "")
    assert sorted(ended.out.splitlines()) == [
        "Namespace(local_rank=None, lr=0.5)",
        "[1] Namespace(local_rank=None, lr=0.5)",
    ]


@pytest.mark.slow
def test_log_files_that_cannot_be_made_are_refused_before_any_worker_starts(tmp_path: Path) -> None:
    path = script(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "file").write_text("")
    ended = run_job("--nproc-per-node", "2", "--log-dir", tmp_path / "file", path)
    assert ended.code == 2
    assert "cannot write there" in ended.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_disk_that_fills_up_costs_the_files_and_not_the_training(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    text = "for number in range(3000):\n    print('x' * 100, number)\nprint('done')\n"
    wrap = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size=64k tmpfs "{logs}" && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*wrap, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not allowed here")
    command = [
        sys.executable,
        "-m",
        "photinus",
        "run",
        "--nproc-per-node",
        "2",
        "--log-dir",
        str(logs),
        "--redirects",
        "3",
    ]
    ended = subprocess.run(
        [*wrap, *command, str(script(tmp_path, text))], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count(": No space left on device. Training continues") == 1
    assert "\ndone\n" in ended.stdout
    assert "[1] done\n" in ended.stdout
