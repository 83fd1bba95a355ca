"""What the ranks of every contestant have in common: asleep in a read until told to run. Needs only Python.

Rank r reads commands from FOLDER/r.in and answers each with a line of JSON on FOLDER/r.out (turns.py speaks the other
side; native/bench/driven.cc is the same in C++):

    prepare TYPE BYTES   frees the tensors and makes new ones
    run PATH CALLS       a tenth as many to warm up, then the mean of so many
    quit
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable


def pin(rank: int) -> None:
    """Binds this thread, and none that runs already, to the usable core whose turn it is."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def serve(
    rank: int,
    folder: str,
    version: str,
    prepare: Callable[[str, int], None],
    call_of: Callable[[str], Callable[[], object]],
    barrier: Callable[[], object],
) -> None:
    """Answers commands until `quit` or the end of the pipe.

    Args:
        rank: this rank; names its pipes.
        folder: where the pipes lie.
        version: what the contestant is, for the report.
        prepare: makes tensors of (type, bytes).
        call_of: the function without arguments that does one call on a path.
        barrier: returns when all ranks have called it.
    """
    with open(f"{folder}/{rank}.out", "w") as answers, open(f"{folder}/{rank}.in") as commands:

        def answer(**facts: object) -> None:
            print(json.dumps(facts), file=answers, flush=True)

        answer(ready=version)
        gc.disable()
        for line in commands:
            verb, *words = line.split()
            if verb == "prepare":
                prepare(words[0], int(words[1]))
                answer()
            elif verb == "run":
                call, calls = call_of(words[0]), int(words[1])
                for _ in range(calls // 10 + 1):
                    call()
                barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    call()
                answer(s=(time.perf_counter() - start) / calls)
            else:
                return
