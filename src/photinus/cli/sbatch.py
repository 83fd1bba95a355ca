"""`photinus run --slurm`: the batch script that starts this job under Slurm, written or handed to sbatch at once."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jinja2

from .. import env
from ..errors import LaunchError, UsageError
from ..version import __version__
from .flags import RunFlags

_LEAVE_S = 60  # before the end of the time limit, or a preemption
_LINE = 100
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z-]*")
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


def main(flags: RunFlags) -> int:
    """Write the script to stdout, to `--output`, or to sbatch, and return the exit code."""
    text = batch_script(flags).encode("utf-8", "surrogateescape")  # words as they were typed, whatever the locale
    if flags.submit:
        _submit(text)
    elif flags.output is not None:
        _write(text, flags.output)
    else:
        sys.stdout.buffer.write(text)
    return 0


def batch_script(flags: RunFlags, *, python: str = sys.executable) -> str:
    """Return the batch script's text; `python`: the interpreter on the hosts of the job.

    Raises:
        UsageError: the flags choose what the scheduler does, or contradict each other.
    """
    for flag in ("--include", "--exclude"):
        if flag in flags.spellings:
            raise UsageError(f"{flags.typed(flag)}: the scheduler chooses hosts and devices. Remove the flag.")
    per_gpu = flags.spec.ranks_per_gpu
    # It may come from the environment here, by which the script's options are made.
    more = ["--ranks-per-gpu", str(per_gpu)] if per_gpu > 1 and not flags.spec.cpu and flags.num_gpus is None else []
    command = [python, "-m", "photinus", "run", *flags.words_on_a_host(*more, without=("--ranks-per-gpu",))]
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # it is not a page
    )
    return templates.get_template("batch.sh.j2").render(
        version=__version__,
        options=_options(flags),
        secret_name=env.JOB_SECRET.name,
        python=shlex.quote(python),
        command=_break_lines(command),
        has_dollars=any(set(word) & set("$`") for word in command),
    )


def _options(flags: RunFlags) -> list[str]:
    spec = flags.spec
    own = set()
    for text in flags.sbatch:
        match = _OPTION.match(text)
        if match is None or "\n" in text:
            raise UsageError(f"--sbatch {text!r}: needs an option of sbatch on one line, like --sbatch --mem=64G.")
        if match[0] in _OURS:
            raise UsageError(f"--sbatch {text}: photinus sets this itself; {_OURS[match[0]]}.")
        own.add(match[0])
    least, most = spec.hosts.nnodes or (1, 1)
    gpus = _gpus_per_host(flags)
    workers = spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else gpus
    options = {
        "--job-name": flags.name or Path(spec.program.target).stem or "photinus",
        "--nodes": str(least) if least == most else f"{least}-{most}",
        "--ntasks-per-node": "1",
        "--time": flags.time,
        "--partition": flags.partition,
        "--gpus-per-node": str(gpus) if gpus else None,
        # At least a core for each worker; Slurm would give the launcher one for all of them.
        "--cpus-per-task": str(workers) if workers else None,
        "--exclusive": None if workers else "",  # as many workers as the host has devices: the whole host
        "--open-mode": "append",
        "--requeue": "",
        "--signal": f"B:USR1@{_LEAVE_S}",
    }
    ours = {name: value for name, value in options.items() if not own & {name, *_INSTEAD.get(name, ())}}
    words = [f"{name}={_quote(value)}" if value else name for name, value in ours.items() if value is not None]
    return [*words, *flags.sbatch]


def _quote(value: str) -> str:
    """Return an option's value as sbatch reads it from a comment: shell-like words."""
    if re.fullmatch(r"[\w.:,@%+/=-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _break_lines(command: list[str]) -> str:
    """Return the command for the shell, over several lines where it is long; a flag and its value stay together."""
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


def _gpus_per_host(flags: RunFlags) -> int | None:
    """Return how many GPUs of each host to request: 0 on the CPU; None: not known."""
    requested, spec = flags.gpus_per_node, flags.spec
    if spec.cpu and requested:
        raise UsageError(f"--cpu and --gpus-per-node {requested} are mutually exclusive: remove one of them.")
    if requested is not None:
        return requested
    if spec.cpu or spec.nproc_per_node == "cpu":
        return 0
    if spec.devices is not None:
        return len(spec.devices)
    if flags.num_gpus is None and isinstance(spec.nproc_per_node, int):
        return -(-spec.nproc_per_node // spec.ranks_per_gpu)
    return flags.num_gpus


def _write(text: bytes, target: str) -> None:
    """Write a new file that its owner alone can read and start; the same file may be there already."""
    path = Path(target)
    try:
        if not (path.is_file() and path.read_bytes() == text):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "wb") as file:
                file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {target}: the file exists. Remove it, or name another.") from None
    except OSError as error:
        raise UsageError(f"--output {target}: cannot be written: {error.strerror}.") from None
    print(f"photinus: wrote {path}; start it with: sbatch {shlex.quote(str(path))}", file=sys.stderr)


def _submit(text: bytes) -> None:
    if shutil.which("sbatch") is None:
        raise LaunchError(
            "--submit needs sbatch, which is not in PATH here. Run this on a login node of the cluster, or write the "
            "script with --output FILE and submit it there."
        )
    # The job runs in this folder, with this environment, as it would with a file.
    code = subprocess.run(["sbatch"], input=text, check=False).returncode
    if code != 0:
        raise LaunchError(
            f"sbatch refused the script (exit code {code}), see above; remove --submit to read it", exit_code=code
        )
