"""The flags of `photinus run`: every spelling people type, and a helpful word for what is not there."""

from __future__ import annotations

import re

import pytest

from photinus.cli.flags import RunFlags, SchedulerFlags, SelectionFlags, parse_run
from photinus.errors import UsageError
from photinus.job.spec import HostSpec, LogSpec, Program


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "3", "x.py"],
        ["--nproc-per-node=3", "x.py"],
        ["--nproc_per_node", "3", "x.py"],
        ["--nproc_per_node=3", "x.py"],
        ["--nproc-per-node", "3", "--", "x.py"],
        ["--nproc-per-node", "3", "--nproc_per_node=3", "x.py"],
    ],
)
def test_dash_underscore_space_and_equals_are_the_same(words):
    assert parse_run(words) == RunFlags(Program("script", "x.py"), nproc_per_node=3)


def test_standalone_is_one_host_also_where_a_scheduler_knows_of_more():
    assert parse_run(["--standalone", "x.py"]).hosts.nnodes == (1, 1)
    assert parse_run(["x.py"]).hosts.nnodes is None


KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
    "PET_NPROC_PER_NODE": "4",
    "PET_RUN_PATH": "",
}


def test_torchruns_variables_stand_for_flags_that_were_not_typed():
    flags = parse_run(["x.py"], KUBEFLOW)
    assert flags.nproc_per_node == 4
    assert flags.hosts == HostSpec(nnodes=(2, 2), node_rank=1, leader="job-node-0-0.job", port=29400)
    assert parse_run(["--nproc-per-node", "8", "x.py"], KUBEFLOW).nproc_per_node == 8
    assert parse_run(["x.py"], {"PET_STANDALONE": "1", "PET_MAX_RESTARTS": "7"}).max_restarts == 7
    elastic = parse_run(
        ["x.py"], {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "job-worker-0:23456", "PET_RDZV_ID": "job"}
    )
    assert elastic.hosts == HostSpec(nnodes=(1, 4), leader="job-worker-0", port=23456, job_id="job")


@pytest.mark.parametrize("typed", ["--standalone", "--hostfile hosts", "--slurm", "--rdzv-endpoint b:1 --nnodes 2"])
def test_torchruns_variables_do_not_contradict_what_was_typed_about_the_hosts(typed):
    flags = parse_run([*typed.split(), "x.py"], KUBEFLOW)
    assert flags.hosts.leader != "job-node-0-0.job"
    assert parse_run(["--num-gpus", "2", "x.py"], {"PET_NPROC_PER_NODE": "auto"}).selection.num_gpus == 2


def test_variables_of_that_prefix_that_torchrun_does_not_read_are_anythings():
    scans = {"PET_IMAGE": "/data/pet.nii", "PET_NAME": "scan", "PET_EXPORT": "1", "PET_HELP": "1", "PET_DEVICE": "0"}
    assert parse_run(["x.py"], scans) == parse_run(["x.py"], {})


def test_a_wrong_value_in_torchruns_variable_is_told_with_its_name():
    with pytest.raises(UsageError, match=r"^PET_NNODES two: needs "):
        parse_run(["x.py"], {"PET_NNODES": "two"})


def parsed(line: str) -> RunFlags:
    return parse_run(line.split())


def test_defaults():
    flags = parse_run(["x.py"])
    assert (flags.nproc_per_node, flags.max_restarts, flags.cpu, flags.stop_grace_s) == ("auto", 3, False, 30.0)


@pytest.mark.parametrize("word", ["auto", "gpu", "cpu"])
def test_words_in_place_of_a_number(word):
    assert parse_run(["--nproc-per-node", word, "x.py"]).nproc_per_node == word


def test_all_after_the_script_is_the_scripts():
    flags = parse_run(["--max-restarts=0", "x.py", "--nproc-per-node", "9", "--", "-m", "y", "--max-restarts"])
    expected = ("--nproc-per-node", "9", "--", "-m", "y", "--max-restarts")
    assert flags == RunFlags(Program("script", "x.py", expected), max_restarts=0)


@pytest.mark.parametrize(
    "words", [["-m", "a.b", "-x", "1"], ["--module=a.b", "-x", "1"], ["--module", "a.b", "-x", "1"]]
)
def test_a_module_ends_the_flags(words):
    assert parse_run(words).program == Program("module", "a.b", ("-x", "1"))


def test_other_flags_take_their_values():
    flags = parse_run(["--cpu", "--stop_grace", "0.5", "--max_restarts", "7", "x.py"])
    assert (flags.cpu, flags.stop_grace_s, flags.max_restarts) == (True, 0.5, 7)


def test_help_wins_over_a_missing_script():
    for words in (["--nproc-per-node", "2", "--help"], ["-h"]):
        with pytest.raises(SystemExit) as left:
            parse_run(words)
        assert left.value.code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--nproc_node", "2", "x.py"], "unknown flag --nproc_node. Did you mean --nproc-per-node?"),
        (["--nproc-per-nodes=2", "x.py"], "Did you mean --nproc-per-node?"),
        (["--max-restart", "2", "x.py"], "Did you mean --max-restarts?"),
        (["--num_processes", "2", "x.py"], "unknown flag --num_processes. It is called --nproc-per-node here"),
        (["-np", "2", "x.py"], "unknown flag -np. It is called --nproc-per-node here"),
        (["--num_machines", "2", "x.py"], "It is called --nnodes here"),
        (["--master_address", "h", "x.py"], "unknown flag --master_address. Did you mean --master-addr?"),
        (["--machine_ranks", "1", "x.py"], "Did you mean --node-rank?"),
        (["--bind_cores_to_rank", "x.py"], "--bind_cores_to_rank is another launcher's flag, and not here: bind with"),
        (["--save_pid", "x.py"], "--save_pid is another launcher's flag, and not here: in a shell"),
        (["--no_ssh", "x.py"], "--no_ssh is another launcher's flag, and not here: type the command on each host"),
        (["--launcher", "pdsh", "x.py"], "--launcher is another launcher's flag, and not here: --hostfile starts over"),
        (["--deepspeed", "x.json", "x.py"], "put it after the script's name"),
        (["--frobnicate", "x.py"], "unknown flag --frobnicate. `photinus run --help` lists the flags"),
        (
            ["--nproc-per-node", "two", "x.py"],
            "--nproc-per-node two: needs a whole number above 0, or auto, gpu, xpu or cpu",
        ),
        (["--nproc_per_node=0", "x.py"], "--nproc_per_node 0: needs at least 1 worker"),
        (["--nproc-per-node", "-2", "x.py"], "--nproc-per-node -2: needs at least 1 worker"),
        (["--nproc-per-node"], "--nproc-per-node needs a value: N|auto|gpu|cpu"),
        (["--nproc-per-node", "--cpu", "x.py"], "--nproc-per-node needs a value"),
        (["--nproc-per-node", "2", "--nproc_per_node=4", "x.py"], "--nproc-per-node is given twice: 2 and 4"),
        (["--max-restarts", "-1", "x.py"], "--max-restarts -1: needs a whole number, 0 or more"),
        (["--max-restarts", "some", "x.py"], "--max-restarts some: needs a whole number, 0 or more"),
        (["--stop-grace", "inf", "x.py"], "--stop-grace inf: needs a number of seconds, 0 or more"),
        (["--stop-grace", "long", "x.py"], "--stop-grace long: needs a number of seconds"),
        (["--cpu=2", "x.py"], "--cpu takes no value, but got '2'"),
        (["--cpu", "--nproc-per-node", "gpu", "x.py"], "--cpu and --nproc-per-node gpu contradict each other"),
        (["--nproc-per-node", "2"], "which script?"),
        ([], "which script?"),
        (["-m"], "-m needs a value: MODULE"),
    ],
)
def test_wrong_use_is_told_with_the_way_out(words, told):
    with pytest.raises(UsageError) as refused:
        parse_run(words)
    assert told in str(refused.value)


@pytest.mark.parametrize("words", [["--device", "0,3"], ["--device=0,3"], ["--device", "0, 3"]])
def test_devices_are_numbers(words):
    assert parse_run([*words, "x.py"]).devices == (0, 3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "cpu"], "--device cpu: needs the numbers of GPUs"),
        (["--device", "²"], "--device ²: needs the numbers of GPUs"),
        (["--device", "1,1"], "GPU 1 is named twice"),
        (["--device", "0", "--cpu"], "--device 0 and --cpu contradict each other"),
        (["--device", "0", "--nproc-per-node", "cpu"], "--device 0 and --nproc-per-node cpu contradict each other"),
        (["--device", "0,3", "--nproc_per_node=3"], "--device 0,3 names 2 GPUs, but --nproc_per_node 3 asks for 3"),
    ],
)
def test_devices_that_contradict_are_refused_with_both_named(words, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        parse_run([*words, "x.py"])


def test_devices_and_as_many_workers_agree():
    assert parse_run(["--device", "0,3", "--nproc-per-node", "2", "x.py"]).devices == (0, 3)


def test_dry_run_is_a_flag():
    assert parse_run(["--dry-run", "x.py"]).dry_run


def test_a_program_need_not_be_python():
    assert parse_run(["--no-python", "bash", "-c", "true"]).program == Program("program", "bash", ("-c", "true"))


def test_a_module_that_is_not_python_is_refused():
    with pytest.raises(UsageError, match="--no-python and -m contradict each other"):
        parse_run(["--no-python", "-m", "x"])


def test_torchruns_flags_for_several_hosts():
    words = "--nnodes=2 --node_rank 1 --master_addr 10.0.0.1 --master_port=29501 --rdzv-id job x.py"
    assert parsed(words).hosts == HostSpec(nnodes=(2, 2), node_rank=1, leader="10.0.0.1", port=29501, job_id="job")
    words = "--nnodes 1:4 --rdzv-backend c10d --rdzv_endpoint h:7 --rdzv_conf timeout=9,read_timeout=3 x.py"
    assert parsed(words).hosts == HostSpec(nnodes=(1, 4), leader="h", port=7, join_timeout_s=9.0)
    conf = "last_call_timeout=2,heartbeat_timeout=9,is_host=1"
    words = f"--rdzv-endpoint [fd00::1]:7 --rdzv-conf {conf} --local-addr fd00::2 x.py"
    expected = HostSpec(
        leader="fd00::1", port=7, last_call_s=2.0, heartbeat_timeout_s=9.0, leads=True, local_address="fd00::2"
    )
    assert parsed(words).hosts == expected


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("h", "h", None), ("h:0", "h", 0), ("fd00::1", "fd00::1", None), ("[fd00::1]", "fd00::1", None)],
)
def test_an_endpoint_is_a_host_and_perhaps_a_port(text, host, port):
    hosts = parse_run(["--rdzv-endpoint", text, "x.py"]).hosts
    assert (hosts.leader, hosts.port) == (host, port)


def test_deepspeeds_flags():
    words = "-H hosts -i a:0,1@b --ssh_port 2222 --export A,B --export C x.py"
    assert parsed(words).selection == SelectionFlags(
        hostfile="hosts", include="a:0,1@b", ssh_port=2222, export=("A", "B", "C")
    )
    assert parsed("-H hosts --num_nodes 2 x.py").selection.num_nodes == 2
    assert parse_run(["--num_gpus", "2", "--no_local_rank", "x.py"]).selection.num_gpus == 2


def test_torchruns_flags_for_output():
    logs = parsed("--log_dir logs -r 0:1,1:3 --tee 3 --local-ranks-filter 0,2 x.py").logs
    both = frozenset({"out", "err"})
    assert logs == LogSpec(
        log_dir="logs",
        redirects={-1: frozenset(), 0: frozenset({"out"}), 1: both},
        tee={-1: both},
        shown_local_ranks=frozenset({0, 2}),
    )


def test_flags_for_schedulers():
    words = "--slurm --time 1:00:00 --sbatch --mem=8G --sbatch=--exclusive --gpus-per-node 4 x.py"
    expected = SchedulerFlags(slurm=True, time="1:00:00", gpus_per_node=4, sbatch=("--mem=8G", "--exclusive"))
    assert parsed(words).scheduler == expected


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--standalone --nnodes 2", "--standalone and --nnodes 2 contradict each other: leave out one of them"),
        ("--standalone --master_addr h", "--standalone and --master_addr h contradict each other"),
        ("--rdzv-endpoint a:1 --master-addr b", "--rdzv-endpoint a:1 and --master-addr b contradict each other"),
        ("--rdzv-endpoint a:1 --master-port 2", "--rdzv-endpoint a:1 and --master-port 2 contradict each other"),
        ("--nnodes 1:2 --node-rank 2", "contradict each other: 2 hosts are numbered 0 to 1"),
        ("--nnodes 2 --node-rank 2", "contradict each other: 2 hosts are numbered 0 to 1"),
        ("--node-rank 1", "--node-rank 1 needs --nnodes N"),
        ("--include a:0 --exclude a:1", "--include a:0 and --exclude a:1 contradict each other"),
        ("--num_gpus 2 --nproc-per-node 3", "--num_gpus 2 and --nproc-per-node 3 contradict each other"),
        ("--hostfile h --nnodes 2", "--hostfile h and --nnodes 2 contradict each other"),
        ("--slurm --local-addr a", "--slurm and --local-addr a contradict each other"),
        ("--num-nodes 2", "--num-nodes 2 means something only with --hostfile"),
        ("--partition p", "--partition p means something only with --slurm"),
        ("--name n", "--name n means something only with --slurm"),
    ],
)
def test_contradictory_flags_are_refused_with_both_named(words, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        parse_run([*words.split(), "x.py"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--nnodes 0", "--nnodes 0: needs a number of hosts, like 2, or the least and the most, like 1:4"),
        ("--nnodes 3:2", "--nnodes 3:2: needs a number of hosts"),
        ("--nnodes 2:", "--nnodes 2:: needs a number of hosts"),
        ("--master-port 70000", "--master-port 70000: needs a port, 1 to 65535"),
        ("--master-port ²", "--master-port ²: needs a port, 1 to 65535"),
        ("--rdzv-endpoint a:b", "--rdzv-endpoint a:b: needs HOST or HOST:PORT"),
        ("--master-addr a:29500 --nnodes 2", "--master-addr a:29500: needs the name or address of a host alone"),
        ("--master-addr a..b --nnodes 2", "--master-addr a..b: needs the name or address of a host"),
        ("--rdzv-backend etcd", "--rdzv-backend etcd: photinus has a rendezvous of its own"),
        ("--rdzv-conf colour=red", "--rdzv-conf colour=red: the options are heartbeat_timeout, is_host"),
        ("--rdzv-conf timeout=long", "--rdzv-conf timeout=long: timeout needs a number of seconds"),
        ("--tee 4", "--tee 4: needs 0 (nothing), 1 (stdout), 2 (stderr) or 3 (both)"),
        ("--redirects 1,0:2", "--redirects 1,0:2: needs 0 (nothing)"),
        ("--export A-B", "'A-B' is no name of an environment variable"),
    ],
)
def test_values_that_make_no_sense_are_named_with_what_is_needed(words, told):
    with pytest.raises(UsageError, match=re.escape(told)):
        parse_run([*words.split(), "x.py"])


@pytest.mark.parametrize("heartbeat", ["0", "1"])
def test_a_heartbeat_timeout_no_longer_than_a_beat_is_refused(heartbeat):
    with pytest.raises(
        UsageError, match=r"heartbeat_timeout needs 1.5 s or more: hosts send a sign of life each second"
    ):
        parse_run(["--rdzv-conf", f"heartbeat_timeout={heartbeat}", "x.py"])


def test_an_address_of_ipv6_may_stand_in_brackets():
    for address in ("fd00::1", "[fd00::1]"):
        assert parse_run(["--nnodes", "2", "--master-addr", address, "x.py"]).hosts.leader == "fd00::1"


def test_flags_of_older_launchers_that_change_nothing_are_taken():
    words = ["--monitor-interval", "5", "--force_multi", "--start_method", "spawn", "x.py"]
    assert parse_run(words) == RunFlags(Program("script", "x.py"))
    assert parse_run(["--use_env", "x.py"]).use_env
    hosts = parse_run(["--standalone", "--rdzv-endpoint", "localhost:0", "--nproc-per-node", "xpu", "x.py"]).hosts
    assert (hosts.nnodes, hosts.port) == ((1, 1), 0)
    assert parse_run(["--nnodes", "1:2", "--node-rank", "0", "x.py"]).hosts.node_rank == 0
    with pytest.raises(UsageError, match="--monitor-interval soon: needs a number of seconds"):
        parse_run(["--monitor-interval", "soon", "x.py"])


def test_gpus_are_shared_on_purpose_only() -> None:
    assert parse_run(["train.py"]).ranks_per_gpu == 1
    flags = parse_run(["--device", "0", "--ranks-per-gpu", "2", "--nproc-per-node", "2", "train.py"])
    assert (flags.ranks_per_gpu, flags.devices) == (2, (0,))
    with pytest.raises(UsageError, match="--ranks-per-gpu 2 and --cpu contradict"):
        parse_run(["--ranks-per-gpu", "2", "--cpu", "train.py"])
    with pytest.raises(UsageError, match="--device 0 names 1 GPU, but --nproc-per-node 2 asks for 2 workers"):
        parse_run(["--device", "0", "--nproc-per-node", "2", "train.py"])


def test_the_environment_says_for_all_commands_that_gpus_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTINUS_RANKS_PER_GPU", "3")
    assert parse_run(["train.py"]).ranks_per_gpu == 3
