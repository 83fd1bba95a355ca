"""The loop of a rank that is measured: asleep in a read from FOLDER/RANK.in until it gets a command. Needs only Python.

It answers each command with a line of JSON on FOLDER/RANK.out:

    prepare TYPE BYTES   frees the tensors; the next ones have this many bytes
    run PATH CALLS       a tenth as many to warm up, then the mean of the calls: seconds, and what they use (getrusage)
    quit

What a path is, each program of a rank says. (native/bench/driven.cc speaks the same in C++.)
"""

from __future__ import annotations

import gc
import json
import os
import resource
import time
from collections.abc import Callable


def pin(rank: int) -> None:
    """Binds this thread, and none that runs already, to the usable core whose turn it is."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def _open(pipe: str, flags: int) -> int:
    """Opens a pipe whose other end is open: to wait for that would be for ever, if who asks was killed meanwhile."""
    opened = os.open(pipe, flags | os.O_NONBLOCK)
    os.set_blocking(opened, True)
    return opened


def serve(
    rank: int,
    folder: str,
    version: str,
    prepare: Callable[[str, int], None],
    call_of: Callable[[str], Callable[[], object]],
    barrier: Callable[[], object],
) -> None:
    """Answers commands, by the pipes of this rank in the folder, until `quit` or their end.

    Args:
        version: what the contestant is, for the report.
        prepare: frees tensors, and makes new ones of (type, bytes) now or in `call_of`.
        call_of: the function without arguments that does one call on a path.
        barrier: returns when all ranks have called it.
    """
    out, commands_in = _open(f"{folder}/{rank}.out", os.O_WRONLY), _open(f"{folder}/{rank}.in", os.O_RDONLY)
    with open(out, "w") as answers, open(commands_in) as commands:

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
                before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
                for _ in range(calls):
                    call()
                seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
                kernel_s = after.ru_stime - before.ru_stime
                answer(
                    s=seconds / calls,
                    cpu_s=(after.ru_utime - before.ru_utime + kernel_s) / calls,
                    kernel_s=kernel_s / calls,
                    faults=(after.ru_minflt - before.ru_minflt) / calls,
                    peak_kib=after.ru_maxrss,
                )
            else:
                return
