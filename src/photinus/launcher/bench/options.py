"""What `photinus bench` measures: its flags, their help, and the checks that need no machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..command_line.usage import UsageError, closest

__all__ = ["BACKENDS", "DTYPES", "HELP", "OPERATIONS", "VALUED", "Options", "parse_bench", "size_name"]

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
BACKENDS = ("photinus", "gloo", "nccl", "ucc")
DTYPES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8}
_UNITS = {"B": 1, "K": 1 << 10, "KiB": 1 << 10, "M": 1 << 20, "MiB": 1 << 20, "G": 1 << 30, "GiB": 1 << 30}
_DEFAULT_SIZES = tuple(4 ** (power + 1) * 1024 for power in range(8))

HELP = """\
usage: photinus bench [flags]

Measures collectives on this host, over every backend that works here, taking
turns in one run, beside what the ranks reach when they only copy memory. Says
what limits each, and which one to choose.

flags (lists are separated by commas):
  --nproc-per-node N  ranks. default: one per GPU, or per usable core (2 to 8);
                      at least 2
  --device cpu|cuda   where the tensors lie. cuda: photinus does not take part
                      yet; ranks share GPUs where there are fewer, nccl then
                      does not. default: cpu, but nccl's on GPUs
  --ops LIST          of all_reduce, reduce_scatter, all_gather, broadcast,
                      all_to_all. default: all_reduce
  --sizes LIST        like 4K,1M,64M. default: 4K to 64M in steps of 4
  --dtype TYPE        float32, float64, bfloat16, float16, int32, int64.
                      default: float32
  --backends LIST     of photinus, gloo, nccl, ucc. default: all that work here
  --seconds S         that each measurement lasts, about. default: 0.3
  --json              the figures as JSON, for programs
  --plot FILE.png     draw bandwidth over size
  --timeout SECONDS   for each measurement. default: 120
  --help              this text

examples:
  photinus bench
  photinus bench --nproc-per-node 4 --ops all_reduce,all_gather --sizes 1M,16M
  photinus bench --plot bandwidth.png

algbw is the tensor's bytes divided by the time; busbw counts what each rank has
to move for it, as nccl-tests do, so that it can be compared between operations
and numbers of ranks. The tensor is the whole one: what all ranks together give
to reduce_scatter, or get from all_gather, is divided among them.

exit code: 0; 1 when a backend that was asked for failed; 2 for wrong use."""


@dataclass(frozen=True)
class Options:
    """What to measure. `None` for ranks and backends: to be found out here.

    Attributes:
        ranks: number of processes.
        device: "cpu" or "cuda".
        operations, sizes_bytes, dtype: what is measured.
        backends: which take part.
        seconds: that a measurement lasts, about.
        timeout_s: for each.
        as_json: print JSON.
        plot: picture to write.
    """

    ranks: int | None = None
    device: str = "cpu"
    operations: tuple[str, ...] = ("all_reduce",)
    sizes_bytes: tuple[int, ...] = _DEFAULT_SIZES
    dtype: str = "float32"
    backends: tuple[str, ...] | None = None
    seconds: float = 0.3
    timeout_s: float = 120.0
    as_json: bool = False
    plot: Path | None = None


def parse_bench(arguments: Sequence[str]) -> Options | None:
    """Reads the words after `photinus bench`; None when help is asked for.

    Raises:
        UsageError: an unknown flag, or a value that cannot be used.
    """
    given: dict[str, str] = {}
    words = list(arguments)
    while words:
        spelling, equals, value = words.pop(0).partition("=")
        name = spelling.replace("_", "-")
        if name in ("--help", "-h"):
            return None
        if name == "--json" and not equals:
            given[name] = ""
            continue
        if name not in VALUED:
            near = closest(name, [*VALUED, "--json", "--help"])
            hint = f" Did you mean {near}?" if near else " See `photinus bench --help`."
            raise UsageError(f"photinus bench does not know {spelling}.{hint}")
        if not equals:
            if not words or words[0].startswith("--"):
                raise UsageError(f"{spelling} needs a value; see `photinus bench --help`.")
            value = words.pop(0)
        given[name] = value
    plot = Path(given["--plot"]) if "--plot" in given else None
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {plot}: the picture is a .png, .svg or .pdf file.")
    if plot is not None and not plot.absolute().parent.is_dir():
        raise UsageError(f"--plot {plot}: there is no folder {plot.absolute().parent}.")
    dtype = given.get("--dtype", "float32")
    sizes = tuple(_size(text) for text in _listed(given.get("--sizes", ""))) or _DEFAULT_SIZES
    return Options(
        ranks=int(_number("--nproc-per-node", given["--nproc-per-node"], 1)) if "--nproc-per-node" in given else None,
        device=_chosen("--device", given.get("--device", "cpu"), ("cpu", "cuda"))[0],
        operations=_chosen("--ops", given.get("--ops", "all_reduce"), OPERATIONS),
        sizes_bytes=sizes,
        dtype=_chosen("--dtype", dtype, tuple(DTYPES))[0],
        backends=_chosen("--backends", given["--backends"], BACKENDS) if "--backends" in given else None,
        seconds=_number("--seconds", given.get("--seconds", "0.3"), 0.001),
        timeout_s=_number("--timeout", given.get("--timeout", "120"), 0.001),
        as_json="--json" in given,
        plot=plot,
    )


VALUED = (
    "--nproc-per-node",
    "--device",
    "--ops",
    "--sizes",
    "--dtype",
    "--backends",
    "--seconds",
    "--plot",
    "--timeout",
)
"""The flags that take a value."""


def size_name(size_bytes: int) -> str:
    """Like 4 KiB or 16 MiB."""
    for unit in ("GiB", "MiB", "KiB"):
        if size_bytes >= _UNITS[unit]:
            return f"{size_bytes / _UNITS[unit]:g} {unit}"
    return f"{size_bytes} B"


def _size(text: str) -> int:
    number = text.rstrip("BKMGi")
    unit = text[len(number) :] or "B"
    try:
        size = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError):
        raise UsageError(f"--sizes {text}: needs a size like 512, 4K, 16M or 1GiB.") from None
    if size < 1:
        raise UsageError(f"--sizes {text}: needs at least 1 byte.")
    return size


def _listed(text: str) -> list[str]:
    return [word for word in text.replace(" ", ",").split(",") if word]


def _chosen(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    for word in _listed(text):
        if word not in known:
            near = closest(word, known)
            hint = f" Did you mean {near}?" if near else ""
            raise UsageError(f"{flag} {word}: there are {', '.join(known)}.{hint}")
    if not _listed(text):
        raise UsageError(f"{flag}: needs one or more of {', '.join(known)}.")
    return tuple(dict.fromkeys(_listed(text)))


def _number(flag: str, text: str, least: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not least <= number < float("inf") or (least == 1 and number != int(number)):
        kind = "a whole number, 1 or more" if least == 1 else "a number of seconds above 0"
        raise UsageError(f"{flag} {text}: needs {kind}.")
    return number
