"""`photinus run --kubernetes`: the manifest that starts this job on a cluster, for `kubectl apply`."""

from __future__ import annotations

import shlex
import sys

from ...version import __version__
from ..command_line.flags import RunFlags
from ..command_line.program import Program
from ..command_line.usage import UsageError
from .job_set import job_set
from .pods import job_parts, secret_object
from .pytorch_job import pytorch_job
from .written import write_text
from .yaml_text import yaml_text

__all__ = ["main", "manifest"]

_KINDS = {"pytorchjob": pytorch_job, "jobset": job_set}
_NEEDS = {"pytorchjob": "Kubeflow's training operator", "jobset": "JobSet"}


def main(flags: RunFlags, program: Program) -> int:
    """Writes the manifest to stdout or to `--output`, and returns the exit code.

    Raises:
        UsageError: an option cannot be carried out, or the file exists.
    """
    if program.target in _KINDS and program.kind == "script":
        raise UsageError(f"--kubernetes {program.target}: write it as --kubernetes={program.target}.")
    text = manifest(flags, program)
    if flags.scheduler.output is None:
        print(text, end="")
        return 0
    path = write_text(flags.scheduler.output, text)
    print(f"photinus: wrote {path}; start it with: kubectl apply -f {shlex.quote(str(path))}", file=sys.stderr)
    return 0


def manifest(flags: RunFlags, program: Program) -> str:
    """The manifest's text: a Secret, and the job.

    Raises:
        UsageError: an option cannot be carried out.
    """
    kind = flags.scheduler.kubernetes or "pytorchjob"
    parts = job_parts(flags, program)
    head = (
        f"# Written by `photinus run --kubernetes={kind}` (photinus {__version__}); it needs {_NEEDS[kind]}.\n"
        f"# The Secret below belongs to this job alone: keep this file to yourself, and write a new one for each job.\n"
    )
    return head + yaml_text([secret_object(parts), _KINDS[kind](parts)])
