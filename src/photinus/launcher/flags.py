"""The flags of `photinus run`: a table, its help, and a parser that knows what people meant.

Dashes and underscores are the same, `--flag value` and `--flag=value` too. Everything from the script's name on
belongs to the script. Torchrun's and other launchers' flags that are not here are named with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .program import Program
from .usage import UsageError, closest

__all__ = ["FLAGS", "HELP", "RunFlags", "parse_run"]


@dataclass(frozen=True)
class RunFlags:
    """What the user asked `photinus run` to do.

    Attributes:
        program: the script or module with its arguments; None when help was asked for.
        nproc_per_node: workers on this host: a number, or "auto", "gpu", "cpu".
        max_restarts: how often all workers are started anew after one has failed.
        cpu: hide the GPUs from the workers.
        devices: the GPUs that the workers see, by number; None: all.
        dry_run: only say what would be started.
        stop_grace_s: seconds that workers get between SIGTERM and SIGKILL after a failure.
    """

    program: Program | None
    nproc_per_node: int | str = "auto"
    max_restarts: int = 3
    cpu: bool = False
    devices: tuple[int, ...] | None = None
    dry_run: bool = False
    stop_grace_s: float = 5.0


@dataclass(frozen=True)
class _Flag:
    name: str
    value: str  # what stands for the value in messages; empty for a switch
    meaning: tuple[str, ...]


_FLAGS = (
    _Flag(
        "--nproc-per-node",
        "N|auto|gpu|cpu",
        (
            "workers on this host. auto: one per GPU, or one per usable",
            "core where there is no GPU. default: auto",
        ),
    ),
    _Flag(
        "--max-restarts",
        "K",
        ("start all workers anew, at most K times, when one fails.", "default: 3"),
    ),
    _Flag("--cpu", "", ("train on the CPU: the workers see no GPU",)),
    _Flag("--device", "0,3", ("the workers see these GPUs only, one each",)),
    _Flag("--dry-run", "", ("only say what would be started, with which environment",)),
    _Flag(
        "--stop-grace",
        "SECONDS",
        ("time to leave for the other workers after one failed,", "before they are killed. default: 5"),
    ),
    _Flag("--standalone", "", ("accepted as in torchrun; one host is what is run anyway",)),
    _Flag("--nnodes", "N", ("accepted as in torchrun; 1 in this version",)),
    _Flag("--use-env", "", ("accepted as in torch.distributed.launch; it is always so",)),
    _Flag("--monitor-interval", "SECONDS", ("accepted as in torchrun; a worker's end is seen at once",)),
    _Flag("--no-python", "", ("what follows is a program, not a Python script",)),
    _Flag("-m", "MODULE", ("run a module, as `python -m` does; ends the flags",)),
    _Flag("--help", "", ("this text",)),
)
FLAGS = tuple(flag.name for flag in _FLAGS)
_BY_NAME = {flag.name: flag for flag in _FLAGS} | {"-h": _Flag("--help", "", ())}
_ALSO = {"--module": "-m"}

_SEVERAL_HOSTS = (
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--local-addr",
    "--hostfile",
    "--num-nodes",
    "--num-machines",
    "--machine-rank",
    "--main-process-ip",
    "--main-process-port",
)
_NUMBER_OF_WORKERS = ("--num-processes", "--num-proc", "--num-gpus", "--nprocs", "--devices", "-n", "-np")
_NOT_HERE = (
    "--tee",
    "--redirects",
    "--log-dir",
    "--local-ranks-filter",
    "--start-method",
    "--role",
    "--run-path",
    "--include",
    "--exclude",
)


def _help() -> str:
    lines = [
        "usage: photinus run [flags] script.py [arguments of the script]",
        "       photinus run [flags] -m module [arguments of the module]",
        "",
        "Starts the script once per device of this host, each process with its rank and",
        "world size. When one fails, says which and of what, and starts all anew from",
        "the last checkpoint.",
        "",
        "flags (dashes or underscores, --flag value or --flag=value):",
    ]
    for flag in _FLAGS:
        head = f"  {flag.name} {flag.value}".rstrip()
        lines.extend(f"{head if number == 0 else '':<21}{text}" for number, text in _wrapped(head, flag.meaning))
    lines += [
        "",
        "examples:",
        "  photinus run train.py                       all GPUs, or all cores",
        "  photinus run --nproc-per-node 2 train.py --epochs 3",
        "  photinus run --nproc-per-node 4 --cpu -m project.train --lr 0.1",
        "",
        "exit code: 0 when all workers ended well; the first cause's own otherwise",
        "(128 + signal for a killed worker); 130 after Ctrl-C, 143 after SIGTERM; 2 for",
        "wrong use.",
    ]
    return "\n".join(lines)


def _wrapped(head: str, meaning: tuple[str, ...]) -> list[tuple[int, str]]:
    """The lines beside a flag; a head wider than its column stands on a line of its own."""
    texts = meaning if len(head) < 20 else ("", *meaning)
    return list(enumerate(texts))


HELP = _help()


def parse_run(arguments: Sequence[str]) -> RunFlags:
    """Reads the words after `photinus run`.

    Raises:
        UsageError: an unknown flag, a wrong or missing value, a flag given twice, contradictory flags, or no script.
    """
    words = list(arguments)
    given: dict[str, tuple[str, str]] = {}  # flag -> (spelling, value)
    program: Program | None = None
    while words:
        word = words.pop(0)
        if word == "--":
            continue
        if not word.startswith("-") or word == "-":
            program = Program("program" if "--no-python" in given else "script", word, tuple(words))
            break
        spelling, equals, value = word.partition("=")
        flag = _find(spelling)
        if flag.value and not equals:
            # A flag where the value should be; but -1 is a value (and a wrong one).
            if not words or (words[0].startswith("-") and not words[0][1:2].isdigit()):
                raise UsageError(f"{spelling} needs a value: {flag.value}.")
            value = words.pop(0)
        elif not flag.value and equals:
            raise UsageError(f"{spelling} takes no value, but got {value!r}.")
        if flag.name in given and given[flag.name][1] != value:
            raise UsageError(f"{flag.name} is given twice: {given[flag.name][1]} and {value}.")
        given[flag.name] = (spelling, value)
        if flag.name == "-m":
            program = Program("module", value, tuple(words))
            break
    if "--help" in given:
        return RunFlags(None)
    flags = RunFlags(
        program=program,
        nproc_per_node=_worker_count(*given.get("--nproc-per-node", ("", "auto"))),
        max_restarts=_whole_number(*given.get("--max-restarts", ("", "3")), least=0),
        cpu="--cpu" in given,
        devices=_devices(*given["--device"]) if "--device" in given else None,
        dry_run="--dry-run" in given,
        stop_grace_s=_seconds(*given.get("--stop-grace", ("", "5"))),
    )
    if program is not None and program.kind == "module" and "--no-python" in given:
        raise UsageError("--no-python and -m contradict each other: a module is Python. Leave out one of them.")
    if "--monitor-interval" in given:
        _seconds(*given["--monitor-interval"])
    if "--nnodes" in given and given["--nnodes"][1] not in ("1", "1:1"):
        raise UsageError(_several_hosts(" ".join(given["--nnodes"])))
    if flags.cpu and flags.nproc_per_node == "gpu":
        raise UsageError("--cpu and --nproc-per-node gpu contradict each other: leave out one of them.")
    if flags.devices is not None:
        _check_devices(flags, given)
    if program is None:
        raise UsageError(
            "which script? Usage: photinus run [flags] script.py [arguments]; `photinus run --help` lists the flags."
        )
    return flags


def _find(spelling: str) -> _Flag:
    name = spelling.replace("_", "-") if spelling.startswith("--") else spelling
    name = _ALSO.get(name, name)
    flag = _BY_NAME.get(name)
    if flag is not None:
        return flag
    if name in _NUMBER_OF_WORKERS:
        raise UsageError(f"unknown flag {spelling}. The number of workers is --nproc-per-node N.")
    if name in _NOT_HERE:
        raise UsageError(f"{spelling} is another launcher's flag; this version of photinus run does not have it.")
    ours = [flag.name for flag in _FLAGS if flag.name.startswith("--")]
    near = closest(name, [*ours, *_SEVERAL_HOSTS, *_NOT_HERE])
    if name in _SEVERAL_HOSTS or near in _SEVERAL_HOSTS:
        meant = "" if name in _SEVERAL_HOSTS else f"unknown flag {spelling}; torchrun spells it {near}. "
        raise UsageError(meant + _several_hosts(near or name))
    if near in ours:
        raise UsageError(f"unknown flag {spelling}. Did you mean {near}?")
    raise UsageError(
        f"unknown flag {spelling}. `photinus run --help` lists the flags; the script's own stand after its name."
    )


def _several_hosts(flag: str) -> str:
    return (
        f"{flag} comes with several hosts: this version runs the workers of one host, and finds address and port "
        f"by itself. Leave it out."
    )


def _worker_count(spelling: str, text: str) -> int | str:
    if text in ("auto", "gpu", "cpu"):
        return text
    try:
        count = int(text)
    except ValueError:
        raise UsageError(f"{spelling} {text}: needs a whole number above 0, or auto, gpu or cpu.") from None
    if count < 1:
        raise UsageError(f"{spelling} {text}: needs at least 1 worker (or auto, gpu, cpu).")
    return count


def _devices(spelling: str, text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() for word in words):
        raise UsageError(f"{spelling} {text}: needs the numbers of GPUs, like 0 or 0,3 (--cpu trains without any).")
    numbers = tuple(int(word) for word in words)
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise UsageError(f"{spelling} {text}: GPU {twice} is named twice; each worker needs one of its own.")
    return numbers


def _check_devices(flags: RunFlags, given: dict[str, tuple[str, str]]) -> None:
    assert flags.devices is not None
    shown = " ".join(given["--device"])
    if flags.cpu or flags.nproc_per_node == "cpu":
        other = "--cpu" if flags.cpu else " ".join(given["--nproc-per-node"])
        raise UsageError(f"{shown} and {other} contradict each other: leave out one of them.")
    if isinstance(flags.nproc_per_node, int) and flags.nproc_per_node != len(flags.devices):
        raise UsageError(
            f"{shown} names {len(flags.devices)} GPU{'s' * (len(flags.devices) > 1)}, but "
            f"{' '.join(given['--nproc-per-node'])} asks for {flags.nproc_per_node} workers, and each needs one of its "
            f"own: leave out one of the two."
        )


def _whole_number(spelling: str, text: str, *, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise UsageError(f"{spelling} {text}: needs a whole number, {least} or more.") from None
    if number < least:
        raise UsageError(f"{spelling} {text}: needs a whole number, {least} or more.")
    return number


def _seconds(spelling: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise UsageError(f"{spelling} {text}: needs a number of seconds.") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{spelling} {text}: needs a number of seconds, 0 or more.")
    return seconds
