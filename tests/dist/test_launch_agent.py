"""The launcher's agent and the orders of other hosts, which are played here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fork_server import REPOSITORY

PLAY = """
import os, sys
from contextlib import closing
from functools import partial
from pathlib import Path
from photinus.run.local.guard import as_subreaper, start_guard
from photinus.run.local.interrupts import handle_signals
from photinus.run.local.output import Output
from photinus.run.local.processes import Processes
from photinus.run.local.store import StoreProcess

folder = Path(sys.argv[1])
with start_guard() as guard, handle_signals() as interrupts, closing(StoreProcess()) as store:
    from photinus.run.agent import Agent, OneHost
    from photinus.job.attempt import JobEndedError
    from photinus.run.local.job import Job
    from photinus.job.spec import JobSpec, Program

    class Leader(OneHost):
        '''Orders to meet anew in the very moment in which the agent sees the failure.'''
        ordered = sys.argv[2] != "regroup"
        def order(self):
            if not self.ordered and agent._processes.any_failed():
                self.ordered = True
                return "regroup"
            if not agent._processes.any_running():
                store.loss = lambda: "the store was killed"  # when nobody needs it any more
            return super().order()
        def verdict_on(self, report, check):
            raise JobEndedError("nobody judges what failed before a meeting, or when the leader is lost")

    output = Output()
    program = Program("script", str(folder / "train.py"))
    job = Job(JobSpec(program, max_restarts=0, cpu=True, stop_grace_s=5.0), "mine", 2, dict(os.environ))
    leader = Leader(job, lambda text, alarm: output.say(text), store)
    processes = partial(Processes, guard=guard, output=output, interrupts=interrupts)
    agent = Agent(job, leader, output, interrupts, processes)
    with as_subreaper():
        try:
            assert agent.run() is None
            print(f"attempts {leader._attempt + 1}")
        except JobEndedError:
            print("ended")
    output.close()
"""
TRAIN = """
import os, time
if os.environ["PHOTINUS_ATTEMPT"] == "0":
    if os.environ["RANK"] == "1":
        raise {error}
    time.sleep({sleeps_s})
"""


def play(folder: Path, error: str, order: str = "regroup", sleeps_s: float = 60) -> tuple[str, str]:
    (folder / "play.py").write_text(PLAY)
    (folder / "train.py").write_text(TRAIN.replace("{error}", error).replace("{sleeps_s}", str(sleeps_s)))
    done = subprocess.run(
        [sys.executable, str(folder / "play.py"), str(folder), order],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_a_failure_in_the_moment_of_an_order_to_meet_anew_is_told_and_hinders_nothing(tmp_path: Path) -> None:
    out, err = play(tmp_path, "OSError('the disk is away')")
    assert out == "attempts 2\n"
    assert "raised OSError: the disk is away" in err
    assert "photinus: starting all workers again\n" in err


def test_a_store_that_is_lost_when_all_workers_have_finished_costs_no_restart(tmp_path: Path) -> None:
    out, err = play(tmp_path, "SystemExit(0)", sleeps_s=0)
    assert (out, err) == ("attempts 1\n", "")


def test_a_rank_that_missed_the_lost_host_is_no_news_at_the_order_to_meet_anew(tmp_path: Path) -> None:
    out, err = play(tmp_path, "__import__('photinus.errors').errors.PeerLostError('rank 0')")
    assert out == "attempts 2\n"
    assert err == ""


def test_a_failure_on_which_nobody_judges_because_the_leader_is_lost_is_shown(tmp_path: Path) -> None:
    out, err = play(tmp_path, "OSError('the disk is away')", order="none")
    assert out == "ended\n"
    assert err.count("raised OSError: the disk is away") == 1
    assert err.endswith("photinus: the job ends\n")
