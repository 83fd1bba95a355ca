"""`photinus run`: reads the command line, looks at the program, and starts the job.

Help and wrong use are answered before anything slow is imported.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from .. import env
from ..cli.flag_table import run_parser
from ..cli.flags import RunFlags, SelectionFlags, parse_run
from ..cli.parser import UsageError
from ..cli.program import Program, add_local_rank, check_program
from ..errors import DeviceError
from ..masking import mask_words
from .local.devices import count_gpus

parser = run_parser

_FUNCTION = "photinus.run.function"
_LONGEST_BYTES = 120 << 10


def main(arguments: Sequence[str]) -> int:
    """Runs the job that the words after `photinus run` describe, and returns the exit code."""
    flags = parse_run(arguments)
    program = flags.program
    check_program(program)
    _check_environment()
    if flags.scheduler.slurm:
        from .schedulers import sbatch

        return sbatch.main(flags)
    _record(arguments, program)
    if flags.selection.hostfile is not None:
        from .ssh.start_hosts import start_hosts

        return start_hosts(flags, main)
    if flags.selection != SelectionFlags():
        from .ssh.selection import flags_text, for_this_host

        try:
            return _start(for_this_host(flags, count_gpus))
        except DeviceError as error:
            raise DeviceError(f"{flags_text(flags.selection)} asks for GPUs: {error}") from None
    return _start(flags)


def _check_environment() -> None:
    """Refuses a variable of ours with a wrong value here, once, instead of in each worker; tells a misspelt name."""
    for variable in env.ALL:
        try:
            variable.get()
        except ValueError as error:
            raise UsageError(str(error)) from None
    for name, meant in env.misspelt(os.environ).items() if env.STARTED_AS.get() is None else ():
        print(f"photinus: environment variable {name} is unknown. Did you mean {meant}?", file=sys.stderr)


def _record(arguments: Sequence[str], program: Program) -> None:
    """Puts what was typed into the environment, from where it gets into the run's config.json."""
    if program.target == _FUNCTION:  # of photinus.launch: the call goes with the process that made it
        return
    if env.STARTED_AS.get() is not None and env.LAUNCH.get() is not None:
        return  # typed on another host, for all of them
    os.environ.pop(env.LAUNCH.name, None)
    text = shlex.join(mask_words(["photinus", "run", *arguments]))
    if len(text) < _LONGEST_BYTES:  # the names of thousands of files are more than a variable holds
        os.environ[env.LAUNCH.name] = text


def _start(flags: RunFlags) -> int:
    """Starts this host's part of the job."""
    if env.STARTED_AS.get() is None:
        from .schedulers.detect_scheduler import place_hosts

        flags = place_hosts(flags)
    program = flags.program if flags.use_env else add_local_rank(flags.program)
    # Where several launchers share a terminal, the first host's says it for all.
    says = env.STARTED_AS.get() is None or not flags.hosts.node_rank
    if program.local_rank_flag is not None and says:
        told = f"{program.target} takes {program.local_rank_flag}: given to each worker (--use-env leaves it out)"
        print(f"photinus: {told}", file=sys.stderr)

    from .supervise import supervise

    return supervise(replace(flags, program=program))
