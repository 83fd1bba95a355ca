"""The words of `photinus run` that a batch script or a manifest starts on each host: the user's, as they were typed."""

from __future__ import annotations

from collections.abc import Mapping

from ..command_line.flags import HostFlags, LogFlags, RunFlags
from ..command_line.program import Program
from ..command_line.usage import UsageError

__all__ = ["gpus_per_host", "program_words", "run_words"]


def run_words(flags: RunFlags) -> list[str]:
    """The flags that say how each host runs its workers; those that say which hosts there are, are left out.

    Raises:
        UsageError: hosts and devices are chosen by name, which the scheduler does.
    """
    selection = flags.selection
    for flag, value in (("--include", selection.include), ("--exclude", selection.exclude)):
        if value is not None:
            raise UsageError(f"{flag} {value}: the scheduler gives out hosts and devices. Leave it out.")
    words: list[str] = []
    if flags.nproc_per_node != "auto":
        words += ["--nproc-per-node", str(flags.nproc_per_node)]
    if flags.cpu:
        words.append("--cpu")
    if flags.devices is not None:
        words += ["--device", ",".join(map(str, flags.devices))]
    if flags.oversubscribe:
        words.append("--oversubscribe")
    if flags.ranks_per_gpu != RunFlags.ranks_per_gpu:
        words += ["--ranks-per-gpu", str(flags.ranks_per_gpu)]
    if selection.num_gpus is not None:
        words += ["--num-gpus", str(selection.num_gpus)]
    if flags.max_restarts != RunFlags.max_restarts:
        words += ["--max-restarts", str(flags.max_restarts)]
    if flags.stop_grace_s != RunFlags.stop_grace_s:
        words += ["--stop-grace", f"{flags.stop_grace_s:g}"]
    if flags.preempt_after_s is not None:
        words += ["--preempt-after", f"{flags.preempt_after_s:g}"]
    if flags.use_env:
        words.append("--use-env")
    waits = {
        "join_timeout": (flags.hosts.join_timeout_s, HostFlags.join_timeout_s),
        "last_call_timeout": (flags.hosts.last_call_s, HostFlags.last_call_s),
    }
    changed = [f"{name}={value:g}" for name, (value, default) in waits.items() if value != default]
    if changed:
        words += ["--rdzv-conf", ",".join(changed)]
    return words + _log_words(flags.logs)


def program_words(program: Program) -> list[str]:
    """The script or module with its arguments, as they stand at the end of the command line."""
    head = {"script": [], "module": ["-m"], "program": ["--no-python"]}[program.kind]
    return [*head, program.target, *program.arguments]


def gpus_per_host(flags: RunFlags) -> int | None:
    """GPUs of each host to ask the scheduler for: as told, else one per worker; 0 on the CPU; None: not known."""
    asked = flags.scheduler.gpus_per_node
    if asked is not None:
        if flags.cpu and asked:
            raise UsageError(f"--cpu and --gpus-per-node {asked} contradict each other: leave out one of them.")
        return asked
    if flags.cpu or flags.nproc_per_node == "cpu":
        return 0
    if flags.devices is not None:
        return len(flags.devices)
    if flags.selection.num_gpus is not None:
        return flags.selection.num_gpus
    return -(-flags.nproc_per_node // flags.ranks_per_gpu) if isinstance(flags.nproc_per_node, int) else None


def _log_words(logs: LogFlags) -> list[str]:
    words = [] if logs.log_dir is None else ["--log-dir", logs.log_dir]
    for flag, chosen in (("--redirects", logs.redirects), ("--tee", logs.tee)):
        if chosen is not None:
            words += [flag, _streams(chosen)]
    if logs.shown_local_ranks is not None:
        words += ["--local-ranks-filter", ",".join(map(str, sorted(logs.shown_local_ranks)))]
    return words


def _streams(chosen: Mapping[int, frozenset[str]]) -> str:
    """Torchrun's digits again: 1 stdout, 2 stderr, 3 both."""
    digits = {rank: str(("out" in streams) + 2 * ("err" in streams)) for rank, streams in chosen.items()}
    named = [f"{rank}:{digit}" for rank, digit in sorted(digits.items()) if rank >= 0]
    return ",".join(named) if named else digits.get(-1, "0")
