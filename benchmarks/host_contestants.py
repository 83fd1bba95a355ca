"""Who takes part on emulated hosts, how each is started there, and what its turns take of the hosts."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
from contestant import Commands
from emulated import CARDS, Counters, Layout
from turns import Contestant

__all__ = [
    "GLOO",
    "HALVED",
    "MPICH",
    "NAMES",
    "OF_TORCH",
    "ON_BOTH_CARDS",
    "OPEN_MPI",
    "PHOTINUS",
    "PLAIN",
    "VARIABLES",
    "HostContestant",
    "Use",
    "contestant",
    "environment",
]

GLOO, PHOTINUS, PLAIN, OPEN_MPI, MPICH = "gloo", "photinus", "bare", "openmpi", "mpich"
HALVED = "photinus-bfloat16"  # float32 that crosses between hosts as bfloat16
ON_BOTH_CARDS = "photinus-2-cards"
VARIABLES = {ON_BOTH_CARDS: {"PHOTINUS_INTERFACE": ",".join(CARDS)}}
"""Photinus as it is when told so; its ranks take part when asked for."""
NAMES = (GLOO, PHOTINUS, PLAIN, OPEN_MPI, MPICH, HALVED, *VARIABLES)
OF_TORCH = (GLOO, PHOTINUS, HALVED)
_TIMEOUT_S = 300.0
_FIRST_PORT = 29500


@dataclass(frozen=True)
class Use:
    """What a call took of the hosts.

    Attributes:
        payload_bytes, card_bytes: by TCP's own counts, and by those of the cards; of the host and direction with most.
        processor_s: of all ranks.
        memory_bytes: of the rank with most, beyond its tensor and what it had before it joined; None: not known.
    """

    payload_bytes: float
    card_bytes: float
    processor_s: float
    memory_bytes: float | None


class HostContestant(Contestant):
    """A contestant on emulated hosts, which notes what each turn takes of them.

    Attributes:
        uses: of the turns since the size was last changed, by path.
    """

    def __init__(self, name: str, where: Layout, commands: Commands, columns: dict[str, str], **more: Any) -> None:
        super().__init__(name, columns, commands, len(where.ranks), timeout_s=_TIMEOUT_S, **more)
        self.uses: dict[str, list[Use]] = {}
        self._where, self._kind = where, ("", 0)

    def prepare(self, dtype: str, size_bytes: int) -> bool:
        """Makes tensors; False when it has none of this kind, or is gone."""
        if (dtype, size_bytes) != self._kind:
            self.uses.clear()
        self._kind = dtype, size_bytes
        return super().prepare(dtype, size_bytes)

    def run(self, path: str, calls: int) -> float | None:
        """Seconds per call, those of the slowest rank; None when it is gone."""
        before = Counters(self._where)
        seconds = super().run(path, calls)
        if seconds is None:
            return None
        after = Counters(self._where)
        done = calls + calls // 10 + 1  # with those that warm up
        processor_s = after.processor_s - before.processor_s
        use = Use(after.payload(before) / done, after.on_cards(before) / done, processor_s / done, self._memory_bytes())
        self.uses.setdefault(path, []).append(use)
        return seconds

    def _memory_bytes(self) -> float | None:
        assert self._folder is not None
        found = []
        for rank, process in enumerate(self._processes):
            before = Path(self._folder.name, f"{rank}.before")
            if before.exists():
                now = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                found.append(_own_bytes(now) - _own_bytes(before.read_text()) - self._kind[1])
        return max(found, default=None)


def _own_bytes(rollup: str) -> int:
    """Without programs and libraries, of which ranks that come and go change the share."""
    return sum(int(kib) for kib in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", rollup, re.MULTILINE)) * 1024


def contestant(name: str, where: Layout, columns: dict[str, str], folder: Path) -> HostContestant:
    """One of NAMES; `folder` is where engines.install and engines.build_native put theirs."""
    if name == PLAIN:
        return HostContestant(name, where, _plain(where, folder / "native/bench/bare"), columns, dtypes=["float32"])
    if name in (OPEN_MPI, MPICH):
        commands = _open_mpi if name == OPEN_MPI else _mpich
        absent = engines.why_not(folder / name)
        return HostContestant(name, where, commands(where, folder / name), columns, dtypes=["float32"], absent=absent)
    return HostContestant(name, where, _torch(where, name), columns)


def _plain(where: Layout, binary: Path) -> Commands:
    addresses = [f"{where.hosts[host].address}:{_FIRST_PORT + local}" for host, local in where.ranks]

    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        return [
            (where.hosts[host].command([binary, str(rank), folder, *addresses]), {})
            for rank, (host, _) in enumerate(where.ranks)
        ]

    return commands


def _torch(where: Layout, backend: str) -> Commands:
    port = _FIRST_PORT + 100 + NAMES.index(backend)

    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        words = [sys.executable, engines.RANKS / "host_rank.py", PHOTINUS if backend in VARIABLES else backend, folder]
        return [
            (where.hosts[host].command(words), environment(where, rank, port) | VARIABLES.get(backend, {}))
            for rank, (host, _) in enumerate(where.ranks)
        ]

    return commands


def environment(where: Layout, rank: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank; the store is on the first host, at this port."""
    host, local = where.ranks[rank]
    return {
        "MASTER_ADDR": where.hosts[0].address,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(where.ranks)),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(where.counts[host]),
        "GROUP_RANK": str(host),
        "GLOO_SOCKET_IFNAME": "eth0",  # the host's own name is an address of loopback there
    }


def _open_mpi(where: Layout, home: Path) -> Commands:
    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        run = [home / "bin/mpirun", "--bind-to", "none", "--host", _slots(where)]
        run += ["--prtemca", "plm_ssh_agent", _agent(where, folder)]
        run += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "eth0"]
        if len(where.ranks) > len(os.sched_getaffinity(0)):
            # It counts the ranks of each host, and these share the cores; and of itself it looks at its sockets in one
            # of 10,000 turns of its loop, each of which gives its core away then: a second for 4 KiB.
            run += ["--mca", "mpi_yield_when_idle", "1", "--mca", "mpi_event_tick_rate", "1"]
        rank = [home / "bin/python", engines.RANKS / "mpi_rank.py", folder]
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": folder}
        return [(where.hosts[0].command([*run, "-n", str(len(where.ranks)), *rank]), allowed)]

    return commands


def _mpich(where: Layout, home: Path) -> Commands:
    def commands(folder: str) -> list[tuple[list[str], dict[str, str]]]:
        run = [home / "bin/mpirun", "-bind-to", "none", "-launcher", "ssh", "-launcher-exec", _agent(where, folder)]
        rank = [home / "bin/python", engines.RANKS / "mpi_rank.py", folder]
        # Of itself UCX finds that these hosts are one machine, and takes memory. Inside a host MPICH shares its own.
        over = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
        return [(where.hosts[0].command([*run, "-hosts", _slots(where), "-n", str(len(where.ranks)), *rank]), over)]

    return commands


def _slots(where: Layout) -> str:
    return ",".join(f"{host.name}:{count}" for host, count in zip(where.hosts, where.counts, strict=True))


def _agent(where: Layout, folder: str) -> Path:
    """A program in ssh's place: AGENT [OPTION ...] HOST WORD ..."""
    lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "host=$1; shift", 'case "$host" in']
    for host in where.hosts:
        for name in (host.name, host.address):
            lines.append(f'{name}) exec {shlex.join(host.command(["sh", "-c"]))} "$*";;')
    lines += ['*) echo "there is no host $host" >&2; exit 1;;', "esac"]
    agent = Path(folder, "enter-host")
    agent.write_text("\n".join(lines) + "\n")
    agent.chmod(0o755)
    return agent
