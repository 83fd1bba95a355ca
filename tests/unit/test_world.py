"""World.from_env: a process's place, from whichever launcher's variables are there."""

from __future__ import annotations

import pytest

from photinus.errors import WorldSizeError
from photinus.world import World


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
    assert World.from_env(environ) == World(5, 8, 1, 4, 1, "torchrun")
    assert not World.from_env(environ).is_main


def test_rank_and_world_size_alone_are_enough_and_are_taken_as_one_host():
    assert World.from_env({"RANK": "1", "WORLD_SIZE": "2"}) == World(1, 2, 1, 2, 0, "torchrun")


def test_open_mpis_variables_are_read():
    environ = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_NODE_RANK": "2",
    }
    assert World.from_env(environ) == World(2, 3, 0, 1, 2, "Open MPI")


def test_slurms_variables_count_inside_srun_only():
    allocation = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert World.from_env(allocation) == World()
    step = {**allocation, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    world = World.from_env(step)
    assert (world.rank, world.world_size, world.local_rank, world.host_rank) == (3, 4, 1, 1)
    assert world.launcher == "Slurm"


def test_torchruns_variables_win_over_those_of_the_scheduler_around_it():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "7", "SLURM_NTASKS": "8"}
    assert World.from_env(environ).world_size == 2


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
    with pytest.raises(ValueError, match=r"WORLD_SIZE='two' \(from torchrun\) is not a whole number"):
        World.from_env({"RANK": "0", "WORLD_SIZE": "two"})


def test_a_world_other_than_the_launcher_meant_is_refused_with_both_numbers():
    with pytest.raises(WorldSizeError, match=r"means a world of 2 processes .* finds a world of 1"):
        World.from_env({"PHOTINUS_WORLD_SIZE": "2"})
    with pytest.raises(WorldSizeError, match=r"means a world of 2 processes .* finds a world of 4"):
        World.from_env({"PHOTINUS_WORLD_SIZE": "2", "RANK": "0", "WORLD_SIZE": "4"})
    assert World.from_env({"PHOTINUS_WORLD_SIZE": "4", "RANK": "0", "WORLD_SIZE": "4"}).world_size == 4


def test_the_process_environment_is_the_default(monkeypatch):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PHOTINUS_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert World.from_env().rank == 1
