"""The attempts of a job on this host: meet the other hosts, start the workers, watch them, and again where it may help.

What follows from a failure is decided elsewhere (`restart_policy`, on one host for all); here it is carried out.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import LaunchError, name_limit
from ..job.attempt import AttemptMembers, JobEndedError, Order, Peers
from ..job.cgroup import OomKills, oom_kills, oom_since
from ..job.deaths import exit_message, failure_text, suspension_words
from ..job.restart_policy import Report, RestartPolicy, Verdict
from ..job.status import LAST_CHECKPOINT
from .local.interrupts import FROM_A_KEYBOARD, SIGNALS, Interrupted, Interrupts
from .local.job import Job
from .local.output import Output
from .local.processes import Processes
from .local.store import StoreProcess

_LOOK_S = 0.5
_SETTLE_S = 0.3
_CULPRIT_S = 3.0
_KEYBOARD_GRACE_S = 1.5  # in place of --stop-grace, where somebody sits waiting


class OneHost:
    """The `Peers` of a job with one host: decides by itself, and is done when its workers are.

    `store`: holds the workers' store.
    """

    fd = None  # nobody gives orders
    leads = True

    def __init__(self, job: Job, say: Callable[[str, bool], None], store: StoreProcess) -> None:
        self._job = job
        self._policy = RestartPolicy(job.spec.max_restarts)
        self._say = say
        self._store = store
        self._attempt = -1
        self._finished = False

    def meet(self, check: Callable[[], None]) -> AttemptMembers:
        """The next attempt, with a store of its own."""
        check()
        self._attempt += 1
        port = self._store.open(self._job.spec.hosts.port or 0)
        workers, restarts = (self._job.local_world_size,), self._policy.restarts
        return AttemptMembers(workers, 0, self._attempt, self._job.job_id, port, restarts=restarts)

    def order(self) -> Order | None:
        """Done, once the workers are; to meet again, when they lost their store and a restart is left."""
        if self._finished or not (loss := self._store.loss()):
            return "done" if self._finished else None
        if not (restart := self._policy.spend_restart()):
            raise JobEndedError(f"{loss}. No restarts left (--max-restarts {self._job.spec.max_restarts})")
        self._say(f"photinus: {loss}: starting all workers again ({restart})\n", True)
        return "regroup"

    def report_ended(self, ranks: Sequence[int]) -> None:
        """The other workers find it in their store."""
        self._store.tell_ended(ranks)

    def report_finished(self) -> None:
        """All is done."""
        self._finished = True

    def verdict_on(self, report: Report, check: Callable[[], None]) -> Verdict:
        """The verdict on this host's workers."""
        verdict = self._policy.decide([report], world_size=self._job.local_world_size, attempt=self._attempt)
        self._say(verdict.text, not verdict.suspended)
        return verdict

    def leave(self, reason: str, exit_code: int) -> None:
        """Nobody else takes part."""


class Agent:
    """Runs a job's workers on this host through all attempts.

    Args:
        job: what to run.
        peers: the hosts of the job.
        output, interrupts: see their modules.
        processes: makes the `Processes` of an attempt of the job, with these two.

    Attributes:
        suspension: what is saved, when the launcher was asked to end; None for nothing.
        ended_workers: whether there were workers to be ended when `run` left.
    """

    def __init__(
        self, job: Job, peers: Peers, output: Output, interrupts: Interrupts, processes: Callable[..., Processes]
    ) -> None:
        self._job = job
        self._grace_s = job.spec.stop_grace_s
        self._peers = peers
        self._output = output
        self._interrupts = interrupts
        self._make_processes = processes
        self._processes: Processes | None = None
        self._began_s: float | None = None
        self._preempt_after_s = job.spec.preempt_after_s
        self._has_said_waiting = False
        self.suspension: str | None = None
        self.ended_workers = False

    def run(self) -> Verdict | None:
        """Returns None when the workers of all hosts have ended well, or the verdict on a failure for good.

        Raises:
            Interrupted: the launcher was asked to end; the workers have been ended.
            JobEndedError: the other hosts ended the job.
            LaunchError: workers could not be started.
        """
        delay_s = 0.0
        try:
            while True:
                members = self._peers.meet(self._raise_if_interrupted)
                self._interrupts.comes_within(delay_s)
                self._raise_if_interrupted()
                oom_before = oom_kills()
                processes = self._start(members)
                order = self._watch(processes)
                if order == "done":
                    processes.wait_for_leftovers(self._grace_s)
                    self._end(signal.SIGTERM, 0.0)
                    return None
                verdict = self._report(processes, oom_before) if order == "stop" else None
                if order != "stop":
                    self._regroup(processes, order)
                self._end(signal.SIGTERM, self._grace_s)
                self._forget("" if verdict is not None else "starting all workers again")
                if verdict is not None and not verdict.restart:
                    return verdict
                delay_s = 0.0 if verdict is None else verdict.delay_s
        except Interrupted:
            number = self._interrupts.first
            assert number is not None
            self._peers.leave(f"exited because of {number.name}", 128 + number)
            grace_s = _KEYBOARD_GRACE_S if number in FROM_A_KEYBOARD else self._grace_s
            # Ctrl-C arrives as KeyboardInterrupt; whatever else ends the launcher asks a worker in the usual way.
            self._end(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM, grace_s)
            if self.suspension is None and self._processes and (step := self._processes.saved_step()) >= 0:
                self.suspension = LAST_CHECKPOINT.format(step)
            raise
        finally:
            self.ended_workers = self._processes is not None
            self._end(signal.SIGTERM, self._grace_s)
            self._forget("the job ends")

    def _start(self, members: AttemptMembers) -> Processes:
        """Starts this host's workers. LaunchError: one of them cannot be started."""
        try:
            os.getcwd()
        except FileNotFoundError:
            raise LaunchError("cannot restart the workers: their working directory was removed") from None
        host = (self._job.spec.started_as or socket.gethostname()) if len(members.workers) > 1 else ""
        self._output.begin_attempt(members.attempt, members.job_id, host)
        self._processes = processes = self._make_processes(self._job, members, orders=self._peers.fd)
        try:
            processes.start()
        except OSError as error:
            raise LaunchError(
                f"cannot start {self._job.local_world_size} workers on {socket.gethostname()}: {error}. "
                f"The launcher ended those that had started.{name_limit(error)}"
            ) from error
        return processes

    def _watch(self, processes: Processes) -> Order:
        """Wait until the job is done, the hosts have to gather again, or a worker of any host has failed."""
        has_reported_finish = False
        reported_ended: set[int] = set()
        while True:
            processes.wait(_LOOK_S)
            self._raise_if_interrupted()
            self._pass_on_suspension(processes)
            processes.kill_overdue(self._grace_s)
            if processes.any_running() and (ended := set(processes.finished_ranks()) - reported_ended):
                reported_ended |= ended
                self._peers.report_ended(sorted(ended))
            if not (processes.any_running() or processes.any_failed() or has_reported_finish):
                has_reported_finish = True
                self._peers.report_finished()
            if (order := self._peers.order()) is not None:
                return order  # before failures: after an order to gather again nobody decides on them
            if processes.any_failed():
                return "stop"

    def _report(self, processes: Processes, oom_before: OomKills | None) -> Verdict | None:
        """Ends the workers after a failure and tells the peers how they ended; returns their verdict, if there is one.

        Raises:
            JobEndedError: an audit found that this host computes wrong, and others go on without it.
        """
        # Ranks that suspend leave at about the same time, each when it is done with what it has open.
        quiet_s = self._grace_s if processes.suspensions() else 0.0
        processes.wait_for_reasons(max(_SETTLE_S, quiet_s), max(_CULPRIT_S, quiet_s))
        self._raise_if_interrupted()
        self._end(signal.SIGTERM, self._grace_s)
        self._raise_if_interrupted()
        deaths, finished = tuple(processes.deaths()), tuple(processes.finished_ranks())
        if any(death.is_faulty for death in deaths) and not isinstance(self._peers, OneHost):
            reason = "left the job: an audit found that it may compute wrong"
            self._forget(f"this host {reason}")
            self._peers.leave(reason, 1)
            raise JobEndedError(f"this host {reason}")
        oom, host = oom_since(oom_before), socket.gethostname()
        report = Report(deaths, finished, processes.steps(), oom, processes.out(), host)
        verdict = self._peers.verdict_on(report, self._raise_if_interrupted)
        for death in deaths if verdict is not None else ():
            self._output.add_to_log(death.rank, exit_message(death))
        return verdict

    def _regroup(self, processes: Processes, order: Order) -> None:
        if processes.suspensions():  # another host's ranks asked them to; they leave when all is saved
            processes.wait_for_reasons(self._grace_s, self._grace_s)
        may_save = order == "save" and not processes.any_failed() and processes.can_suspend()
        if may_save and (words := self._suspend(processes)) is not None:
            self._output.say(f"photinus: {words}; all workers start again\n")

    def _end(self, ask: signal.Signals, grace_s: float) -> None:
        if self._processes is not None:
            self._processes.stop(ask, grace_s)
            self._output.drain(0.5)

    def _forget(self, next_step: str) -> None:
        """Let go of the ended workers. Without a verdict there is a `next_step`: report their own failures first."""
        if (processes := self._processes) is None:
            return
        deaths = processes.deaths() if next_step else []
        if own := [death for death in deaths if death.is_own and -death.status not in SIGNALS]:
            for death in deaths:
                self._output.add_to_log(death.rank, exit_message(death))
            finished, attempt = processes.finished_ranks(), processes.attempt
            text = failure_text(own, finished=finished, attempt=attempt, next_step=next_step)
            self._output.say(text, alarm=True)
        self._job = replace(self._job, out=processes.out())
        processes.close()
        self._processes = None

    def _raise_if_interrupted(self) -> None:
        if (number := self._interrupts.first) is not None:
            self._let_save(number)  # before the other hosts hear of it: their ranks take part
            raise Interrupted

    def _let_save(self, number: signal.Signals) -> None:
        """The launcher was asked to end, and nobody sits waiting at a keyboard: workers that can save first."""
        processes = self._processes
        if number not in (signal.SIGTERM, signal.SIGHUP) or processes is None or not processes.can_suspend():
            return
        self.suspension = self._suspend(processes)

    def _suspend(self, processes: Processes) -> str | None:
        """Lets the workers save and leave; returns words for that, None when they did not."""
        began_s = time.monotonic()
        processes.suspend(self._grace_s)
        if processes.suspensions():
            return suspension_words(processes.suspensions())
        in_time = time.monotonic() - began_s < self._grace_s
        why = "ended before they saved" if in_time else f"did not save within {self._grace_s:g} s (--stop-grace)"
        self._output.say(f"photinus: the workers {why}: steps since their last checkpoint are lost\n")
        return None

    def _pass_on_suspension(self, processes: Processes) -> None:
        """SIGUSR1 to the launcher is for its workers, as soon as they hear it."""
        interrupts = self._interrupts
        self._began_s = self._began_s or time.monotonic()
        if self._preempt_after_s is not None and time.monotonic() - self._began_s >= self._preempt_after_s:
            self._preempt_after_s, interrupts.suspension_wanted = None, True
        if not interrupts.suspension_wanted:
            return
        if processes.can_suspend():
            interrupts.suspension_wanted = self._has_said_waiting = False
            processes.ask_to_suspend()
        elif not self._has_said_waiting:
            self._has_said_waiting = True
            self._output.say(
                "photinus: suspend requested, but no worker is in a loop that saves yet (photinus.Loop with `out`, or "
                "photinus.suspend_requested): waiting for one\n"
            )
