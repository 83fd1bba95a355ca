"""What `photinus bench` measures: its flags, and the checks that need no machine."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from ..command_line.flag_values import positive_seconds, whole_number
from ..command_line.parser import Parser

_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_BACKENDS = ("photinus", "gloo", "nccl", "ucc")
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_SIZES = tuple(4 ** (power + 1) * 1024 for power in range(8))
_MOST_RANKS = 1024
_UNITS = {"B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30}

_ABOUT = """\
Measures collectives on this host, over every backend that works here, taking
turns in one run, beside what the ranks reach when they only copy memory. Says
what limits each, and which one to choose. Lists are separated by commas."""
_MORE = """\
examples:
  photinus bench
  photinus bench --nproc-per-node 4 --ops all_reduce,all_gather --sizes 1M,16M
  photinus bench --plot bandwidth.png
  photinus bench --device cuda
  photinus bench --explain --hosts 4x8 --latency-us 25 --rate-gbit 10

algbw is the tensor's bytes divided by the time; busbw counts what each rank has
to move for it, as nccl-tests do, so that it can be compared between operations
and numbers of ranks. The tensor is the whole one: what all ranks together give
to reduce_scatter, or get from all_gather, is divided among them.

exit code: 0; 1 when a backend that was asked for failed; 2 for wrong use, or
a device that is absent."""


def parser() -> Parser:
    """The command line. A value that is None is to be found out here."""
    made = Parser("bench", "[flags]", about=_ABOUT, more=_MORE)
    ranks = "ranks. default: one per GPU, or per usable core (2 to 8); at least 2"
    made.add("--nproc-per-node", metavar="N", dest="ranks", type=whole_number(2, _MOST_RANKS), help=ranks)
    where = "where the tensors lie. cuda: what is fastest is kept, and taken by backend auto from then on; ranks share "
    where += "GPUs where there are fewer, and nccl does not take part then. default: cpu, but nccl's on GPUs"
    made.add("--device", metavar="cpu|cuda", one_of=("cpu", "cuda"), default="cpu", help=where)
    operations = f"of {', '.join(_OPERATIONS)}. default: all_reduce"
    usual = ("all_reduce",)
    made.add("--ops", metavar="LIST", dest="operations", some_of=_OPERATIONS, default=usual, help=operations)
    sizes = "like 4K,1M,64M. default: 4K to 64M in steps of 4"
    made.add("--sizes", metavar="LIST", dest="sizes_bytes", type=_sizes, default=_SIZES, help=sizes)
    types = f"{', '.join(DTYPES)}. default: float32"
    made.add("--dtype", metavar="TYPE", one_of=tuple(DTYPES), default="float32", help=types)
    backends = f"of {', '.join(_BACKENDS)}. default: all that work here"
    made.add("--backends", metavar="LIST", some_of=_BACKENDS, help=backends)
    lasts = "that each measurement lasts, about. default: 0.3"
    made.add("--seconds", metavar="S", type=positive_seconds, default=0.3, help=lasts)
    made.add("--json", action="store_true", dest="as_json", help="the figures as JSON, for programs")
    made.add("--plot", metavar="FILE.png", type=_picture, help="draw bandwidth over size")
    how = "measure nothing: print how the engine runs each call, why, and for how long by its model (docs/scale.md)"
    made.add("--explain", action="store_true", help=how)
    where = "to explain: like 4x8 or 3+1, the ranks of each host. default: all on this one"
    made.add("--hosts", metavar="LIST", type=_hosts, default=(), help=where)
    lasts = "to explain: one way between hosts, as the line at a job's start says. default: 3"
    made.add("--latency-us", metavar="US", type=positive_seconds, default=3.0, help=lasts)
    rate = "to explain: of a host's card. default: 200"
    made.add("--rate-gbit", metavar="GBIT", type=positive_seconds, default=200.0, help=rate)
    each = "for each measurement. default: 120"
    made.add("--timeout", metavar="SECONDS", dest="timeout_s", type=positive_seconds, default=120.0, help=each)
    return made


def parse_bench(arguments: Sequence[str]) -> Namespace:
    """Reads the words after `photinus bench`; raises UsageError."""
    options = parser().parse(arguments)
    Parser.refuse_without(options.given, ("--hosts",), "--explain")
    Parser.refuse_without(options.given, ("--latency-us", "--rate-gbit"), "--hosts")
    return options


def size_name(size_bytes: int) -> str:
    """Like 4 KiB or 16 MiB."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:g} {unit}"
    return f"{size_bytes} B"


def _sizes(text: str) -> tuple[int, ...]:
    found = []
    for word in text.replace(",", " ").split():
        number = word.rstrip("BKMGi")
        try:
            found.append(int(float(number) * _UNITS[word[len(number) :] or "B"]))
        except (ValueError, KeyError, OverflowError):
            raise ArgumentTypeError("needs sizes like 512, 4K, 16M or 1GiB.") from None
    if not found or min(found) < 1:
        raise ArgumentTypeError("needs at least 1 byte.")
    return tuple(found)


def _hosts(text: str) -> tuple[int, ...]:
    try:
        hosts, x, ranks = text.partition("x")
        found = (int(ranks),) * int(hosts) if x else tuple(map(int, text.split("+")))
    except ValueError:
        found = ()
    if not found or min(found) < 1 or not 2 <= sum(found) <= _MOST_RANKS:
        raise ArgumentTypeError(
            f"needs hosts x ranks, like 4x8, or the ranks of each, like 3+1; 2 to {_MOST_RANKS} ranks."
        )
    return found


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise ArgumentTypeError("the picture is a .png, .svg or .pdf file.")
    if not os.access(folder := path.absolute().parent, os.W_OK):  # seen before minutes of measuring
        raise ArgumentTypeError(f"there is no folder {folder} that this user can write to.")
    return path
