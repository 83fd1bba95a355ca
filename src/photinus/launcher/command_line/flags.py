"""What the user asked `photinus run` to do, and the parser that reads it from the command line.

Everything from the script's name on belongs to the script. The flags themselves are in flag_table.py, what stands
behind them is read by flag_values.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ... import env
from .flag_table import FLAGS, HELP, find
from .flag_values import (
    read_devices,
    read_endpoint,
    read_host,
    read_host_count,
    read_names,
    read_port,
    read_ranks,
    read_rendezvous_options,
    read_seconds,
    read_streams,
    read_whole_number,
    read_worker_count,
)
from .program import Program
from .usage import UsageError

__all__ = ["FLAGS", "HELP", "HostFlags", "LogFlags", "RunFlags", "SchedulerFlags", "SelectionFlags", "parse_run"]


@dataclass(frozen=True)
class HostFlags:
    """Several hosts, each started with the same command.

    Attributes:
        nnodes: the least and the most hosts; None when the user did not say.
        node_rank: this host's number; None: in the order in which they come.
        leader: name or address of the host that leads; None when not said.
        port: its port; 0: any; None when not said.
        leads: whether this host leads, when the user said so (torchrun's is_host).
        job_id: the job's name; None when not said.
        local_address: what this host listens on and is reached at.
        join_timeout_s: seconds to wait for the least number of hosts.
        last_call_s: seconds to wait for more hosts than the least.
        heartbeat_timeout_s: seconds of silence after which a host counts as lost.
    """

    nnodes: tuple[int, int] | None = None
    node_rank: int | None = None
    leader: str | None = None
    port: int | None = None
    leads: bool | None = None
    job_id: str | None = None
    local_address: str | None = None
    join_timeout_s: float = 600.0
    last_call_s: float = 5.0
    heartbeat_timeout_s: float = 30.0


@dataclass(frozen=True)
class SelectionFlags:
    """Hosts named in one place and reached over ssh, as DeepSpeed does it.

    Attributes:
        hostfile: path of the file of hosts.
        include, exclude: DeepSpeed's words for hosts and devices, as typed.
        num_nodes, num_gpus: the first so many hosts, and devices of each.
        ssh: the command that reaches a host; ssh_port: its port.
        export: names of environment variables to hand over.
    """

    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    ssh: str = "ssh"
    ssh_port: int | None = None
    export: tuple[str, ...] = ()


@dataclass(frozen=True)
class LogFlags:
    """Where the workers' output goes. `redirects`, `tee`: "out" and "err" by local rank, -1: all that are not named."""

    log_dir: str | None = None
    redirects: Mapping[int, frozenset[str]] | None = None
    tee: Mapping[int, frozenset[str]] | None = None
    shown_local_ranks: frozenset[int] | None = None


@dataclass(frozen=True)
class SchedulerFlags:
    """A batch script or a manifest in place of a run."""

    slurm: bool = False
    kubernetes: str | None = None
    image: str | None = None
    name: str | None = None
    namespace: str | None = None
    time: str | None = None
    partition: str | None = None
    gpus_per_node: int | None = None
    sbatch: tuple[str, ...] = ()
    output: str | None = None
    submit: bool = False


@dataclass(frozen=True)
class RunFlags:
    """What the user asked `photinus run` to do.

    Attributes:
        program: the script or module with its arguments; None when help was asked for.
        nproc_per_node: workers on this host: a number, or "auto", "gpu", "cpu".
        max_restarts: how often all workers are started anew after one has failed.
        cpu: hide the GPUs from the workers.
        devices: the GPUs that the workers see, by number; None: all.
        ranks_per_gpu: workers that share a GPU.
        oversubscribe: more workers than the cores are good for are meant.
        dry_run: only say what would be started.
        stop_grace_s: seconds between SIGTERM and SIGKILL for a worker that is asked to leave.
        use_env: do not give --local_rank to scripts that take it.
        preempt_after_s: a trial: ask the workers to suspend after so long, once.
    """

    program: Program | None
    nproc_per_node: int | str = "auto"
    max_restarts: int = 3
    cpu: bool = False
    devices: tuple[int, ...] | None = None
    ranks_per_gpu: int = 1
    oversubscribe: bool = False
    dry_run: bool = False
    stop_grace_s: float = 30.0
    use_env: bool = False
    preempt_after_s: float | None = None
    hosts: HostFlags = field(default_factory=HostFlags)
    selection: SelectionFlags = field(default_factory=SelectionFlags)
    logs: LogFlags = field(default_factory=LogFlags)
    scheduler: SchedulerFlags = field(default_factory=SchedulerFlags)


@dataclass
class _Given:
    """The flags as they were typed: name -> the spelling, and the text behind it."""

    flags: dict[str, tuple[str, str]] = field(default_factory=dict)
    lists: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.flags

    def __getitem__(self, name: str) -> tuple[str, str]:
        return self.flags[name]

    def shown(self, name: str) -> str:
        return " ".join(word for word in self.flags[name] if word)

    def number(self, name: str, *, least: int) -> int | None:
        return read_whole_number(*self.flags[name], least=least) if name in self.flags else None

    def text(self, name: str) -> str | None:
        return self.flags[name][1] if name in self.flags else None

    def add(self, name: str, spelling: str, value: str, *, repeated: bool) -> None:
        if repeated:
            self.lists.setdefault(name, []).append((spelling, value))
        elif name in self.flags and self.flags[name][1] != value:
            raise UsageError(f"{name} is given twice: {self.flags[name][1]} and {value}.")
        self.flags[name] = (spelling, value)


def parse_run(arguments: Sequence[str]) -> RunFlags:
    """Reads the words after `photinus run`.

    Raises:
        UsageError: an unknown flag, a wrong or missing value, a flag given twice, contradictory flags, or no script.
    """
    given, program = _split(list(arguments))
    if "--help" in given:
        return RunFlags(None)
    flags = RunFlags(
        program=program,
        nproc_per_node=read_worker_count(*given["--nproc-per-node"]) if "--nproc-per-node" in given else "auto",
        max_restarts=3 if (restarts := given.number("--max-restarts", least=0)) is None else restarts,
        cpu="--cpu" in given,
        devices=read_devices(*given["--device"]) if "--device" in given else None,
        oversubscribe="--oversubscribe" in given,
        ranks_per_gpu=given.number("--ranks-per-gpu", least=1) or env.RANKS_PER_GPU.get(),
        dry_run="--dry-run" in given,
        stop_grace_s=read_seconds(*given["--stop-grace"]) if "--stop-grace" in given else RunFlags.stop_grace_s,
        use_env="--use-env" in given,
        preempt_after_s=read_seconds(*given["--preempt-after"]) if "--preempt-after" in given else None,
        hosts=_host_flags(given),
        selection=_selection_flags(given),
        logs=_log_flags(given),
        scheduler=_scheduler_flags(given),
    )
    if "--monitor-interval" in given:
        read_seconds(*given["--monitor-interval"])
    _refuse_contradictions(flags, given)
    if program is None:
        raise UsageError(
            "which script? Usage: photinus run [flags] script.py [arguments]; `photinus run --help` lists the flags."
        )
    return flags


def _split(words: list[str]) -> tuple[_Given, Program | None]:
    given = _Given()
    while words:
        word = words.pop(0)
        if word == "--":
            continue
        if not word.startswith("-") or word == "-":
            return given, Program("program" if "--no-python" in given else "script", word, tuple(words))
        spelling, equals, value = word.partition("=")
        flag = find(spelling)
        if flag.value.startswith("[="):
            pass  # a switch that may have a value behind "="
        elif flag.value and not equals:
            # A flag where the value should be; but -1 is a value (and a wrong one), and sbatch's options begin so.
            if not words or (words[0].startswith("-") and not words[0][1:2].isdigit() and flag.name != "--sbatch"):
                raise UsageError(f"{spelling} needs a value: {flag.value}.")
            value = words.pop(0)
        elif not flag.value and equals:
            raise UsageError(f"{spelling} takes no value, but got {value!r}.")
        given.add(flag.name, spelling, value, repeated=flag.repeated)
        if flag.name == "-m":
            return given, Program("module", value, tuple(words))
    return given, None


def _host_flags(given: _Given) -> HostFlags:
    leader = read_host(*given["--master-addr"]) if "--master-addr" in given else None
    port = read_port(*given["--master-port"]) if "--master-port" in given else None
    if "--rdzv-endpoint" in given:
        host, at_port = read_endpoint(*given["--rdzv-endpoint"])
        for flag, mine, other in (("--master-addr", leader, host), ("--master-port", port, at_port)):
            if mine is not None and other is not None and mine != other:
                raise _contradiction(given, "--rdzv-endpoint", flag)
        leader, port = host, port if at_port is None else at_port
    backend = given.text("--rdzv-backend")
    if backend not in (None, "c10d", "static"):
        raise UsageError(
            f"{given.shown('--rdzv-backend')}: photinus has a rendezvous of its own, which needs no {backend}. Leave "
            f"the flag out, and name the host that leads with --master-addr."
        )
    conf = read_rendezvous_options(*given["--rdzv-conf"]) if "--rdzv-conf" in given else {}
    alone = (1, 1) if "--standalone" in given else None  # and not as many as srun or mpirun may say
    return HostFlags(
        nnodes=read_host_count(*given["--nnodes"]) if "--nnodes" in given else alone,
        node_rank=given.number("--node-rank", least=0),
        leader=leader,
        port=port,
        leads=bool(conf["is_host"]) if "is_host" in conf else None,
        job_id=given.text("--rdzv-id"),
        local_address=read_host(*given["--local-addr"]) if "--local-addr" in given else None,
        join_timeout_s=float(conf.get("join_timeout", HostFlags.join_timeout_s)),
        last_call_s=float(conf.get("last_call_timeout", HostFlags.last_call_s)),
        heartbeat_timeout_s=float(conf.get("heartbeat_timeout", HostFlags.heartbeat_timeout_s)),
    )


def _selection_flags(given: _Given) -> SelectionFlags:
    return SelectionFlags(
        hostfile=given.text("--hostfile"),
        include=given.text("--include"),
        exclude=given.text("--exclude"),
        num_nodes=given.number("--num-nodes", least=1),
        num_gpus=given.number("--num-gpus", least=1),
        ssh=given.text("--ssh") or "ssh",
        ssh_port=read_port(*given["--ssh-port"]) if "--ssh-port" in given else None,
        export=tuple(name for words in given.lists.get("--export", ()) for name in read_names(*words)),
    )


def _log_flags(given: _Given) -> LogFlags:
    return LogFlags(
        log_dir=given.text("--log-dir"),
        redirects=read_streams(*given["--redirects"]) if "--redirects" in given else None,
        tee=read_streams(*given["--tee"]) if "--tee" in given else None,
        shown_local_ranks=read_ranks(*given["--local-ranks-filter"]) if "--local-ranks-filter" in given else None,
    )


def _scheduler_flags(given: _Given) -> SchedulerFlags:
    kind = (given.text("--kubernetes") or "pytorchjob") if "--kubernetes" in given else None
    if kind not in (None, "pytorchjob", "jobset"):
        raise UsageError(f"{given.shown('--kubernetes')}: needs pytorchjob or jobset.")
    return SchedulerFlags(
        slurm="--slurm" in given,
        kubernetes=kind,
        image=given.text("--image"),
        name=given.text("--name"),
        namespace=given.text("--namespace"),
        time=given.text("--time"),
        partition=given.text("--partition"),
        gpus_per_node=given.number("--gpus-per-node", least=0),
        sbatch=tuple(option for _, option in given.lists.get("--sbatch", ())),
        output=given.text("--output"),
        submit="--submit" in given,
    )


_ONE_HOST_ONLY = ("--node-rank", "--master-addr", "--rdzv-endpoint", "--local-addr")
_MADE_BY_HOSTFILE = ("--nnodes", "--node-rank", "--rdzv-endpoint", "--standalone")
_NEEDS_HOSTFILE = ("--num-nodes", "--ssh", "--ssh-port", "--export")
_SLURM_ONLY = ("--time", "--partition", "--sbatch", "--submit")
_KUBERNETES_ONLY = ("--image", "--namespace")
_SCHEDULER_ONLY = ("--name", "--gpus-per-node", "--output")


def _refuse_contradictions(flags: RunFlags, given: _Given) -> None:
    def together(first: str, *others: str) -> None:
        for other in others:
            if first in given and other in given:
                raise _contradiction(given, first, other)

    def only_with(words: Sequence[str], *needed: str) -> None:
        for word in words:
            if word in given and not any(flag in given for flag in needed):
                raise UsageError(f"{given.shown(word)} means something only with {' or '.join(needed)}.")

    if flags.program is not None and flags.program.kind == "module" and "--no-python" in given:
        raise UsageError("--no-python and -m contradict each other: a module is Python. Leave out one of them.")
    if flags.cpu and flags.nproc_per_node == "gpu":
        raise _contradiction(given, "--cpu", "--nproc-per-node")
    if flags.devices is not None:
        _check_devices(flags, given)
    together("--ranks-per-gpu", "--cpu", "--num-gpus")
    together("--include", "--exclude", "--num-gpus")
    together("--num-gpus", "--exclude", "--device", "--nproc-per-node")
    together("--device", "--include", "--exclude", "--hostfile")
    together("--hostfile", *_MADE_BY_HOSTFILE)
    together("--slurm", "--kubernetes", "--hostfile", "--node-rank", "--master-addr", "--rdzv-endpoint")
    together("--kubernetes", "--hostfile", "--node-rank", "--master-addr", "--rdzv-endpoint")
    together("--submit", "--output", "--dry-run")
    only_with(_NEEDS_HOSTFILE, "--hostfile")
    only_with(_SLURM_ONLY, "--slurm")
    only_with(_KUBERNETES_ONLY, "--kubernetes")
    only_with(_SCHEDULER_ONLY, "--slurm", "--kubernetes")
    _check_hosts(flags.hosts, given)


def _check_hosts(hosts: HostFlags, given: _Given) -> None:
    several = hosts.nnodes is not None and hosts.nnodes[1] > 1
    if "--standalone" in given:
        for flag in (*(("--nnodes",) if several else ()), *_ONE_HOST_ONLY):
            if flag in given:
                raise _contradiction(given, "--standalone", flag)
    if hosts.node_rank is None:
        return
    if hosts.nnodes is None:
        if hosts.node_rank > 0:
            raise UsageError(f"{given.shown('--node-rank')} needs --nnodes N: how many hosts are there?")
        return
    least, most = hosts.nnodes
    if least != most:
        raise UsageError(
            f"{given.shown('--node-rank')} and {given.shown('--nnodes')} contradict each other: hosts that come and go "
            f"are numbered as they come. Leave out --node-rank, or give one number of hosts."
        )
    if hosts.node_rank >= most:
        raise UsageError(
            f"{given.shown('--node-rank')} and {given.shown('--nnodes')} contradict each other: {most} "
            f"host{'s are' if most > 1 else ' is'} numbered 0 to {most - 1}."
        )


def _contradiction(given: _Given, first: str, second: str) -> UsageError:
    return UsageError(f"{given.shown(first)} and {given.shown(second)} contradict each other: leave out one of them.")


def _check_devices(flags: RunFlags, given: _Given) -> None:
    assert flags.devices is not None
    if flags.cpu or flags.nproc_per_node == "cpu":
        raise _contradiction(given, "--device", "--cpu" if flags.cpu else "--nproc-per-node")
    if isinstance(flags.nproc_per_node, int) and flags.nproc_per_node != len(flags.devices) * flags.ranks_per_gpu:
        raise UsageError(
            f"{given.shown('--device')} names {len(flags.devices)} GPU{'s' * (len(flags.devices) > 1)}, but "
            f"{given.shown('--nproc-per-node')} asks for {flags.nproc_per_node} workers, and each needs one of its "
            f"own: leave out one of the two."
        )
