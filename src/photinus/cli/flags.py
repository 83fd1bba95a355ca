"""What the user asked `photinus run` to do, read from the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from .. import env
from ..errors import UsageError
from ..job.spec import HostSpec, JobSpec, LogSpec, Program
from .flag_table import run_parser
from .parser import Parser

_Part = TypeVar("_Part", HostSpec, "SelectionFlags", LogSpec, "SchedulerFlags")


@dataclass(frozen=True)
class SelectionFlags:
    """Hosts named in one place and reached over ssh, as DeepSpeed does it. `include` and `exclude` are as typed."""

    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    ssh: str = "ssh"
    ssh_port: int | None = None
    export: tuple[str, ...] = ()


@dataclass(frozen=True)
class SchedulerFlags:
    """A batch script in place of a run."""

    slurm: bool = False
    name: str | None = None
    time: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = None
    sbatch: tuple[str, ...] = ()
    output: str | None = None
    submit: bool = False


@dataclass(frozen=True)
class RunFlags(JobSpec):
    """What the user asked `photinus run` to do; flag_table says what each flag means.

    `given`: the flags that were typed: by its first spelling, the one that was used and the text behind it.
    """

    use_env: bool = False
    selection: SelectionFlags = field(default_factory=SelectionFlags)
    scheduler: SchedulerFlags = field(default_factory=SchedulerFlags)
    given: Mapping[str, tuple[str, str]] = field(default_factory=dict, compare=False, repr=False)

    def spec(self) -> JobSpec:
        """Returns what leaves the command line."""
        return JobSpec(**{each.name: getattr(self, each.name) for each in fields(JobSpec)})


def parse_run(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> RunFlags:
    """Reads the words after `photinus run`; `--help` prints the help and raises SystemExit.

    Flags that were not typed are taken from torchrun's variables, like PET_NNODES, where they are set.

    Raises:
        UsageError: an unknown flag, a wrong or missing value, a flag given twice, contradictory flags, or no script.
    """
    parser = run_parser()
    told = _told_by_torchrun(parser, os.environ if environ is None else environ, parser.parse(arguments).given)
    values = parser.parse(arguments, told)
    typed = {action.dest: getattr(values, action.dest) for action in map(parser.flags.__getitem__, values.given)}
    _refuse_contradictions(typed, values.given)
    module = typed.get("module")
    words = values.rest if module is None else (module, *values.rest)
    if not words:
        raise UsageError(
            "which script? Usage: photinus run [flags] script.py [arguments]; `photinus run --help` lists the flags."
        )
    kind = "module" if module is not None else "program" if "no_python" in typed else "script"
    if "export" in typed:
        typed["export"] = tuple(name for names in typed["export"] for name in names)
    if "sbatch" in typed:
        typed["sbatch"] = tuple(typed["sbatch"])
    if "standalone" in typed:
        typed.setdefault("nnodes", (1, 1))  # and not as many as srun or mpirun may say
    typed.setdefault("ranks_per_gpu", _ranks_per_gpu())
    return RunFlags(
        Program(kind, words[0], words[1:]),
        hosts=_part(HostSpec, typed),
        selection=_part(SelectionFlags, typed),
        logs=_part(LogSpec, typed),
        scheduler=_part(SchedulerFlags, typed),
        given=values.given,
        **{each.name: typed[each.name] for each in fields(RunFlags) if each.name in typed},
    )


# What was typed, in place of what torchrun's variables say.
_CHOOSE_HOSTS = ("--hostfile", "--standalone", "--slurm")
_TYPED_INSTEAD = {
    "--nproc-per-node": ("--num-gpus", "--device", "--include", "--exclude"),
    "--master-addr": ("--rdzv-endpoint", *_CHOOSE_HOSTS),
    "--master-port": ("--rdzv-endpoint", *_CHOOSE_HOSTS),
    "--rdzv-endpoint": ("--master-addr", *_CHOOSE_HOSTS),
    **dict.fromkeys(("--nnodes", "--node-rank", "--local-addr"), _CHOOSE_HOSTS),
}


# Those that torchrun reads from variables; others of that prefix may be anything's.
_OF_TORCHRUN = frozenset({
    "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--local-addr", "--rdzv-backend",
    "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--standalone", "--max-restarts", "--monitor-interval", "--role",
    "--start-method", "--no-python", "--log-dir", "--redirects", "--tee", "--local-ranks-filter",
})  # fmt: skip


def _told_by_torchrun(
    parser: Parser, environ: Mapping[str, str], typed: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Flags by torchrun's variables, PET_ and the flag's name: Kubeflow tells each host its place in a job by them."""
    told = {}
    for variable, text in environ.items():
        flag = "--" + variable.removeprefix("PET_").lower().replace("_", "-")
        if not variable.startswith("PET_") or not text or flag not in _OF_TORCHRUN:
            continue
        action = parser.flags[flag]
        name, is_switch = action.option_strings[0], action.nargs == 0
        if (text == "1" or not is_switch) and not any(each in typed for each in _TYPED_INSTEAD.get(name, ())):
            told[name] = (variable, "" if is_switch else text)
    return told


def _ranks_per_gpu() -> int:
    try:
        return env.RANKS_PER_GPU.get()
    except ValueError as error:
        raise UsageError(str(error)) from None


def _part(kind: type[_Part], typed: Mapping[str, Any]) -> _Part:
    return kind(**{each.name: typed[each.name] for each in fields(kind) if each.name in typed})


def _refuse_contradictions(typed: dict[str, Any], given: Mapping[str, tuple[str, str]]) -> None:
    """Raises UsageError for flags that cannot both be meant; puts what --rdzv-* say under the names of HostSpec."""

    def shown(flag: str) -> str:
        return " ".join(filter(None, given[flag]))

    def refuse(first: str, second: str, why: str = "leave out one of them.") -> None:
        raise UsageError(f"{shown(first)} and {shown(second)} contradict each other: {why}")

    def together(first: str, *others: str) -> None:
        for other in others:
            if first in given and other in given:
                refuse(first, other)

    if "rdzv_endpoint" in typed:
        leader, port = typed["rdzv_endpoint"]
        if typed.setdefault("leader", leader) != leader:
            refuse("--rdzv-endpoint", "--master-addr")
        if port is not None and typed.setdefault("port", port) != port:
            refuse("--rdzv-endpoint", "--master-port")
    typed.update(typed.get("rdzv_conf", {}))
    if "-m" in given and "--no-python" in given:
        raise UsageError("--no-python and -m contradict each other: a module is Python. Leave out one of them.")
    workers = typed.get("nproc_per_node")
    if workers == "gpu":
        together("--cpu", "--nproc-per-node")
    if workers == "cpu":
        together("--device", "--nproc-per-node")
    together("--device", "--cpu")
    if "devices" in typed and isinstance(workers, int):
        count = len(typed["devices"])
        if workers != count * typed.get("ranks_per_gpu", _ranks_per_gpu()):
            raise UsageError(
                f"{shown('--device')} names {count} GPU{'s' * (count > 1)}, but {shown('--nproc-per-node')} asks for "
                f"{workers} workers, and each needs one of its own: leave out one of the two."
            )
    together("--ranks-per-gpu", "--cpu", "--num-gpus")
    together("--include", "--exclude", "--num-nodes", "--num-gpus")
    together("--exclude", "--num-nodes")
    together("--num-gpus", "--exclude", "--device", "--nproc-per-node")
    together("--device", "--include", "--exclude", "--hostfile")
    together("--hostfile", "--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone")
    if "--hostfile" in given and "--local-addr" in given:
        why = "each host has an address of its own. Name the hosts by theirs in the file, or the first by"
        refuse("--local-addr", "--hostfile", f"{why} --master-addr.")
    for flag, of in {"--hostfile": "the file", "--slurm": "the job"}.items():
        if flag in given and "leads" in typed:
            refuse("--rdzv-conf", flag, f"the first host of {of} leads, whatever is_host says.")
    together("--slurm", "--hostfile", "--node-rank", "--master-addr", "--rdzv-endpoint")
    together("--slurm", "--local-addr")
    together("--submit", "--output", "--dry-run")
    Parser.refuse_without(given, ("--num-nodes", "--ssh", "--ssh-port", "--export"), "--hostfile")
    of_slurm = ("--time", "--partition", "--sbatch", "--submit", "--name", "--gpus-per-node", "--output")
    Parser.refuse_without(given, of_slurm, "--slurm")
    _, most = typed.get("nnodes", (1, 1))
    if most > 1:
        together("--standalone", "--nnodes")
    if typed.get("leader") not in ("localhost", "127.0.0.1", "::1"):  # what torchrun itself makes of --standalone
        together("--standalone", "--rdzv-endpoint", "--master-addr")
    together("--standalone", "--node-rank", "--local-addr")
    host = typed.get("node_rank", 0)
    if "nnodes" not in typed and host > 0:
        raise UsageError(f"{shown('--node-rank')} needs --nnodes N: how many hosts are there?")
    if "nnodes" in typed and host >= most:
        refuse("--node-rank", "--nnodes", f"{most} host{'s are' if most > 1 else ' is'} numbered 0 to {most - 1}.")
