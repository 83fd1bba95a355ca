"""Every PHOTINUS_ variable, declared once.

An explicit argument always beats a variable, and a variable beats the default. Variables of the field
(RANK, WORLD_SIZE, ...) are read in `photinus.job`, which knows the launchers that set them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from .words import closest

T = TypeVar("T")

_OURS = "PHOTINUS_"
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable: its name, how its text becomes a value, its default, and what it is for."""

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str
    other_name: str = ""  # read where the first is not set

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The value in force (of another environment than this process's, when given).

        Raises:
            ValueError: its text cannot be parsed; names the variable.
        """
        variables = os.environ if environ is None else environ
        text = variables.get(self.name) or variables.get(self.other_name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"environment variable {self.name}={text!r}: {error} ({self.meaning})") from None


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise ValueError("needs a number of seconds above 0")


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise ValueError("needs a whole number above 0")


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"needs one of {', '.join(words)}")
        return text

    return parse


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("needs 0 or 1")
    return text == "1"


def _levels(text: str) -> tuple[int, ...]:
    sizes = (
        () if text == "unmeasured" else tuple(int(word) if word.strip().isdecimal() else 0 for word in text.split(","))
    )
    if any(size < 2 for size in sizes) or any(size & (size - 1) for size in sizes[:-1]):
        raise ValueError("needs sizes from 2 on, all but the last powers of two, like 4,2, or unmeasured")
    return sizes


def _text(name: str, meaning: str) -> Variable[str | None]:
    return Variable(name, str, None, meaning)


EXPECTED_WORLD_SIZE: Variable[int | None] = Variable(
    "PHOTINUS_WORLD_SIZE",
    _count,
    None,
    "expected world size; set by `photinus run`, checked by photinus.init and by the backend",
)
TIMEOUT_S: Variable[float] = Variable(
    "PHOTINUS_TIMEOUT_S", _seconds, 300.0, "timeout in seconds of a collective, unless you give another"
)
GRACE_S: Variable[float] = Variable(
    "PHOTINUS_GRACE_S",
    _seconds,
    120.0,
    "seconds without a sign of life (stopped, swapped out, frozen) after which other ranks count a rank as lost",
)
WAITING_S: Variable[float] = Variable(
    "PHOTINUS_WAITING_S",
    _seconds,
    5.0,
    "seconds before a waiting rank prints which ranks and which operation it waits for",
)
STRICT_SITES: Variable[bool] = Variable(
    "PHOTINUS_STRICT_SITES",
    _switch,
    False,
    "1: equal calls from different source lines, which show ranks out of step, are an error instead of a warning",
)
RANKS_PER_GPU: Variable[int] = Variable(
    "PHOTINUS_RANKS_PER_GPU",
    _count,
    1,
    "number of ranks that may share a GPU (to test a job of several ranks on one GPU); `photinus run` sets it for "
    "--ranks-per-gpu",
)
FULL_TRACEBACK: Variable[bool] = Variable(
    "PHOTINUS_FULL_TRACEBACK",
    _switch,
    False,
    "1: the traceback of an uncaught error also shows the frames inside Photinus",
)
COMPARE_DATA: Variable[bool] = Variable(
    "PHOTINUS_COMPARE_DATA",
    _switch,
    True,
    "0: do not compare a few samples of the ranks' data sets, which have to be equal",
)
HOST_ID = _text(
    "PHOTINUS_HOST_ID", "identity of this host; ranks with the same identity share memory (default: detected)"
)
INTERFACE: Variable[tuple[str, ...]] = Variable(
    "PHOTINUS_INTERFACE",
    lambda text: tuple(name.strip() for name in text.split(",") if name.strip()),
    (),
    "network cards (eth0,eth1) over which ranks of several hosts exchange tensors (default: GLOO_SOCKET_IFNAME, which "
    "`photinus run` sets, else the card that reaches the other hosts)",
)
LEVELS: Variable[tuple[int, ...] | None] = Variable(
    "PHOTINUS_LEVELS",
    _levels,
    None,
    "groups in which hosts exchange: sizes whose product is the number of hosts, like 2,2 for four hosts; or "
    "unmeasured: by the number of hosts alone (default: by speeds measured while the group starts)",
)
BACKEND: Variable[str] = Variable(
    "PHOTINUS_BACKEND", str, "auto", "torch.distributed backend that photinus.init uses when none is given"
)
INSTRUCTION_SET: Variable[str | None] = Variable(
    "PHOTINUS_INSTRUCTION_SET",
    _one_of("baseline", "neon", "avx2", "avx512"),
    None,
    "vector instructions that the engine adds with, neon on ARM; read once by the engine, in native/kernels/choose.cc "
    "(default: the best that the processor has)",
)
JOB_SECRET = _text(
    "PHOTINUS_JOB_SECRET",
    "secret text that only the launchers of one job on several hosts know; never passed to workers (ranks that srun or "
    "mpirun started use it to find only each other)",
)
LAUNCH = _text(
    "PHOTINUS_LAUNCH",
    "the command line of `photinus run` that started this process; set by it, and written into a run's config.json",
)
PREEMPT_AT_STEP: Variable[int | None] = Variable(
    "PHOTINUS_PREEMPT_AT_STEP",
    _count,
    None,
    "to test preemption: rank 0 suspends the job after this step, in the first attempt",
)
WORKER_FILES = _text(
    "PHOTINUS_WORKER_FILES",
    "memory files in which a worker reports its step and its errors to the launcher, and those of all workers of this "
    "host for snapshots; set by `photinus run`",
)
OUT = _text(
    "PHOTINUS_OUT",
    "folder of the run in which the attempt before ended, and its number in the script; set by `photinus run`, for "
    "scripts that name the folder by time or pid",
)
ATTEMPT: Variable[int] = Variable(
    "PHOTINUS_ATTEMPT",
    int,
    0,
    "number of earlier starts of the workers, also without a failure (a suspension, a new host); set by `photinus "
    "run` (default: torchrun's TORCHELASTIC_RESTART_COUNT)",
    "TORCHELASTIC_RESTART_COUNT",
)
JOB_ID: Variable[str] = Variable("TORCHELASTIC_RUN_ID", str, "", "the job's name; set by the launcher")

ALL: tuple[Variable[object], ...] = tuple(each for each in list(globals().values()) if isinstance(each, Variable))


def misspelt(environ: Mapping[str, str]) -> dict[str, str]:
    """Names that begin like ours and are none of them, but come near one: which one was probably meant."""
    ours = {each.name.removeprefix(_OURS): each.name for each in ALL if each.name.startswith(_OURS)}
    suggestions = {}
    for name in environ:
        rest = name.removeprefix(_OURS)
        if rest != name and rest not in ours and (near := closest(rest, ours, cutoff=0.7)):
            suggestions[name] = ours[near]
    return suggestions
