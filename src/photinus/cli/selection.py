"""Choose the hosts and devices of a job: --include, --exclude, --num-nodes and --num-gpus, as in DeepSpeed.

A device's number is its slot in the host file. Hosts keep the file's order, whatever the order in which they are
named. Where DeepSpeed takes fewer hosts or more devices than asked for without a word, this refuses with both numbers.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..errors import UsageError
from ..job.spec import JobSpec
from ..run.ssh.hostfile import Host
from ..words import hint
from .flags import RunFlags

_ITEM = re.compile(r"(?P<name>[^:@\s]+|\[[0-9a-fA-F:.%\w]+\])(?::(?P<slots>[\d,\s-]*))?")


@dataclass(frozen=True)
class Share:
    """The part of one host that the job gets.

    Attributes:
        devices: the GPUs that were chosen by number, in that order; None: they were not.
        count: number of workers; None: the host chooses it.
        gpus: each worker needs a GPU, because GPUs were asked for.
    """

    host: Host
    devices: tuple[int, ...] | None = None
    count: int | None = None
    gpus: bool = False

    def job(self, spec: JobSpec) -> JobSpec:
        """Return the part of the job that runs on this host.

        Raises:
            UsageError: --nproc-per-node asks for more workers than the host has slots.
        """
        request, devices, count = spec.nproc_per_node, self.devices, self.count
        if isinstance(request, int):
            each = spec.ranks_per_gpu if self.gpus and not spec.cpu else 1
            if count is not None and (request > count * each or request % each):
                raise UsageError(
                    f"--nproc-per-node {request} asks for {request} workers on each host, but {self.host.name} has "
                    f"{count} slot{'s' * (count != 1)} for this job{f', for {each} workers each' * (each > 1)}"
                    + (f" ({self.host.where})." if self.host.where else ".")
                )
            devices, count = devices and devices[: request // each], request // each
        elif request != "auto":
            return spec
        if self.gpus and devices is None and count is not None:
            devices = tuple(range(count))
        if devices is not None:
            return replace(spec, nproc_per_node="auto", devices=devices)
        return spec if count is None else replace(spec, nproc_per_node=count)


def select(hosts: Sequence[Host], flags: RunFlags) -> tuple[Share, ...]:
    """Return what the job gets of each host; hosts of which it gets nothing are left out.

    Raises:
        UsageError: a host or slot that is not in the file, more hosts or devices than there are, or nothing left.
    """
    if flags.include is not None:
        selection = _parse_names("--include", flags.include, hosts)
        choice = [(host, selection[host.name]) for host in hosts if host.name in selection]
        return tuple(
            Share(h, slots, len(slots), gpus=True) if slots else Share(h, count=h.slots) for h, slots in choice
        )
    if flags.exclude is not None:
        selection = _parse_names("--exclude", flags.exclude, hosts)
        shares = [_exclude(host, selection.get(host.name)) for host in hosts]
        rest = tuple(share for share in shares if share is not None)
        if not rest:
            raise UsageError(f"--exclude {flags.exclude} leaves no devices.")
        return rest
    count, gpus = flags.num_nodes, flags.num_gpus
    if count is not None and count > len(hosts):
        raise UsageError(f"--num-nodes {count} needs {count} hosts, but {flags.hostfile} lists {len(hosts)}.")
    hosts = hosts[:count]
    for host in hosts:
        if gpus is not None and host.slots is not None and host.slots < gpus:
            raise UsageError(
                f"--num-gpus {gpus} needs {gpus} devices per host, but {host.name} has slots={host.slots} "
                f"({host.where})."
            )
    return tuple(Share(host, count=host.slots if gpus is None else gpus, gpus=gpus is not None) for host in hosts)


def for_this_host(flags: RunFlags) -> JobSpec:
    """Return the job with --include, --exclude or --num-gpus carried out, where there is no host file.

    Raises:
        UsageError: another host is named, or nothing is left.
    """
    if flags.num_gpus is not None:
        return replace(flags.spec, devices=tuple(range(flags.num_gpus)))
    if flags.include is not None:
        return replace(flags.spec, devices=_local_slots("--include", flags.include) or None)  # None: all
    if flags.exclude is None:
        return flags.spec
    excluded = _local_slots("--exclude", flags.exclude)
    if not excluded:
        raise UsageError(f"--exclude {flags.exclude} leaves no hosts: without --hostfile there is only this one.")
    return replace(flags.spec, without_devices=excluded)


def _exclude(host: Host, slots: tuple[int, ...] | None) -> Share | None:
    if slots is None:
        return Share(host, count=host.slots)
    if not slots:  # the whole host
        return None
    if host.slots is None:
        raise UsageError(
            f"--exclude names devices of {host.name}, but {host.where} does not list its number of slots: write "
            f"`{host.destination} slots=N` there."
        )
    rest = tuple(slot for slot in range(host.slots) if slot not in slots)
    return Share(host, devices=rest, count=len(rest), gpus=True) if rest else None


def _parse_names(flag: str, text: str, hosts: Sequence[Host]) -> Mapping[str, tuple[int, ...]]:
    """Return what `_items` reads; refuse hosts and slots that are not in the file."""
    by_name = {host.name: host for host in hosts}
    selection = _items(flag, text)
    for name, slots in selection.items():
        if name not in by_name:
            near = hint(name, by_name, f" It names {', '.join(by_name)}.")
            raise UsageError(f"{flag} {text}: host {name} is not in the host file.{near}")
        present = by_name[name].slots
        beyond = [slot for slot in slots if present is not None and slot >= present]
        if beyond:
            raise UsageError(
                f"{flag} {text}: {name} has no slot {beyond[0]}; {by_name[name].where} has slots={present}, which are "
                f"numbered 0 to {present - 1 if present else 0}."
            )
    return selection


def _local_slots(flag: str, text: str) -> tuple[int, ...]:
    """Return the devices that are named of this host; () for all."""
    selection = _items(flag, text)
    for name in selection:
        if name not in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
            raise UsageError(
                f"{flag} {text}: without --hostfile there is only localhost. List {name} in a file and give it "
                f"with --hostfile."
            )
    return tuple(dict.fromkeys(itertools.chain(*selection.values()))) if all(selection.values()) else ()


def _items(flag: str, text: str) -> dict[str, tuple[int, ...]]:
    """Return the hosts with the slots that are named of each, once, in the order typed; () for the whole host."""
    selection: dict[str, tuple[int, ...]] = {}
    for item in text.split("@"):
        matched = _ITEM.fullmatch(item.strip())
        if matched is None:
            raise UsageError(f"{flag} {text}: {item!r} is not valid. Give hosts with or without devices, like a:0,1@b.")
        name, slots = matched["name"].strip("[]"), list[int]()
        for word in [] if matched["slots"] is None else matched["slots"].split(","):
            span = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", word)
            first, last = (int(span[1]), int(span[2] or span[1])) if span else (1, 0)
            if first > last:
                raise UsageError(
                    f"{flag} {text}: {word!r} is not a device. Devices are numbers from 0, like 0,2 or 0-3."
                )
            slots += range(first, last + 1)
        is_whole = not slots or selection.get(name) == ()
        selection[name] = () if is_whole else tuple(dict.fromkeys([*selection.get(name, ()), *slots]))
    return selection
