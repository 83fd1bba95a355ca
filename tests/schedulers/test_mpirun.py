"""Photinus inside a real mpirun of Open MPI: its processes as the ranks, and our launcher once on each host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from .told import TELL, check_ranks, told

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def is_open_mpi() -> bool:
    """Whether mpirun is there, and is Open MPI's."""
    if shutil.which("mpirun") is None:
        return False
    return "Open MPI" in subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout


open_mpi = pytest.mark.skipif(not is_open_mpi(), reason="needs Open MPI (Debian: apt-get install openmpi-bin)")

# Takes ssh's place: runs on this machine what mpirun wants to run on the host. So one machine can be several hosts.
NO_SSH = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
"""
RUN = [sys.executable, "-m", "photinus", "run", "--nproc-per-node", "2", "--cpu"]


def mpirun(*words: str | Path, timeout_s: float = 120.0, **environ: str) -> subprocess.CompletedProcess[str]:
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    # Its folders have the host's name, and those of made-up hosts would stay in /tmp.
    with tempfile.TemporaryDirectory(prefix="photinus-mpi-") as folder:
        return subprocess.run(
            ["mpirun", "--oversubscribe", *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, **allowed, "TMPDIR": folder, **environ},
            check=False,
        )


def hosts(folder: Path, *names: str) -> list[str | Path]:
    """Words that make mpirun take this machine for hosts of these names."""
    agent = folder / "no-ssh"
    agent.write_text(NO_SSH)
    agent.chmod(0o755)
    return ["--host", ",".join(names), "-mca", "plm_rsh_agent", agent, "-mca", "plm", "rsh"]


@open_mpi
def test_processes_of_mpirun_are_the_ranks_without_any_launcher_of_ours(tmp_path: Path):
    ran = mpirun("-np", "4", sys.executable, TELL, tmp_path, "--lr", "0.1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_ranks(tmp_path, launcher="Open MPI", local_sizes=(4,), arguments=("--lr", "0.1"))


@open_mpi
def test_processes_of_mpirun_on_several_hosts_meet_where_mpirun_runs(tmp_path: Path):
    two = hosts(tmp_path, "photinus-test-a:2", "photinus-test-b:2")
    ran = mpirun("-np", "4", *two, sys.executable, TELL, tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_ranks(tmp_path, launcher="Open MPI", local_sizes=(2, 2))


@open_mpi
def test_photinus_run_on_each_host_by_mpirun_is_one_job(tmp_path: Path):
    two = hosts(tmp_path, "photinus-test-a:1", "photinus-test-b:1")
    ran = mpirun("-np", "2", *two, "--map-by", "ppr:1:node", *RUN, TELL, tmp_path, "--lr", "0.1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_ranks(tmp_path, launcher="photinus run", local_sizes=(2, 2), arguments=("--lr", "0.1"))


@open_mpi
def test_several_launchers_on_a_host_are_refused_with_what_to_type(tmp_path: Path):
    ran = mpirun("-np", "2", *RUN, TELL, tmp_path)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    assert "mpirun --map-by ppr:1:node photinus run" in ran.stderr
    assert "mpirun -np 2 python train.py" in ran.stderr
    assert not told(tmp_path)


@open_mpi
def test_processes_that_would_train_alone_are_refused_with_both_numbers(tmp_path: Path):
    ran = mpirun("-np", "2", "-x", "RANK=0", "-x", "WORLD_SIZE=1", sys.executable, TELL, tmp_path)
    assert ran.returncode != 0
    assert "Open MPI started 2 processes" in ran.stderr
    assert "a job of 1 (WORLD_SIZE=1)" in ran.stderr
    assert not told(tmp_path)


@pytest.mark.skipif(shutil.which("mpiexec.hydra") is None, reason="needs MPICH (Debian: apt-get install mpich)")
def test_processes_of_mpichs_mpiexec_are_the_ranks_also_behind_a_shell(tmp_path: Path):
    command = f"{sys.executable} {TELL} {tmp_path} --lr 0.1; exit $?"
    ran = subprocess.run(
        ["mpiexec.hydra", "-n", "2", "bash", "-c", command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check_ranks(tmp_path, launcher="MPICH", local_sizes=(2,), arguments=("--lr", "0.1"))
