"""What a worker finds in its environment."""

from __future__ import annotations

import pytest

from photinus.job.attempt import AttemptMembers
from photinus.job.spec import JobSpec, Program
from photinus.job.world import World
from photinus.run.local import job
from photinus.run.local.job import Job

MEMBERS = AttemptMembers((2, 2), host_rank=1, attempt=2, job_id="job", store_port=1234, restarts=1)


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """A list of one number, which a test may change."""
    cores = [8]
    monkeypatch.setattr(job, "usable_cores", lambda: cores[0])
    return cores


def environ(members=MEMBERS, base=None, *, cpu=False):
    flags = JobSpec(Program("script", "train.py"), max_restarts=3, cpu=cpu, role="trainer")
    return Job(flags, "job", 2, base or {}).environ(members, 1)


def test_world_reads_what_the_launcher_writes():
    assert World.from_env(environ()) == World(3, 4, 1, 2, 1, "photinus run")


def test_torchruns_variables_and_the_meant_world_size():
    found = environ()
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
        "ROLE_NAME": "trainer",
        "PHOTINUS_ATTEMPT": "2",
        "TORCHELASTIC_RESTART_COUNT": "1",  # as torchrun, not for hosts that came or a suspension
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "job",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PHOTINUS_WORLD_SIZE": "4",
    }
    assert {name: found.get(name) for name in expected} == expected


def test_the_users_environment_is_inherited_but_not_ranks_of_another_job():
    found = environ(base={"HOME": "/home/me", "RANK": "17", "WORLD_SIZE": "99"})
    assert (found["HOME"], found["RANK"], found["WORLD_SIZE"]) == ("/home/me", "3", "4")


def test_threads_share_the_usable_cores_unless_the_user_says_otherwise(cores):
    assert environ()["OMP_NUM_THREADS"] == "4"
    cores[0] = 1
    assert environ()["OMP_NUM_THREADS"] == "1"
    assert environ(base={"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


def test_workers_without_gpus_ask_for_huge_pages_unless_the_user_decided(monkeypatch):
    monkeypatch.setattr("photinus.process_memory.huge_pages", lambda: "madvise")
    assert environ(cpu=True)["THP_MEM_ALLOC_ENABLE"] == "1"
    assert environ(cpu=True)["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    without = environ(base={"THP_MEM_ALLOC_ENABLE": "0"})
    assert without["THP_MEM_ALLOC_ENABLE"] == "0"
    assert "GLIBC_TUNABLES" not in without
    assert environ(base={"GLIBC_TUNABLES": "glibc.malloc.check=1"})["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
    on_gpu = Job(JobSpec(Program("script", "train.py")), "job", 1, {}, gpus=("0",))
    assert not {"THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES"} & on_gpu.environ(MEMBERS, 1).keys()


def test_on_one_host_gloo_stays_on_the_loopback_unless_the_user_says_otherwise():
    alone = AttemptMembers((2,), 0, 0, "job", 1234)
    assert environ(alone)["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ(alone, base={"GLOO_SOCKET_IFNAME": "eth1"})["GLOO_SOCKET_IFNAME"] == "eth1"
    assert "GLOO_SOCKET_IFNAME" not in environ()
    of_a_worker = {"GLOO_SOCKET_IFNAME": "lo", "PHOTINUS_WORLD_SIZE": "2"}  # in which a job on several hosts is started
    assert "GLOO_SOCKET_IFNAME" not in environ(base=of_a_worker)


def test_cpu_hides_the_gpus():
    assert environ(base={"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environ(base={"CUDA_VISIBLE_DEVICES": "0,1"}, cpu=True)["CUDA_VISIBLE_DEVICES"] == ""


def test_cpu_is_told_to_accelerate_too_which_would_train_with_one_process_each():
    assert environ(cpu=True)["ACCELERATE_USE_CPU"] == "true"
    assert environ(base={"ACCELERATE_USE_CPU": "false"}, cpu=True)["ACCELERATE_USE_CPU"] == "false"
    assert "ACCELERATE_USE_CPU" not in environ()
