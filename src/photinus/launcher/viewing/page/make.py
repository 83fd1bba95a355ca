"""The command `photinus report`: which runs, and where the page goes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ....errors import LaunchError
from ....runlog.run import Run
from ....runlog.tables import write_atomically
from ...command_line.usage import UsageError, closest
from ..run_argument import run_folder
from ..units import size

__all__ = ["FLAGS", "HELP", "main"]

FLAGS = ("--out", "--help")

_POINTS = 300

HELP = """\
usage: photinus report [RUN ...] [-o FILE.html]

Makes one HTML page of a run: curves of loss and metrics, speed, where the time
of a step goes on each rank, what happened when, options, versions and machine.
The page needs no network and no other file, so it can be mailed. Several RUNs
are drawn over each other, with the options in which they differ.

RUN is a run's folder, or a folder with runs in it, of which the newest is
taken. default: the newest below this folder. A run that still trains, or was
cut off, is shown as far as it came.

flags:
  -o, --out FILE.html  where to write. default: report.html in the run's folder,
                       or here for several; - is standard output
  --help               this text

examples:
  photinus report runs/digits
  photinus report runs/baseline runs/larger-batch -o compared.html
  photinus report -o - | gzip > report.html.gz

exit code: 0; 1 when the page could not be written; 2 for wrong use."""


@dataclass(frozen=True)
class _Options:
    runs: tuple[str, ...]
    out: str | None


def main(arguments: Sequence[str]) -> int:
    """Writes the page, and says where it is; returns the exit code.

    Raises:
        UsageError: wrong words, or a run is not there.
        LaunchError: the page could not be written.
    """
    options = _options(list(arguments))
    if options is None:
        print(HELP)
        return 0
    folders = [run_folder("report", given) for given in options.runs or (None,)]
    twice = next((folder for i, folder in enumerate(folders) if folder.resolve() in _resolved(folders[:i])), None)
    if twice is not None:
        raise UsageError(f"photinus report: {twice} is meant twice.")
    runs = [Run(folder, points=_POINTS) for folder in folders]
    for run in runs:
        run.refresh()

    from .page import page

    text = page(runs)
    if options.out == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
        return 0
    path = Path(options.out) if options.out else (folders[0] if len(runs) == 1 else Path(".")) / "report.html"
    if path.is_dir():
        raise UsageError(
            f"photinus report --out {path}: that is a folder; give a file, such as {path / 'report.html'}."
        )
    if not path.parent.is_dir():
        raise UsageError(f"photinus report --out {path}: there is no folder {path.parent}.")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise LaunchError(f"the page could not be written to {path}: {error.strerror or error}") from error
    print(f"{path} ({size(len(text.encode()))}): open it in a browser; it needs nothing else")
    return 0


def _resolved(folders: Sequence[Path]) -> set[Path]:
    return {folder.resolve() for folder in folders}


def _options(words: list[str]) -> _Options | None:
    """The command line; None for help."""
    runs: list[str] = []
    out: str | None = None
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--help", "-h"):
            return None
        if name in ("-o", "--out", "--output"):
            out = value if equals else words.pop(0) if words else ""
            if not out:
                raise UsageError(f"{name} needs a file, such as {name} out.html, or - for standard output.")
        elif word.startswith("-"):
            near = closest(name, FLAGS)
            hint = f" Did you mean {near}?" if near else " See `photinus report --help`."
            raise UsageError(f"photinus report does not know {name}.{hint}")
        elif word.endswith((".html", ".htm")) and not os.path.isdir(word):
            raise UsageError(f"photinus report {word}: to write the page there, type -o {word}.")
        else:
            runs.append(word)
    return _Options(tuple(runs), out)
