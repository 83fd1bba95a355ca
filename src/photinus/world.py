"""Who am I among the processes of this job: rank, local rank, world size, as the launcher says.

Torch-free, reads the environment once, and refuses contradictions instead of guessing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from . import env
from .errors import WorldSizeError

__all__ = ["World"]


@dataclass(frozen=True)
class _Launcher:
    """The names under which one launcher tells a process its place."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str | None
    host_rank: str | None


_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    _Launcher(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_NODE_RANK",
    ),
    _Launcher("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", None, "SLURM_NODEID"),
)


@dataclass(frozen=True)
class World:
    """A process's place in its job.

    Attributes:
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes of the job.
        local_rank: index of this process on its host.
        local_world_size: number of processes of the job on this host (world_size when the launcher does not say).
        host_rank: index of this host in the job.
        launcher: which launcher's variables were found, "none" for a plain `python script.py`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host_rank: int = 0
    launcher: str = "none"

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that logs and saves."""
        return self.rank == 0

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Reads the place from the environment: torchrun's variables first, then Open MPI's, then Slurm's.

        RANK=-1 (the old templates' "not distributed") and no variables at all both mean a world of one. Slurm's
        variables count only inside `srun` (SLURM_STEP_ID is set), since `salloc` sets some of them for a plain shell.

        Raises:
            WorldSizeError: rank and world size contradict each other, one is given without the other, or the
                world size differs from what the launcher means (PHOTINUS_WORLD_SIZE).
            ValueError: a variable is not a whole number.
        """
        environ = os.environ if environ is None else environ
        world = cls()
        for launcher in _LAUNCHERS:
            if launcher.name == "Slurm" and "SLURM_STEP_ID" not in environ:
                continue
            if launcher.rank in environ or launcher.world_size in environ:
                world = cls._from(launcher, environ)
                break
        meant = env.EXPECTED_WORLD_SIZE.get(environ)
        if meant is not None and meant != world.world_size:
            raise WorldSizeError(
                f"the launcher means a world of {meant} processes ({env.EXPECTED_WORLD_SIZE.name}={meant}), but this "
                f"process finds a world of {world.world_size}. Do not change RANK or WORLD_SIZE in the script; start "
                f"it with `photinus run --nproc-per-node N` for another size."
            )
        return world

    @classmethod
    def _from(cls, launcher: _Launcher, environ: Mapping[str, str]) -> World:
        def read(name: str | None, default: int) -> int:
            text = environ.get(name) if name else None
            if text is None or text == "":
                return default
            try:
                return int(text)
            except ValueError:
                raise ValueError(f"{name}={text!r} (from {launcher.name}) is not a whole number") from None

        rank, world_size = read(launcher.rank, -1), read(launcher.world_size, -1)
        if rank == -1 and world_size in (-1, 0, 1):
            return cls()
        if rank < 0 or world_size < 1 or rank >= world_size:
            raise WorldSizeError(
                f"{launcher.rank}={environ.get(launcher.rank, 'not set')} and "
                f"{launcher.world_size}={environ.get(launcher.world_size, 'not set')} (from {launcher.name}) do not "
                f"fit: a job of W processes needs both, with ranks 0 to W-1. Start with `photinus run` or torchrun, "
                f"or unset both for one process."
            )
        local_world_size = read(launcher.local_world_size, world_size)
        local_rank = read(launcher.local_rank, rank)
        if not 0 <= local_rank < local_world_size:
            raise WorldSizeError(
                f"{launcher.local_rank}={local_rank} but this host runs {local_world_size} processes of the job "
                f"({launcher.local_world_size or 'no variable says how many'}, from {launcher.name})."
            )
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            local_world_size=local_world_size,
            host_rank=read(launcher.host_rank, 0),
            launcher=launcher.name,
        )
