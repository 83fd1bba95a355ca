"""Runs one rank of `photinus.launch`: python -m photinus.run.function CALL ANSWERS

Both are memory files of the process that launched, so that nothing is left behind, however that ends. CALL holds its
sys.path and the call, function and arguments pickled by value; ANSWERS gets what each rank returned, or how it failed.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import cloudpickle

from .local.worker import describe, raised_by

# The file begins with the place where the last whole answer ends: half an answer of a killed rank is not read.
_END_BYTES = 8


def read_answers(answers: BinaryIO) -> dict[int, tuple[str, bytes]]:
    """The last answer of each rank, in rank order: ("result", pickled), ("error", JSON), or ("begun", nothing)."""
    answers.seek(0)
    end, found = int.from_bytes(answers.read(_END_BYTES), "little"), {}
    while answers.tell() < end:
        rank, kind, data = pickle.load(answers)
        found[rank] = (kind, data)
    return dict(sorted(found.items()))


def _answer(path: str, kind: str, data: bytes = b"") -> None:
    with open(path, "r+b") as answers:
        fcntl.flock(answers, fcntl.LOCK_EX)
        answers.seek(int.from_bytes(answers.read(_END_BYTES), "little") or _END_BYTES)
        pickle.dump((int(os.environ["RANK"]), kind, data), answers)
        end = answers.tell()
        answers.flush()
        answers.seek(0)
        answers.write(end.to_bytes(_END_BYTES, "little"))


def _load(call: str) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The function and its arguments.

    What it uses of the caller's __main__ (a notebook's cells) is put here, where pickle looks for it by name.
    """
    with open(call, "rb") as file:
        sys.path[:] = pickle.load(file)
        function, arguments, keywords = cloudpickle.load(file)
    names = {each.__name__: each for each in _subclasses(object)} | getattr(function, "__globals__", {})
    for name, value in names.items():
        if getattr(value, "__module__", None) == "__main__":
            globals().setdefault(name, value)
    return function, arguments, keywords


def _subclasses(base: type) -> Iterator[type]:
    found: list[type] = type.__subclasses__(base)
    for each in found:
        yield each
        yield from _subclasses(each)


def main(call: str, answers: str) -> None:
    """Calls the function and keeps what it returns."""
    _answer(answers, "begun")  # takes the place of what an attempt before this one said
    function, arguments, keywords = _load(call)
    try:
        value = function(*arguments, **keywords)
        pickled = cloudpickle.dumps(value)
    except BaseException as error:
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
        _answer(answers, "error", json.dumps(describe(error, text, 1, time.monotonic(), raised_by(error))).encode())
        raise
    _answer(answers, "result", pickled)


if __name__ == "__mp_main__":  # of a process that the function starts by spawn, and that gets such names too
    _load(sys.argv[1])
if __name__ == "__main__":
    main(*sys.argv[1:])
