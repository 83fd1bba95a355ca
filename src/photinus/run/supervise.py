"""One job on this host, from its start to its exit code: the guard, the signals, the output, and the agent."""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace

from .. import env
from ..errors import DeviceError, LaunchError
from ..job.attempt import Formation, JobEndedError, Peers
from ..job.spec import JobSpec
from ..job.worker_files import make_image_files
from ..version import check_torch
from ..words import mask_words
from .agent import Agent, OneHost
from .local.devices import (
    VISIBLE,
    WorkerCount,
    check_devices,
    choose_worker_count,
    count_gpus,
    gpu_names,
    usable_cores,
    visible_devices,
)
from .local.guard import Guard, as_subreaper, start_guard
from .local.interrupts import Interrupted, Interrupts, handle_signals
from .local.job import Job
from .local.logs import Logs
from .local.output import Output
from .local.start_method import StartMethod
from .local.store import StoreProcess
from .local.worker import python_command
from .ssh.lifeline import hold_lifeline

_SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")  # whoever has set them
_CHOSEN_LATER = "chosen when it starts"

_SIGNAL_TO_ALL_S = 0.3
_LONGEST_FOLDER_BYTES = 107 - len("/listener-12345678")


def supervise(spec: JobSpec, *, secret: str | None = None, listener: socket.socket | None = None) -> int:
    """Runs the job that the spec describes, through all its attempts, and returns the exit code.

    Args:
        spec: the job.
        secret: of the launchers of this job, where another host started this one.
        listener: a socket that was bound for the host that leads, which is this one then.

    Raises:
        DeviceError: fewer GPUs than asked for.
        LaunchError: workers could not be started, or one failed for good; carries the exit code.
        OldTorchError: torch is too old.
    """
    if not _has_torch():
        raise LaunchError(
            f"photinus run needs PyTorch, which {sys.executable} does not have. Install it (pytorch.org shows the "
            f"command for your device), or start photinus with a Python that has it."
        )
    check_torch()
    environ = dict(os.environ) | ({env.JOB_SECRET.name: secret} if secret is not None else {})
    job_id = spec.hosts.job_id or uuid.uuid4().hex
    sys.stdout.flush()
    sys.stderr.flush()
    with ExitStack() as stack:
        guard = stack.enter_context(start_guard())  # it forks, so it comes before all threads
        interrupts = stack.enter_context(handle_signals())
        if spec.started_as is not None:
            hold_lifeline(spec.stop_grace_s)
        logs = Logs(spec.logs)
        output = stack.enter_context(closing(Output(logs, lambda: interrupts.forced)))
        temporary = stack.enter_context(_temporary_folder(guard))
        environ[env.RANKS_PER_GPU.name] = str(spec.ranks_per_gpu)
        method = stack.enter_context(closing(StartMethod(spec, interrupts, output.say)))
        store = stack.enter_context(closing(StoreProcess(method, output.say)))
        stack.enter_context(as_subreaper())
        # Where the number of workers was typed, torch is imported while this process counts the GPUs.
        typed = len(spec.devices) * spec.ranks_per_gpu if spec.devices is not None else spec.nproc_per_node
        if isinstance(typed, int):
            method.begin(Job(spec, job_id, typed, environ, (), temporary))
        try:
            with interrupts.raise_at_once():
                workers, gpus = _choose_workers(spec, environ)
        except Interrupted:
            return _report_interrupt(spec, interrupts, output, 0)
        if workers.reason:
            where = "" if (name := spec.started_as) is None else f"host {name}: "
            plural = "s" if workers.count != 1 else ""
            output.say(f"photinus: {where}{workers.count} worker{plural} ({workers.reason})\n")
        job = Job(spec, job_id, workers.count, environ, gpus, temporary)
        logs.check(job.local_world_size)
        if not isinstance(typed, int):
            method.begin(job)
        if spec.dry_run:
            try:
                print(dry_run_text(job, logs, method.wait()))
            except Interrupted:
                return _report_interrupt(spec, interrupts, output, 0)
            return 0
        job = replace(job, images=make_image_files(workers.count))
        logs.open()
        try:
            with interrupts.raise_at_once():
                peers = stack.enter_context(_join(job, output, store, listener))
        except Interrupted:
            return _report_interrupt(spec, interrupts, output, 0)
        agent = Agent(job, peers, guard=guard, output=output, interrupts=interrupts, start_method=method)
        try:
            verdict = agent.run()
        except Interrupted:
            if agent.suspension is not None:
                output.say(f"photinus: {agent.suspension}; the same command resumes from there\n")
            return _report_interrupt(spec, interrupts, output, workers.count * agent.ended_workers)
        except JobEndedError:
            # A signal to all hosts: another's end is no news then, if it arrives first.
            if interrupts.comes_within(_SIGNAL_TO_ALL_S if spec.started_as is not None else 0.0):
                return _report_interrupt(spec, interrupts, output, workers.count * agent.ended_workers)
            raise
    if verdict is None:
        return 0
    if not peers.leads and spec.started_as is not None:
        return verdict.exit_code
    after = f" after {verdict.restarts} restart{'s' * (verdict.restarts > 1)}" if verdict.restarts else ""
    where = f" of host {verdict.host}" if not isinstance(peers, OneHost) else ""
    raise LaunchError(
        f"the job failed{after}; the first cause was rank {verdict.rank}{where}, see above "
        f"(exit code {verdict.exit_code})",
        exit_code=verdict.exit_code,
    )


def _choose_workers(spec: JobSpec, environ: MutableMapping[str, str]) -> tuple[WorkerCount, tuple[str, ...]]:
    """Choose the workers of this host, and name the GPU of each; with --device, hide all other GPUs.

    Raises:
        UsageError: more workers than can be meant.
        DeviceError: fewer GPUs than asked for.
    """
    try:
        return _count_workers(spec, environ)
    except DeviceError as error:
        raise DeviceError(f"{spec.choice} asks for GPUs: {error}" if spec.choice else str(error)) from None


def _count_workers(spec: JobSpec, environ: MutableMapping[str, str]) -> tuple[WorkerCount, tuple[str, ...]]:
    is_xpu = spec.nproc_per_node == "xpu"
    gpus = functools.cache(functools.partial(count_gpus, "xpu" if is_xpu else "cuda"))
    request = "gpu" if is_xpu else spec.nproc_per_node
    if spec.devices is not None:
        environ[VISIBLE] = os.environ[VISIBLE] = visible_devices(spec.devices, environ.get(VISIBLE))
        request = len(spec.devices) * spec.ranks_per_gpu
    workers = choose_worker_count(
        request,
        cpu_only=spec.cpu,
        gpus=gpus,
        cores=usable_cores,
        ranks_per_gpu=spec.ranks_per_gpu,
        oversubscribe=spec.oversubscribe,
    )
    if spec.devices is not None:
        check_devices(spec.devices, gpus())
    present = gpus() if gpus.cache_info().currsize else 0  # not asked where GPUs do not matter
    return workers, gpu_names(workers.count, present, environ.get(VISIBLE), spec.ranks_per_gpu)


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:  # by a finder that hides it
        return False


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
    """A folder for the workers' sockets, gone when the launcher is; empty where there can be none."""
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


def dry_run_text(job: Job, logs: Logs, why_spawned: str) -> str:
    """The job as text: the command, how workers start, what all workers share, and what is each one's own.

    With several hosts the ranks are known only for the first, unless the hosts run equally many workers.
    """
    hosts, program, max_restarts = job.spec.hosts, job.spec.program, job.spec.max_restarts
    least, most = hosts.nnodes or (1, 1)
    host_rank = hosts.node_rank or 0
    python = [] if program.kind == "program" else [*python_command(), *(["-m"] if program.kind == "module" else [])]
    command = [*python, program.target, *program.arguments_of("LOCAL_RANK")]
    formation = Formation((job.local_world_size,) * most, host_rank, 0, job.job_id, 0)
    environ = job.environ(formation, 0)
    later = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")
    environ |= dict.fromkeys(later, _CHOSEN_LATER)
    shared = [name for name, value in sorted(environ.items()) if os.environ.get(name) != value or name in _SHOWN]
    lines = []
    if most > 1:
        lines = [
            f"{most if least == most else f'{least} to {most}'} hosts, which are numbered "
            + ("by --node-rank" if hosts.node_rank is not None else "as they come")
            + f"; this one as number {host_rank}, if {most} of them run as many workers:"
        ]
    count = f"{job.local_world_size} worker{'s' * (job.local_world_size != 1)}"
    lines += [
        f"{count} on {socket.gethostname()}, in {os.getcwd()}:",
        f"  {shlex.join(mask_words(command))}",
        f"start method: {f'spawn: {why_spawned}' if why_spawned else 'fork, from a process that has imported torch'}",
        f"restarted at most {max_restarts} time{'s' * (max_restarts != 1)} when one fails",
        *([logs.describe()] if logs.writes else []),
        "",
        "in the environment of all:",
        *(f"  {name}={environ[name]}" for name in shared if name not in ("LOCAL_RANK", "RANK", "ROLE_RANK")),
        "",
        "and of each:",
    ]
    for local_rank in range(job.local_world_size):
        rank = formation.first_rank + local_rank
        lines.append(f"  LOCAL_RANK={local_rank} RANK={rank} ROLE_RANK={rank}")
    return "\n".join(lines)
