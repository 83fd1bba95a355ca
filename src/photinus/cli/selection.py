"""Which hosts and devices a job gets: --include, --exclude, --num-nodes and --num-gpus, with DeepSpeed's meaning.

A device's number is its slot in the host file. Hosts keep the file's order, whatever the order in which they are
named. Where DeepSpeed takes fewer hosts or more devices than asked for without a word, this refuses with both numbers.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..run.ssh.hostfile import Host
from ..words import hint
from .flags import RunFlags, SelectionFlags

# What chose the hosts and their devices, or is said anew for each host.
_LEFT_OUT = {
    *("--hostfile", "--include", "--exclude", "--num-nodes", "--num-gpus", "--nproc-per-node", "--master-addr"),
    *("--master-port", "--ssh", "--ssh-port", "--export", "--dry-run", "-m"),
}

_ITEM = re.compile(r"(?P<name>[^:@\s]+|\[[0-9a-fA-F:.%\w]+\])(?::(?P<slots>[\d,\s-]*))?")


@dataclass(frozen=True)
class Share:
    """What the job gets of one host.

    `devices`: the GPUs that were chosen by number, if they were, in that order. `count`: workers; None: as many as the
    host finds right. `gpus`: each worker needs a GPU, because GPUs were asked for.
    """

    host: Host
    devices: tuple[int, ...] | None = None
    count: int | None = None
    gpus: bool = False


def select(hosts: Sequence[Host], selection: SelectionFlags) -> tuple[Share, ...]:
    """What the job gets of each host; hosts of which it gets nothing are left out.

    Raises:
        UsageError: a host or slot that is not in the file, more hosts or devices than there are, or nothing left.
    """
    if selection.include is not None:
        named = _parse_names("--include", selection.include, hosts)
        chosen = [(host, named[host.name]) for host in hosts if host.name in named]
        return tuple(
            Share(h, slots, len(slots), gpus=True) if slots else Share(h, count=h.slots) for h, slots in chosen
        )
    if selection.exclude is not None:
        named = _parse_names("--exclude", selection.exclude, hosts)
        shares = [_exclude(host, named.get(host.name)) for host in hosts]
        kept = tuple(share for share in shares if share is not None)
        if not kept:
            raise UsageError(f"--exclude {selection.exclude} leaves no device of no host.")
        return kept
    if selection.num_nodes is not None:
        if selection.num_nodes > len(hosts):
            raise UsageError(
                f"--num-nodes {selection.num_nodes} asks for {selection.num_nodes} hosts, but {selection.hostfile} "
                f"names {len(hosts)}."
            )
        hosts = hosts[: selection.num_nodes]
    if selection.num_gpus is None:
        return tuple(Share(host, count=host.slots) for host in hosts)
    for host in hosts:
        if host.slots is not None and host.slots < selection.num_gpus:
            raise UsageError(
                f"--num-gpus {selection.num_gpus} asks for {selection.num_gpus} devices of each host, but {host.name} "
                f"has slots={host.slots} ({host.where})."
            )
    return tuple(Share(host, count=selection.num_gpus, gpus=True) for host in hosts)


def for_this_host(flags: RunFlags, count_gpus: Callable[[], int]) -> RunFlags:
    """The same job with --include, --exclude or --num-gpus carried out, where there is no host file and so one host.

    Raises:
        UsageError: another host is named, or nothing is left.
    """
    selection = flags.selection
    devices: tuple[int, ...] | None = None
    if selection.num_gpus is not None:
        devices = tuple(range(selection.num_gpus))
    elif selection.include is not None:
        devices = _local_slots("--include", selection.include) or None  # all
    elif selection.exclude is not None:
        excluded = _local_slots("--exclude", selection.exclude)
        if not excluded:
            raise UsageError(
                f"--exclude {selection.exclude} leaves no host: without --hostfile there is only this one."
            )
        present = count_gpus()
        devices = tuple(number for number in range(present) if number not in excluded)
        beyond = [number for number in excluded if number >= present]
        if beyond or not devices:
            why = f"there is no GPU {beyond[0]}" if beyond else "none is left"
            raise UsageError(f"--exclude {selection.exclude}: {why}; torch sees {present} GPUs here.")
    plain = replace(flags, selection=SelectionFlags())
    if devices is None:
        return plain
    if isinstance(flags.nproc_per_node, int) and flags.nproc_per_node != len(devices):
        raise UsageError(
            f"--include {selection.include} chooses {len(devices)} devices, but --nproc-per-node "
            f"{flags.nproc_per_node} asks for {flags.nproc_per_node} workers: leave out one of the two."
        )
    if flags.cpu:
        return replace(plain, nproc_per_node=len(devices))
    return replace(plain, devices=devices)


def flags_text(selection: SelectionFlags) -> str:
    """What the user typed to choose devices, for messages."""
    chosen = {"--include": selection.include, "--exclude": selection.exclude, "--num-gpus": selection.num_gpus}
    return " ".join(f"{flag} {value}" for flag, value in chosen.items() if value is not None)


def _exclude(host: Host, slots: tuple[int, ...] | None) -> Share | None:
    if slots is None:
        return Share(host, count=host.slots)
    if not slots:  # the whole host
        return None
    if host.slots is None:
        raise UsageError(
            f"--exclude names devices of {host.name}, but {host.where} does not say how many it has: write "
            f"`{host.destination} slots=N` there."
        )
    kept = tuple(slot for slot in range(host.slots) if slot not in slots)
    return Share(host, devices=kept, count=len(kept), gpus=True) if kept else None


def _parse_names(flag: str, text: str, hosts: Sequence[Host]) -> Mapping[str, tuple[int, ...]]:
    """What `_items` reads, of hosts and slots that are in the file."""
    known = {host.name: host for host in hosts}
    named = _items(flag, text)
    for name, slots in named.items():
        if name not in known:
            near = hint(name, known, f" It names {', '.join(known)}.")
            raise UsageError(f"{flag} {text}: host {name} is not in the host file.{near}")
        present = known[name].slots
        beyond = [slot for slot in slots if present is not None and slot >= present]
        if beyond:
            raise UsageError(
                f"{flag} {text}: {name} has no slot {beyond[0]}; {known[name].where} says slots={present}, which are "
                f"numbered 0 to {present - 1 if present else 0}."
            )
    return named


def _local_slots(flag: str, text: str) -> tuple[int, ...]:
    """The devices of this host; () for all."""
    named = _items(flag, text)
    for name in named:
        if name not in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
            raise UsageError(
                f"{flag} {text}: there is no host file, so localhost is all there is. Name {name} in a file and give "
                f"it with --hostfile."
            )
    return tuple(dict.fromkeys(itertools.chain(*named.values()))) if all(named.values()) else ()


def _items(flag: str, text: str) -> dict[str, tuple[int, ...]]:
    """Host -> the slots that stand behind it, each once, in the order typed; () for the whole host."""
    named: dict[str, tuple[int, ...]] = {}
    for item in text.split("@"):
        matched = _ITEM.fullmatch(item.strip())
        if matched is None:
            raise UsageError(
                f"{flag} {text}: {item!r} is not understood. It takes hosts with or without devices, like a:0,1@b."
            )
        name, slots = matched["name"].strip("[]"), _slots(flag, text, matched["slots"])
        is_whole = not slots or named.get(name) == ()
        named[name] = () if is_whole else tuple(dict.fromkeys([*named.get(name, ()), *slots]))
    return named


def _slots(flag: str, text: str, listed: str | None) -> tuple[int, ...]:
    if listed is None:
        return ()
    numbers: list[int] = []
    for word in listed.split(","):
        matched = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", word)
        first, last = (int(matched[1]), int(matched[2] or matched[1])) if matched else (1, 0)
        if first > last:
            raise UsageError(f"{flag} {text}: {word!r} is no device. They are numbers from 0, like 0,2 or 0-3.")
        numbers += range(first, last + 1)
    return tuple(numbers)


def host_words(
    flags: RunFlags, share: Share, *, host_rank: int = 0, hosts: int = 1, leader: str = "", port: int = 0
) -> list[str]:
    """What stands after `photinus run` on this host: flags and program as typed, without all that chose hosts.

    For one host alone, nothing is said of leader and port, where the first host listens.

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
