"""The job's specification, resolved once from the command line, torchrun's variables and the scheduler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Program:
    """The program that each worker runs.

    Attributes:
        kind: "script" (`target` is a path, run as `python target` would), "module" (a name, as `python -m`) or
            "program" (anything executable, found as a shell would find it).
        target: the path or name as the user typed it.
        arguments: what the program finds in sys.argv[1:].
        local_rank_flag: "--local_rank" or "--local-rank" when the program is to be given that as well.
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    local_rank_flag: str | None = None

    def arguments_of(self, local_rank: int | str) -> tuple[str, ...]:
        """Return sys.argv[1:] of the worker with this number on its host."""
        if self.local_rank_flag is None:
            return self.arguments
        return (f"{self.local_rank_flag}={local_rank}", *self.arguments)


@dataclass(frozen=True)
class HostSpec:
    """The hosts of a job, as typed; a field that was not typed is None.

    `nnodes`: the least and the most. `leads`: whether this host leads, where the user said so (torchrun's is_host).
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
class LogSpec:
    """Destinations of the workers' output.

    `redirects`, `tee`: streams ("out", "err") that go to files. Key: local rank; -1 stands for ranks not named.
    """

    log_dir: str | None = None
    redirects: Mapping[int, frozenset[str]] | None = None
    tee: Mapping[int, frozenset[str]] | None = None
    shown_local_ranks: frozenset[int] | None = None


@dataclass(frozen=True)
class JobSpec:
    """The programs to start, and the hosts. It is all that a launcher knows of the user's request.

    Attributes:
        nproc_per_node: workers of this host: a number, or "auto", "gpu", "cpu", "xpu".
        devices: the GPUs that were chosen by number; None: all that are visible.
        without_devices: the GPUs that were excluded by number.
        stop_grace_s: seconds between SIGTERM and SIGKILL.
        start_method: "fork" or "spawn"; None: fork, where it is possible and pays.
        preempt_after_s: seconds after which the workers are suspended and started again, as a test.
        dry_run: whether to show what would start, and start nothing.
        use_env: do not add --local_rank to the arguments of a script that takes it.
        typed: the command line, without secrets; for the run's config.json.
        choice: the flags that chose the GPUs, as typed, where that was not --device; for messages.
        started_as: the name of this host where another one started this launcher (over ssh), and shows its output.
    """

    program: Program
    nproc_per_node: int | str = "auto"
    max_restarts: int = 3
    cpu: bool = False
    devices: tuple[int, ...] | None = None
    without_devices: tuple[int, ...] = ()
    ranks_per_gpu: int = 1
    oversubscribe: bool = False
    dry_run: bool = False
    stop_grace_s: float = 30.0
    role: str = "default"
    start_method: str | None = None
    preempt_after_s: float | None = None
    use_env: bool = False
    typed: str = ""
    choice: str = ""
    started_as: str | None = None
    hosts: HostSpec = field(default_factory=HostSpec)
    logs: LogSpec = field(default_factory=LogSpec)

    def to_json(self) -> str:
        """Return the spec as JSON, without the fields that have their defaults."""
        hosts, logs = _changed(self.hosts, HostSpec()), _changed(self.logs, LogSpec())
        program = {name: value for name, value in asdict(self.program).items() if value not in (None, ())}
        own = _changed(self, JobSpec(self.program))
        return json.dumps({"program": program, **own, "hosts": hosts, "logs": logs}, default=sorted)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """Return the spec that `to_json` wrote. ValueError: this version of Photinus cannot read it."""
        try:
            own = json.loads(text)
            program, hosts, logs = (own.pop(name) for name in ("program", "hosts", "logs"))
            for part, name in ((program, "arguments"), (hosts, "nnodes"), (own, "devices"), (own, "without_devices")):
                if name in part:
                    part[name] = tuple(part[name])
            for name in logs.keys() & {"redirects", "tee"}:
                logs[name] = {int(local_rank): frozenset(streams) for local_rank, streams in logs[name].items()}
            if "shown_local_ranks" in logs:
                logs["shown_local_ranks"] = frozenset(logs["shown_local_ranks"])
            return cls(**{**own, "program": Program(**program), "hosts": HostSpec(**hosts), "logs": LogSpec(**logs)})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"the job's specification is of a different version of Photinus: {error}") from None


def _changed(part: Any, plain: Any) -> dict[str, Any]:
    values = {each.name: getattr(part, each.name) for each in fields(part)}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}
