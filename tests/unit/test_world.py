"""World.from_env: a process's place, from whichever launcher's variables are there."""

from __future__ import annotations

import pytest

from photinus.errors import WorldSizeError
from photinus.job.world import World, check_company


def test_no_variables_mean_a_world_of_one():
    world = World.from_env({})
    assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
    assert world.launcher == "none"
    assert world.is_main


@pytest.mark.parametrize("world_size", ["1", "-1", "0", ""])
def test_rank_minus_one_of_the_old_templates_means_not_distributed(world_size):
    world = World.from_env({"RANK": "-1", "WORLD_SIZE": world_size, "LOCAL_RANK": "-1"})
    assert (world.rank, world.world_size, world.local_rank) == (0, 1, 0)


def test_torchruns_variables_are_read():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1"}
    assert World.from_env({**environ, "TORCHELASTIC_RUN_ID": "x"}) == World(5, 8, 1, 4, 1, "torchrun")
    assert not World.from_env(environ).is_main


def test_rank_and_world_size_alone_are_enough_and_are_taken_as_one_host():
    assert World.from_env({"RANK": "1", "WORLD_SIZE": "2"}) == World(1, 2, 1, 2, 0, "the environment")


@pytest.mark.parametrize(("rank", "local_rank", "host"), [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)])
def test_ranks_that_mpirun_deals_out_know_their_host(rank, local_rank, host):
    places = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_SIZE": 2}
    environ = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in places.items()}
    assert World.from_env(environ).host_rank == host


def test_open_mpis_variables_are_read():
    environ = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "0",
    }
    assert World.from_env(environ) == World(2, 3, 0, 1, 2, "Open MPI")


def slurm_task(rank: int, node: int, local: int, **more: str) -> dict[str, str]:
    """A task of `srun -n7 --ntasks-per-node=2` on four nodes, in a job that asked for 8 tasks."""
    return {
        "SLURM_JOB_ID": "12",
        "SLURM_NTASKS": "8",
        "SLURM_TASKS_PER_NODE": "2(x4)",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_STEP_NODELIST": "node[01-04]",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local),
        **more,
    }


def test_slurms_variables_are_those_of_the_step():
    assert World.from_env(slurm_task(3, 1, 1)) == World(3, 7, 1, 2, 1, "Slurm")
    assert World.from_env(slurm_task(6, 3, 0)) == World(6, 7, 0, 1, 3, "Slurm")


@pytest.mark.parametrize("step", [None, "4294967290", "4294967291", "batch"])
def test_slurms_variables_count_inside_srun_only(step: str | None):
    # `salloc` and `sbatch` set some of them for a shell, which newer versions even run as a step of its own.
    environ = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
    assert World.from_env(environ if step is None else {**environ, "SLURM_STEP_ID": step}) == World()


def test_slurm_without_the_steps_own_numbers_is_read_as_far_as_it_goes():
    environ = {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "1",
    }
    assert World.from_env(environ) == World(3, 4, 1, 4, 1, "Slurm")


def test_a_list_of_slurms_that_cannot_be_read_is_named():
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE='2x' \(from Slurm\) cannot be read"):
        World.from_env(slurm_task(0, 0, 0, SLURM_STEP_TASKS_PER_NODE="2x"))


def test_mpich_and_intel_mpi_are_read():
    environ = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert World.from_env(environ) == World(3, 4, 1, 2, 1, "MPICH")


def test_mvapich_is_read():
    environ = {
        "MV2_COMM_WORLD_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "2",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "2",
    }
    assert World.from_env(environ) == World(1, 2, 1, 2, 0, "MVAPICH2")


def test_mpirun_inside_of_slurm_is_believed_and_not_the_srun_that_started_its_helpers():
    helper = slurm_task(1, 1, 0, SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)")
    mpi = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    assert World.from_env({**helper, **mpi}) == World(3, 4, 1, 2, 1, "MPICH")


def test_srun_with_pmi_is_slurm():
    pmi = {"PMI_RANK": "3", "PMI_SIZE": "7"}
    assert World.from_env(slurm_task(3, 1, 1, **pmi)) == World(3, 7, 1, 2, 1, "Slurm")


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, r"started 7 processes .* a job of 1 \(WORLD_SIZE=1\)"),
        ({"RANK": "-1", "WORLD_SIZE": "-1"}, r"started 7 processes .* a job of 1 \(WORLD_SIZE=-1\)"),
        (
            {"RANK": "1", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"},
            r"started 7 processes .* a job of 1 \(GROUP_WORLD_SIZE=1\)",
        ),
    ],
)
def test_seven_tasks_that_would_train_side_by_side_are_refused_with_both_numbers(ranks: dict[str, str], numbers: str):
    with pytest.raises(WorldSizeError, match=numbers):
        World.from_env(slurm_task(3, 1, 1, **ranks))


@pytest.mark.parametrize("ranks", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_separate_trainings_in_one_step_are_possible_when_meant(ranks: dict[str, str]):
    assert World.from_env(slurm_task(3, 1, 1, **ranks, PHOTINUS_WORLD_SIZE="1")).world_size == 1


def test_a_launcher_on_each_host_of_a_step_is_what_srun_is_for():
    environ = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "GROUP_WORLD_SIZE": "2"}
    assert World.from_env(slurm_task(1, 1, 0, RANK="7", WORLD_SIZE="8", **environ)).world_size == 8


def test_a_process_alone_in_a_slurm_job_of_several_tasks_is_refused_with_both_numbers():
    environ = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "4"}
    with pytest.raises(WorldSizeError, match=r"Slurm job 12 has 4 tasks.*a world of 1.*srun python"):
        check_company(environ)
    check_company({**environ, "PHOTINUS_WORLD_SIZE": "1"})
    check_company({**environ, "SLURM_NTASKS": "1"})
    check_company({"SLURM_JOB_ID": "12", "SLURM_TASKS_PER_NODE": "8"})  # cores, not processes that anybody asked for
    check_company({})


def test_torchruns_variables_win_over_those_of_the_scheduler_around_it():
    environ = {"RANK": "0", "WORLD_SIZE": "8", "SLURM_STEP_ID": "0", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}
    assert World.from_env(environ).rank == 0


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "3", "WORLD_SIZE": "3"},
        {"RANK": "5", "WORLD_SIZE": "3"},
        {"RANK": "-2", "WORLD_SIZE": "3"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"RANK": "0"},
    ],
)
def test_a_rank_and_world_size_that_do_not_fit_are_refused_with_both(environ):
    with pytest.raises(WorldSizeError) as refused:
        World.from_env(environ)
    assert f"RANK={environ.get('RANK', 'not set')}" in str(refused.value)
    assert f"WORLD_SIZE={environ.get('WORLD_SIZE', 'not set')}" in str(refused.value)


def test_a_local_rank_outside_its_host_is_refused():
    environ = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(WorldSizeError, match=r"LOCAL_RANK=2 but this host runs 2 processes"):
        World.from_env(environ)


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(ValueError, match=r"WORLD_SIZE='two' \(from the environment\) is not a whole number"):
        World.from_env({"RANK": "0", "WORLD_SIZE": "two"})


def test_a_world_other_than_the_launcher_meant_is_refused_with_both_numbers():
    with pytest.raises(WorldSizeError, match=r"expects a world of 2 processes .* finds a world of 1"):
        World.from_env({"PHOTINUS_WORLD_SIZE": "2"})
    with pytest.raises(WorldSizeError, match=r"expects a world of 2 processes .* finds a world of 4"):
        World.from_env({"PHOTINUS_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "4"})
    assert World.from_env({"PHOTINUS_WORLD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "4"}).world_size == 4


def test_the_process_environment_is_the_default(monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PHOTINUS_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert World.from_env().rank == 1
