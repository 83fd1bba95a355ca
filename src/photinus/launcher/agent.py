"""torch.distributed.elastic's agent over our own worker processes and our own colleagues.

Elastic runs the circle (meet, start, watch, start again or give up); this class does what elastic leaves open: how
workers start, how their end is noticed and told, how the rest is ended. Beyond the four methods that
`SimpleElasticAgent` asks its subclasses for, it sets `_remaining_restarts`, as elastic's own local agent does, and
takes the place of `_assign_worker_ranks` and `_exit_barrier`, which would wait in a store for hosts that may be gone.
"""

from __future__ import annotations

import signal
import socket
import time
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource
from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException

from ..errors import LaunchError
from ..world.ended import tell_ended
from .cgroup import OomKills, oom_kills
from .colleagues import LOOPBACK, Colleagues, Order
from .environment import Place, worker_environ
from .guard import Guard
from .hosts.messages import Report
from .interrupts import FROM_A_KEYBOARD, Interrupts
from .job import Job
from .judge import Verdict
from .output import Output
from .processes import Processes, Start
from .rendezvous import JobRendezvous
from .report import last_words, tell_failure
from .suspension import words_of

T = TypeVar("T")

__all__ = ["Agent"]

_MONITOR_STEP_S = 0.5
_SETTLE_S = 0.3
_CULPRIT_S = 3.0
_STORE_PATIENCE = timedelta(seconds=3)


class Agent(SimpleElasticAgent):
    """Runs a job's workers on this host through all attempts.

    Args:
        job: what to run.
        colleagues: the other hosts, or that there are none.
        guard, output, interrupts: see their modules.
    """

    def __init__(
        self, job: Job, colleagues: Colleagues, *, guard: Guard, output: Output, interrupts: Interrupts
    ) -> None:
        self._rendezvous_handler = JobRendezvous(colleagues, job.job_id, self._raise_if_interrupted)
        spec = WorkerSpec(
            role="default",
            local_world_size=job.local_world_size,
            rdzv_handler=self._rendezvous_handler,
            entrypoint=job.program.target,
            max_restarts=job.max_restarts,
            monitor_interval=0.001,  # the waiting is done in _monitor_workers, which wakes when something happens
        )
        super().__init__(spec)
        self._job = job
        self._colleagues = colleagues
        self._guard = guard
        self._output = output
        self._interrupts = interrupts
        self._processes: Processes | None = None
        self._oom_before: OomKills | None = None
        self._verdict: Verdict | None = None
        self._restarts = 0
        self._delay_s = 0.0
        self._told_finished = False
        self._told_ended: set[int] = set()
        self._began_s: float | None = None
        self._tried = False  # --preempt-after
        self._told_waiting = False
        self.suspension: str | None = None

    @property
    def failure(self) -> Verdict | None:
        """The verdict on the last attempt that failed."""
        return self._verdict

    @property
    def restarts(self) -> int:
        """How often all workers were started anew because one had failed."""
        return self._restarts

    def _assign_worker_ranks(
        self, store: object, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        formation = _known(self._rendezvous_handler.formation)
        first, world_size = formation.first_rank, formation.world_size
        return [
            Worker(local_rank, first + local_rank, first + local_rank, world_size, world_size)
            for local_rank in range(spec.local_world_size)
        ]

    def _exit_barrier(self) -> None:
        """All hosts are done: the colleagues said so."""

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._wait_out(self._delay_s)
        self._delay_s = 0.0
        self._told_finished = False
        self._told_ended = set()
        job, spec = self._job, worker_group.spec
        formation = _known(self._rendezvous_handler.formation)
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
                attempt=formation.attempt,
                max_restarts=spec.max_restarts,
                job_id=formation.job_id,
                interface=formation.interface,
            )
            gpu = job.gpus[worker.local_rank] if job.gpus else ""
            starts.append(Start(worker.global_rank, worker.local_rank, _Environ(place, job), gpu))
        self._output.begin_attempt(formation.attempt, formation.job_id)
        self._oom_before = oom_kills()
        self._processes = Processes(
            job.program,
            guard=self._guard,
            output=self._output,
            interrupts=self._interrupts,
            orders=self._colleagues.fd,
            temporary=job.temporary,
        )
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
        self._pass_on_suspension(processes)
        processes.kill_overdue(self._job.stop_grace_s)
        self._tell_ended(processes)
        order = self._colleagues.order()
        if order is None and not processes.running() and not processes.failed() and not self._told_finished:
            self._told_finished = True
            self._colleagues.finished()
            order = self._colleagues.order()
        if order is not None and order.kind == "regroup":  # before failures: nobody judges those any more
            return self._regroup(processes, order)
        if processes.failed() or (order is not None and order.kind == "stop"):
            # Ranks that suspend leave at about the same time, each when it is done with what it has open.
            quiet_s = self._job.stop_grace_s if processes.suspensions() else 0.0
            processes.settle(max(_SETTLE_S, quiet_s), max(_CULPRIT_S, quiet_s))
            self._raise_if_interrupted()
            self._end(signal.SIGTERM, self._job.stop_grace_s)
            self._raise_if_interrupted()
            return self._failed(processes, worker_group)
        if order is not None and order.kind == "done":
            self._end(signal.SIGTERM, 0.0)
            return RunResult(WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers})
        return RunResult(WorkerState.HEALTHY)

    def _tell_ended(self, processes: Processes) -> None:
        """Lets workers know which others have ended well: they may wait for them to join a group."""
        ended = set(processes.finished()) - self._told_ended
        if not ended or not processes.running():
            return
        self._told_ended |= ended
        port = _known(self._rendezvous_handler.formation).store_port
        try:
            tell_ended(TCPStore(LOOPBACK, port, wait_for_workers=False, timeout=_STORE_PATIENCE), ended)
        except RuntimeError as error:  # the leading host may be gone; then the colleagues say so
            self._output.say(f"photinus: ranks {sorted(ended)} have ended; the others could not be told: {error}\n")

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._end(signal.SIGTERM, self._job.stop_grace_s)
        self._forget()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        # Ctrl-C arrives as KeyboardInterrupt; whatever else ends the launcher asks a worker in the usual way.
        grace_s = self._job.interrupt_grace_s if death_sig in FROM_A_KEYBOARD else self._job.stop_grace_s
        self._end(signal.SIGINT if death_sig == signal.SIGINT else signal.SIGTERM, grace_s)
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
        deaths = tuple(processes.deaths())
        for death in deaths:
            self._output.add_to_log(death.rank, last_words(death))
        finished = tuple(processes.finished())
        report = Report(deaths, finished, processes.steps(), processes.saved(), self._oom_before, oom_kills())
        answer = self._colleagues.judged(report, self._raise_if_interrupted)
        if isinstance(answer, Order):
            return self._called(answer)
        self._verdict = answer
        self._delay_s = answer.delay_s
        self._restarts += answer.restart and not answer.suspended
        self._remaining_restarts = int(answer.restart)  # elastic counts down, and asks whether one is left
        failures = {
            death.rank: ProcessFailure(death.local_rank, death.pid, death.status, error_file="")
            for death in report.deaths
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def _regroup(self, processes: Processes, order: Order) -> RunResult:
        if processes.suspensions():  # another host's ranks asked them to; they leave when all is saved
            processes.settle(self._job.stop_grace_s, self._job.stop_grace_s)
        if processes.failed():
            own = [death for death in processes.deaths() if not (death.consequence or death.suspended)]
            if own:
                told = tell_failure(
                    own,
                    finished=processes.finished(),
                    attempt=_known(self._rendezvous_handler.formation).attempt,
                    next_step="hosts come and go just then: starting all workers again",
                )
                self._output.say(told, alarm=True)
        elif order.unharmed and processes.can_suspend():
            words = self._suspend(processes)
            if words is not None:
                self._output.say(f"photinus: {words}; all go on from there\n")
        return self._called(order)

    def _called(self, order: Order) -> RunResult:
        """The colleagues want to meet anew: elastic sees a healthy group and other hosts that wait."""
        self._rendezvous_handler.called = True
        return RunResult(WorkerState.HEALTHY)

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
            self._let_save(number)  # before the other hosts hear of it: their ranks take part
            self._colleagues.leave(f"left, ended by {number.name}", 128 + number)
            raise SignalException(f"the launcher got {number.name}", number)

    def _let_save(self, number: signal.Signals) -> None:
        """The launcher was asked to end, and nobody sits waiting at a keyboard: workers that can save first."""
        processes = self._processes
        if number not in (signal.SIGTERM, signal.SIGHUP) or processes is None or not processes.can_suspend():
            return
        self.suspension = self._suspend(processes)

    def _suspend(self, processes: Processes) -> str | None:
        """Lets the workers save and leave; returns words for that, None when they did not."""
        processes.suspend(self._job.stop_grace_s)
        if processes.suspensions():
            return words_of(processes.suspensions())
        self._output.say(
            f"photinus: the workers had not saved within {self._job.stop_grace_s:g} s (--stop-grace); the last "
            f"checkpoint is an earlier one\n"
        )
        return None

    def _pass_on_suspension(self, processes: Processes) -> None:
        """SIGUSR1 to the launcher is for its workers, as soon as they hear it."""
        job, interrupts = self._job, self._interrupts
        self._began_s = self._began_s or time.monotonic()
        if job.preempt_after_s is not None and not self._tried:
            self._tried = time.monotonic() - self._began_s >= job.preempt_after_s
            interrupts.suspension_wanted |= self._tried
        if not interrupts.suspension_wanted:
            return
        if processes.can_suspend():
            interrupts.suspension_wanted = self._told_waiting = False
            processes.ask_to_suspend()
        elif not self._told_waiting:
            self._told_waiting = True
            self._output.say(
                "photinus: asked to suspend; no worker is inside a loop that saves (photinus.Loop with `out`, or "
                "photinus.preemption) yet: waiting for one\n"
            )

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
