"""What batch script and manifest have in common: the words that they start on each host, templates, the file."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import jinja2

from ..command_line.flags import RunFlags
from ..command_line.program import Program
from ..command_line.usage import UsageError

# What YAML does not take as it is, or may take as a line's end.
_INVISIBLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")

_SAID_ON_EACH_HOST = (
    *("--nproc-per-node", "--cpu", "--device", "--oversubscribe", "--num-gpus"),
    *("--max-restarts", "--stop-grace", "--preempt-after", "--use-env", "--rdzv-conf", "--master-port", "--rdzv-id"),
    *("--log-dir", "--redirects", "--tee", "--local-ranks-filter"),
)


def run_words(flags: RunFlags) -> list[str]:
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


def program_words(program: Program) -> list[str]:
    """The script or module with its arguments, as they stand at the end of the command line."""
    head = {"script": [], "module": ["-m"], "program": ["--no-python"]}[program.kind]
    return [*head, program.target, *program.arguments]


def gpus_per_host(flags: RunFlags) -> int | None:
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


def fill(template: str, **values: object) -> str:
    """The text of a template of this folder; `quoted` writes text, or a list of texts, in quotes."""
    files = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # these are no pages
    )
    files.filters["quoted"] = _quote
    return files.get_template(template).render(values)


def _quote(value: object) -> str:
    return _INVISIBLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def put(text: str, target: str | None, *, start: str, executable: bool = False) -> int:
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
