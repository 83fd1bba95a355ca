"""Photinus inside a real Slurm of two hosts: without our launcher, with it, and by the script of examples/slurm."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from photinus.runlog.tables import read_rows
from tests.fork_server import REPOSITORY

from .slurm_cluster import Cluster, slurm_cluster, why_no_slurm
from .told import TELL, check_ranks, told

SMALL_RUN = REPOSITORY / "tests" / "small_run.py"
JOB = REPOSITORY / "examples" / "slurm" / "job.sh"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_no_slurm() is not None, reason=why_no_slurm() or ""),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster() as running:
        yield running


def check_four_ranks(folder: Path, launcher: str, *arguments: str) -> None:
    check_ranks(folder, launcher=launcher, local_sizes=(2, 2), arguments=arguments)
    assert [rank["node"] for rank in told(folder)] == ["node1", "node1", "node2", "node2"]


def test_tasks_of_srun_are_the_ranks_without_any_launcher_of_ours(cluster: Cluster, tmp_path: Path):
    ran = cluster.run("srun", "-N2", "--ntasks-per-node=2", sys.executable, TELL, tmp_path, "--lr", "0.1")
    assert ran.code == 0, ran.out + ran.err
    check_four_ranks(tmp_path, "Slurm", "--lr", "0.1")


def test_hosts_with_different_numbers_of_tasks_are_read_rightly(cluster: Cluster, tmp_path: Path):
    # Slurm fills the first host, and leaves one task for the second.
    ran = cluster.run("srun", "-N2", "-n4", sys.executable, TELL, tmp_path)
    assert ran.code == 0, ran.out + ran.err
    check_ranks(tmp_path, launcher="Slurm", local_sizes=(3, 1))


def test_two_jobs_side_by_side_do_not_meet(cluster: Cluster, tmp_path: Path):
    for name in "ab":
        (tmp_path / name).mkdir()
    both = (
        f"srun -n2 {sys.executable} {TELL} {tmp_path}/a & first=$!; "
        f"srun -n2 {sys.executable} {TELL} {tmp_path}/b; code=$?; wait $first && exit $code"
    )
    ran = cluster.run("bash", "-c", both)
    assert ran.code == 0, ran.out + ran.err
    for name in "ab":
        assert [rank["sum"] for rank in told(tmp_path / name)] == [3.0, 3.0]


def test_photinus_run_on_each_host_by_srun_is_one_job(cluster: Cluster, tmp_path: Path):
    run = [sys.executable, "-m", "photinus", "run", "--nproc-per-node", "2", "--cpu", TELL, tmp_path, "--lr", "0.1"]
    ran = cluster.run("srun", "-N2", "--ntasks-per-node=1", *run)
    assert ran.code == 0, ran.out + ran.err
    check_four_ranks(tmp_path, "photinus run", "--lr", "0.1")


def test_several_launchers_on_a_host_are_refused_with_what_to_type(cluster: Cluster, tmp_path: Path):
    ran = cluster.run("srun", "-N2", "-n4", sys.executable, "-m", "photinus", "run", "--cpu", TELL, tmp_path)
    assert ran.code == 2
    assert "srun --ntasks-per-node=1 photinus run" in ran.err
    assert not told(tmp_path)


def test_a_batch_script_of_ours_trains_on_all_hosts(cluster: Cluster, tmp_path: Path):
    options = ["--time=5", "--mem=0", f"--output={tmp_path}/log"]
    words = ["--nproc-per-node", "2", "--cpu", TELL, tmp_path, "--lr", "0.1"]
    job = cluster.run("sbatch", "--parsable", *options, JOB, *words, cwd=tmp_path, PATH=PATH)
    assert job.code == 0, job.err
    ended = cluster.wait_for(job.out.strip(), "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    assert ended["JobState"] == "COMPLETED", (tmp_path / "log").read_text()
    check_four_ranks(tmp_path, "photinus run", "--lr", "0.1")


def test_a_batch_job_that_is_asked_to_leave_saves_is_queued_again_and_trains_to_the_end(
    cluster: Cluster, tmp_path: Path
):
    run, log = tmp_path / "run", tmp_path / "log"
    options = {"batch_size": 8, "samples": 48, "epochs": 3, "wait_s": 0.5}  # 18 steps
    words = ["--nproc-per-node", "2", "--cpu", SMALL_RUN, run, "", json.dumps(options)]
    submitted = cluster.run(
        *("sbatch", "--parsable", "--nodes=1", f"--output={log}", JOB, *words),
        cwd=tmp_path,
        PYTHONPATH=str(REPOSITORY),
        PATH=PATH,
    )
    assert submitted.code == 0, submitted.err
    job = submitted.out.strip()
    cluster.wait_until(lambda: read_rows(run / "losses.csv"), "a step is done")
    # What Slurm does by itself a minute before the end of the time limit.
    cluster.run("scancel", "--signal=USR1", "--batch", job)
    ended = cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    said = log.read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    assert "photinus: suspended at step " in said, said
    assert f"job {job} is queued again" in said
    result = json.loads((run / "result-0.json").read_text())
    assert 0 < result["began_at"] < 18, said
    assert [row["step"] for row in read_rows(run / "losses.csv")] == list(range(1, 19))


def test_a_process_alone_in_a_job_of_several_tasks_is_refused(cluster: Cluster, tmp_path: Path):
    batch = f"#!/bin/bash\nexec {sys.executable} {TELL} {tmp_path}\n"
    job = cluster.run("sbatch", "--parsable", "-n4", f"--output={tmp_path}/log", text=batch)
    ended = cluster.wait_for(job.out.strip(), "COMPLETED", "FAILED")
    said = (tmp_path / "log").read_text()
    assert ended["JobState"] == "FAILED", said
    assert "has 4 tasks" in said
    assert "world of 1" in said
