"""The words of `photinus run` that a batch script or a manifest starts on each host: the user's, as they were typed."""

from __future__ import annotations

from ..command_line.flags import HostFlags, RunFlags
from ..command_line.program import Program
from ..command_line.usage import UsageError

__all__ = ["gpus_per_host", "program_words", "run_words"]

_OF_WORKERS = (
    *("--nproc-per-node", "--cpu", "--device", "--oversubscribe", "--num-gpus"),
    *("--max-restarts", "--stop-grace", "--preempt-after", "--use-env"),
    *("--log-dir", "--redirects", "--tee", "--local-ranks-filter"),
)


def run_words(flags: RunFlags) -> list[str]:
    """The flags that say how each host runs its workers; those that say which hosts there are, are left out.

    Raises:
        UsageError: hosts and devices are chosen by name, which the scheduler does.
    """
    selection = flags.selection
    for flag, value in (("--include", selection.include), ("--exclude", selection.exclude)):
        if value is not None:
            raise UsageError(f"{flag} {value}: the scheduler gives out hosts and devices. Leave it out.")
    words = [word for flag in _OF_WORKERS if flag in flags.given for word in (flag, flags.given[flag][1]) if word]
    if flags.ranks_per_gpu != RunFlags.ranks_per_gpu:  # which may come from the environment here
        words += ["--ranks-per-gpu", str(flags.ranks_per_gpu)]
    waits = {
        "join_timeout": (flags.hosts.join_timeout_s, HostFlags.join_timeout_s),
        "last_call_timeout": (flags.hosts.last_call_s, HostFlags.last_call_s),
    }
    changed = [f"{name}={value:g}" for name, (value, default) in waits.items() if value != default]
    return [*words, "--rdzv-conf", ",".join(changed)] if changed else words


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
