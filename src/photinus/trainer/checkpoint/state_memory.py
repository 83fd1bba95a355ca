"""A state in the memory of the ranks of a host, for a process to write while they train on: see writer.py.

Each rank copies its piece into a memory file (see image.py): one of the launcher's where the loop keeps snapshots, else
one of its own, which it keeps: new pages cost three times as long as the copy. The first rank of a host opens the files
of all, so that they outlive the ranks.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import env
from ...job.cgroup import free_memory
from ...job.worker_files import Head, path_of
from ...job.world import World
from ...parallel.exchange.agreement import gather_per_rank, place_in_group
from .durable import temporary
from .image import Content, Copy, MemoryFile

LEAST_BYTES = 64 << 20
"""Below, writing at once costs less than the process."""
MOST_RANKS = 250
"""Ranks of a host that write together: one message to another process carries no more descriptors."""
_MOST_OF_MEMORY = 0.8  # of what is free


@dataclass(frozen=True)
class HostImage:
    """A state in memory, as one rank sees it.

    Attributes:
        files: descriptors of the memory files of this host's ranks, by local rank; empty where this rank leads no
            writing.
        heads: the heads of their images.
        uses: the use of each file (see `MemoryFile.unseal`).
        is_parted: all of the ranks' own entries can be written in parts (see parts.py).
        host, hosts: this one's number, and how many write.
        folder, token: the place of the unfinished checkpoint, and the end of its name, for the hosts to find it.
        skeletons: by rank, of all hosts, where there are several.
    """

    files: tuple[int, ...]
    heads: tuple[dict[str, Any], ...]
    uses: tuple[int, ...]
    is_parted: bool
    host: int
    hosts: int
    folder: str
    token: str
    skeletons: dict[int, bytes]


class StateMemory:
    """The memory file of this process, and those of its host's ranks that it has opened."""

    def __init__(self) -> None:
        self._file: MemoryFile | None = None
        self._opened: dict[str, int] = {}
        self._group: tuple[Any, list[list[int]]] | None = None

    def plan(self, content: Content, step: int = 0, *, alone: bool = False) -> Copy:
        """Return this rank's piece of a state, not copied yet.

        Args:
            alone: this rank has the whole state, and the others do not take part.

        Raises:
            TypeError, ValueError: something in it cannot be saved.
        """
        if alone:
            return Copy(Head("", step, 0, 1, 0, 1), content)
        (rank, world_size), hosts = place_in_group(), self.hosts()
        ranks = next(ranks for ranks in hosts if rank in ranks)
        return Copy(Head("", step, rank, world_size, ranks.index(rank), len(ranks)), content)

    def take(self, copy: Copy, *, is_split: bool = False) -> MemoryFile | str:
        """Copy this rank's piece into a file of its own, where its host writes. Return the file, or why it has none.

        Args:
            is_split: each host writes; else the first one.
        """
        file, head = self._own_file(), copy.head
        if head.local_size < head.world_size and not is_split and head.rank not in self.hosts()[0]:
            return file
        if (copy.bytes - file.allocated_bytes) * head.local_size > _MOST_OF_MEMORY * free_memory():
            return "no room"
        try:
            copy.take(file)
            copy.wait_for_device()
        except (OSError, RuntimeError, ValueError) as error:  # such as a limit on this process
            return str(error) or type(error).__name__
        return file

    def share(
        self, copy: Copy, file: MemoryFile | str, folder: Path, *, is_split: bool = False, alone: bool = False
    ) -> HostImage | None:
        """Bring the pieces of a host together. All ranks call it, but for a state that this one has `alone`.

        Args:
            file: the file that has the piece; a text: why there is none.
            folder: to write in: hosts that see one can all write there.
            is_split: ranks have parts that no other rank has.

        Returns:
            None where a rank has no copy, or ranks do not see what they need of each other: then it has to be gathered.
        """
        rank = 0 if alone else place_in_group()[0]
        hosts = [[0]] if alone else self.hosts()
        own = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        writing = hosts if is_split else hosts[:1]
        mine: dict[str, Any] = {
            "why not": file if isinstance(file, str) else "",
            "head": asdict(copy.head),
            "parted": copy.can_be_parted,
            "skeleton": copy.skeleton if len(writing) > 1 else None,
            "probe": _leave_probe(folder) if rank == 0 and len(writing) > 1 else "",
        }
        if isinstance(file, MemoryFile):
            mine |= {"path": path_of(file.descriptor), "file": _identity(os.fstat(file.descriptor)), "use": file.use}
        everyone = [mine] if alone else gather_per_rank(mine)
        probe, is_parted = everyone[0]["probe"], is_split and all(each["parted"] for each in everyone)
        why_not = next((each["why not"] for each in everyone if each["why not"]), "")
        if len(writing) > 1 and not is_parted:
            why_not = "not to be written in parts"
        files, there = tuple[int, ...](), [everyone[each] for each in hosts[own]]
        if not why_not and own < len(writing) and rank == hosts[own][0]:
            try:
                files = tuple(self._open(each["path"], each["file"]) for each in there)
                if len(writing) > 1 and not os.path.isfile(probe):
                    why_not = "not one folder"
            except (OSError, ValueError) as error:
                why_not = str(error)
        answers = [why_not] if alone else gather_per_rank(why_not)
        if probe and rank == 0:
            Path(probe).unlink(missing_ok=True)
        if any(answers):
            return None
        heads, uses = tuple(each["head"] for each in there), tuple(each["use"] for each in there)
        skeletons = {number: each["skeleton"] for number, each in enumerate(everyone)} if len(writing) > 1 else {}
        place = os.path.dirname(probe), probe.rpartition("-")[2]
        return HostImage(files, heads, uses, is_parted, own, len(writing), *place, skeletons)

    def hosts(self) -> list[list[int]]:
        """Return the ranks of each host; ranks of a host can open each other's files, as a rule. All ranks call it."""
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._group is None or self._group[0] is not group:
            names = gather_per_rank(f"{socket.gethostname()} {env.HOST_ID.get()} {World.from_env().host_rank}")
            hosts = []
            for host in dict.fromkeys(names):
                ranks = [rank for rank, name in enumerate(names) if name == host]
                hosts += [ranks[start : start + MOST_RANKS] for start in range(0, len(ranks), MOST_RANKS)]
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


def _leave_probe(folder: Path) -> str:
    """Leaves a file for ranks of other hosts to see; its path ends with a token. "" where that is not possible."""
    probe = temporary(folder / "probe")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
    except OSError:
        return ""
    return str(probe.absolute())
