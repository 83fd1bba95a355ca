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
from ..job.spec import JobSpec, Program
from ..run.local.devices import count_gpus
from ..run.local.program import add_local_rank, check_program, missing_packages
from ..words import mask_words
from .flags import RunFlags, parse_run
from .flags import run_parser as parser  # noqa: F401 (the pages read it)

_FUNCTION = "photinus.run.function"
_LONGEST_BYTES = 120 << 10
_CHOOSES_DEVICES = ("--include", "--exclude", "--num-gpus")


def main(arguments: Sequence[str]) -> int:
    """Run the job that the words after `photinus run` describe, and return the exit code."""
    flags = parse_run(arguments)
    program = flags.spec.program
    check_program(program)
    _check_environment()
    _record(arguments, program)
    return _start_here(flags) if flags.hostfile is None else _start_hosts(flags, flags.hostfile)


def _check_environment() -> None:
    """Refuse a variable of ours with a wrong value here, once, instead of in each worker; warn of a misspelt name."""
    for variable in env.ALL:
        try:
            variable.get()
        except ValueError as error:
            raise UsageError(str(error)) from None
    for name, suggestion in env.misspelt(os.environ).items() if env.STARTED_AS.get() is None else ():
        print(f"photinus: environment variable {name} is unknown. Did you mean {suggestion}?", file=sys.stderr)


def _record(arguments: Sequence[str], program: Program) -> None:
    """Put what was typed into the environment, from where it gets into the run's config.json."""
    if program.target == _FUNCTION:  # of photinus.launch: the call goes with the process that made it
        return
    if env.STARTED_AS.get() is not None and env.LAUNCH.get() is not None:
        return  # typed on another host, for all of them
    os.environ.pop(env.LAUNCH.name, None)
    text = shlex.join(mask_words(["photinus", "run", *arguments]))
    if len(text) < _LONGEST_BYTES:  # the names of thousands of files are more than a variable holds
        os.environ[env.LAUNCH.name] = text


def _start_hosts(flags: RunFlags, hostfile: str) -> int:
    """Start the job on the hosts of the host file, from here."""
    from ..run.ssh.hostfile import read_hostfile
    from ..run.ssh.start_hosts import Way, start_hosts
    from .selection import host_words, select

    shares = select(read_hostfile(hostfile), flags)

    def words_of(number: int, leader: str, port: int) -> list[str]:
        return host_words(flags, shares[number], host_rank=number, hosts=len(shares), leader=leader, port=port)

    for number in range(len(shares)):
        words_of(number, "", 0)  # finds fault before anything is started
    way = Way(flags.ssh, flags.ssh_port, flags.export)
    return start_hosts(flags.spec, [share.host for share in shares], words_of, way, main)


def _start_here(flags: RunFlags) -> int:
    """Start this host's part of the job."""
    try:
        spec = _resolve(flags)
        from ..run.supervise import supervise

        return supervise(spec)
    except DeviceError as error:
        choice = flags.typed(*_CHOOSES_DEVICES)
        raise DeviceError(f"{choice} asks for GPUs: {error}" if choice else str(error)) from None


def _resolve(flags: RunFlags) -> JobSpec:
    """Return what to start here, with what the flags choose of this host, and what a scheduler says of the others."""
    spec, started_as = flags.spec, env.STARTED_AS.get()
    if flags.spellings.keys() & {*_CHOOSES_DEVICES}:
        from .selection import for_this_host

        spec = for_this_host(flags, count_gpus)
    if started_as is None:
        from .detect_scheduler import place_hosts

        spec = replace(spec, hosts=place_hosts(spec.hosts, os.environ))
    program = spec.program if flags.use_env else add_local_rank(spec.program)
    # Where several launchers share a terminal, the first host's says it for all.
    says = started_as is None or not spec.hosts.node_rank
    if says and program.local_rank_flag is not None:
        text = f"{program.target} takes {program.local_rank_flag}: each worker gets it (to omit it: --use-env)"
        print(f"photinus: {text}", file=sys.stderr)
    if says and (missing := missing_packages(program)):
        print(
            f"photinus: {program.target} lists packages in its header (PEP 723) that {sys.executable} lacks: "
            f"{', '.join(missing)}. `photinus run` installs nothing. With uv, and photinus in that list: `uv sync "
            f"--script {program.target}`, then `$(uv python find --script {program.target}) -m photinus run ...`",
            file=sys.stderr,
        )
    return replace(spec, program=program, started_as=started_as)
