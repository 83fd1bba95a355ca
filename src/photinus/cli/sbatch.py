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
from ..job.spec import Program
from ..version import __version__
from .flags import RunFlags

_LEAVE_S = 60  # before the end of the time limit, or a preemption
_LINE = 100
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z-]*")
_SAID_ON_EACH_HOST = (
    *("--nproc-per-node", "--cpu", "--device", "--oversubscribe", "--num-gpus"),
    *("--max-restarts", "--stop-grace", "--preempt-after", "--use-env", "--rdzv-conf", "--master-port", "--rdzv-id"),
    *("--log-dir", "--redirects", "--tee", "--local-ranks-filter"),
)


def main(flags: RunFlags) -> int:
    """Writes the script to stdout, to `--output`, or to sbatch, and returns the exit code."""
    text = batch_script(flags)
    if flags.scheduler.submit:
        return _submit(text)
    return _put(text, flags.scheduler.output, start="sbatch", executable=True)


def batch_script(flags: RunFlags, *, python: str = sys.executable) -> str:
    """The batch script's text; `python`: the interpreter on the hosts of the job. Raises UsageError."""
    command = [python, "-m", "photinus", "run", *_run_words(flags), *_program_words(flags.program)]
    return _fill(
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
    gpus = _gpus_per_host(flags)
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


def _run_words(flags: RunFlags) -> list[str]:
    """The flags that say how each host runs its workers; those that say which hosts there are, are left out.

    Raises:
        UsageError: hosts and devices are chosen by name, which the scheduler does.
    """
    for flag in ("--include", "--exclude"):
        if flag in flags.given:
            raise UsageError(f"{flag} {flags.given[flag][1]}: the scheduler gives out hosts and devices. Leave it out.")
    words = [
        word for flag in _SAID_ON_EACH_HOST if flag in flags.given for word in (flag, flags.given[flag][1]) if word
    ]
    if flags.ranks_per_gpu != RunFlags.ranks_per_gpu:  # which may come from the environment here
        words += ["--ranks-per-gpu", str(flags.ranks_per_gpu)]
    return words


def _program_words(program: Program) -> list[str]:
    """The script or module with its arguments, as they stand at the end of the command line."""
    head = {"script": [], "module": ["-m"], "program": ["--no-python"]}[program.kind]
    return [*head, program.target, *program.arguments]


def _gpus_per_host(flags: RunFlags) -> int | None:
    """GPUs of each host to ask the scheduler for: as told, else one per worker; 0 on the CPU; None: not known."""
    asked = flags.scheduler.gpus_per_node
    if asked is not None:
        if flags.cpu and asked:
            raise UsageError(f"--cpu and --gpus-per-node {asked} contradict each other: leave out one of them.")
        return asked
    if flags.cpu or flags.nproc_per_node == "cpu":
        return 0
    if flags.devices is not None:
        return len(flags.devices)
    if flags.selection.num_gpus is not None:
        return flags.selection.num_gpus
    return -(-flags.nproc_per_node // flags.ranks_per_gpu) if isinstance(flags.nproc_per_node, int) else None


def _fill(template: str, **values: object) -> str:
    """Return the text of a template of this folder."""
    files = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # it is not a page
    )
    return files.get_template(template).render(values)


def _put(text: str, target: str | None, *, start: str, executable: bool = False) -> int:
    """Puts the text on stdout, or into a new file that its owner alone can read; returns the exit code, 0.

    `start`: the command for the file. UsageError: it exists with other content, or cannot be written.
    """
    data = text.encode("utf-8", "surrogateescape")  # words as they were typed, whatever the locale
    if target is None:
        sys.stdout.buffer.write(data)
        return 0
    path = Path(target)
    try:
        if not (path.is_file() and path.read_bytes() == data):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700 if executable else 0o600)
            with os.fdopen(opened, "wb") as file:
                file.write(data)
    except FileExistsError:
        raise UsageError(f"--output {target}: the file exists. Remove it, or name another.") from None
    except OSError as error:
        raise UsageError(f"--output {target}: cannot be written: {error.strerror}.") from None
    print(f"photinus: wrote {path}; start it with: {start} {shlex.quote(str(path))}", file=sys.stderr)
    return 0


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
