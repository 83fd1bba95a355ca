"""The command `photinus report`: which runs, and where the page goes."""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path

from ...cli.parser import Parser
from ...errors import UsageError
from ...runlog.files import write_atomically
from ...runlog.run import Run, run_folder
from ...runlog.units import size

_POINTS = 300

_ABOUT = """\
Write one HTML page about a run: curves of loss and metrics, speed, where the
time of a step goes on each rank, events, options, versions and machine. The
page needs no network and no other file, so you can mail it. Several RUNs share
the plots, and the options in which they differ are listed.

RUN is the run's folder, or a folder with runs: then the newest is taken.
default: the newest run below the current folder. A run that still trains, or
was interrupted, is shown as far as it got."""
_MORE = """\
examples:
  photinus report runs/digits
  photinus report runs/baseline runs/larger-batch -o compared.html
  photinus report -o - | gzip > report.html.gz

exit code: 0; 2 for wrong use, or if the page could not be written."""


def parser() -> Parser:
    """The command line."""
    parser = Parser("report", "[RUN ...] [-o FILE.html]", about=_ABOUT, more=_MORE)
    parser.add("runs", SUPPRESS, metavar="RUN", nargs="*")
    where = "file to write. default: report.html in the run's folder (several: in this folder); - is standard output"
    parser.add("--out -o --output FILE.html", f"(or -o) {where}")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Writes the page, and says where it is; returns the exit code."""
    options = parser().parse(arguments)
    for word in options.runs:
        if word.endswith((".html", ".htm")) and not os.path.isdir(word):
            raise UsageError(f"photinus report {word}: to write the page there, type -o {word}.")
    folders = [run_folder("report", name) for name in options.runs or (None,)]
    for i, folder in enumerate(folders):
        if folder.resolve() in {other.resolve() for other in folders[:i]}:
            raise UsageError(f"photinus report: {folder} is given twice.")
    runs = [Run(folder, points=_POINTS) for folder in folders]
    for run in runs:
        run.refresh()

    from .page import page

    text = page(runs).encode(errors="backslashreplace").decode()  # names of folders may be no UTF-8
    if options.out == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.buffer.flush()
        return 0
    path = Path(options.out) if options.out else (folders[0] if len(runs) == 1 else Path(".")) / "report.html"
    if path.is_dir():
        example = path / "report.html"
        raise UsageError(f"photinus report --out {path}: that is a folder; give a file, such as {example}.")
    if not path.parent.is_dir():
        raise UsageError(f"photinus report --out {path}: there is no folder {path.parent}.")
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UsageError(f"photinus report: {path} could not be written: {error.strerror or error}.") from error
    print(f"{path} ({size(len(text.encode()))}): open it in a browser; it needs nothing else")
    return 0
