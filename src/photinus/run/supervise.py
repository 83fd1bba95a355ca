"""One job on this host, from its start to its exit code. What it needs is opened here, once, each thing complete."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial

from ..errors import LaunchError
from ..job.attempt import JobEndedError, Peers
from ..job.restart_policy import Verdict
from ..job.spec import JobSpec
from ..job.status import RESUMES
from ..job.worker_files import make_image_files
from .agent import Agent, OneHost
from .local.devices import count_gpus
from .local.guard import Guard, as_subreaper, start_guard
from .local.interrupts import Interrupted, Interrupts, handle_signals
from .local.job import Job
from .local.logs import Logs
from .local.output import Output
from .local.processes import Processes
from .local.start_method import StartMethod
from .local.store import StoreProcess
from .plan import dry_run_text, place_on_gpus
from .ssh.lifeline import hold_lifeline

_SIGNAL_TO_ALL_S = 0.3
_LONGEST_FOLDER_BYTES = 107 - len("/listener-12345678")


def supervise(job: Job, *, listener: socket.socket | None = None) -> int:
    """Run the job of this host through all its attempts, and return the exit code.

    Args:
        job: as `plan` made it.
        listener: a socket that was bound for the host that leads, which is this one then.

    Raises:
        UsageError, DeviceError: this host does not have what was asked for.
        LaunchError: workers could not be started, or one failed for good; carries the exit code.
    """
    spec = job.spec
    sys.stdout.flush()
    sys.stderr.flush()
    with ExitStack() as stack:
        guard = stack.enter_context(start_guard())  # it forks, so it comes before all threads
        interrupts = stack.enter_context(handle_signals())
        if spec.started_as is not None:
            hold_lifeline(spec.stop_grace_s)
        logs = Logs(spec.logs)
        output = stack.enter_context(closing(Output(logs, lambda: interrupts.forced)))
        job = replace(job, temporary=stack.enter_context(_temporary_folder(guard)))
        method = stack.enter_context(closing(StartMethod(spec, interrupts, output.say)))
        store = stack.enter_context(closing(StoreProcess(method, output.say)))
        stack.enter_context(as_subreaper())
        try:
            if job.local_world_size > 0:  # torch is imported while this process counts the GPUs
                method.begin(job)
            with interrupts.raise_at_once():
                job = place_on_gpus(job, count_gpus)
            for note in job.notes:
                output.say(f"photinus: {note}\n")
            method.begin(job)
            if spec.dry_run:
                print(dry_run_text(job, method.wait()))
                return 0
            logs.open()
            job = replace(job, images=make_image_files(job.local_world_size))
            with interrupts.raise_at_once():
                peers = stack.enter_context(_join(job, output, store, listener))
        except Interrupted:
            return _report_interrupt(spec, interrupts, output, 0)
        processes = partial(Processes, guard=guard, output=output, interrupts=interrupts, start_method=method)
        agent = Agent(job, peers, output, interrupts, processes)
        try:
            verdict = agent.run()
        except Interrupted:
            if agent.suspension is not None:
                output.say(f"photinus: {agent.suspension}; {RESUMES}\n")
            return _report_interrupt(spec, interrupts, output, job.local_world_size * agent.ended_workers)
        except JobEndedError:
            # Of a signal to all hosts, the end of another host may be noticed first: the signal is the news.
            if interrupts.comes_within(_SIGNAL_TO_ALL_S if spec.started_as is not None else 0.0):
                return _report_interrupt(spec, interrupts, output, job.local_world_size * agent.ended_workers)
            raise
    return 0 if verdict is None else _exit_code(verdict, peers, spec)


def _exit_code(verdict: Verdict, peers: Peers, spec: JobSpec) -> int:
    if not peers.leads and spec.started_as is not None:
        return verdict.exit_code
    after = f" after {verdict.restarts} restart{'s' * (verdict.restarts > 1)}" if verdict.restarts else ""
    where = f" of host {verdict.host}" if not isinstance(peers, OneHost) else ""
    raise LaunchError(
        f"the job failed{after}; the first cause was rank {verdict.rank}{where}, see above "
        f"(exit code {verdict.exit_code})",
        exit_code=verdict.exit_code,
    )


@contextmanager
def _join(job: Job, output: Output, store: StoreProcess, listener: socket.socket | None) -> Iterator[Peers]:
    """Take part in the job for the duration of the block."""
    if job.spec.hosts.nnodes is None or job.spec.hosts.nnodes[1] == 1:
        yield OneHost(job, output.say, store)
        return
    from .local.join import join_job  # with asyncio, which one host does without

    with join_job(job, say=output.say, store=store, listener=listener) as peers:
        yield peers


def _report_interrupt(spec: JobSpec, interrupts: Interrupts, output: Output, workers: int) -> int:
    number = interrupts.first
    assert number is not None
    if spec.started_as is None:
        few = {0: "no worker was running", 1: "its worker was ended"}
        what = few.get(workers, f"{workers} workers were ended")
        output.say(f"photinus: ended by {number.name}: {what}\n")
    return 128 + number


@contextmanager
def _temporary_folder(guard: Guard) -> Iterator[str]:
    """Make a folder for the workers' sockets, gone when the launcher is; yield "" where there can be none."""
    try:
        folder = tempfile.mkdtemp(prefix="photinus-")
    except OSError:  # a full disk, or read-only: a job that makes no sockets runs all the same
        yield ""
        return
    guard.remove(folder)
    try:
        # A socket's path has 107 bytes at most, 18 of them behind ours; multiprocessing's own may be shorter.
        yield folder if len(os.fsencode(folder)) <= _LONGEST_FOLDER_BYTES else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)
