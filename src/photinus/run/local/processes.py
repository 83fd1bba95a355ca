"""The worker processes of one attempt on this host: started, watched and ended.

    start             each worker in a session and process group of its own, protected by the guard
    wait              sleeps until a worker ends (pidfd), an interrupt comes or the time is over
    wait_for_reasons  after the first failure: gives the other workers a moment to fail and say why
    suspend           asks the workers that can to save and exit
    stop              a signal, a grace, then SIGKILL, for the workers first and then for what they left running

A process that a worker started and left, also in a session of its own, becomes the launcher's child (see
`guard.as_subreaper`), which reaps it. Other orphans can become its children, too: those of a shell whose place the
launcher took (`exec`), and all of a container whose first process the launcher is. They lack the variables that workers
have, and are not ended.

A worker that has ended is left unreaped until `stop`: until then no other process can get its pid and process group, so
a kill cannot strike another process.

A worker writes about its end (an exception, the stack at a fatal signal) into memory files, see `job.worker_files`.
"""

from __future__ import annotations

import contextlib
import glob
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ... import env
from ...job.attempt import AttemptMembers
from ...job.cgroup import text_of
from ...job.deaths import Death, Raised
from ...job.status import HEARD, ONLY_ASKED_BY_SIGTERM, SUSPENDED_CODE, Status, read
from ...job.worker_files import WorkerFiles, path_of
from .guard import Guard
from .interrupts import Interrupts
from .job import Job
from .output import Output
from .start_method import Forked, StartMethod
from .worker import WORKER_FILE, python_command

_KILLED_DIES_WITHIN_S = 5.0
_LEFT_ENDS_WITHIN_S, _LEFT_DIES_WITHIN_S = 0.5, 0.5
_SAY_LEFT_S = 1.0
_LOOK_S = 0.01
_NOTICED_WITHIN_S = 0.03  # by ranks that wait for the one that died
_RECORD_LIMIT_BYTES = 4 << 20  # a text may be clipped to 100,000 characters, each 12 bytes in JSON
_OF_A_WORKER = f"{env.WORKER_FILES.name}="


@dataclass
class _Worker:
    rank: int
    local_rank: int
    process: subprocess.Popen[bytes] | Forked
    pidfd: int
    error_file: int  # memory files, see the module's docstring
    fault_file: int
    status_file: int
    started_at_s: float
    status: int | None = None  # exit code or minus the signal, once it has ended
    seen_at_s: float = 0.0
    recorded_at_s: float | None = None  # when the launcher first saw that it had raised
    asked_to_leave: bool = False  # by the launcher, while it ran well
    killed_by_us: bool = False
    ended_outright: bool = False  # by SIGKILL where SIGTERM would only have asked it to save
    overdue_s: float | None = None

    def record(self) -> Raised | None:
        """The record of its uncaught exception, if it has written one."""
        if os.fstat(self.error_file).st_size:
            return Raised.from_json(_content(self.error_file))
        # A program (--no-python) writes no record.
        has_suspended = self.status == SUSPENDED_CODE and self.last_status().steps > 0
        return Raised((("Suspended", ""),), "", SUSPENDED_CODE) if has_suspended else None

    def has_raised(self) -> bool:
        """Return whether an exception ended it. (After a record of torch's `@record`, it may still run.)"""
        return (record := self.record()) is not None and record.raised_at_s is not None

    def ask(self, number: signal.Signals) -> None:
        """Sends a signal, and continues a process that is stopped (SIGSTOP), so that it can act upon the signal."""
        for each in (number, signal.SIGCONT):
            signal.pidfd_send_signal(self.pidfd, each)

    def request(self, number: signal.Signals) -> None:
        """Sends a request to suspend to the process whose loop handles it; where there is none, to the worker."""
        status = self.last_status()
        with contextlib.suppress(ProcessLookupError):  # a container numbers its processes by itself
            if status.letter in HEARD and os.getsid(status.pid) == self.process.pid:
                os.kill(status.pid, number)
                return
        self.ask(number)

    def hears(self, letters: str) -> bool:
        """Return whether the letter of its status is one of these (see status.py)."""
        return self.last_status().letter in letters

    def last_status(self) -> Status:
        """Read the status that it reported last."""
        return read(_content(self.status_file))

    def is_leaving(self) -> bool:
        """Return whether it has raised, its own hooks are done, and it only has to exit (see `worker._fail`)."""
        return self.has_raised() and _content(self.error_file).endswith("\n")


class Processes:
    """The workers of one attempt. Made, started, watched and stopped by one thread.

    `orders` is a file descriptor that also ends a `wait` when it is readable, `start_method` how workers start.
    """

    def __init__(
        self,
        job: Job,
        members: AttemptMembers,
        *,
        guard: Guard,
        output: Output,
        interrupts: Interrupts,
        orders: int | None = None,
        start_method: StartMethod | None = None,
    ) -> None:
        self.attempt = members.attempt
        self._job = job
        self._members = members
        self._guard = guard
        self._output = output
        self._interrupts = interrupts
        self._start_method = start_method
        self._workers: list[_Worker] = []
        self._poll = select.poll()
        self._poll.register(interrupts.fd, select.POLLIN)
        self._orders = orders
        if orders is not None:
            self._poll.register(orders, select.POLLIN)
        self._asked_at_s: float | None = None  # when `suspend` did
        self._others: set[int] = set()  # this process's children before the workers: guard, store
        self._stopped = False

    def start(self) -> None:
        """Starts all workers of this host. OSError: one cannot be started; `stop` ends the others."""
        self._others = _children_of(os.getpid())
        for local_rank in range(self._job.local_world_size):
            self._workers.append(self._start(local_rank))

    def wait(self, timeout_s: float) -> None:
        """Returns when a worker has ended, an interrupt has come, or the time is over."""
        events = self._poll.poll(max(0.0, timeout_s) * 1000)
        self._interrupts.drain()
        if self._orders is not None:  # the next wait would not sleep otherwise
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._orders)
        if events:
            self._note_ends()
        self._leftovers()

    def any_failed(self) -> bool:
        """Return whether a worker has failed."""
        return any(worker.status not in (None, 0) for worker in self._workers)

    def any_running(self) -> bool:
        """Return whether a worker has not ended."""
        return any(worker.status is None for worker in self._workers)

    def can_suspend(self) -> bool:
        """Return whether a running worker would receive a request to suspend."""
        return not self._stopped and any(w.status is None and w.hears(HEARD) for w in self._workers)

    def suspensions(self) -> list[Raised]:
        """Return the records of the workers that saved and exit, or have exited, on request."""
        records = [worker.record() for worker in self._workers]
        return [record for record in records if record is not None and record.suspended]

    def ask_to_suspend(self) -> None:
        """Sends SIGUSR1 to the workers that hear it; their ranks agree on a step, save and leave."""
        for worker in self._workers:
            if worker.status is None and worker.hears(HEARD):
                worker.request(signal.SIGUSR1)

    def suspend(self, grace_s: float) -> None:
        """Sends SIGTERM to all workers and waits until they have saved and left; `stop` has to follow, with this grace.

        Returns earlier when a worker ends without saving (the rest cannot save without it), and at a second interrupt.
        """
        self._asked_at_s = time.monotonic()
        deadline = self._asked_at_s + grace_s
        for worker in self._workers:
            if worker.status is None:
                worker.asked_to_leave = True
                worker.request(signal.SIGTERM)
        self._wait_for_ends(deadline, lambda: self._interrupts.forced or self._any_ended_unsaved())

    def kill_overdue(self, grace_s: float) -> None:
        """Kills workers that raised an exception but have not exited, because the other workers wait for them.

        A process can hang while it exits (threads that are not daemons, a communicator's destructor).
        """
        now = time.monotonic()
        for worker in self._workers:
            if worker.status is not None or not worker.is_leaving():
                continue
            if worker.recorded_at_s is None:
                worker.recorded_at_s = now
            elif now - worker.recorded_at_s > grace_s and worker.overdue_s is None:
                worker.overdue_s = now - worker.recorded_at_s
                worker.killed_by_us = True
                signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)

    def wait_for_reasons(self, timeout_s: float, cause_timeout_s: float) -> None:
        """After the first failure, gives the other ranks a moment to fail by themselves and say why.

        Returns early when each has ended or recorded an exception. While every known failure is a consequence of a lost
        rank, waits up to `cause_timeout_s`: the kernel may take long to end a process with much memory or a GPU. After
        a SIGKILL, which is a cause, it does not wait for a rank in the middle of a long step, which `stop` kills, but
        for one that has begun to record its exception.
        """
        begun_at_s = time.monotonic()
        was_killed = not self.suspensions() and any(w.status == -signal.SIGKILL for w in self._workers)
        while not self._interrupts.received:
            elapsed_s = time.monotonic() - begun_at_s
            silent = [w for w in self._workers if w.status is None and not w.has_raised()]
            cause_known = any(not death.consequence for death in self.deaths())
            if was_killed and cause_known and elapsed_s > _NOTICED_WITHIN_S:
                silent = [w for w in silent if not w.hears("r") or os.fstat(w.error_file).st_size]
            is_late = elapsed_s > (timeout_s if cause_known or not silent else cause_timeout_s)
            if is_late or (not silent and (cause_known or not self.any_running())):
                return
            self.wait(_LOOK_S)

    def stop(self, ask: signal.Signals, grace_s: float) -> None:
        """Ends all workers, then what they left running: `ask`, then SIGKILL after the grace. Idempotent.

        Workers that `suspend` has asked are not asked again, and have the rest of that grace. A second interrupt ends
        the grace. A stopped worker (SIGSTOP) is continued, so that it can exit. Processes that the workers left get
        SIGTERM and a moment, for which the next attempt waits.
        """
        if self._stopped:
            return
        self._stopped = True
        self._note_ends()
        deadline = (self._asked_at_s or time.monotonic()) + grace_s
        for worker in self._workers:
            if worker.status is None:
                was_asked, worker.asked_to_leave = worker.asked_to_leave, not worker.has_raised()
                # SIGINT would only make an interpreter that is still starting print where it was interrupted.
                started = os.fstat(worker.fault_file).st_size > 0
                ask_it = ask if started else signal.SIGTERM
                if ask_it == signal.SIGTERM and worker.hears(ONLY_ASKED_BY_SIGTERM):
                    worker.ended_outright = True
                    ask_it = signal.SIGKILL
                elif was_asked:
                    continue
                worker.ask(ask_it)
        self._wait_for_ends(deadline, lambda: self._interrupts.forced)
        deadline = min(deadline, time.monotonic() + _LEFT_ENDS_WITHIN_S)
        if not self.any_running():
            for pid in self._leftovers():
                _signal(pid, signal.SIGTERM)
                _signal(pid, signal.SIGCONT)
            while self._leftovers() and time.monotonic() < deadline and not self._interrupts.forced:
                time.sleep(_LOOK_S)
        self._kill()

    def wait_for_leftovers(self, grace_s: float) -> None:
        """After a good end, waits for what the workers left running (a last `rsync &`); `stop` kills what remains.

        A process in a session of its own (tmux, ssh-agent) is not waited for and not ended.
        """
        begun_s, waited_s, has_said = time.monotonic(), 0.0, False
        while not self._interrupts.received:
            self._others |= {pid for pid in self._leftovers() if not self._is_in_session(pid)}
            leftovers = self._leftovers()
            if not leftovers or waited_s >= grace_s:
                return
            if waited_s > _SAY_LEFT_S and not has_said:
                has_said = True
                self._output.say(
                    f"photinus: all workers exited with code 0; waiting up to {grace_s:g} s (--stop-grace) for "
                    f"{_names(leftovers)}\n"
                )
            self.wait(min(0.1, grace_s - waited_s))
            waited_s = time.monotonic() - begun_s

    def deaths(self) -> list[Death]:
        """Return the deaths of the workers that failed, by local rank."""
        host = socket.gethostname()
        deaths = []
        for worker in self._workers:
            if not worker.status:
                continue
            # A worker that was asked to leave has no failure of its own, unless somebody else killed it just then.
            outright = worker.ended_outright and worker.status == -signal.SIGKILL
            struck = worker.status == -signal.SIGKILL and not worker.killed_by_us and not outright
            stack = [line for line in _content(worker.fault_file).splitlines() if WORKER_FILE not in line]
            deaths.append(
                Death(
                    rank=worker.rank,
                    local_rank=worker.local_rank,
                    pid=worker.process.pid,
                    host=host,
                    gpu=self._job.gpus[worker.local_rank] if self._job.gpus else "",
                    status=-signal.SIGTERM if outright else worker.status,
                    seen_at_s=worker.seen_at_s,
                    lived_s=worker.seen_at_s - worker.started_at_s,
                    raised=worker.record(),
                    ended_by_us=worker.asked_to_leave and not struck,
                    fault_stack="\n".join(stack),
                    overdue_s=worker.overdue_s,
                    last_lines=self._output.last_lines(worker.rank),
                    log=str(self._output.log_of(worker.rank) or ""),
                )
            )
        return deaths

    def finished_ranks(self) -> list[int]:
        """Return the ranks that exited with code 0 before they were asked to exit."""
        return [worker.rank for worker in self._workers if worker.status == 0 and not worker.asked_to_leave]

    def steps(self) -> int:
        """Return the number of training steps that the workers have reported."""
        return max(worker.last_status().steps for worker in self._workers)

    def saved_step(self) -> int:
        """Return the step of the run's newest checkpoint; -1 for none."""
        return max(worker.last_status().saved for worker in self._workers)

    def out(self) -> str:
        """Return the run that the workers were in (see status.py)."""
        outs = [worker.last_status().out for worker in self._workers]
        return max(outs, key=lambda out: int(out.partition(":")[0] or 0), default="")

    def close(self) -> None:
        """Closes the files of the ended workers."""
        assert self._stopped
        for worker in self._workers:
            for file in (worker.error_file, worker.fault_file, worker.status_file):
                os.close(file)
        self._workers.clear()

    def _start(self, local_rank: int) -> _Worker:
        program, rank = self._job.spec.program, self._members.first_rank + local_rank
        error, fault, status = (os.memfd_create(f"photinus-{what}-{rank}") for what in ("error", "fault", "status"))
        words = [str(os.getpid()), self._job.temporary]
        words += [program.kind, program.target, *program.arguments_of(local_rank)]
        environ = self._job.environ(self._members, local_rank)
        environ |= WorkerFiles(path_of(error), path_of(fault), path_of(status), self._job.images).environ()
        environ[env.OUT.name] = self._job.out
        stdout, stderr = self._output.ends_for(rank, local_rank)
        stdin = None if rank == 0 else subprocess.DEVNULL
        try:
            process: subprocess.Popen[bytes] | Forked | None = None
            if self._start_method is not None:
                process = self._start_method.fork(words, environ, (stdin, stdout, stderr))
            process = process or subprocess.Popen(
                [*python_command(), WORKER_FILE, *words],
                env=environ,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        finally:
            for end in (stdout, stderr):
                if end is not None:
                    os.close(end)
        self._guard.protect(process.pid)
        self._interrupts.groups.add(process.pid)
        pidfd = os.pidfd_open(process.pid)
        self._poll.register(pidfd, select.POLLIN)
        return _Worker(rank, local_rank, process, pidfd, error, fault, status, time.monotonic())

    def _wait_for_ends(self, deadline: float, enough: Callable[[], bool]) -> None:
        """Until all workers have ended, it is enough, or the monotonic clock is at the deadline."""
        while self.any_running() and time.monotonic() < deadline and not enough():
            self.wait(min(0.1, deadline - time.monotonic()))

    def _any_ended_unsaved(self) -> bool:
        records = [worker.record() for worker in self._workers if worker.status not in (None, 0)]
        return any(record is None or not record.suspended for record in records)

    def _note_ends(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.status is not None:
                continue
            ended = os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            worker.status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            worker.seen_at_s = now
            self._poll.unregister(worker.pidfd)
            self._interrupts.groups.discard(worker.process.pid)

    def _leftovers(self) -> set[int]:
        """Reap the processes that workers left and that have ended; return the pids of those that run."""
        new = _children_of(os.getpid()) - self._others - {worker.process.pid for worker in self._workers}
        for pid in tuple(new):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] or not (_is_of_a_worker(pid) or self._is_in_session(pid)):
                    new.remove(pid)
        found: set[int] = set()
        while new:
            found |= new
            new = set().union(*map(_children_of, new)) - found - self._others
        return found

    def _is_in_session(self, pid: int) -> bool:
        """Return whether it is in the session of a worker."""
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(pid) in {worker.process.pid for worker in self._workers}
        return True  # it has just ended

    def _kill(self) -> None:
        if leftovers := self._leftovers():
            self._output.say(f"photinus: killed processes that the workers left running: {_names(leftovers)}\n")
        for worker in self._workers:
            worker.killed_by_us |= worker.status is None
            # The group may be gone from a worker that never got to be its leader, or belong to no one we may signal.
            _signal(-worker.process.pid, signal.SIGKILL)
        self._wait_for_ends(time.monotonic() + _KILLED_DIES_WITHIN_S, lambda: False)
        for worker in self._workers:
            if worker.status is None:
                self._output.say(
                    f"photinus: rank {worker.rank} (pid {worker.process.pid}) still exists {_KILLED_DIES_WITHIN_S:g} s "
                    f"after SIGKILL: it may hang in the kernel (a device, a network file system) and hold its device\n"
                )
                continue
            worker.process.wait()
            os.close(worker.pidfd)
        deadline = time.monotonic() + _LEFT_DIES_WITHIN_S
        while (leftovers := self._leftovers()) and time.monotonic() < deadline:
            for pid in leftovers:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.002)
        for worker in self._workers:
            self._guard.release(worker.process.pid)


def _children_of(pid: int) -> set[int]:
    files = glob.glob(f"/proc/{pid}/task/*/children")
    return {int(child) for file in files for child in text_of(Path(file)).split()}


def _is_of_a_worker(pid: int) -> bool:
    """Return whether a process has a worker's environment. A program that has just begun has none for a moment."""
    for _ in range(10):
        if environ := text_of(Path(f"/proc/{pid}/environ")):
            return _OF_A_WORKER in environ
        time.sleep(0.002)
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    """Signals a process, or a group under its negative number, unless it is gone or another user's by now."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _names(pids: set[int]) -> str:
    """The first processes of these, by command and pid, and how many more there are."""
    words = []
    for pid in sorted(pids)[:3]:
        command = text_of(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()
        words.append(f"{command[:60] or 'a process'} (pid {pid})")
    return ", ".join(words) + f" and {len(pids) - 3} more" * (len(pids) > 3)


def _content(file: int) -> str:
    return os.pread(file, _RECORD_LIMIT_BYTES, 0).decode("utf-8", "replace")
