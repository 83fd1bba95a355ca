"""Copies of a state in the memory of the ranks, each byte once per host, for a process to write while they train on.

Each rank copies its piece into a memory file of its own (see image.py), which it keeps: new pages cost three times as
long as the copy. The first rank of a host opens the files of all, so that they outlive the ranks.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import env
from ...job.cgroup import free_memory
from ...job.worker_files import Head
from ...job.world import World
from ...parallel.exchange.agreement import gather_per_rank, place_in_group, together
from ...parallel.exchange.tensors import tensors_in
from ...parallel.zero.split_states import is_known_split
from .durable import temporary
from .image import Content, Copy, MemoryFile

LEAST_BYTES = 64 << 20
"""Below, writing at once costs less than the process."""
_MOST_OF_MEMORY = 0.8  # of what is free
_MOST_RANKS = 250  # that write together: one message to another process carries no more descriptors


@dataclass(frozen=True)
class Copied:
    """A state in memory, as one rank sees it.

    Attributes:
        files: descriptors of the images of this host's ranks, by local rank; empty where this rank leads no writing.
        is_parted: all of the ranks' own entries can be written in parts (see parts.py).
        host, hosts: this one's number, and how many write.
        folder, token: the place of the unfinished checkpoint, and the end of its name, for the hosts to find it.
        skeletons: by rank, of all hosts, where there are several.
    """

    files: tuple[int, ...]
    is_parted: bool = False
    host: int = 0
    hosts: int = 1
    folder: str = ""
    token: str = ""
    skeletons: dict[int, bytes] = field(default_factory=dict)


class Copies:
    """The memory file of this process, and those of its host's ranks that it has opened.

    Attributes:
        host_bytes: of the last copy, of all ranks of this host.
    """

    def __init__(self) -> None:
        self._file: MemoryFile | None = None
        self._opened: dict[str, int] = {}
        self._group: tuple[Any, list[list[int]]] | None = None
        self.host_bytes = 0

    def alone(self, content: Content) -> Copied | None:
        """Copies a state that this rank has whole. Returns None where there is no room.

        Raises:
            TypeError: something in it cannot be saved.
        """
        copy, file = Copy(Head("", 0, 0, 1, 0, 1), content), self._own_file()
        if copy.bytes - file.allocated_bytes > _MOST_OF_MEMORY * free_memory():
            return None
        try:
            copy.take(file)
        except OSError:  # a limit on this process
            return None
        copy.seal()
        self.host_bytes = copy.bytes
        return Copied((self._open(_path_of(file), _identity(os.fstat(file.descriptor))),))

    def take(self, image: Callable[[], Content], folder: Path, step: int = 0) -> Copied | None:
        """Copies a state that all ranks have together, some of it in parts. All ranks call it.

        Args:
            image: makes its content, without an exchange.
            folder: to write in: hosts that see one can all write there.

        Returns:
            None where there is no room, or ranks do not see what they need of each other, or tensors
            are split as only torch knows: then it has to be gathered.

        Raises:
            TypeError, ValueError: something in it cannot be saved.
        """
        (rank, world_size), hosts = place_in_group(), self._hosts_of_group()
        own = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        with together(f"copying what to save in {folder}"):
            content = image()
            if not all(map(is_known_split, tensors_in(content.own))):  # only torch can gather it
                return None
            head = Head("", step, rank, world_size, hosts[own].index(rank), len(hosts[own]))
            copy, file = Copy(head, content), self._own_file()
        is_split = bool(content.own)
        mine: dict[str, Any] = {
            "path": _path_of(file),
            "file": _identity(os.fstat(file.descriptor)),
            "bytes": copy.bytes,
            "needed": copy.bytes - file.allocated_bytes,
            "free": free_memory(),
            "parted": copy.can_be_parted,
            "probe": _leave_probe(folder) if rank == 0 and is_split and len(hosts) > 1 else "",
        }
        everyone = gather_per_rank(mine)
        probe, is_parted = everyone[0]["probe"], is_split and all(each["parted"] for each in everyone)
        writing = hosts if is_split else hosts[:1]
        why_not, files = "", tuple[int, ...]()
        if len(writing) > 1 and not is_parted:
            why_not = "not to be written in parts"
        for ranks in writing:
            there = [everyone[each] for each in ranks]
            if sum(each["needed"] for each in there) > _MOST_OF_MEMORY * min(each["free"] for each in there):
                why_not = "no room"
        if not why_not and own < len(writing):
            try:
                copy.take(file)
                copy.seal()
                if rank == hosts[own][0]:
                    files = tuple(self._open(everyone[each]["path"], everyone[each]["file"]) for each in hosts[own])
                    if len(writing) > 1 and not os.path.isfile(probe):
                        why_not = "not one folder"
            except (OSError, RuntimeError, ValueError) as error:
                why_not = str(error) or type(error).__name__
        answer: dict[str, Any] = {"why not": why_not, "skeleton": copy.skeleton if len(writing) > 1 else None}
        answers = gather_per_rank(answer)
        if probe and rank == 0:
            Path(probe).unlink(missing_ok=True)
        if any(each["why not"] for each in answers):
            return None
        self.host_bytes = sum(everyone[each]["bytes"] for each in hosts[own])
        skeletons = {each: answers[each]["skeleton"] for each in range(world_size)} if len(writing) > 1 else {}
        place = os.path.dirname(probe), probe.rpartition("-")[2]
        return Copied(files, is_parted, own, len(writing), *place, skeletons)

    def _hosts_of_group(self) -> list[list[int]]:
        """The ranks of each host, of this process group; ranks of a host can open each other's files, as a rule."""
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._group is None or self._group[0] is not group:
            names = gather_per_rank(f"{socket.gethostname()} {env.HOST_ID.get()} {World.from_env().host_rank}")
            hosts = []
            for host in dict.fromkeys(names):
                ranks = [rank for rank, name in enumerate(names) if name == host]
                hosts += [ranks[start : start + _MOST_RANKS] for start in range(0, len(ranks), _MOST_RANKS)]
            self._group = group, hosts
        return self._group[1]

    def close(self) -> None:
        """Gives the memory back, as soon as the process that writes has closed it, too."""
        for descriptor in self._opened.values():
            os.close(descriptor)
        if self._file is not None:
            self._file.close()
        self._opened, self._file = {}, None

    def _own_file(self) -> MemoryFile:
        if self._file is None:
            descriptor = os.memfd_create("photinus-saving")
            try:
                self._file = MemoryFile(f"/proc/self/fd/{descriptor}")
            finally:
                os.close(descriptor)
        return self._file

    def _open(self, path: str, file: tuple[int, int]) -> int:
        """The descriptor of a rank's file. In a container, its process may have another number than it says."""
        key = f"{path} {file}"
        if key not in self._opened:
            if _identity(os.stat(path)) != file:
                raise ValueError(f"{path} is another file than the one of its rank")
            self._opened[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._opened[key]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _path_of(file: MemoryFile) -> str:
    return f"/proc/{os.getpid()}/fd/{file.descriptor}"


def _leave_probe(folder: Path) -> str:
    """Leaves a file for ranks of other hosts to see; its path ends with a token. "" where that is not possible."""
    probe = temporary(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError:
        return ""
    return str(probe.absolute())
