"""The flags of `photinus run`: every spelling people type, and a helpful word for what is not there."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest

from photinus.cli.flags import RunFlags, parse_run
from photinus.errors import UsageError
from photinus.job.spec import HostSpec, JobSpec, LogSpec, Program

SCRIPT = Program("script", "x.py")


def parsed(line: str, environ: dict[str, str] | None = None) -> RunFlags:
    """What the words ask for. Each job of this file also survives the way to another host."""
    flags = parse_run(shlex.split(line), {} if environ is None else environ)
    assert JobSpec.from_json(flags.spec.to_json()) == flags.spec
    return flags


@pytest.mark.parametrize(
    "flag",
    [
        *("nproc-per-node 3", "nproc-per-node=3", "nproc_per_node 3", "nproc_per_node=3", "nproc-per-node 3 --"),
        "nproc-per-node 3 --nproc_per_node=3",
    ],
)
def test_dash_underscore_space_and_equals_are_the_same(flag: str) -> None:
    assert parsed(f"--{flag} x.py").spec == JobSpec(SCRIPT, nproc_per_node=3)


@pytest.mark.parametrize("flag", ["-n 3", "-np 3", "-ppn 3", "-ppn 3 --nnodes 1:1"])
def test_the_number_of_workers_is_also_spelled_as_in_mpirun(flag: str) -> None:
    assert parsed(f"{flag} x.py").spec.nproc_per_node == 3


OUT, BOTH = frozenset({"out"}), frozenset({"out", "err"})


@pytest.mark.parametrize(
    ("line", "spec"),
    [
        ("x.py", JobSpec(SCRIPT, "auto", max_restarts=3, stop_grace_s=30.0)),
        ("--nproc-per-node auto x.py", JobSpec(SCRIPT)),
        ("--nproc-per-node gpu x.py", JobSpec(SCRIPT, "gpu")),
        ("--nproc-per-node cpu x.py", JobSpec(SCRIPT, "cpu")),
        ("--nproc-per-node xpu x.py", JobSpec(SCRIPT, "xpu")),
        ("--cpu --stop_grace 0.5 x.py", JobSpec(SCRIPT, cpu=True, stop_grace_s=0.5)),
        ("--device 0,3 x.py", JobSpec(SCRIPT, devices=(0, 3))),
        ("--device='0, 3' --nproc-per-node 2 x.py", JobSpec(SCRIPT, 2, devices=(0, 3))),
        ("--device 0 --ranks-per-gpu 2 --nproc-per-node 2 x.py", JobSpec(SCRIPT, 2, devices=(0,), ranks_per_gpu=2)),
        ("--dry-run x.py", JobSpec(SCRIPT, dry_run=True)),
        ("--use_env x.py", JobSpec(SCRIPT, use_env=True)),
        ("--no_local_rank x.py", JobSpec(SCRIPT, use_env=True)),
        ("--monitor-interval 5 --force_multi x.py", JobSpec(SCRIPT)),
        ("--start_method spawn x.py", JobSpec(SCRIPT, start_method="spawn")),
        ("--start-method=forkserver x.py", JobSpec(SCRIPT, start_method="fork")),
        # the program
        ("--max-restarts=0 x.py --cpu -- -m y",
         JobSpec(Program("script", "x.py", ("--cpu", "--", "-m", "y")), max_restarts=0)),
        ("-m a.b -x 1", JobSpec(Program("module", "a.b", ("-x", "1")))),
        ("-m '' -x 1", JobSpec(Program("module", "", ("-x", "1")))),  # a variable of the shell that is not set
        ("--module=a.b -x 1", JobSpec(Program("module", "a.b", ("-x", "1")))),
        ("--module a.b -x 1", JobSpec(Program("module", "a.b", ("-x", "1")))),
        ("--no-python bash -c true", JobSpec(Program("program", "bash", ("-c", "true")))),
    ],
)  # fmt: skip
def test_flags_of_one_host(line: str, spec: JobSpec) -> None:
    assert parsed(line).spec == spec


@pytest.mark.parametrize(
    ("line", "hosts"),
    [
        ("", HostSpec()),
        ("--standalone", HostSpec((1, 1))),  # also where a scheduler knows of more hosts
        ("--standalone --rdzv-endpoint localhost:0", HostSpec((1, 1), leader="localhost", port=0)),
        ("--nnodes 1:2 --node-rank 0", HostSpec((1, 2), node_rank=0)),
        ("--nnodes=2 --node_rank 1 --master_addr 10.0.0.1 --master_port=29501 --rdzv-id job",
         HostSpec((2, 2), node_rank=1, leader="10.0.0.1", port=29501, job_id="job")),
        ("--nnodes 1:4 --rdzv-backend c10d --rdzv_endpoint h:7 --rdzv_conf timeout=9,read_timeout=3",
         HostSpec((1, 4), leader="h", port=7, join_timeout_s=9.0)),
        ("--rdzv-endpoint [fd00::1]:7 --rdzv-conf last_call_timeout=2,heartbeat_timeout=9,is_host=1 "
         "--local-addr fd00::2",
         HostSpec(leader="fd00::1", port=7, last_call_s=2.0, heartbeat_timeout_s=9.0, leads=True,
                  local_address="fd00::2")),
        ("--rdzv-endpoint h", HostSpec(leader="h")),
        ("--rdzv-endpoint h:0", HostSpec(leader="h", port=0)),
        ("--rdzv-endpoint fd00::1", HostSpec(leader="fd00::1")),
        ("--rdzv-endpoint [fd00::1]", HostSpec(leader="fd00::1")),
        ("--nnodes 2 --master-addr fd00::1", HostSpec((2, 2), leader="fd00::1")),
        ("--nnodes 2 --master-addr [fd00::1]", HostSpec((2, 2), leader="fd00::1")),
    ],
)  # fmt: skip
def test_torchruns_flags_for_several_hosts(line: str, hosts: HostSpec) -> None:
    assert parsed(f"{line} x.py").spec == JobSpec(SCRIPT, hosts=hosts)


def test_torchruns_flags_for_output() -> None:
    logs = parsed("--log_dir logs -r 0:1,1:3 --tee 3 --local-ranks-filter 0,2 x.py").spec.logs
    assert logs == LogSpec("logs", {-1: frozenset(), 0: OUT, 1: BOTH}, {-1: BOTH}, frozenset({0, 2}))


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("-H hosts -i a:0,1@b --ssh_port 2222 --export A,B --export C",
         {"hostfile": "hosts", "include": "a:0,1@b", "ssh_port": 2222, "export": ("A", "B", "C")}),
        ("-H hosts --num_nodes 2", {"hostfile": "hosts", "num_nodes": 2}),
        ("--num_gpus 2", {"num_gpus": 2}),
    ],
)  # fmt: skip
def test_flags_of_deepspeed(line: str, fields: dict[str, object]) -> None:
    flags = parsed(f"{line} x.py")
    assert flags == RunFlags(JobSpec(SCRIPT), flags.spellings, **fields)  # type: ignore[arg-type]


KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "4",
    "PET_RUN_PATH": "",
}


def test_torchruns_variables_stand_for_flags_that_were_not_typed() -> None:
    hosts = HostSpec((2, 2), node_rank=1, leader="job-node-0-0.job", port=29400)
    assert parsed("x.py", KUBEFLOW).spec == JobSpec(SCRIPT, 4, hosts=hosts)
    assert parsed("--nproc-per-node 8 x.py", KUBEFLOW).spec == JobSpec(SCRIPT, 8, hosts=hosts)
    assert parsed("x.py", {"PET_STANDALONE": "1", "PET_MAX_RESTARTS": "7"}).spec.max_restarts == 7
    elastic = {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_ID": "job"}
    assert parsed("x.py", elastic).spec.hosts == HostSpec((1, 4), leader="job-worker-0", port=23456, job_id="job")


@pytest.mark.parametrize("typed", ["--standalone", "--hostfile hosts", "--rdzv-endpoint b:1 --nnodes 2"])
def test_torchruns_variables_do_not_contradict_what_was_typed_about_the_hosts(typed: str) -> None:
    assert parsed(f"{typed} x.py", KUBEFLOW).spec.hosts.leader != "job-node-0-0.job"
    assert parsed("--num-gpus 2 x.py", {"PET_NPROC_PER_NODE": "auto"}).num_gpus == 2


def test_variables_of_that_prefix_that_torchrun_does_not_read_are_anythings() -> None:
    scans = {"PET_IMAGE": "/data/pet.nii", "PET_NAME": "scan", "PET_EXPORT": "1", "PET_HELP": "1", "PET_DEVICE": "0"}
    assert parsed("x.py", scans) == parsed("x.py")


def test_a_wrong_value_in_torchruns_variable_is_told_with_its_name() -> None:
    with pytest.raises(UsageError, match=r"^PET_NNODES two: needs "):
        parsed("x.py", {"PET_NNODES": "two"})


def test_the_environment_says_for_all_commands_that_gpus_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTINUS_RANKS_PER_GPU", "3")
    assert parsed("x.py").spec.ranks_per_gpu == 3


@pytest.mark.parametrize("line", ["--nproc-per-node 2 --help", "-h"])
def test_help_wins_over_a_missing_script(line: str) -> None:
    with pytest.raises(SystemExit) as exit_of:
        parsed(line)
    assert exit_of.value.code == 0


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--nproc_node 2 x.py", "unknown flag --nproc_node. Did you mean --nproc-per-node?"),
        ("--nproc-per-nodes=2 x.py", "Did you mean --nproc-per-node?"),
        ("--max-restart 2 x.py", "Did you mean --max-restarts?"),
        ("--num_processes 2 x.py", "unknown flag --num_processes. Its name here is --nproc-per-node"),
        (
            "-np 4 --nnodes 2 --master-addr a x.py",
            "-np 4: with several hosts, this is the total in mpirun",
        ),
        ("-n 4 --hostfile f x.py", "Write --nproc-per-node N (or -ppn N) for N workers on each host"),
        ("--num_machines 2 x.py", "Its name here is --nnodes"),
        ("--master_address h x.py", "unknown flag --master_address. Did you mean --master-addr?"),
        ("--machine_ranks 1 x.py", "Did you mean --node-rank?"),
        ("--bind_cores_to_rank x.py", "--bind_cores_to_rank is a flag of a different launcher: bind with"),
        ("--save_pid x.py", "--save_pid is a flag of a different launcher: in a shell"),
        ("--no_ssh x.py", "--no_ssh is a flag of a different launcher: type the command on each host"),
        ("--launcher pdsh x.py", "--launcher is a flag of a different launcher: --hostfile starts over"),
        ("--deepspeed x.json x.py", "put it after the script's name"),
        ("--frobnicate x.py", "unknown flag --frobnicate. `photinus run --help` lists the flags"),
        ("--nproc-per-node two x.py", "--nproc-per-node two: needs a whole number above 0, or auto, gpu, xpu or cpu"),
        ("--nproc_per_node=0 x.py", "--nproc_per_node 0: needs at least 1 worker"),
        ("--nproc-per-node -2 x.py", "--nproc-per-node -2: needs at least 1 worker"),
        ("--nproc-per-node", "--nproc-per-node needs a value: N|auto|gpu|cpu"),
        ("--nproc-per-node --cpu x.py", "--nproc-per-node needs a value"),
        ("--nproc-per-node 2 --nproc_per_node=4 x.py", "--nproc-per-node is given twice: 2 and 4"),
        ("--max-restarts -1 x.py", "--max-restarts -1: needs a whole number, 0 or more"),
        ("--max-restarts some x.py", "--max-restarts some: needs a whole number, 0 or more"),
        ("--stop-grace inf x.py", "--stop-grace inf: needs a number of seconds, 0 or more"),
        ("--stop-grace long x.py", "--stop-grace long: needs a number of seconds"),
        ("--cpu=2 x.py", "--cpu takes no value, but got '2'"),
        ("--cpu --nproc-per-node gpu x.py", "--cpu and --nproc-per-node gpu are mutually exclusive"),
        ("--nproc-per-node 2", "which script?"),
        ("", "which script?"),
        ("-m", "-m needs a value: MODULE"),
        ("--device cpu x.py", "--device cpu: needs the numbers of GPUs"),
        ("--device '²' x.py", "--device ²: needs the numbers of GPUs"),
        ("--device 1,1 x.py", "GPU 1 is given twice"),
        ("--device 0 --cpu x.py", "--device 0 and --cpu are mutually exclusive"),
        ("--device 0 --nproc-per-node cpu x.py", "--device 0 and --nproc-per-node cpu are mutually exclusive"),
        ("--device 0,3 --nproc_per_node=3 x.py", "--device 0,3 names 2 GPUs, but --nproc_per_node 3 asks for 3"),
        ("--standalone --nnodes 2 x.py", "--standalone and --nnodes 2 are mutually exclusive: remove one of them"),
        ("--standalone --master_addr h x.py", "--standalone and --master_addr h are mutually exclusive"),
        ("--rdzv-endpoint a:1 --master-addr b x.py", "--rdzv-endpoint a:1 and --master-addr b are mutually exclusive"),
        ("--rdzv-endpoint a:1 --master-port 2 x.py", "--rdzv-endpoint a:1 and --master-port 2 are mutually exclusive"),
        ("--nnodes 1:2 --node-rank 2 x.py", "are mutually exclusive: 2 hosts are numbered 0 to 1"),
        ("--nnodes 2 --node-rank 2 x.py", "are mutually exclusive: 2 hosts are numbered 0 to 1"),
        ("--node-rank 1 x.py", "--node-rank 1 needs --nnodes N"),
        ("--include a:0 --exclude a:1 x.py", "--include a:0 and --exclude a:1 are mutually exclusive"),
        ("--num_gpus 2 --nproc-per-node 3 x.py", "--num_gpus 2 and --nproc-per-node 3 are mutually exclusive"),
        ("--hostfile h --nnodes 2 x.py", "--hostfile h and --nnodes 2 are mutually exclusive"),
        ("--num-nodes 2 x.py", "--num-nodes 2 has an effect only with --hostfile"),
        ("--nnodes 0 x.py", "--nnodes 0: needs a number of hosts, like 2, or the least and the most, like 1:4"),
        ("--nnodes 3:2 x.py", "--nnodes 3:2: needs a number of hosts"),
        ("--nnodes 2: x.py", "--nnodes 2:: needs a number of hosts"),
        ("--master-port 70000 x.py", "--master-port 70000: needs a port, 1 to 65535"),
        ("--master-port '²' x.py", "--master-port ²: needs a port, 1 to 65535"),
        ("--rdzv-endpoint a:b x.py", "--rdzv-endpoint a:b: needs HOST or HOST:PORT"),
        ("--master-addr a:29500 --nnodes 2 x.py", "--master-addr a:29500: needs only a host's name or address"),
        ("--master-addr a..b --nnodes 2 x.py", "--master-addr a..b: needs the name or address of a host"),
        ("--rdzv-backend etcd x.py", "--rdzv-backend etcd: photinus has its own rendezvous"),
        ("--rdzv-conf colour=red x.py", "--rdzv-conf colour=red: the options are heartbeat_timeout, is_host"),
        ("--rdzv-conf timeout=long x.py", "--rdzv-conf timeout=long: timeout needs a number of seconds"),
        ("--tee 4 x.py", "--tee 4: needs 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both)"),
        ("--redirects 1,0:2 x.py", "--redirects 1,0:2: needs 0 (nothing)"),
        ("--export A-B x.py", "'A-B' is not a name of an environment variable"),
        ("--no-python -m x", "--no-python and -m are mutually exclusive: a module is Python"),
        ("--monitor-interval soon x.py", "--monitor-interval soon: needs a number of seconds"),
        ("--ranks-per-gpu 2 --cpu x.py", "--ranks-per-gpu 2 and --cpu are mutually exclusive"),
        ("--device 0 --nproc-per-node 2 x.py", "--device 0 names 1 GPU, but --nproc-per-node 2 asks for 2 workers"),
        (
            "--rdzv-conf heartbeat_timeout=1 x.py",
            "heartbeat_timeout needs 1.5 s or more: hosts send a sign of life each second",
        ),
    ],
)
def test_wrong_use_is_told_with_the_way_out(line: str, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        parsed(line)


def test_each_field_of_a_job_survives_the_way_to_another_host() -> None:
    """A field that is added and not carried over shows here: each has another value than its default."""
    hosts = HostSpec((1, 2), 1, "a", 7, True, "night", "b", 1.0, 2.0, 3.0)
    logs = LogSpec("logs", {-1: frozenset(), 0: OUT}, {1: BOTH}, frozenset({0, 2}))
    program = Program("module", "x", ("--lr", "0.1"), "--local_rank")
    chosen = {"use_env": True, "typed": "photinus run x", "choice": "--num-gpus 2", "started_as": "a"}
    others = (2, True, True, 0.5, "r", "spawn", 9.0)
    spec = JobSpec(program, "gpu", 7, True, (2, 0), (1,), *others, hosts=hosts, logs=logs, **chosen)  # type: ignore[arg-type]
    plain = JobSpec(SCRIPT)
    for one, other in ((spec, plain), (spec.hosts, plain.hosts), (spec.logs, plain.logs), (program, SCRIPT)):
        same = {each.name for each in dataclasses.fields(one) if getattr(one, each.name) == getattr(other, each.name)}
        assert not same, "not tried here"
    assert JobSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"program": {"kind": "script", "target": "x.py"}, "hosts": {"x": 1}, "logs": {}}']
)
def test_a_job_of_a_different_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="different version of Photinus"):
        JobSpec.from_json(text)
