"""`photinus run`: reads the command line, looks at the program, and starts the job.

Help and wrong use are answered before anything slow is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from .flags import HELP, parse_run
from .program import check_program

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the job that the words after `photinus run` describe, and returns the exit code.

    Raises:
        UsageError: the words cannot be carried out as they are.
        DeviceError: fewer GPUs than asked for.
        LaunchError: workers could not be started, or one failed for good; carries the exit code.
    """
    flags = parse_run(arguments)
    if flags.program is None:
        print(HELP)
        return 0
    check_program(flags.program)

    from .supervise import supervise

    return supervise(flags, flags.program)
