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
from ..errors import UsageError
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
    check_program(flags.spec.program)
    _check_environment()
    _record(arguments, flags.spec.program)
    return _start_here(flags) if flags.hostfile is None else _start_hosts(flags, flags.hostfile)


def _check_environment() -> None:
    """Refuse a variable of ours with a wrong value here, once, instead of in each worker; warn of a misspelt name."""
    for variable in env.ALL:
        try:
            variable.get()
        except ValueError as error:
            raise UsageError(str(error)) from None
    for name, suggestion in env.misspelt(os.environ).items():
        print(f"photinus: environment variable {name} is unknown. Did you mean {suggestion}?", file=sys.stderr)


def _record(arguments: Sequence[str], program: Program) -> None:
    """Put what was typed into the environment, from where it gets into the run's config.json."""
    if program.target == _FUNCTION:  # of photinus.launch: the call goes with the process that made it
        return
    os.environ.pop(env.LAUNCH.name, None)
    text = shlex.join(mask_words(["photinus", "run", *arguments]))
    if len(text) < _LONGEST_BYTES:  # the names of thousands of files are more than a variable holds
        os.environ[env.LAUNCH.name] = text


def _start_hosts(flags: RunFlags, hostfile: str) -> int:
    """Start the job on the hosts of the host file, from here."""
    from ..run.ssh.hostfile import read_hostfile
    from ..run.ssh.start_hosts import SshOptions, start_hosts
    from ..run.supervise import supervise
    from .selection import select

    shares = select(read_hostfile(hostfile), flags)
    spec = _complete(flags.spec, flags)
    specs = [share.job(spec) for share in shares]
    options = SshOptions(flags.ssh, flags.ssh_port, flags.export)
    return start_hosts(specs, [share.host for share in shares], options, supervise)


def _start_here(flags: RunFlags) -> int:
    """Start this host's part of the job, with what a scheduler says of the other hosts."""
    from ..run.supervise import supervise
    from .detect_scheduler import place_hosts

    spec = flags.spec
    if flags.spellings.keys() & {*_CHOOSES_DEVICES}:
        from .selection import for_this_host

        spec = for_this_host(flags, count_gpus)
    return supervise(_complete(replace(spec, hosts=place_hosts(spec.hosts, os.environ)), flags))


def _complete(spec: JobSpec, flags: RunFlags) -> JobSpec:
    """Return the job with --local_rank, if the program takes it; print what the user should know of the program."""
    program = spec.program if flags.use_env else add_local_rank(spec.program)
    if program.local_rank_flag is not None:
        text = f"{program.target} takes {program.local_rank_flag}: each worker gets it (to omit it: --use-env)"
        print(f"photinus: {text}", file=sys.stderr)
    if missing := missing_packages(program):
        print(
            f"photinus: {program.target} lists packages in its header (PEP 723) that {sys.executable} lacks: "
            f"{', '.join(missing)}. `photinus run` installs nothing. With uv, and photinus in that list: `uv sync "
            f"--script {program.target}`, then `$(uv python find --script {program.target}) -m photinus run ...`",
            file=sys.stderr,
        )
    return replace(spec, program=program, choice=flags.typed(*_CHOOSES_DEVICES))
