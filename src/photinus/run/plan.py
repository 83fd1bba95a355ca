"""The job of this host: a `JobSpec` becomes a `Job`, or an error that says what to type instead.

    plan            all that needs no GPU: the program, the environment, and the number of workers where it was typed
    place_on_gpus   the number of workers where it was not, and the GPU of each

Nothing is started here. What is asked: the spec, the environment and the files of this host; torch counts GPUs in a
function that the caller gives. `dry_run_text` is what `--dry-run` prints.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shlex
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from .. import env
from ..errors import DeviceError, LaunchError, UsageError
from ..job.attempt import AttemptMembers
from ..job.spec import JobSpec
from ..version import check_torch
from ..words import mask_words
from .local.devices import VISIBLE, check_devices, choose_worker_count, gpu_names, usable_cores, visible_devices
from .local.job import Job
from .local.logs import Logs
from .local.program import add_local_rank, check_program, missing_packages
from .local.worker import python_command

_SHOWN = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")  # whoever has set them
_NOT_SHOWN = ("LOCAL_RANK", "RANK", "ROLE_RANK", env.LAUNCH.name)
_NO_SCRIPT_HAS = ("--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts", "--hostfile", "--oversubscribe")
_CHOSEN_LATER = "chosen when it starts"


def plan(spec: JobSpec, environ: Mapping[str, str]) -> Job:
    """Return the job of this host, with 0 workers where their number depends on its GPUs or cores.

    Raises:
        UsageError: the program cannot be started, or the environment or the spec contradicts itself.
        LaunchError, OldTorchError: torch is missing or too old.
    """
    check_request(spec, environ)
    if not _has_torch():
        raise LaunchError(
            f"photinus run needs PyTorch, which {sys.executable} does not have. Install it (pytorch.org shows the "
            f"command for your device), or start photinus with a Python that has it."
        )
    check_torch()
    if not spec.use_env:
        spec = replace(spec, program=add_local_rank(spec.program))
    if spec.devices is not None:
        spec = _use_devices(spec, spec.devices)
    typed = spec.nproc_per_node if spec.devices is None else len(spec.devices) * spec.ranks_per_gpu
    count = typed if isinstance(typed, int) and not spec.without_devices else 0
    own = {env.RANKS_PER_GPU.name: str(spec.ranks_per_gpu), **({env.LAUNCH.name: spec.typed} if spec.typed else {})}
    job_id = spec.hosts.job_id or uuid.uuid4().hex
    return Job(spec, job_id, count, {**environ, **own}, notes=tuple(_notes_on(spec, environ)))


def check_request(spec: JobSpec, environ: Mapping[str, str]) -> None:
    """Raise UsageError if the program cannot be started, or a variable of ours has a wrong value: once for all."""
    check_program(spec.program)
    for variable in env.ALL:
        try:
            variable.get(environ)
        except ValueError as error:
            raise UsageError(str(error)) from None


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ModuleNotFoundError:  # by a finder that hides it
        return False


def _use_devices(spec: JobSpec, devices: Sequence[int]) -> JobSpec:
    """Return the spec with these devices, each for `ranks_per_gpu` workers; with --cpu as many workers."""
    request, each = spec.nproc_per_node, 1 if spec.cpu else spec.ranks_per_gpu
    if spec.choice and isinstance(request, int) and request != len(devices) * each:
        raise UsageError(
            f"{spec.choice} chooses {len(devices)} devices{f' for {each} workers each' * (each > 1)}, but "
            f"--nproc-per-node {request} asks for {request} workers: remove one of the two."
        )
    if spec.cpu:
        return replace(spec, nproc_per_node=len(devices), devices=None)
    return replace(spec, devices=tuple(devices))


def _notes_on(spec: JobSpec, environ: Mapping[str, str]) -> Iterator[str]:
    """Say what the user should know of the program and the environment; once for all hosts that share a terminal."""
    if spec.started_as is not None and spec.hosts.node_rank:
        return
    program = spec.program
    for name, suggestion in env.misspelt(environ).items():
        yield f"environment variable {name} is unknown. Did you mean {suggestion}?"
    if program.local_rank_flag is not None:
        yield f"{program.target} takes {program.local_rank_flag}: each worker gets it (to omit it: --use-env)"
    behind = [word for word in program.arguments if word.partition("=")[0].replace("_", "-") in _NO_SCRIPT_HAS]
    if behind and "--" not in program.arguments:
        yield f"the script gets {' '.join(behind)}: write it before {program.target} if `photinus run` should have it"
    if missing := missing_packages(program):
        yield (
            f"{program.target} lists packages in its header (PEP 723) that {sys.executable} lacks: "
            f"{', '.join(missing)}. `photinus run` installs nothing. With uv, and photinus in that list: `uv sync "
            f"--script {program.target}`, then `$(uv python find --script {program.target}) -m photinus run ...`"
        )


def place_on_gpus(
    job: Job, count_gpus: Callable[[str, Mapping[str, str]], int], cores: Callable[[], int] = usable_cores
) -> Job:
    """Return the job with the number of its workers and the GPU of each; with --device, other GPUs are hidden.

    Args:
        job: as `plan` made it.
        count_gpus: number of GPUs ("cuda" or "xpu") that torch sees in an environment; not called where it has no
            effect.
        cores: number of usable cores.

    Raises:
        UsageError: more workers than can be meant, or a flag names a worker or a GPU that this host does not have.
        DeviceError: fewer GPUs than asked for.
    """
    try:
        return _place(job, count_gpus, cores)
    except DeviceError as error:
        choice = job.spec.choice
        raise DeviceError(f"{choice} asks for GPUs: {error}" if choice else str(error)) from None


def _place(job: Job, count_gpus: Callable[[str, Mapping[str, str]], int], cores: Callable[[], int]) -> Job:
    spec, environ = job.spec, dict(job.base_environ)
    kind = "xpu" if spec.nproc_per_node == "xpu" else "cuda"
    if spec.without_devices:
        spec = _use_devices(spec, _all_but(spec, count_gpus(kind, environ)))
    request = "gpu" if kind == "xpu" else spec.nproc_per_node
    if spec.devices is not None:
        environ[VISIBLE] = visible_devices(spec.devices, environ.get(VISIBLE))
        request = len(spec.devices) * spec.ranks_per_gpu
    gpus = functools.cache(functools.partial(count_gpus, kind, environ))
    workers = choose_worker_count(
        request,
        cpu_only=spec.cpu,
        gpus=gpus,
        cores=cores,
        ranks_per_gpu=spec.ranks_per_gpu,
        oversubscribe=spec.oversubscribe,
    )
    if spec.devices is not None:
        check_devices(spec.devices, gpus())
    Logs(spec.logs).check(workers.count)
    present = gpus() if gpus.cache_info().currsize else 0  # not asked where GPUs do not matter
    names = gpu_names(workers.count, present, environ.get(VISIBLE), spec.ranks_per_gpu)
    notes = job.notes
    if workers.reason:
        host = "" if spec.started_as is None else f"host {spec.started_as}: "
        notes += (f"{host}{workers.count} worker{'s' * (workers.count != 1)} ({workers.reason})",)
    return replace(job, spec=spec, local_world_size=workers.count, base_environ=environ, gpus=names, notes=notes)


def _all_but(spec: JobSpec, present: int) -> list[int]:
    beyond = [number for number in spec.without_devices if number >= present]
    devices = [number for number in range(present) if number not in spec.without_devices]
    if beyond or not devices:
        why = f"there is no GPU {beyond[0]}" if beyond else "none is left"
        raise UsageError(f"{spec.choice}: {why}; torch sees {present} GPUs here.")
    return devices


def dry_run_text(job: Job, why_spawned: str) -> str:
    """Return the job as text: the command, how workers start, what all workers share, and what is each one's own.

    With several hosts the ranks are known only for the first, unless the hosts run equally many workers.
    """
    hosts, program, max_restarts = job.spec.hosts, job.spec.program, job.spec.max_restarts
    logs = Logs(job.spec.logs)
    least, most = hosts.nnodes or (1, 1)
    host_rank = hosts.node_rank or 0
    python = [] if program.kind == "program" else [*python_command(), *(["-m"] if program.kind == "module" else [])]
    command = [*python, program.target, *program.arguments_of("LOCAL_RANK")]
    members = AttemptMembers((job.local_world_size,) * most, host_rank, 0, job.job_id, 0)
    environ = job.environ(members, 0)
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
        *(f"  {name}={environ[name]}" for name in shared if name not in _NOT_SHOWN),
        "",
        "and of each:",
    ]
    for local_rank in range(job.local_world_size):
        rank = members.first_rank + local_rank
        lines.append(f"  LOCAL_RANK={local_rank} RANK={rank} ROLE_RANK={rank}")
    return "\n".join(lines)
