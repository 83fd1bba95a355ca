"""`photinus run --slurm`: the batch script that starts this job under Slurm, written or handed to sbatch at once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from ... import env
from ...errors import LaunchError
from ...version import __version__
from ..command_line.flags import RunFlags
from ..command_line.usage import UsageError
from .inside import fill, gpus_per_host, program_words, put, run_words

_LEAVE_S = 60  # before the end of the time limit, or a preemption
_LINE = 100
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z-]*")


def main(flags: RunFlags) -> int:
    """Writes the script to stdout, to `--output`, or to sbatch, and returns the exit code."""
    text = batch_script(flags)
    if flags.scheduler.submit:
        return _submit(text)
    return put(text, flags.scheduler.output, start="sbatch", executable=True)


def batch_script(flags: RunFlags, *, python: str = sys.executable) -> str:
    """The batch script's text; `python`: the interpreter on the hosts of the job. Raises UsageError."""
    command = [python, "-m", "photinus", "run", *run_words(flags), *program_words(flags.program)]
    return fill(
        "batch.sh.j2",
        version=__version__,
        options=_options(flags),
        secret_name=env.JOB_SECRET.name,
        python=shlex.quote(python),
        command=_break_lines(command),
        has_dollars=any(set(word) & set("$`") for word in command),
    )


def _options(flags: RunFlags) -> list[str]:
    asked = flags.scheduler
    own = {_own_option(text) for text in asked.sbatch}
    least, most = flags.hosts.nnodes or (1, 1)
    gpus = gpus_per_host(flags)
    workers = flags.nproc_per_node if isinstance(flags.nproc_per_node, int) else gpus
    options = {
        "--job-name": asked.name or Path(flags.program.target).stem or "photinus",
        "--nodes": str(least) if least == most else f"{least}-{most}",
        "--ntasks-per-node": "1",
        "--time": asked.time,
        "--partition": asked.partition,
        "--gpus-per-node": str(gpus) if gpus else None,
        # At least a core for each worker; Slurm would give the launcher one for all of them.
        "--cpus-per-task": str(workers) if workers else None,
        "--exclusive": None if workers else "",  # as many workers as the host has devices: the whole host
        "--open-mode": "append",
        "--requeue": "",
        "--signal": f"B:USR1@{_LEAVE_S}",
    }
    ours = {name: value for name, value in options.items() if not own & {name, *_INSTEAD.get(name, ())}}
    shown = [f"{name}={_quote(value)}" if value else name for name, value in ours.items() if value is not None]
    return [*shown, *asked.sbatch]


# What a user may say in other words: then ours is left out. Short names stand for long ones.
_INSTEAD = {
    "--job-name": {"-J"},
    "--nodes": {"-N"},
    "--time": {"-t"},
    "--partition": {"-p"},
    "--gpus-per-node": {"--gres", "--gpus", "-G", "--gpus-per-task", "--gpus-per-socket"},
    "--cpus-per-task": {"-c", "--exclusive", "--cpus-per-gpu"},
    "--exclusive": {"-c", "--cpus-per-task", "--cpus-per-gpu", "--oversubscribe", "-s"},
    "--requeue": {"--no-requeue"},
}
_OURS = {
    **dict.fromkeys(("--nodes", "-N"), "use --nnodes"),
    **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), "use --nproc-per-node"),
    **dict.fromkeys(("--array", "-a"), "one script per training"),
}


def _own_option(text: str) -> str:
    """The name of an option for sbatch."""
    match = _OPTION.match(text)
    if match is None or "\n" in text:
        raise UsageError(f"--sbatch {text!r}: needs an option of sbatch on one line, like --sbatch --mem=64G.")
    if match[0] in _OURS:
        raise UsageError(f"--sbatch {text}: photinus sets this itself; {_OURS[match[0]]}.")
    return match[0]


def _quote(value: str) -> str:
    """An option's value as sbatch reads it from a comment: shell-like words."""
    if re.fullmatch(r"[\w.:,@%+/=-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _break_lines(command: list[str]) -> str:
    """The command for the shell, over several lines where it is long; a flag and its value stay together."""
    pieces: list[str] = []
    for before, word in zip(["", *command], command, strict=False):
        if before.startswith("-") and not word.startswith("-"):
            pieces[-1] += f" {shlex.quote(word)}"
        else:
            pieces.append(shlex.quote(word))
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > _LINE:
            lines.append("")
        lines[-1] += f" {piece}" if lines[-1] else piece
    return " \\\n    ".join(lines)


def _submit(text: str) -> int:
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "--submit needs sbatch, which is not in PATH here. Run this on a login node of the cluster, or write the "
            "script with --output FILE and hand it to sbatch there."
        )
    # The job runs in this folder, with this environment, as it would with a file.
    ended = subprocess.run(["sbatch"], input=text.encode("utf-8", "surrogateescape"), cwd=os.getcwd(), check=False)
    if ended.returncode != 0:
        raise LaunchError(
            f"sbatch refused the script (exit code {ended.returncode}), see above; leave out --submit to read it",
            exit_code=ended.returncode,
        )
    return 0
