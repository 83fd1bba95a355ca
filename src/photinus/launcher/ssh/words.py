"""The words of `photinus run` for one host of a job that was typed in one place."""

from __future__ import annotations

from collections.abc import Mapping

from ..command_line.flags import HostFlags, LogFlags, RunFlags
from ..command_line.usage import UsageError
from .selection import Share

__all__ = ["words_for"]


def words_for(
    flags: RunFlags, share: Share, *, host_rank: int = 0, hosts: int = 1, leader: str = "", port: int = 0
) -> list[str]:
    """What stands after `photinus run` on this host: flags and program, without all that chose hosts.

    Args:
        flags: what the user typed.
        share: what the job gets of this host.
        host_rank, hosts: which host of how many; for one alone, nothing is said of leader and port.
        leader, port: where the first host listens.

    Raises:
        UsageError: --nproc-per-node asks for more workers than the host has slots.
    """
    words = _workers(flags, share)
    plain = RunFlags
    if flags.cpu:
        words.append("--cpu")
    if flags.oversubscribe:
        words.append("--oversubscribe")
    if flags.ranks_per_gpu != plain.ranks_per_gpu:
        words += ["--ranks-per-gpu", str(flags.ranks_per_gpu)]
    if flags.max_restarts != plain.max_restarts:
        words += ["--max-restarts", str(flags.max_restarts)]
    if flags.stop_grace_s != plain.stop_grace_s:
        words += ["--stop-grace", repr(flags.stop_grace_s)]
    if flags.preempt_after_s is not None:
        words += ["--preempt-after", f"{flags.preempt_after_s:g}"]
    if flags.use_env:
        words.append("--use-env")
    if hosts > 1:
        words += ["--nnodes", str(hosts), "--node-rank", str(host_rank)]
        words += ["--master-addr", leader, "--master-port", str(port)]
    words += _rendezvous(flags.hosts)
    words += _logs(flags.logs)
    program = flags.program
    if program.kind == "module":
        return [*words, "-m", program.target, *program.arguments]
    if program.kind == "program":
        words.append("--no-python")
    return [*words, program.target, *program.arguments]


def _workers(flags: RunFlags, share: Share) -> list[str]:
    wanted = flags.nproc_per_node
    if isinstance(wanted, int):
        if share.count is not None and wanted > share.count:
            raise UsageError(
                f"--nproc-per-node {wanted} asks for {wanted} workers on each host, but {share.host.name} has "
                f"{share.count} slot{'s' * (share.count != 1)} for this job"
                + (f" ({share.host.where})." if share.host.where else ".")
            )
        devices = share.devices[:wanted] if share.devices is not None else None
        count: int | None = wanted
    elif wanted != "auto":
        return ["--nproc-per-node", wanted]
    else:
        devices, count = share.devices, share.count
    if devices is not None and not flags.cpu:
        return ["--device", ",".join(map(str, devices))]
    if count is None:
        return []
    return ["--num-gpus" if share.gpus and not flags.cpu else "--nproc-per-node", str(count)]


def _rendezvous(hosts: HostFlags) -> list[str]:
    plain = HostFlags()
    words = ["--rdzv-id", hosts.job_id] if hosts.job_id is not None else []
    options = []
    if hosts.join_timeout_s != plain.join_timeout_s:
        options.append(f"join_timeout={hosts.join_timeout_s!r}")
    if hosts.last_call_s != plain.last_call_s:
        options.append(f"last_call_timeout={hosts.last_call_s!r}")
    if hosts.heartbeat_timeout_s != plain.heartbeat_timeout_s:
        options.append(f"heartbeat_timeout={hosts.heartbeat_timeout_s!r}")
    return [*words, "--rdzv-conf", ",".join(options)] if options else words


def _logs(logs: LogFlags) -> list[str]:
    words = ["--log-dir", logs.log_dir] if logs.log_dir is not None else []
    if logs.redirects is not None:
        words += ["--redirects", _streams(logs.redirects)]
    if logs.tee is not None:
        words += ["--tee", _streams(logs.tee)]
    if logs.shown_local_ranks is not None:
        words += ["--local-ranks-filter", ",".join(map(str, sorted(logs.shown_local_ranks)))]
    return words


def _streams(chosen: Mapping[int, frozenset[str]]) -> str:
    """Torchrun's spelling: one digit for all ranks, or LOCAL_RANK:DIGIT,... for some."""
    digits = {rank: str(("out" in streams) + 2 * ("err" in streams)) for rank, streams in chosen.items()}
    if set(digits) == {-1}:
        return digits[-1]
    return ",".join(f"{rank}:{digit}" for rank, digit in sorted(digits.items()) if rank >= 0)
