"""torch.distributed.elastic's agent over our own worker processes.

Elastic decides (rendezvous, ranks, restart or give up, other hosts); this class does what elastic leaves open: how
workers start, how their end is noticed and told, how the rest is ended. It uses only the four methods that
`SimpleElasticAgent` asks its subclasses for, and `_remaining_restarts`, which elastic's own local agent sets too.
"""

from __future__ import annotations

import signal
import socket
import time
from typing import Any, TypeVar

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler

from ..errors import LaunchError
from .cgroup import OomKills, oom_kills
from .environment import Place, worker_environ
from .guard import Guard
from .interrupts import Interrupts
from .job import Job
from .output import Output
from .processes import Processes, Start
from .report import Death, first_cause, hopeless, signature, tell_failure

T = TypeVar("T")

__all__ = ["Agent", "backoff_s"]

_MONITOR_STEP_S = 0.5
_SETTLE_S = 0.3
_CULPRIT_S = 3.0
_QUICK_S = 10.0
_BACKOFF_LIMIT_S = 5.0


def backoff_s(quick_failures: int) -> float:
    """Seconds to wait before the next attempt after so many in a row that failed soon: 0, 0, 1, 2, 4, then 5."""
    return min(_BACKOFF_LIMIT_S, 2.0 ** (quick_failures - 2)) if quick_failures >= 2 else 0.0


class Agent(SimpleElasticAgent):
    """Runs a job's workers on this host through all attempts. `failure` tells of the last one that failed."""

    def __init__(
        self, job: Job, rendezvous: RendezvousHandler, *, guard: Guard, output: Output, interrupts: Interrupts
    ) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=job.local_world_size,
            rdzv_handler=rendezvous,
            entrypoint=job.program.target,
            max_restarts=job.max_restarts,
            monitor_interval=0.001,  # the waiting is done in _monitor_workers, which wakes when something happens
        )
        super().__init__(spec)
        self._job = job
        self._guard = guard
        self._output = output
        self._interrupts = interrupts
        self._processes: Processes | None = None
        self._oom_before: OomKills | None = None
        self._quick_failures = 0
        self._cause: Death | None = None
        self._attempts = 0

    @property
    def failure(self) -> Death | None:
        """First cause of the last attempt that failed."""
        return self._cause

    @property
    def attempts(self) -> int:
        """Number of attempts started so far."""
        return self._attempts

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._wait_out(backoff_s(self._quick_failures))
        job, spec = self._job, worker_group.spec
        starts = []
        for worker in worker_group.workers:
            place = Place(
                rank=worker.global_rank,
                world_size=worker.world_size,
                local_rank=worker.local_rank,
                local_world_size=spec.local_world_size,
                host_rank=_known(worker_group.group_rank),
                hosts=_known(worker_group.group_world_size),
                master_address=_known(worker_group.master_addr),
                master_port=_known(worker_group.master_port),
                attempt=self._attempts,
                max_restarts=spec.max_restarts,
                job_id=job.job_id,
            )
            starts.append(Start(worker.global_rank, worker.local_rank, _Environ(place, job)))
        self._attempts += 1
        self._oom_before = oom_kills()
        self._processes = Processes(job.program, guard=self._guard, output=self._output, interrupts=self._interrupts)
        try:
            self._processes.start(starts)
        except OSError as error:
            raise LaunchError(
                f"{job.local_world_size} workers could not be started on {socket.gethostname()}: {error}. "
                f"Those that were have been ended."
            ) from error
        return dict(self._processes.pids())

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        processes = self._processes
        assert processes is not None
        processes.wait(_MONITOR_STEP_S)
        self._raise_if_interrupted()
        processes.kill_overdue(self._job.stop_grace_s)
        if processes.failed():
            processes.settle(_SETTLE_S, _CULPRIT_S)
            self._raise_if_interrupted()
            self._end(signal.SIGTERM, self._job.stop_grace_s)
            self._raise_if_interrupted()
            return self._failed(processes, worker_group)
        if processes.running():
            return RunResult(WorkerState.HEALTHY)
        self._end(signal.SIGTERM, 0.0)
        return RunResult(WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end(signal.SIGTERM, self._job.stop_grace_s)
        self._forget()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Ctrl-C arrives as KeyboardInterrupt; whatever else ends the launcher asks a worker in the usual way.
        self._end(signal.SIGINT if death_sig == signal.SIGINT else signal.SIGTERM, self._job.interrupt_grace_s)
        self._forget()

    def _end(self, ask: signal.Signals, grace_s: float) -> None:
        if self._processes is not None:
            self._processes.stop(ask, grace_s)
            self._output.drain(0.5)

    def _forget(self) -> None:
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _failed(self, processes: Processes, worker_group: WorkerGroup) -> RunResult:
        deaths = processes.deaths()
        cause = first_cause(deaths)
        self._quick_failures = self._quick_failures + 1 if cause.lived_s < _QUICK_S else 0
        world_size = worker_group.workers[0].world_size
        why_not = hopeless(cause, deaths, world_size)
        if self._remaining_restarts > 0 and why_not is None:
            number = worker_group.spec.max_restarts - self._remaining_restarts + 1
            delay_s = backoff_s(self._quick_failures)
            next_step = (
                f"restarting all {world_size} workers from the last checkpoint "
                f"(restart {number} of {worker_group.spec.max_restarts})" + (f" in {delay_s:.0f} s" if delay_s else "")
            )
        else:
            if why_not is not None:
                next_step = f"not restarting: {why_not}"
            elif worker_group.spec.max_restarts == 0:
                next_step = "not restarting (--max-restarts 0)"
            else:
                next_step = f"no restart is left of {worker_group.spec.max_restarts}"
            self._remaining_restarts = 0
        again = self._remaining_restarts > 0 and self._cause is not None and signature(cause) == signature(self._cause)
        self._output.say(
            tell_failure(
                deaths,
                finished=processes.finished(),
                attempt=self._attempts - 1,
                next_step=next_step,
                oom_before=self._oom_before,
                oom_after=oom_kills(),
                seen_before=again,
            ),
            alarm=True,
        )
        self._cause = cause
        failures = {
            death.rank: ProcessFailure(death.local_rank, death.pid, death.status, error_file="") for death in deaths
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _wait_out(self, delay_s: float) -> None:
        deadline = time.monotonic() + delay_s
        while True:
            self._raise_if_interrupted()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(0.05, left_s))

    def _raise_if_interrupted(self) -> None:
        number = self._interrupts.first
        if number is not None:
            raise SignalException(f"the launcher got {number.name}", number)

    def _construct_event(self, state: str, source: EventSource, *args: Any, **kwargs: Any) -> Event:
        # Elastic would look up the host's full name for each event (10 s where the name server does not answer), to
        # put it into events that nobody reads here.
        return Event(f"torchelastic.worker.status.{state}", source, metadata={"hostname": socket.gethostname()})


class _Environ:
    """Makes the environment of one worker when its error file is known."""

    def __init__(self, place: Place, job: Job) -> None:
        self._place = place
        self._job = job

    def __call__(self, error_file: str) -> dict[str, str]:
        return worker_environ(
            self._place,
            self._job.environ,
            usable_cores=self._job.usable_cores,
            cpu_only=self._job.cpu_only,
            error_file=error_file,
        )


def _known(value: T | None) -> T:
    """A field of the worker group that the rendezvous has filled by now."""
    assert value is not None
    return value
