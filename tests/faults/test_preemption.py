"""Asked to suspend in mid-epoch: all ranks save the same step and leave soon; resumed, no bit differs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import photinus
from photinus.runlog.events import read_events
from photinus.trainer.session import preemption
from tests.dist.test_run import RunningJob, run_job, script
from tests.dist.test_run_hosts import free_port, launch
from tests.faults.test_run_end import alive
from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, train
from tests.worker_processes import rank_of

RUN = {"batch_size": 12, "samples": 60, "epochs": 2}  # 5 steps an epoch
LONG = {**RUN, "epochs": 60}
DIGITS = REPOSITORY / "examples" / "digits"
DEADLINE_S = 60.0


def run_to_the_end(rank: int, world_size: int, out: str | None = None) -> dict[str, Any]:
    return train(out, backend="auto", **RUN)


def run_and_be_asked(rank: int, world_size: int, out: str, asked: int) -> None:
    def kill(step: int) -> None:
        if (rank, step) == (asked, 3):
            os.kill(os.getpid(), signal.SIGUSR1)

    train(out, backend="auto", kill=kill, wait_s=0.01 * rank, **RUN)


def count_up(rank: int, world_size: int, asked: list[int]) -> int:
    """A loop of one's own whose ranks meet in the call alone."""
    step = 0
    while True:
        step += 1
        if rank in asked and step == 40:
            os.kill(os.getpid(), signal.SIGUSR1)
        if preemption.suspend_requested():
            assert preemption.suspend_requested()  # without an exchange
            preemption.close()
            return step


def test_one_rank_is_asked_all_save_the_same_step_and_no_bit_differs(tmp_path: Path) -> None:
    here = "tests.faults.test_preemption:"
    codes = {0: preemption.EXIT_CODE, 1: preemption.EXIT_CODE}
    options: dict[str, Any] = {"world_size": 2, "backend": "photinus"}
    whole = values(run_ranks(here + "run_to_the_end", **options))
    asked = run_ranks(here + "run_and_be_asked", expect=codes, arguments={"out": str(tmp_path), "asked": 1}, **options)
    assert re.search(r"suspended at step [345], saved in ", asked[0].output)  # 5: the epoch's end
    resumed = values(run_ranks(here + "run_to_the_end", arguments={"out": str(tmp_path)}, **options))
    assert resumed[0]["began_at"] in (3, 4, 5)
    assert [one["fingerprint"] for one in resumed] == [one["fingerprint"] for one in whole]


@pytest.mark.parametrize("asked", [[2], pytest.param([0, 1, 2], marks=pytest.mark.slow)])
def test_ranks_of_a_loop_of_ones_own_stop_at_the_step_of_the_first_that_was_asked(asked: list[int]) -> None:
    found = values(
        run_ranks("tests.faults.test_preemption:count_up", world_size=3, backend="gloo", arguments={"asked": asked})
    )
    assert found == [40, 40, 40]


TRAINS = """
import os, sys, time, torch, photinus
photinus.init(seed=0)
model, optimizer = photinus.wrap(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
data, folder = torch.rand(4000, 2), sys.argv[1]
loop = photinus.Loop(model, optimizer, data, batch_size=4, epochs=1, out=folder + "/run")
for batch in loop:
    loop.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    open(f"{folder}/trains-{os.environ['PHOTINUS_ATTEMPT']}", "w").write("yes")
    time.sleep(0.05)
"""


@pytest.mark.parametrize("by_shell", [False, True], ids=["Python", "a shell script"])
def test_a_program_that_suspends_itself_is_treated_as_a_script_that_does(tmp_path: Path, by_shell: bool) -> None:
    path = script(tmp_path, TRAINS)
    command = f"{sys.executable} {path} {tmp_path}"
    program = ["bash", "-c", f"{command}; exit $?"] if by_shell else command.split()
    job = RunningJob(["--cpu", "--nproc-per-node", "1", "--max-restarts", "0", "--no-python", *program])
    job.wait_for(tmp_path / "trains-0")
    job.send(signal.SIGUSR1)
    job.wait_for(tmp_path / "trains-1")
    job.send(signal.SIGTERM)
    ended = job.end()
    assert ended.code == 143
    assert "photinus: suspended\nphotinus: starting the worker again (no failure, and not counted as one)" in ended.err
    assert ended.err.endswith(
        "photinus: suspended; the same command resumes from there\nphotinus: ended by SIGTERM: its worker was ended\n"
    )


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.full((2,), float(index))


def run_with_loader_workers(rank: int, world_size: int, out: str, context: str, signal_number: int) -> None:
    os.setpgrp()
    torch.manual_seed(0)
    model, optimizer = photinus.wrap(model := nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=1e-6))
    theirs: Any = DataLoader(Slow(), 4, num_workers=2, multiprocessing_context=context, worker_init_fn=_draw)
    loop = photinus.Loop(model, optimizer, theirs, epochs=1, out=out, report=QUIET)
    for batch in loop:
        if loop.step == 3:  # to every process of the group, from outside
            subprocess.run(["kill", f"-{signal_number}", "--", f"-{os.getpgrp()}"], check=False)
        loop.backward(model(batch).mean())
        optimizer.step()


def _draw(worker: int) -> None:
    torch.rand(worker)


@pytest.mark.parametrize(
    ("context", "number"),
    [
        ("fork", signal.SIGTERM),
        ("fork", signal.SIGUSR1),
        pytest.param("forkserver", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("forkserver", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("spawn", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_whole_process_group_leaves_loader_workers_to_their_rank(
    tmp_path: Path, context: str, number: signal.Signals
) -> None:
    (rank,) = run_ranks(
        "tests.faults.test_preemption:run_with_loader_workers",
        world_size=1,
        backend="gloo",
        expect={0: preemption.EXIT_CODE},
        arguments={"out": str(tmp_path), "context": context, "signal_number": int(number)},
    )
    assert re.search(r"suspended at step [34], saved in ", rank.output)
    assert "Traceback" not in rank.output
    _, left = psutil.wait_procs(
        _in_group(rank.pid), timeout=10
    )  # a fork server goes once it sees that the rank is gone
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]


def _in_group(group: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == group:
                found.append(process)
    return found


# -- under the launcher ----------------------------------------------------------------------------------------------


def start_small(out: Path, *flags: str) -> RunningJob:
    words = ["--cpu", "--nproc-per-node", "2", *flags, REPOSITORY / "tests" / "small_run.py", out, ""]
    options = json.dumps({**LONG, "backend": "photinus", "wait_s": 0.02})
    return RunningJob([*words, options], PYTHONPATH=str(REPOSITORY))


def rows(out: Path) -> int:
    file = out / "losses.csv"
    return max(0, len(file.read_text().splitlines()) - 1) if file.exists() else 0


def wait_for_steps(job: RunningJob, out: Path, steps: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while rows(out) < steps:
        if job.process.poll() is not None or time.monotonic() > deadline:
            ended = job.end(kill=True)
            raise AssertionError(f"{steps} steps were awaited in vain\n{ended.out}\n{ended.err}")
        time.sleep(0.01)


def workers(launcher: int) -> dict[int, int]:
    """Pids of a launcher's workers by rank."""
    found = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        if (rank := rank_of(pid)) is not None:
            found[rank] = pid
    return found


def fingerprints(out: Path) -> list[str]:
    return [json.loads((out / f"result-{rank}.json").read_text())["fingerprint"] for rank in (0, 1)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("whole")
    ended = start_small(out).end()
    assert ended.code == 0, ended.out + ended.err
    return fingerprints(out)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_worker_that_is_asked_suspends_all_and_the_launcher_starts_them_again(
    tmp_path: Path, whole: list[str], number: signal.Signals
) -> None:
    job = start_small(tmp_path, "--max-restarts", "0")
    wait_for_steps(job, tmp_path, 16)
    first = workers(job.process.pid)
    begun = time.monotonic()
    os.kill(first[1], number)
    while any(map(alive, first.values())):
        assert time.monotonic() - begun < 5.0
        time.sleep(0.01)
    ended = job.end()
    assert ended.code == 0, ended.out + ended.err
    words = r"^photinus: suspended at step (\d+), saved in \S+step-0*(\d+)\nphotinus: starting all 2 workers again "
    said = re.search(words, ended.err, re.MULTILINE)
    assert said, ended.err
    assert said[1] == said[2]
    assert f"step {said[1]}" in ended.out  # resumed from ...
    assert "restart" not in ended.err
    assert fingerprints(tmp_path) == whole


@pytest.mark.slow
def test_a_launcher_that_is_asked_by_sigusr1_suspends_its_workers_and_starts_them_again(
    tmp_path: Path, whole: list[str]
) -> None:
    job = start_small(tmp_path)
    wait_for_steps(job, tmp_path, 16)
    job.send(signal.SIGUSR1)
    ended = job.end()
    assert ended.code == 0, ended.out + ended.err
    assert ended.err.count("photinus: suspended at step ") == 1, ended.err
    assert fingerprints(tmp_path) == whole


def processes_of(launcher: int) -> list[int]:
    """A launcher's pid and those of all processes that it has started."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [launcher, *(each for child in children for each in processes_of(int(child)))]


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the launcher", "all its processes"])
def test_a_launcher_that_is_ended_by_sigterm_lets_its_workers_save_and_the_same_command_goes_on(
    tmp_path: Path, whole: list[str], whom: str
) -> None:
    job = start_small(tmp_path)
    wait_for_steps(job, tmp_path, 16)
    ours = workers(job.process.pid)
    begun = time.monotonic()
    for _ in range(2):  # as `timeout` and schedulers do it
        job.send(signal.SIGTERM)
    if whom == "all its processes":  # as Slurm's scancel and systemd do it
        for pid in processes_of(job.process.pid):
            os.kill(pid, signal.SIGTERM)
    ended = job.end()
    assert time.monotonic() - begun < 5.0
    assert ended.code == 143, ended.out + ended.err
    assert re.fullmatch(
        r"photinus: suspended at step \d+, saved in \S+; the same command resumes from there\n"
        r"photinus: ended by SIGTERM: 2 workers were ended\n",
        ended.err,
    ), ended.err
    assert not any(map(alive, ours.values()))
    again = start_small(tmp_path).end()
    assert again.code == 0, again.out + again.err
    assert "resumed from " in again.out
    assert fingerprints(tmp_path) == whole


def start_on_a_host(out: Path, port: int, nnodes: str, *flags: str) -> RunningJob:
    options = json.dumps({**LONG, "backend": "gloo", "wait_s": 0.02})
    words = (*flags, REPOSITORY / "tests" / "small_run.py", out, "", options)
    return launch(port, *words, nnodes=nnodes, PYTHONPATH=str(REPOSITORY))


def start_on_two_hosts(out: Path, nnodes: str) -> list[RunningJob]:
    port = free_port()
    return [start_on_a_host(out, port, nnodes) for _ in range(2)]


@pytest.mark.slow
def test_workers_save_before_they_are_ended_for_a_host_that_comes(tmp_path: Path) -> None:
    port, flags = free_port(), ("--rdzv-conf", "last_call_timeout=0.5")
    first = start_on_a_host(tmp_path, port, "1:2", *flags)
    wait_for_steps(first, tmp_path, 16)
    second = start_on_a_host(tmp_path, port, "1:2", *flags)
    for job in (first, second):
        ended = job.end()
        assert ended.code == 0, ended.out + ended.err
        if job is first:
            (step,) = re.findall(r"photinus: suspended at step (\d+), saved in ", ended.err)
    starts = [event.facts for event in read_events(tmp_path) if event.kind == "start"]
    assert [start["world_size"] for start in starts] == [1, 2]
    assert starts[1]["resumed_from"].endswith(f"step-{int(step):08}")


@pytest.mark.slow
def test_a_launcher_of_one_host_is_asked_and_the_ranks_of_both_suspend_and_go_on(tmp_path: Path) -> None:
    jobs = start_on_two_hosts(tmp_path, "2")
    wait_for_steps(jobs[0], tmp_path, 16)
    jobs[1].send(signal.SIGUSR1)
    for job in jobs:
        ended = job.end()
        assert ended.code == 0, ended.out + ended.err
        assert ended.err.count("photinus: suspended at step ") == 1, ended.err
        assert "restart" not in ended.err


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["the launcher", "all its processes"])
def test_all_hosts_are_ended_by_sigterm_and_all_ranks_have_saved(tmp_path: Path, whom: str) -> None:
    jobs = start_on_two_hosts(tmp_path, "2")
    wait_for_steps(jobs[0], tmp_path, 16)
    begun = time.monotonic()
    for job in jobs:
        for pid in processes_of(job.process.pid) if whom == "all its processes" else [job.process.pid]:
            os.kill(pid, signal.SIGTERM)
    said = []
    for job in jobs:
        ended = job.end()
        assert ended.code == 143, ended.out + ended.err
        said += re.findall(r"suspended at step (\d+), saved in ", ended.err)
    assert time.monotonic() - begun < 5.0
    assert said, "no launcher said that its workers had saved"
    assert len(set(said)) == 1
    assert (tmp_path / "checkpoints" / f"step-{int(said[0]):08}").is_dir()


@pytest.mark.slow
def test_ctrl_c_ends_a_run_within_two_seconds_and_saves_nothing(tmp_path: Path) -> None:
    job = start_small(tmp_path)
    wait_for_steps(job, tmp_path, 16)
    begun = time.monotonic()
    job.send(signal.SIGINT)
    ended = job.end()
    assert time.monotonic() - begun < 2.0
    assert ended.code == 130, ended.err
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert all(step % 5 == 0 for step in steps), steps
    assert ended.err == (
        f"photinus: the last checkpoint is of step {steps[-1]}; the same command resumes from there\n"
        "photinus: ended by SIGINT: 2 workers were ended\n"
    )


@pytest.mark.slow
def test_a_killed_rank_still_costs_no_grace_although_the_others_take_sigterm(tmp_path: Path) -> None:
    job = start_small(tmp_path, "--stop-grace", "30")
    wait_for_steps(job, tmp_path, 16)
    first = workers(job.process.pid)
    os.kill(first[0], signal.SIGSTOP)  # rank 1 now waits for it, deep in a collective
    time.sleep(0.5)
    begun = time.monotonic()
    os.kill(first[0], signal.SIGKILL)
    while alive(first[1]):
        assert time.monotonic() - begun < 5.0
        time.sleep(0.01)
    ended = job.end()
    assert ended.code == 0, ended.out + ended.err
    assert "rank 0 " in ended.err
    assert "restart 1 of 3" in ended.err


def test_a_request_to_suspend_says_once_that_no_worker_is_in_a_loop(tmp_path: Path) -> None:
    ended = run_job("-n", "1", "--cpu", "--preempt-after", "0.1", script(tmp_path, "import time; time.sleep(2.5)"))
    assert ended.code == 0, ended.err
    assert ended.err.count("photinus: suspend requested, but no worker is in a loop that saves yet") == 1


@pytest.mark.slow
def test_a_trial_of_preemption_after_some_seconds_costs_nothing(tmp_path: Path, whole: list[str]) -> None:
    ended = start_small(tmp_path, "--preempt-after", "0.1").end()
    assert ended.code == 0, ended.out + ended.err
    assert ended.err.count("photinus: suspended at step ") == 1, ended.err
    assert fingerprints(tmp_path) == whole


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train.py", "train_loop.py"])
def test_the_digits_examples_are_suspended_at_a_given_step_and_end_with_the_same_bits(
    tmp_path: Path, name: str
) -> None:
    def run(out: Path, **environ: str) -> tuple[object, str]:
        words = ["--cpu", "--nproc-per-node", "2", DIGITS / name, "--epochs", "2", "--out", out]
        ended = RunningJob(words, **environ).end()
        assert ended.code == 0, ended.out + ended.err
        newest = sorted((out / "checkpoints").glob("step-*"))[-1]
        files = json.loads((newest / "manifest.json").read_text())["files"]
        return (files["model"], files["optimizer"]), ended.err

    expected, _ = run(tmp_path / "quiet")
    found, said = run(tmp_path / "suspended", PHOTINUS_PREEMPT_AT_STEP="30")
    step = re.search(r"suspended at step (\d+), saved in ", said)
    assert step, said
    assert 30 <= int(step[1]) < 30 + 16
    assert found == expected
