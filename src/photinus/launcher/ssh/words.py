"""The words of `photinus run` for one host of a job that was typed in one place."""

from __future__ import annotations

from ..command_line.flags import RunFlags
from ..command_line.usage import UsageError
from .selection import Share

__all__ = ["host_words"]

# What chose the hosts and their devices, or is said anew for each host.
_LEFT_OUT = {
    *("--hostfile", "--include", "--exclude", "--num-nodes", "--num-gpus", "--nproc-per-node", "--master-addr"),
    *("--master-port", "--ssh", "--ssh-port", "--export", "--dry-run", "-m"),
}


def host_words(
    flags: RunFlags, share: Share, *, host_rank: int = 0, hosts: int = 1, leader: str = "", port: int = 0
) -> list[str]:
    """What stands after `photinus run` on this host: flags and program as typed, without all that chose hosts.

    Args:
        flags: what the user typed.
        share: what the job gets of this host.
        host_rank, hosts: which host of how many; for one alone, nothing is said of leader and port.
        leader, port: where the first host listens.

    Raises:
        UsageError: --nproc-per-node asks for more workers than the host has slots.
    """
    words = _workers(flags, share)
    words += [f"{name}={text}" if text else name for name, (_, text) in flags.given.items() if name not in _LEFT_OUT]
    if hosts > 1:
        words += ["--nnodes", str(hosts), "--node-rank", str(host_rank)]
        words += ["--master-addr", leader, "--master-port", str(port)]
    module = ["-m"] if flags.program.kind == "module" else []
    return [*words, *module, flags.program.target, *flags.program.arguments]


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
