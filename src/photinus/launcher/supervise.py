"""One job on this host, from its start to its exit code: the guard, the signals, the output, and elastic's agent."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import LaunchError
from .devices import VISIBLE, check_devices, choose_worker_count, count_gpus, usable_cores, visible_devices
from .dry_run import told
from .flags import RunFlags
from .guard import guarding
from .interrupts import Interrupted, Interrupts, taking_interrupts
from .job import Job
from .output import Output
from .processes import adopting_orphans
from .program import Program
from .report import exit_code_of

if TYPE_CHECKING:
    from .agent import Agent
    from .rendezvous import OneHostRendezvous

__all__ = ["supervise"]

_INTERRUPT_GRACE_S = 1.5


def supervise(flags: RunFlags, program: Program) -> int:
    """Runs the job that the flags describe, through all its attempts, and returns the exit code.

    Raises:
        DeviceError: fewer GPUs than asked for.
        LaunchError: workers could not be started, or one failed for good; carries the exit code.
    """
    environ = dict(os.environ)
    # The guard forks, so it comes before torch and its threads; and signals are taken before the slow import of torch.
    with guarding() as guard, taking_interrupts() as interrupts, _output() as output:
        try:
            if flags.devices is not None:
                environ[VISIBLE] = os.environ[VISIBLE] = visible_devices(flags.devices, environ.get(VISIBLE))
            with interrupts.striking_at_once(), _quiet_torch(environ):
                agent_class, rendezvous_class, signal_exception = _import_torch_parts()
                wanted = flags.nproc_per_node if flags.devices is None else len(flags.devices)
                chosen = choose_worker_count(wanted, cpu_only=flags.cpu, gpus=count_gpus, cores=usable_cores)
                if flags.devices is not None:
                    check_devices(flags.devices, count_gpus())
        except Interrupted:
            return _interrupted(interrupts, output, "before any worker was started")
        if chosen.reason:
            output.say(f"photinus: {chosen.count} worker{'s' if chosen.count != 1 else ''} ({chosen.reason})\n")
        job = Job(
            program=program,
            job_id=uuid.uuid4().hex,
            local_world_size=chosen.count,
            max_restarts=flags.max_restarts,
            stop_grace_s=flags.stop_grace_s,
            interrupt_grace_s=_INTERRUPT_GRACE_S,
            usable_cores=usable_cores(),
            cpu_only=flags.cpu,
            environ=environ,
        )
        if flags.dry_run:
            print(told(job))
            return 0
        rendezvous = rendezvous_class(job.job_id)
        agent = agent_class(job, rendezvous, guard=guard, output=output, interrupts=interrupts)
        try:
            with adopting_orphans():
                result = agent.run()
        except signal_exception:
            return _interrupted(interrupts, output, f"{chosen.count} workers were ended")
        finally:
            rendezvous.shutdown()
    if not result.is_failed():
        return 0
    cause = agent.failure
    assert cause is not None
    restarts = agent.attempts - 1
    after = f" after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    code = exit_code_of(cause)
    raise LaunchError(
        f"the job failed{after}; the first cause was rank {cause.rank}, see above (exit code {code})", exit_code=code
    )


def _import_torch_parts() -> tuple[type[Agent], type[OneHostRendezvous], type[Exception]]:
    from torch.distributed.elastic.multiprocessing import SignalException

    from .agent import Agent
    from .rendezvous import OneHostRendezvous

    return Agent, OneHostRendezvous, SignalException


def _interrupted(interrupts: Interrupts, output: Output, what: str) -> int:
    number = interrupts.first
    assert number is not None
    output.say(f"photinus: ended by {number.name}: {what}\n")
    return 128 + number


@contextmanager
def _output() -> Iterator[Output]:
    sys.stdout.flush()
    sys.stderr.flush()
    output = Output()
    try:
        yield output
    finally:
        output.close()


@contextmanager
def _quiet_torch(environ: Mapping[str, str]) -> Iterator[None]:
    """While torch is imported for the launcher's own use: no device backends, and no log lines of elastic.

    Our report stands in place of elastic's warnings; who sets LOGLEVEL wants to see them.
    """
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    os.environ[name] = "0"
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise LaunchError(
            f"photinus run needs PyTorch, which {sys.executable} does not have. Install it as pytorch.org says for "
            f"your device, or start photinus with the Python that has it."
        ) from None
    finally:
        if name in environ:
            os.environ[name] = environ[name]
        else:
            del os.environ[name]
    if "LOGLEVEL" not in environ:
        elastic = logging.getLogger("torch.distributed.elastic")
        elastic.addHandler(logging.NullHandler())
        elastic.propagate = False
