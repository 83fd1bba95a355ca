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
from ..errors import DeviceError, UsageError
from ..job.spec import Program
from ..run.local.devices import count_gpus
from ..run.local.program import add_local_rank, check_program, missing_packages
from ..words import mask_words
from .flag_table import run_parser
from .flags import RunFlags, SelectionFlags, parse_run

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
        from . import sbatch

        return sbatch.main(flags)
    _record(arguments, program)
    if flags.selection.hostfile is not None:
        return _start_hosts(flags)
    if flags.selection != SelectionFlags():
        from .selection import flags_text, for_this_host

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


def _start_hosts(flags: RunFlags) -> int:
    """Starts the job on the hosts of the host file, from here."""
    from ..run.ssh.hostfile import read_hostfile
    from ..run.ssh.start_hosts import Way, start_hosts
    from .selection import host_words, select

    selection = flags.selection
    assert selection.hostfile is not None
    shares = select(read_hostfile(selection.hostfile), selection)

    def words_of(number: int, leader: str, port: int) -> list[str]:
        return host_words(flags, shares[number], host_rank=number, hosts=len(shares), leader=leader, port=port)

    for number in range(len(shares)):
        words_of(number, "", 0)  # finds fault before anything is started
    way = Way(selection.ssh, selection.ssh_port, selection.export)
    return start_hosts(flags.spec(), [share.host for share in shares], words_of, way, main)


def _start(flags: RunFlags) -> int:
    """Starts this host's part of the job."""
    if env.STARTED_AS.get() is None:
        from .detect_scheduler import place_hosts

        flags = place_hosts(flags)
    program = flags.program if flags.use_env else add_local_rank(flags.program)
    # Where several launchers share a terminal, the first host's says it for all.
    says = env.STARTED_AS.get() is None or not flags.hosts.node_rank
    if program.local_rank_flag is not None and says:
        told = f"{program.target} takes {program.local_rank_flag}: given to each worker (--use-env leaves it out)"
        print(f"photinus: {told}", file=sys.stderr)
    if says and (missing := missing_packages(program)):
        print(
            f"photinus: {program.target} lists packages in its header (PEP 723) that {sys.executable} lacks: "
            f"{', '.join(missing)}. `photinus run` installs nothing. With uv, and photinus in that list: `uv sync "
            f"--script {program.target}`, then `$(uv python find --script {program.target}) -m photinus run ...`",
            file=sys.stderr,
        )

    from ..run.supervise import supervise

    return supervise(replace(flags.spec(), program=program, started_as=env.STARTED_AS.get()))
