"""A rank is killed: the job starts anew at its first attempt, from the last checkpoint, and says who died of what."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from photinus.runlog.events import read_events
from tests.dist.test_run import DEADLINE_S, ONE_STEP, RunningJob, run_job, script
from tests.faults.test_run_end import descendants

# Adds up all_reduce results; rank 0 saves each 5 steps. Interrupted or not, the end is the same number.
RESUMING = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from photinus import engine

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
address = folder / f"address-{attempt}"
if rank == 0:
    Path(f"{address}.new").write_text(engine.new_address())
    os.replace(f"{address}.new", address)
while not address.exists():
    time.sleep(0.005)
ranks = engine.Communicator(rank, int(os.environ["WORLD_SIZE"]), address.read_text(), timeout_s=30)
saved = folder / "saved.json"
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "sum": 0.0}
(folder / f"began-{attempt}-{rank}").write_text(str(state["step"]))
while state["step"] < steps:
    numbers = np.full(1000, rank + state["step"], np.float32)
    ranks.all_reduce(numbers)
    state = {"step": state["step"] + 1, "sum": state["sum"] + numbers[0].item()}
    if rank == 0 and state["step"] % 5 == 0:
        Path(f"{saved}.new").write_text(json.dumps(state))
        os.replace(f"{saved}.new", saved)
    if state["step"] == 20:
        (folder / f"pid-{attempt}-{rank}").write_text(str(os.getpid()))
    time.sleep(0.01)
if rank == 0:
    print(json.dumps({"attempt": attempt, **state}))
ranks.close()
"""


def kill_and_resume(folder: Path, *, world_size: int, victim: int, number: signal.Signals = signal.SIGKILL) -> None:
    """One job whose rank `victim` is killed in mid-run, checked from the message to the final number."""
    folder.mkdir()
    path = script(folder, RESUMING)
    job = RunningJob(["--nproc-per-node", str(world_size), "--max-restarts", "1", path, folder, "60"])
    job.wait_for(*(folder / f"pid-0-{rank}" for rank in range(world_size)))
    pid = int((folder / f"pid-0-{victim}").read_text())
    os.kill(pid, number)
    ended = job.end()
    assert ended.code == 0, ended.err
    expected = sum(sum(rank + step for rank in range(world_size)) for step in range(60))
    assert json.loads(ended.out) == {"attempt": 1, "step": 60, "sum": expected}
    assert int((folder / f"began-1-{victim}").read_text()) >= 15
    lines = [line for line in ended.err.splitlines() if line.startswith("photinus: ")]
    assert lines[0] == f"photinus: rank {victim} (pid {pid}) was killed by {number.name}"
    assert "attempt 0" in lines[1]
    assert lines[-1] == (f"photinus: restarting all {world_size} workers (restart 1 of 1)")
    others = [line for line in lines if line.startswith("photinus: rank") and line != lines[0]]
    named = [rank for line in others for rank in re.match(r"photinus: ranks? ([\d, ]+)", line).group(1).split(",")]
    assert sorted(map(int, named)) == [rank for rank in range(world_size) if rank != victim]
    assert "Traceback" not in ended.err
    assert "memory" not in ended.err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_costs_one_restart_and_no_result(tmp_path, victim):
    kill_and_resume(tmp_path / "job", world_size=2, victim=victim)


@pytest.mark.slow
@pytest.mark.parametrize("time", range(20))
def test_any_rank_killed_many_times_in_a_row(tmp_path, time):
    kill_and_resume(tmp_path / "job", world_size=3, victim=time % 3)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT, signal.SIGBUS])
def test_other_signals_are_named_too(tmp_path, number):
    kill_and_resume(tmp_path / "job", world_size=2, victim=1, number=number)


FAILS_AT_FIRST = f"""
import os, sys, time
if os.environ["RANK"] == "1": {"; ".join(ONE_STEP.strip().splitlines())}
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def load(name):
    raise FileNotFoundError(f"no shard {{name}}")
if rank == 1 and attempt == 0:
    print("about to fail")
    load("x.bin")
if rank == 0 and attempt == 0:
    time.sleep(100)
if rank == 1 and attempt == 1:
    sys.exit(7)
time.sleep(100)
"""


def test_each_failure_is_told_once_with_its_own_words_and_the_last_decides_the_exit_code(tmp_path):
    path = script(tmp_path, FAILS_AT_FIRST)
    ended = run_job("--nproc-per-node", "3", "--max-restarts", "1", path)
    assert ended.code == 7
    assert ended.out == "[1] about to fail\n"
    pid = r"\(pid \d+\)"
    assert re.fullmatch(
        rf"""
photinus: rank 1 {pid} raised FileNotFoundError: no shard x.bin
photinus:   local rank 1 of host \S+, attempt 0, \d+.\d s after its start

    Traceback \(most recent call last\):
      File "{path}", line 9, in <module>
        load\("x.bin"\)(?:
        ~+\^+)?
      File "{path}", line 6, in load
        raise FileNotFoundError\(f"no shard {{name}}"\)
    FileNotFoundError: no shard x.bin

photinus: ranks 0, 2 ended by the launcher
photinus: restarting all 3 workers \(restart 1 of 1\)

photinus: rank 1 {pid} exited with code 7
photinus:   local rank 1 of host \S+, attempt 1, \d+.\d s after its start
photinus: ranks 0, 2 ended by the launcher
photinus: no restarts left \(--max-restarts 1\)
photinus: LaunchError: the job failed after 1 restart; the first cause was rank 1, see above \(exit code 7\)
""",
        ended.err,
    ), ended.err


def test_a_job_that_dies_of_a_signal_for_good_exits_with_128_and_the_signal(tmp_path):
    path = script(tmp_path, "import os, time\nif os.environ['RANK'] == '0': os.kill(os.getpid(), 9)\ntime.sleep(100)\n")
    ended = run_job("--nproc-per-node", "2", "--max-restarts", "0", path)
    assert ended.code == 137
    assert "photinus: not restarting (--max-restarts 0)\n" in ended.err
    assert "(exit code 137)" in ended.err


def test_a_working_directory_that_was_removed_meanwhile_is_named_in_place_of_another_attempt(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    script(folder, "import os, shutil\nshutil.rmtree(os.getcwd())\nos.kill(os.getpid(), 9)\n")
    ended = run_job("--nproc-per-node", "1", "script.py", cwd=folder)
    assert ended.code == 1
    last = "photinus: LaunchError: cannot restart the workers: their working directory was removed"
    assert ended.err.splitlines()[-1] == last


def test_what_cannot_go_better_is_not_tried_again(tmp_path):
    path = script(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()\n")
    ended = run_job("--nproc-per-node", "2", path, "--bogus")
    assert ended.code == 2
    assert "not restarting: exit code 2 before the first training step would happen again" in ended.err
    # Once from each rank; and in the report, if the first cause is the rank whose lines the launcher carries.
    assert ended.err.count("unrecognized arguments: --bogus") in (2, 3)


def test_an_error_of_the_program_before_its_first_step_is_one_attempt_with_one_traceback(tmp_path):
    ended = run_job("--nproc-per-node", "2", script(tmp_path, "print(modle)\n"))
    assert ended.code == 1
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert ended.err.count("raised NameError: name 'modle' is not defined") == 1
    assert "not restarting: NameError before the first training step would happen again" in ended.err


# Resumes by itself, and fails at the same line after 10 steps of the first attempt and 5 more of the second.
OWN_LOOP = """
import os, sys, torch
from pathlib import Path
saved = Path(sys.argv[1])
step = int(saved.read_text()) if saved.exists() else 0
optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
while True:
    optimizer.step()
    step += 1
    saved.write_text(str(step))
    if step in (10, 15):
        raise OSError("storage is away")
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_that_gets_further_each_time_is_tried_again(tmp_path):
    path = script(tmp_path, OWN_LOOP)
    ended = run_job("--nproc-per-node", "1", "--max-restarts", "1", path, tmp_path / "saved")
    assert (tmp_path / "saved").read_text() == "15"
    assert "no restarts left (--max-restarts 1)" in ended.err  # and not: came again


def test_an_error_that_comes_at_the_same_place_again_ends_a_run_and_shows_its_traceback_first_and_last(tmp_path):
    fails = "raise OSError(f'storage is away: {os.getpid()}')\n"
    one_step = f"if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n    exec({ONE_STEP!r})"
    path = script(tmp_path, f"import os\n{one_step}\n\n\n{fails}")
    ended = run_job("--nproc-per-node", "1", path)
    assert ended.code == 1
    assert ended.err.count("raised OSError: storage is away") == 2
    assert ended.err.count("Traceback (most recent call last)") == 2
    assert "photinus: restarting the worker (restart 1 of 3)\n" in ended.err
    assert f"not restarting: OSError happened again at {path}:6, and training got no further than before" in ended.err


# Fails at each 15th step of the run, so that each attempt gets further than the one before.
FAILS_FURTHER_ON = """
import sys, torch, photinus
with photinus.init(backend="gloo"):
    model = torch.nn.Linear(1, 1)
    model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [(torch.ones(1), torch.ones(1))] * 20
    save = photinus.Saving(every_steps=10, snapshot_every=0)
    loop = photinus.Loop(model, optimizer, data, batch_size=1, epochs=2, out=sys.argv[1], save=save)
    began = loop.step
    for x, y in loop:
        if loop.step % 15 == 0 and loop.step > began + 5:
            raise OSError("storage is away")
        loop.backward((model(x) - y).square().mean())
        optimizer.step()
"""


def test_a_run_that_gets_further_each_time_is_tried_again_from_its_checkpoint(tmp_path):
    ended = run_job("--nproc-per-node", "1", "--cpu", script(tmp_path, FAILS_FURTHER_ON), tmp_path / "run")
    assert ended.code == 1, ended.out + ended.err
    assert "restarting the worker (restart 1 of 3)\n" in ended.err
    assert "restarting the worker (restart 2 of 3)" in ended.err
    assert re.findall(r"^resumed from .*/step-0*(\d+): ", ended.out, re.MULTILINE) == ["10", "20"]
    assert "OSError happened again at" in ended.err


# The last attempt ends well, the earlier ones wait to be ended.
WAITS = """
import os, sys, time
from pathlib import Path
folder, last, rank = Path(sys.argv[1]), int(sys.argv[2]), os.environ["RANK"]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(folder / f"began-{attempt}-{rank}").write_text("yes")
while attempt < last:
    time.sleep(0.01)
"""
MEETS = WAITS.replace(
    "while",
    """
import torch, torch.distributed as dist
dist.init_process_group("photinus")
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == dist.get_world_size()
(folder / f"met-{attempt}-{rank}").write_text("yes")
dist.barrier()
while""",
)


def store_of(job: RunningJob) -> int:
    """The pid of the process that holds the store of a job's workers."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for pid in descendants(job.process.pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "photinus-store\n":
                    return pid
        time.sleep(0.005)
    raise AssertionError("no process holds a store")


def kill_stores(job: RunningJob, folder: Path, *moments: str) -> list[int]:
    """Kills the store at each moment, which both ranks write down; returns its pids."""
    pids = []
    for moment in moments:
        job.wait_for(folder / f"{moment}-0", folder / f"{moment}-1")
        pids.append(store_of(job))
        os.kill(pids[-1], signal.SIGKILL)
    return pids


@pytest.mark.parametrize(
    ("text", "moments"),
    [(WAITS, ("began-0", "began-1")), pytest.param(MEETS, ("met-0", "began-1"), marks=pytest.mark.slow)],
    ids=["without torch", "training, then starting"],
)
def test_a_killed_store_costs_a_restart_each_time_and_is_told(tmp_path, text, moments):
    job = RunningJob(["--nproc-per-node", "2", "--max-restarts", "2", script(tmp_path, text), tmp_path, "2"])
    pids = kill_stores(job, tmp_path, *moments)
    ended = job.end()
    assert ended.code == 0, ended.err
    holds = "photinus: the process that holds the workers' store"
    assert [line for line in ended.err.splitlines() if line.startswith("photinus: ")] == [
        f"{holds} (pid {pid}) was killed by SIGKILL: starting all workers again (restart {number} of 2)"
        for number, pid in enumerate(pids, 1)
    ]


def test_a_killed_store_ends_a_job_without_restarts(tmp_path):
    job = RunningJob(["--nproc-per-node", "2", "--max-restarts", "0", script(tmp_path, WAITS), tmp_path, "1"])
    (pid,) = kill_stores(job, tmp_path, "began-0")
    ended = job.end()
    assert ended.code == 1
    assert ended.err == (
        f"photinus: LaunchError: the process that holds the workers' store (pid {pid}) was killed by SIGKILL. No "
        f"restarts left (--max-restarts 0)\n"
    )


def test_a_restart_that_a_lost_store_cost_counts_among_those_of_the_last_line(tmp_path):
    path = script(tmp_path, WAITS + "sys.exit(7)\n")
    job = RunningJob(["--nproc-per-node", "2", "--max-restarts", "1", path, tmp_path, "1"])
    kill_stores(job, tmp_path, "began-0")
    assert "photinus: LaunchError: the job failed after 1 restart; the first cause was rank " in job.end().err


FEWER = """
import os, sys, time
from pathlib import Path
import numpy as np
from photinus import engine

rank, address = int(os.environ["RANK"]), Path(sys.argv[1]) / "address"
if rank == 0:
    Path(f"{address}.new").write_text(engine.new_address())
    os.replace(f"{address}.new", address)
while not address.exists():
    time.sleep(0.005)
ranks = engine.Communicator(rank, 2, address.read_text(), timeout_s=30)
for _ in range(40 if rank == 0 else 12):
    ranks.all_reduce(np.ones(8, np.float32))
ranks.close()
"""


def test_a_rank_with_fewer_batches_is_the_first_cause_and_the_job_is_not_started_again(tmp_path: Path) -> None:
    ended = run_job("--nproc-per-node", "2", script(tmp_path, FEWER), tmp_path)
    assert ended.code == 1
    assert ended.err.count("PeerLostError: rank 1") == 2  # in the head and in the traceback
    assert "not restarting: rank 1 exited with code 0 while others had more to do" in ended.err
    assert "the first cause was rank 1, see above" in ended.err


INTERRUPTED = """
import sys, time, torch, photinus
with photinus.init(backend="gloo"):
    model = torch.nn.Linear(1, 1)
    model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [(torch.ones(1), torch.ones(1))] * 4
    for x, y in (loop := photinus.Loop(model, optimizer, data, batch_size=1, epochs=1000, out=sys.argv[1])):
        loop.backward((model(x) - y).square().mean())
        optimizer.step()
        if loop.step == 10:
            loop.out.joinpath("waits").write_text("yes")
            time.sleep(600)
"""


def test_after_ctrl_c_the_launcher_tells_the_last_checkpoint_and_how_to_go_on(tmp_path):
    run = tmp_path / "run"
    job = RunningJob(["--nproc-per-node", "1", "--cpu", script(tmp_path, INTERRUPTED), run])
    job.wait_for(run / "waits")
    job.send(signal.SIGINT)
    lines = job.end().err.splitlines()
    assert lines[-2] == "photinus: the last checkpoint is of step 8; the same command resumes from there"
    assert lines[-1].startswith("photinus: ended by SIGINT: ")


ALONE = """
import contextlib, os, signal, sys, torch, photinus
how, out = sys.argv[1], sys.argv[2] or None
model, data = torch.nn.Linear(1, 1), [(torch.ones(1), torch.ones(1))] * 4
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if how == "Trainer":
    stop = lambda loop: loop.step == 12 and os.kill(os.getpid(), signal.SIGINT)
    photinus.Trainer(model, optimizer, torch.nn.MSELoss(), epochs=9, batch_size=1, out=out, callbacks=[stop]).fit(data)
with photinus.init() if how == "with" else contextlib.nullcontext():
    if how == "init":
        photinus.init()
    model, optimizer = photinus.wrap(model, optimizer)
    resume = "never" if how == "never" else "auto"
    for x, y in (loop := photinus.Loop(model, optimizer, data, batch_size=1, epochs=9, out=out, resume=resume)):
        loop.backward((model(x) - y).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if loop.step == (2 if how == "early" else 10):
            os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("how", ["with", "init", "no init", "Trainer", "never", "early", "without out"])
def test_after_ctrl_c_a_script_without_a_launcher_tells_the_last_checkpoint_and_how_to_go_on(tmp_path, how):
    out = "" if how == "without out" else str(tmp_path / "run")
    command = [sys.executable, script(tmp_path, ALONE), how, out]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert "KeyboardInterrupt" in ended.stderr.splitlines()[-1]
    told = [line for line in ended.stdout.splitlines() if "checkpoint" in line]
    if how in ("never", "early", "without out"):  # nothing is kept, or the command would start over
        assert told == []
        return
    assert told == ["photinus: the last checkpoint is of step 8; the same command resumes from there"]
    (end,) = (event for event in read_events(tmp_path / "run") if event.kind == "end")
    assert (end.facts["how"], end.facts["text"]) == ("left", "Ctrl-C")
    again = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert "step-00000008: " in next(line for line in again.stdout.splitlines() if line.startswith("resumed from "))
