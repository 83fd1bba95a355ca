"""The flags of `photinus bench`, and the checks that need no machine."""

from __future__ import annotations

import os
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path

from ...cli.flag_values import positive_seconds, whole_number
from ...cli.parser import Parser

_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
_BACKENDS = ("photinus", "gloo", "nccl", "ucc")
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_SIZES = tuple(4 ** (power + 1) * 1024 for power in range(8))
_MOST_RANKS = 1024
_UNITS = {"B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30}

_ABOUT = """\
Measure collectives on this host over every backend that works here, in turns.
Compare them with plain memory copies by the same ranks. Print what limits each
backend, and which one to choose. Separate lists by commas."""
_MORE = """\
examples:
  photinus bench
  photinus bench --nproc-per-node 4 --ops all_reduce,all_gather --sizes 1M,16M
  photinus bench --plot bandwidth.png
  photinus bench --device cuda
  photinus bench --explain --hosts 4x8 --latency-us 25 --rate-gbit 10

algbw is the size divided by the time. busbw counts the bytes that each rank has
to move for it, as nccl-tests do: compare it between operations and numbers of
ranks. The size is that of the whole tensor: reduce_scatter's input on each
rank, all_gather's output.

exit code: 0; 1 if a backend that you asked for failed; 2 for wrong use, or if
the device does not exist."""


def parser() -> Parser:
    """The command line. A value that is None is to be found out here."""
    parser = Parser("bench", "[flags]", about=_ABOUT, more=_MORE)
    ranks = "number of ranks, at least 2. default: one per GPU, or per usable core (2 to 8)"
    parser.add("--nproc-per-node N", ranks, whole_number(2, _MOST_RANKS), dest="ranks")
    where = "device of the tensors. cuda: the fastest backend is saved, and backend auto uses it from then on; with "
    where += "fewer GPUs than ranks, ranks share GPUs, without nccl. default: cpu (nccl: GPUs)"
    parser.add("--device cpu|cuda", where, one_of=("cpu", "cuda"), default="cpu")
    operations = f"operations: {', '.join(_OPERATIONS)}. default: all_reduce"
    parser.add("--ops LIST", operations, some_of=_OPERATIONS, default=("all_reduce",), dest="operations")
    sizes = "sizes of the tensor, like 4K,1M,64M. default: 4K, 16K, ... 64M"
    parser.add("--sizes LIST", sizes, _sizes, default=_SIZES, dest="sizes_bytes")
    parser.add("--dtype TYPE", f"one of {', '.join(DTYPES)}. default: float32", one_of=tuple(DTYPES), default="float32")
    parser.add("--backends LIST", f"backends: {', '.join(_BACKENDS)}. default: all that work here", some_of=_BACKENDS)
    parser.add("--seconds S", "approximate time of each measurement. default: 0.3", positive_seconds, default=0.3)
    parser.add("--json", "print the figures as JSON", dest="as_json")
    parser.add("--plot FILE.png", "draw bandwidth over size", _picture)
    how = "measure nothing: print how the engine runs each call, why, and the time by its model (docs/scale.md)"
    parser.add("--explain", how)
    where = "with --explain: ranks of each host, like 4x8 or 3+1. default: all ranks on one host"
    parser.add("--hosts LIST", where, _hosts, default=(), only_with=("--explain",))
    lasts = "with --explain: latency between hosts, one way, in microseconds, as a job logs it at its start. default: 3"
    parser.add("--latency-us US", lasts, positive_seconds, default=3.0, only_with=("--hosts",))
    rate = "with --explain: bandwidth of a host's network card in Gbit/s. default: 200"
    parser.add("--rate-gbit GBIT", rate, positive_seconds, default=200.0, only_with=("--hosts",))
    each = "timeout of each measurement. default: 120"
    parser.add("--timeout SECONDS", each, positive_seconds, default=120.0, dest="timeout_s")
    return parser


def parse_bench(arguments: Sequence[str]) -> Namespace:
    """Reads the words after `photinus bench`; raises UsageError."""
    return parser().parse(arguments)


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
