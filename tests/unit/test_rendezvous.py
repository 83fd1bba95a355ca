"""Where ranks meet that srun or mpirun started: all of them come to the same address and port by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from photinus.errors import NotInitializedError
from photinus.job.rendezvous import find_rendezvous, hydra_proxy, port_of
from photinus.job.world import World

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "node[1-3]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "2387804161"}


def slurm_task(rank: int, **more: str) -> dict[str, str]:
    return {
        **STEP,
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_LOCALID": str(rank % 2),
        **more,
    }


def mpi_task(rank: int, local_size: int = 4, **more: str) -> dict[str, str]:
    return {
        **OPEN_MPI,
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        **more,
    }


def found(environ: dict[str, str]):
    return find_rendezvous(World.from_env(environ), environ)


def test_all_tasks_of_a_step_come_to_the_first_host_and_the_same_port():
    everyone = {(place.address, place.port, place.job) for place in (found(slurm_task(rank)) for rank in range(5))}
    assert len(everyone) == 1
    assert everyone.pop()[0] == "node1"


def test_tasks_on_one_host_meet_on_loopback():
    environ = slurm_task(0, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="2", SLURM_STEP_NODELIST="node7")
    assert found(environ).address == "127.0.0.1"
    assert found(mpi_task(1)).address == "127.0.0.1"


def test_jobs_and_steps_that_run_side_by_side_get_different_ports_below_those_for_outgoing_connections():
    ports = [port_of(job, step) for job in range(70_000, 70_400) for step in (0, 1, 2)]
    assert len(set(ports)) == len(ports)
    assert all(20000 <= port < 32768 for port in ports)


def test_what_is_set_wins_each_by_itself():
    place = found(slurm_task(0, MASTER_ADDR="10.0.0.1", MASTER_PORT="1234"))
    assert (place.address, place.port, place.given) == ("10.0.0.1", 1234, True)
    alone = found(slurm_task(0, MASTER_PORT="1234"))
    assert (alone.address, alone.port, alone.given) == ("node1", 1234, False)
    assert found(slurm_task(0, MASTER_ADDR="10.0.0.1")).port == found(slurm_task(0)).port


@pytest.mark.parametrize("port", ["0", "65536", "http", "-1"])
def test_a_master_port_that_is_none_is_refused(port: str):
    with pytest.raises(ValueError, match=f"MASTER_PORT='{port}'"):
        found(slurm_task(0, MASTER_PORT=port))


def test_two_jobs_of_mpirun_on_one_host_do_not_meet():
    first, second = found(mpi_task(0)), found(mpi_task(0, PMIX_NAMESPACE="2387869697"))
    assert first.job != second.job
    assert first.port != second.port


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "3942580224.0;tcp://10.0.0.1,192.168.1.1:43817"}, "10.0.0.1"),
        ({"OMPI_MCA_orte_hnp_uri": "3942580224.0;tcp6://[fd00::1]:43817"}, "fd00::1"),
        ({"PMIX_NAMESPACE": "prterun-login-2-4711@1"}, "login-2"),
    ],
)
def test_open_mpi_on_several_hosts_meets_where_mpirun_runs(variables: dict[str, str], address: str):
    assert found(mpi_task(3, local_size=2, **variables)).address == address


def test_open_mpi_on_several_hosts_that_says_nothing_is_told_what_to_type():
    with pytest.raises(NotInitializedError, match=r"4 processes on several hosts, 2 of them here.*-x MASTER_ADDR="):
        found(mpi_task(3, local_size=2))


def test_an_mpiexec_that_does_not_name_its_job_is_told_what_to_type():
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    with pytest.raises(NotInitializedError, match=r"-genv MASTER_ADDR 127.0.0.1 -genv MASTER_PORT PORT"):
        found(environ)
    assert found({**environ, "MASTER_PORT": "4321"}).port == 4321


def test_the_proxy_of_mpiexec_is_found_among_the_ancestors(tmp_path: Path):
    for pid, name, parent in [(50, "python (x) y", 40), (40, "bash", 30), (30, "hydra_pmi_proxy", 20), (20, "sshd", 1)]:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1 4194304")
    assert hydra_proxy(50, tmp_path) == hydra_proxy(40, tmp_path) == 30
    assert hydra_proxy(20, tmp_path) is None
    assert hydra_proxy(60, tmp_path) is None


def test_ranks_set_by_hand_need_address_and_port():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    with pytest.raises(
        NotInitializedError, match=r"this job has 2 processes \(from the environment\), but MASTER_PORT is not set"
    ):
        found(environ)
