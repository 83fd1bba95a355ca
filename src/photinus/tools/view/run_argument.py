"""RUN on the command line: the folder of a run, something in it, a folder with runs in it, or nothing at all."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import UsageError
from ...runlog.run import DEPTH, FILES, is_run, newest_run
from ...words import closest


def run_folder(command: str, argument: str | None) -> Path:
    """The folder of the run that is meant; `argument` None: the newest below the working directory. Raises UsageError.

    `command` stands in messages: "top" or "report".
    """
    below = Path(os.path.expanduser("." if argument is None else argument))
    if argument is not None:
        if not below.exists():
            raise UsageError(f"photinus {command} {argument}: there is no such folder.{_hint(below)}")
        if below.is_file():
            below = below.parent
        if is_run(below):
            return below
        if below.name == "checkpoints" and is_run(below.parent):
            return below.parent
    found = newest_run(below)
    if found is not None:
        return found
    where = "here" if argument is None else f"in {argument}"
    raise UsageError(
        f"photinus {command}: there is no run {where} ({below.resolve()}, and down to {DEPTH} folders below it). A "
        f"run's folder is what the script gives as out=..., with {FILES[-1]} in it: photinus {command} FOLDER."
    )


def _hint(path: Path) -> str:
    folder = path.parent
    near = closest(path.name, [each.name for each in folder.iterdir() if each.is_dir()]) if folder.is_dir() else None
    return f" Did you mean {folder / near}?" if near else ""
