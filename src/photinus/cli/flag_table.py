"""The flags of `photinus run`: what stands behind them, what they do, and the names that other launchers use."""

from __future__ import annotations

from typing import Any

from .flag_values import TYPES, rendezvous, whole_number
from .parser import Parser

# Section -> a flag, other spellings of it, what stands for its value in help (nothing: a switch) -> what it does.
_SECTIONS = {
    "workers": {
        "--nproc-per-node N|auto|gpu|cpu": "workers on a host. auto: one per GPU, or one per usable core where there "
        "is no GPU. default: auto",
        "--cpu": "train on the CPU: the workers see no GPU",
        "--device 0,3": "use only these GPUs, one per worker",
        "--oversubscribe": "allow more than 4 workers per core",
        "--ranks-per-gpu N": "run N workers per GPU (for testing)",
        "--num-gpus --num-accelerators N": "run N workers per host, each with a GPU",
        "--max-restarts K": "if a worker fails, restart all, at most K times. default: 3",
        "--stop-grace --shutdown-timeout SECONDS": "seconds between SIGTERM and SIGKILL, for workers to "
        "save and exit. default: 30",
        "--preempt-after SECONDS": "test preemption: after SECONDS all workers save, exit and restart",
        "--use-env --no-local-rank": "do not give --local_rank to a script that takes it",
        "--role NAME": "ROLE_NAME of the workers. default: default",
        "--no-python": "run a program that is not a Python script",
        "-m --module MODULE": "run a module, like `python -m`; must be the last flag",
        "--dry-run": "print what would start, and its environment",
    },
    "several hosts, the same command on each": {
        "--nnodes N|LEAST:MOST": "number of hosts; LEAST:MOST: hosts may join and exit. default: 1",
        "--node-rank R": "number of this host, from 0. default: order of joining",
        "--master-addr HOST": "address of the leading host",
        "--master-port PORT": "port of the leading host. 0: any (one host only). default: 29500",
        "--rdzv-endpoint HOST:PORT": "--master-addr and --master-port in one",
        "--rdzv-id ID": "name of the job; hosts of a different job are refused",
        "--rdzv-backend NAME": "c10d or static, as in torchrun; both mean the same here",
        "--rdzv-conf KEY=VALUE,...": "seconds. join_timeout=600: for LEAST hosts to join; last_call_timeout=5: then "
        "for more; heartbeat_timeout=30: until a silent host counts as lost",
        "--local-addr ADDRESS": "address on which this host listens",
    },
    "several hosts, started from here over ssh": {
        "--hostfile -H FILE": "lines like `host slots=4`",
        "--include -i HOST:0,1@HOST2": "use only these hosts and devices of the file, or of localhost",
        "--exclude -e HOST:0@HOST2": "use all hosts and devices except these",
        "--num-nodes N": "use the first N hosts of the file",
        "--ssh COMMAND": "ssh command. default: ssh",
        "--ssh-port PORT": "port of the ssh servers",
        "--export NAME,...": "pass these environment variables too",
    },
    "output": {
        "--log-dir --enable-each-rank-log DIR": "also write each rank's output to files in DIR",
        "--redirects -r 0..3": "write to the files only: 0 nothing, 1 stdout, 2 stderr, 3 both",
        "--tee -t 0..3": "write to the files and the terminal: as --redirects",
        "--local-ranks-filter 0,2": "show only these ranks of a host",
    },
    "schedulers": {
        "--slurm": "write a batch script for this job, and start nothing",
        "--name NAME": "name of the batch job",
        "--time LIMIT": "time limit of the batch job",
        "--partition NAME": "partition of the batch job",
        "--gpus-per-node N": "GPUs to request. default: one per worker",
        "--sbatch OPTION": "another option for the batch script, like --mem=64G",
        "--output FILE": "file for the batch script. default: stdout",
        "--submit": "submit the batch script to sbatch",
    },
    "accepted from other launchers, without effect": {
        "--standalone": "one host is the default",
        "--monitor-interval SECONDS": "the end of a worker is noticed immediately",
        "--start-method NAME": "workers are always new processes",
        "--force-multi": "one host is a job like any other",
        "--no-ssh-check": "all hosts are always checked first",
    },
}
# Those whose values are called otherwise in RunFlags and its parts.
_CALLED = {
    "--device": "devices",
    "--stop-grace": "stop_grace_s",
    "--preempt-after": "preempt_after_s",
    "-m": "module",
    "--master-addr": "leader",
    "--master-port": "port",
    "--rdzv-id": "job_id",
    "--local-addr": "local_address",
    "--local-ranks-filter": "shown_local_ranks",
}
_MORE: dict[str, dict[str, Any]] = {
    "--export": {"action": "append"},
    "--sbatch": {"action": "append"},
    "--gpus-per-node": {"type": whole_number(0)},
    "--rdzv-backend": {"type": rendezvous},
}
_RENAMED = {
    "--num-processes": "--nproc-per-node",
    "--num-proc": "--nproc-per-node",
    "--nprocs": "--nproc-per-node",
    "--devices": "--nproc-per-node N, or --device 0,3",
    "-n": "--nproc-per-node",
    "-np": "--nproc-per-node",
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--gpu-ids": "--device",
    "--gpus": "--num-gpus",
    "--min-elastic-nodes": "--nnodes LEAST:MOST",
    "--max-elastic-nodes": "--nnodes LEAST:MOST",
    "--launcher-args": "--ssh",
}
_ABSENT = {
    "--run-path": "give the path as the script",
    "--launcher": "--hostfile starts over ssh, --slurm writes a batch script, and mpirun starts workers itself",
    "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP are always handled",
    "--logs-specs": "--log-dir, --redirects and --tee say where output goes",
    "--log-line-prefix-template": "lines of ranks but 0 begin with the rank, like [1]",
    "--print-completion": "`photinus completion bash` prints the script",
    "--event-log-handler": "there are no event logs",
    "--numa-binding": "bind with numactl or the scheduler",
    "--virtual-local-rank": "--device chooses GPUs",
    "--duplicate-stdout-filters": "filter the files under --log-dir",
    "--duplicate-stderr-filters": "filter the files under --log-dir",
    "--bind-cores-to-rank": "bind with numactl or the scheduler; ranks share the cores by OMP_NUM_THREADS",
    "--bind-core-list": "bind with numactl or taskset",
    "--save-pid": "in a shell, `$!` is the launcher's pid after `photinus run ... &`",
    "--no-ssh": "type the command on each host, with --nnodes N --master-addr HOST",
    "--venv-script": "all hosts need the same Python at the same path",
    "--multi-gpu": "several workers need no flag",
    "--mixed-precision": "it is the training script's choice",
    "--autotuning": "DeepSpeed's own",
    "--elastic-training": "give --nnodes LEAST:MOST",
    "--deepspeed-config": "it belongs to the script: put it after the script's name",
    "--deepspeed": "it belongs to the script: put it after the script's name",
}
_ABOUT = """\
Start the script once per device. Each process gets its rank and world size. If
a worker fails, report which one and why, and restart all workers; Loop and
Trainer then resume. Dashes and underscores in flags are the same."""
_MORE_HELP = """\
examples:
  photinus run train.py                       all GPUs, or all cores
  photinus run --nproc-per-node 2 train.py --epochs 3
  photinus run --nproc-per-node 4 --cpu -m project.train --lr 0.1
  photinus run --nnodes 2 --master-addr node1 train.py         on both hosts
  photinus run --hostfile hosts --include a:0,1@b train.py     from one of them

exit code: 0 if all workers exit with 0; else that of the worker that failed
first (128 + signal if it was killed); 130 after Ctrl-C; 143 after SIGTERM; 2
for wrong use."""


def run_parser() -> Parser:
    """The command line of `photinus run`."""
    parser = Parser(
        "run",
        "[flags] script.py [arguments of the script]",
        "[flags] -m module [arguments of the module]",
        about=_ABOUT,
        more=_MORE_HELP,
        passes_on=True,
        renamed=_RENAMED,
        absent=_ABSENT,
    )
    for section, rows in _SECTIONS.items():
        for flag, meaning in rows.items():
            name, *also = (word for word in flag.split() if word.startswith("-"))
            metavar = flag.split()[-1]
            options: dict[str, Any] = {"action": "store_true"}
            if not metavar.startswith("-"):
                options = {"metavar": metavar, "type": TYPES.get(metavar, str)}
            if name in _CALLED:
                options["dest"] = _CALLED[name]
            parser.add(name, section=section, also=also, help=meaning, **{**options, **_MORE.get(name, {})})
    parser.offered["--nproc-per-node"] = ("auto", "gpu", "cpu")
    return parser
