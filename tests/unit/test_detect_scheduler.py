"""What `photinus run` finds out when srun or mpirun started it once on each host."""

from __future__ import annotations

import pytest

from photinus.cli import detect_scheduler
from photinus.cli.detect_scheduler import place_hosts
from photinus.cli.flags import parse_run
from photinus.errors import LaunchError, UsageError
from photinus.job.spec import HostSpec


@pytest.fixture(autouse=True)
def _names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect_scheduler, "reachable_address", str)


def srun(rank: int, per_host: str, hosts: str, tasks: int, **more: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": per_host,
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
        **more,
    }


def mpirun(rank: int, size: int, local_size: int, **more: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_NAMESPACE": "99",
        "OMPI_MCA_orte_hnp_uri": "99.0;tcp://10.0.0.1:4000",
        **more,
    }


def seen(environ: dict[str, str]) -> HostSpec:
    return place_hosts(HostSpec(local_address="here"), environ)


def test_a_launcher_on_each_host_of_a_step_knows_its_place():
    places = [seen(srun(rank, "1(x3)", "node[1-3]", 3)) for rank in range(3)]
    assert [place.node_rank for place in places] == [0, 1, 2]
    assert {(p.nnodes, p.leader, p.job_id) for p in places} == {((3, 3), "node1", "slurm-4711.0")}
    assert len({place.port for place in places}) == 1


def test_a_launcher_on_each_host_of_mpirun_knows_its_place():
    places = [seen(mpirun(rank, 2, 1)) for rank in range(2)]
    assert [(p.nnodes, p.node_rank, p.leader) for p in places] == [((2, 2), 0, "10.0.0.1"), ((2, 2), 1, "10.0.0.1")]


@pytest.mark.parametrize(("own", "secret"), [({}, "1f-2e"), ({"PHOTINUS_JOB_SECRET": "mine"}, "mine")])
def test_the_secret_is_the_jobs_own_or_what_mpirun_made(own: dict[str, str], secret: str):
    environ = mpirun(0, 2, 1, OMPI_MCA_orte_precondition_transports="1f-2e", **own)
    seen(environ)
    assert environ["PHOTINUS_JOB_SECRET"] == secret


def test_where_nothing_is_shared_there_is_no_secret():
    environ = srun(0, "1(x3)", "node[1-3]", 3)
    seen(environ)
    assert "PHOTINUS_JOB_SECRET" not in environ


def test_address_and_port_that_are_set_win():
    place = seen(srun(1, "1(x3)", "node[1-3]", 3, MASTER_ADDR="10.1.1.1", MASTER_PORT="4000"))
    assert (place.leader, place.port, place.job_id) == ("10.1.1.1", 4000, "10.1.1.1:4000")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "4"},  # a batch script on one host
        srun(0, "1", "node1", 1),
        mpirun(0, 1, 1),
        # a script under a launcher that starts another one
        srun(1, "1(x3)", "node[1-3]", 3, RANK="1", WORLD_SIZE="3", TORCHELASTIC_RUN_ID="x"),
    ],
    ids=["nothing", "batch script", "srun of one", "mpirun of one", "worker"],
)
def test_a_launcher_that_is_alone_is_not_told_of_other_hosts(environ: dict[str, str]):
    assert seen(environ) == HostSpec(local_address="here")


def test_several_launchers_on_a_host_are_refused_with_both_ways_to_do_it_right():
    with pytest.raises(UsageError) as refused:
        seen(srun(0, "2,1", "node[1-2]", 3))
    text = str(refused.value)
    assert "started `photinus run` 3 times, 2 of them on one host" in text
    assert "srun --ntasks-per-node=1 photinus run" in text
    assert "srun --ntasks=3 python train.py" in text
    with pytest.raises(UsageError, match=r"mpirun --map-by ppr:1:node photinus run.*mpirun -np 4 python train.py"):
        seen(mpirun(0, 4, 2))


def test_the_host_with_one_launcher_refuses_too_when_another_has_two():
    with pytest.raises(UsageError, match="2 of them on one host"):
        seen(srun(1, "2,1", "node[1-2]", 3, SLURM_PROCID="2", SLURM_NODEID="1"))


def test_one_launcher_in_a_job_of_several_hosts_is_refused():
    environ = {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    with pytest.raises(UsageError, match=r"job 12 has 2 hosts.*srun --ntasks-per-node=1 photinus run.*--nnodes 1"):
        seen(environ)


def test_photinus_run_takes_hosts_leader_and_secret_from_the_scheduler():
    environ = mpirun(0, 2, 1, MASTER_ADDR="127.0.0.1", OMPI_MCA_orte_precondition_transports="1f-2e")
    hosts = place_hosts(HostSpec(), environ)
    assert (hosts.nnodes, hosts.node_rank, hosts.leader, hosts.local_address) == ((2, 2), 0, "127.0.0.1", "127.0.0.1")
    assert 20000 <= (hosts.port or 0) < 32768
    assert hosts.job_id == "mpi-99"
    assert environ["PHOTINUS_JOB_SECRET"] == "1f-2e"


@pytest.mark.parametrize("words", [["--nnodes", "1"], ["--standalone"], ["--nnodes", "2", "--master-addr", "a"]])
def test_what_the_user_says_of_hosts_wins_over_the_scheduler(words: list[str]):
    typed = parse_run([*words, "train.py"]).spec.hosts
    assert place_hosts(typed, mpirun(0, 4, 2)) is typed
    assert place_hosts(typed, {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2"}) is typed


@pytest.mark.parametrize("words", [["--master-addr", "a", "--master-port", "29400"], ["--rdzv-endpoint", "a:29400"]])
def test_a_leader_alone_that_was_typed_is_filled_in_by_the_scheduler(words: list[str]):
    typed = parse_run([*words, "--local-addr", "here", "train.py"]).spec.hosts
    places = [place_hosts(typed, srun(rank, "1(x2)", "node[1-2]", 2)) for rank in range(2)]
    assert [(p.nnodes, p.node_rank, p.leader, p.port) for p in places] == [((2, 2), i, "a", 29400) for i in range(2)]
    with pytest.raises(UsageError, match="has 2 hosts, but photinus run was started on this one only"):
        place_hosts(typed, {"SLURM_JOB_ID": "12", "SLURM_JOB_NUM_NODES": "2"})


def test_an_environment_that_contradicts_itself_is_a_launch_error():
    with pytest.raises(LaunchError, match=r"SLURM_STEP_NUM_TASKS='many' \(from Slurm\) is not a whole number"):
        seen(srun(0, "1", "node1", 1, SLURM_STEP_NUM_TASKS="many"))
    with pytest.raises(LaunchError, match="no variable names the host of rank 0"):
        seen({k: v for k, v in mpirun(0, 2, 1).items() if k != "OMPI_MCA_orte_hnp_uri"})
