"""`photinus run`: makes a `JobSpec` of the command line, and has it started here or on the hosts of a file.

Help and wrong use are answered before anything slow is imported.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

from ..job.spec import JobSpec
from ..words import mask_words
from .flags import parse_run
from .flags import run_parser as parser  # noqa: F401 (the pages read it)

_FUNCTION = "photinus.run.function"
_LONGEST_BYTES = 120 << 10
_CHOOSES_DEVICES = ("--include", "--exclude", "--num-gpus")


def main(arguments: Sequence[str]) -> int:
    """Run the job that the words after `photinus run` describe, and return the exit code."""
    from .selection import for_this_host, select

    flags = parse_run(arguments)
    text = shlex.join(mask_words(["photinus", "run", *arguments]))
    # Of photinus.launch the call is kept. The names of thousands of files are more than a variable holds.
    typed = text if flags.spec.program.target != _FUNCTION and len(text) < _LONGEST_BYTES else ""
    flags = replace(flags, spec=replace(flags.spec, typed=typed, choice=flags.typed(*_CHOOSES_DEVICES)))
    if flags.hostfile is None:
        from .detect_scheduler import place_hosts

        spec = for_this_host(flags)
        return _start(replace(spec, hosts=place_hosts(spec.hosts, os.environ)))
    from ..run.plan import check_request
    from ..run.ssh.hostfile import read_hostfile
    from ..run.ssh.start_hosts import SshOptions, start_hosts

    check_request(flags.spec, os.environ)
    shares = select(read_hostfile(flags.hostfile), flags)
    options = SshOptions(flags.ssh, flags.ssh_port, flags.export)
    return start_hosts([share.job(flags.spec) for share in shares], [share.host for share in shares], options, _start)


def _start(spec: JobSpec) -> int:
    from ..run.plan import plan
    from ..run.supervise import supervise

    return supervise(plan(spec, os.environ))
