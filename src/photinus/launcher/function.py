"""Runs one rank of `photinus.launch`: python -m photinus.launcher.function FOLDER

FOLDER, private to the job, holds the call (function and arguments, pickled by value) and gets what each rank returned.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path

import cloudpickle

from .workers.worker import describe

__all__ = ["CALL", "ERROR", "PATH", "RESULT"]

PATH, CALL, RESULT, ERROR = "path", "call", "result.{}", "error.{}"
"""Names in the folder: sys.path of the caller, the call, and per rank what it returned, or how it failed."""


def main(folder: Path) -> None:
    """Calls the function and keeps what it returns."""
    rank = os.environ["RANK"]
    sys.path[:] = (folder / PATH).read_text().split("\0")
    for old in (RESULT, ERROR):
        (folder / old.format(rank)).unlink(missing_ok=True)  # of an attempt before this one
    function, arguments, keywords = cloudpickle.loads((folder / CALL).read_bytes())
    try:
        value = function(*arguments, **keywords)
        pickled = cloudpickle.dumps(value)
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        (folder / ERROR.format(rank)).write_text(json.dumps(describe(error, text, 1, time.monotonic())))
        raise
    unfinished = folder / f"unfinished.{rank}"
    unfinished.write_bytes(pickled)
    unfinished.rename(folder / RESULT.format(rank))  # whole or not at all


if __name__ == "__main__":
    main(Path(sys.argv[1]))
