"""The flags of `photinus run`: one table of them, and what the user asked for, read from the command line."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from .. import env
from ..errors import UsageError
from ..job.spec import HostSpec, JobSpec, LogSpec, Program
from . import flag_values as read
from .parser import Parser, Spellings, contradiction, refuse_exclusive, shown

_T = TypeVar("_T")


@dataclass(frozen=True)
class RunFlags:
    """The request to `photinus run`: a job, and how to choose its hosts.

    Attributes:
        spec: the job, as far as the command line says it.
        include, exclude: as typed.
        spellings: the flags that were typed: by its first spelling, the one that was used and the text behind it.
        All others: the values of the flags of that name.
    """

    spec: JobSpec
    spellings: Spellings
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    ssh: str = "ssh"
    ssh_port: int | None = None
    export: tuple[str, ...] = ()

    def typed(self, *names: str) -> str:
        """Return these flags with their values, as far as they were given, for messages."""
        return " ".join(f"{name} {self.spellings[name][1]}" for name in names if name in self.spellings)


class _Flag(NamedTuple):
    """A flag as `Parser.add` takes it, and the field that it sets, by default the one of its name."""

    usage: str
    help: str
    type: Callable[[str], Any] = str
    sets: str | None = None


_FLAGS = {
    "workers": (
        _Flag(
            "--nproc-per-node -ppn -np -n N|auto|gpu|cpu",
            "workers on a host. auto: one per GPU, or one per usable core without GPUs. default: auto",
            read.worker_count,
        ),
        _Flag("--cpu", "train on the CPU: the workers see no GPU"),
        _Flag("--device 0,3", "use only these GPUs, one per worker", read.devices, "devices"),
        _Flag("--oversubscribe", "allow more than 4 workers per core"),
        _Flag("--ranks-per-gpu N", "run N workers per GPU (for testing)", read.whole_number(1)),
        _Flag("--num-gpus --num-accelerators N", "run N workers per host, each with a GPU", read.whole_number(1)),
        _Flag("--max-restarts K", "if a worker fails, restart all, at most K times. default: 3", read.whole_number(0)),
        _Flag(
            "--stop-grace --shutdown-timeout SECONDS",
            "seconds between SIGTERM and SIGKILL, for workers to save and exit. default: 30",
            read.seconds,
            "stop_grace_s",
        ),
        _Flag(
            "--preempt-after SECONDS",
            "test preemption: after SECONDS all workers save, exit and restart",
            read.seconds,
            "preempt_after_s",
        ),
        _Flag(
            "--start-method fork|spawn",
            "fork: import torch once and fork the workers; spawn: each imports it. default: fork where possible",
            read.start_method,
        ),
        _Flag("--use-env --no-local-rank", "do not give --local_rank to a script that takes it"),
        _Flag("--role NAME", "ROLE_NAME of the workers. default: default"),
        _Flag("--no-python", "run a program that is not a Python script"),
        _Flag("-m --module MODULE", "run a module, like `python -m`; must be the last flag", sets="module"),
        _Flag("--dry-run", "print what would start, and its environment"),
    ),
    "several hosts, the same command on each": (
        _Flag(
            "--nnodes N|LEAST:MOST", "number of hosts; LEAST:MOST: hosts may join and exit. default: 1", read.host_count
        ),
        _Flag("--node-rank R", "number of this host, from 0. default: order of joining", read.whole_number(0)),
        _Flag("--master-addr HOST", "address of the leading host", read.host, "leader"),
        _Flag(
            "--master-port PORT", "port of the leading host. 0: any (one host only). default: 29500", read.port, "port"
        ),
        _Flag("--rdzv-endpoint HOST:PORT", "--master-addr and --master-port in one", read.endpoint),
        _Flag("--rdzv-id ID", "name of the job; hosts of a different job are refused", sets="job_id"),
        _Flag("--rdzv-backend NAME", "c10d or static, as in torchrun; both mean the same here", read.rendezvous),
        _Flag(
            "--rdzv-conf KEY=VALUE,...",
            "seconds. join_timeout=600: for LEAST hosts to join; last_call_timeout=5: then for more; "
            "heartbeat_timeout=30: until a silent host counts as lost",
            read.rendezvous_options,
        ),
        _Flag("--local-addr ADDRESS", "address on which this host listens", read.host, "local_address"),
    ),
    "several hosts, started from here over ssh": (
        _Flag("--hostfile -H FILE", "lines like `host slots=4`"),
        _Flag("--include -i HOST:0,1@HOST2", "use only these hosts and devices of the file, or of localhost"),
        _Flag("--exclude -e HOST:0@HOST2", "use all hosts and devices except these"),
        _Flag("--num-nodes N", "use the first N hosts of the file", read.whole_number(1)),
        _Flag("--ssh COMMAND", "ssh command. default: ssh"),
        _Flag("--ssh-port PORT", "port of the ssh servers", read.port),
        _Flag("--export NAME,...", "pass these environment variables too", read.variables),
    ),
    "output": (
        _Flag("--log-dir --enable-each-rank-log DIR", "also write each rank's output to files in DIR"),
        _Flag("--redirects -r 0..3", "write to the files only: 0 nothing, 1 stdout, 2 stderr, 3 both", read.streams),
        _Flag("--tee -t 0..3", "write to the files and the terminal: as --redirects", read.streams),
        _Flag("--local-ranks-filter 0,2", "show only these ranks of a host", read.local_ranks, "shown_local_ranks"),
    ),
    "accepted from other launchers, without effect": (
        _Flag("--standalone", "one host is the default"),
        _Flag("--monitor-interval SECONDS", "the end of a worker is noticed immediately", read.seconds),
        _Flag("--force-multi", "one host is a job like any other"),
        _Flag("--no-ssh-check", "all hosts are always checked first"),
    ),
}
_REPEATED = ("--export",)
_ONLY_WITH = dict.fromkeys(("--num-nodes", "--ssh", "--ssh-port", "--export"), ("--hostfile",))
# A flag, and those that cannot stand beside it.
_EXCLUSIVE = (
    ("--device", "--cpu"),
    ("--ranks-per-gpu", "--cpu", "--num-gpus"),
    ("--include", "--exclude", "--num-nodes", "--num-gpus"),
    ("--exclude", "--num-nodes"),
    ("--num-gpus", "--exclude", "--device", "--nproc-per-node"),
    ("--device", "--include", "--exclude", "--hostfile"),
    ("--hostfile", "--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone"),
    ("--standalone", "--node-rank", "--local-addr"),
)
# Other launchers' flags: how they are called here, or what to do instead.
_RENAMED = {
    **dict.fromkeys(("--num-processes", "--num-proc", "--nprocs"), "--nproc-per-node"),
    **dict.fromkeys(("--min-elastic-nodes", "--max-elastic-nodes"), "--nnodes LEAST:MOST"),
    "--devices": "--nproc-per-node N, or --device 0,3",
    "--num-machines": "--nnodes",
    "--machine-rank": "--node-rank",
    "--main-process-ip": "--master-addr",
    "--main-process-port": "--master-port",
    "--gpu-ids": "--device",
    "--gpus": "--num-gpus",
    "--launcher-args": "--ssh",
}
_ABSENT = {
    **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters"), "filter the files under --log-dir"),
    **dict.fromkeys(("--deepspeed", "--deepspeed-config"), "it belongs to the script: put it after the script's name"),
    "--run-path": "give the path as the script",
    "--launcher": "--hostfile starts over ssh, and mpirun starts workers itself",
    "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP are always handled",
    "--logs-specs": "--log-dir, --redirects and --tee say where output goes",
    "--log-line-prefix-template": "lines of ranks but 0 begin with the rank, like [1]",
    "--event-log-handler": "there are no event logs",
    "--numa-binding": "bind with numactl or the scheduler",
    "--virtual-local-rank": "--device chooses GPUs",
    "--bind-cores-to-rank": "bind with numactl or the scheduler; ranks share the cores by OMP_NUM_THREADS",
    "--bind-core-list": "bind with numactl or taskset",
    "--save-pid": "in a shell, `$!` is the launcher's pid after `photinus run ... &`",
    "--no-ssh": "type the command on each host, with --nnodes N --master-addr HOST",
    "--venv-script": "all hosts need the same Python at the same path",
    "--multi-gpu": "several workers need no flag",
    "--mixed-precision": "it is the training script's choice",
    "--autotuning": "DeepSpeed's own",
    "--elastic-training": "give --nnodes LEAST:MOST",
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
    """Return the command line of `photinus run`."""
    parser = Parser(
        "run",
        "[flags] script.py [arguments of the script]",
        "[flags] -m module [arguments of the module]",
        about=_ABOUT,
        more=_MORE_HELP,
        passes_on=True,
        renamed=_RENAMED,
        absent=_ABSENT,
        exclusive=_EXCLUSIVE,
    )
    for section, flags in _FLAGS.items():
        for usage, about, kind, sets in flags:
            name = usage.split()[0]
            options: dict[str, Any] = {"action": "append"} if name in _REPEATED else {}
            parser.add(usage, about, kind, section=section, dest=sets, only_with=_ONLY_WITH.get(name, ()), **options)
    return parser


def parse_run(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> RunFlags:
    """Read the words after `photinus run`; `--help` prints the help and raises SystemExit.

    Flags that were not typed are taken from torchrun's variables, like PET_NNODES, where they are set.

    Raises:
        UsageError: an unknown flag, a wrong or missing value, a flag given twice, contradictory flags, or no script.
    """
    parser = run_parser()
    environ = os.environ if environ is None else environ
    values = parser.parse(arguments, _flags_of_torchrun(parser, environ), _TYPED_INSTEAD)
    spellings: Spellings = values.spellings
    typed = {(dest := parser.flags[name].dest): getattr(values, dest) for name in spellings}
    try:
        typed.setdefault("ranks_per_gpu", env.RANKS_PER_GPU.get())
    except ValueError as error:
        raise UsageError(str(error)) from None
    _read_rendezvous(typed, spellings)
    _refuse_contradictions(typed, spellings)
    words = [typed["module"], *values.rest] if "module" in typed else list(values.rest)
    if not words:
        raise UsageError(
            "which script? Usage: photinus run [flags] script.py [arguments]; `photinus run --help` lists the flags."
        )
    kind = "module" if "module" in typed else "program" if "no_python" in typed else "script"
    if "standalone" in typed:
        typed.setdefault("nnodes", (1, 1))  # a scheduler may say otherwise
    typed["export"] = tuple(name for names in typed.get("export", ()) for name in names)
    typed["program"] = Program(kind, words[0], tuple(words[1:]))
    typed["hosts"], typed["logs"] = _fill(HostSpec, typed), _fill(LogSpec, typed)
    typed["spec"], typed["spellings"] = _fill(JobSpec, typed), spellings
    return _fill(RunFlags, typed)


def _fill(kind: type[_T], typed: Mapping[str, Any]) -> _T:
    """Return a dataclass with those of its fields that were typed."""
    return kind(**{each.name: typed[each.name] for each in fields(kind) if each.name in typed})  # type: ignore[arg-type]


# Flags that torchrun also reads from variables. Any program may use other variables of that prefix.
_OF_TORCHRUN = frozenset({
    "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--local-addr", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone", "--max-restarts", "--monitor-interval", "--role",
    "--start-method", "--no-python", "--log-dir", "--redirects", "--tee", "--local-ranks-filter",
})  # fmt: skip
_CHOOSE_HOSTS = ("--hostfile", "--standalone")
# A flag -> those that mean, where one is typed, that its variable does not count.
_TYPED_INSTEAD = {
    "--nproc-per-node": ("--num-gpus", "--device", "--include", "--exclude"),
    "--master-addr": ("--rdzv-endpoint", *_CHOOSE_HOSTS),
    "--master-port": ("--rdzv-endpoint", *_CHOOSE_HOSTS),
    "--rdzv-endpoint": ("--master-addr", *_CHOOSE_HOSTS),
    **dict.fromkeys(("--nnodes", "--node-rank", "--local-addr"), _CHOOSE_HOSTS),
}


def _flags_of_torchrun(parser: Parser, environ: Mapping[str, str]) -> Spellings:
    """Read torchrun's variables, PET_ and a flag's name: by them Kubeflow gives each host its place in a job."""
    found = {}
    for variable, text in environ.items():
        flag = "--" + variable.removeprefix("PET_").lower().replace("_", "-")
        if variable.startswith("PET_") and text and flag in _OF_TORCHRUN:
            is_switch = parser.flags[flag].nargs == 0
            if text == "1" or not is_switch:
                found[flag] = (variable, "" if is_switch else text)
    return found


def _read_rendezvous(typed: dict[str, Any], spellings: Spellings) -> None:
    """Put what --rdzv-endpoint and --rdzv-conf say under the names of HostSpec; refuse two different leaders."""
    leader, port = typed.get("rdzv_endpoint", (None, None))
    if leader is not None and typed.setdefault("leader", leader) != leader:
        raise contradiction(spellings, "--rdzv-endpoint", "--master-addr")
    if port is not None and typed.setdefault("port", port) != port:
        raise contradiction(spellings, "--rdzv-endpoint", "--master-port")
    typed.update(typed.get("rdzv_conf", {}))


def _refuse_contradictions(typed: Mapping[str, Any], spellings: Spellings) -> None:
    """Raise UsageError for flags whose values cannot both be meant."""
    if "-m" in spellings and "--no-python" in spellings:
        raise UsageError("--no-python and -m are mutually exclusive: a module is Python. Remove one of them.")
    spelling = spellings.get("--nproc-per-node", ("",))[0]
    if spelling in ("-n", "-np") and spellings.keys() & {"--nnodes", "--hostfile"}:
        raise UsageError(
            f"{shown(spellings, '--nproc-per-node')}: with several hosts, this is the total in mpirun, and the number "
            f"per host in `photinus run`. Write --nproc-per-node N (or -ppn N) for N workers on each host."
        )
    workers, gpus, (_, most) = typed.get("nproc_per_node"), typed.get("devices", ()), typed.get("nnodes", (1, 1))
    exclusive: list[tuple[str, ...]] = []
    if workers == "gpu":
        exclusive.append(("--cpu", "--nproc-per-node"))
    if workers == "cpu":
        exclusive.append(("--device", "--nproc-per-node"))
    if most > 1:
        exclusive.append(("--standalone", "--nnodes"))
    if typed.get("leader") not in ("localhost", "127.0.0.1", "::1"):  # what torchrun itself makes of --standalone
        exclusive.append(("--standalone", "--rdzv-endpoint", "--master-addr"))
    refuse_exclusive(spellings, exclusive)
    if gpus and isinstance(workers, int) and workers != len(gpus) * typed["ranks_per_gpu"]:
        raise UsageError(
            f"{shown(spellings, '--device')} names {len(gpus)} GPU{'s' * (len(gpus) > 1)}, but "
            f"{shown(spellings, '--nproc-per-node')} asks for {workers} workers, and each needs its own: remove one "
            f"of the two."
        )
    if "--hostfile" in spellings and "leads" in typed:
        why = "the first host of the file leads; is_host has no effect."
        raise contradiction(spellings, "--rdzv-conf", "--hostfile", why)
    if "--hostfile" in spellings and "--local-addr" in spellings:
        why = "each host has its own address. Write it into the file, or give that of the first host with"
        raise contradiction(spellings, "--local-addr", "--hostfile", f"{why} --master-addr.")
    number = typed.get("node_rank", 0)
    if "nnodes" not in typed and number > 0:
        raise UsageError(f"{shown(spellings, '--node-rank')} needs --nnodes N: how many hosts are there?")
    if number >= most:
        why = f"{most} host{'s are' if most > 1 else ' is'} numbered 0 to {most - 1}."
        raise contradiction(spellings, "--node-rank", "--nnodes", why)
