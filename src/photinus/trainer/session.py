"""A session: this process's place in the job, its device, and the process group that joins the ranks.

    with photinus.init() as world:
        ...                              # world.rank, world.device, ...

One process without a launcher is a world of one: the same code, a process group of size 1 and no port. Several
processes come from a launcher (`photinus run`, torchrun, Slurm, Open MPI), which says rank and world size.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import os
import socket
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist

from .. import env, errors
from ..errors import CollectiveError, DeviceError, NotInitializedError, PhotinusError, WorldSizeError
from ..world import World
from .agreement import gather_per_rank
from .progress import say

__all__ = ["Session", "choose_backend", "choose_device", "current_session", "init", "require_session"]

T = TypeVar("T")


@dataclass(frozen=True)
class _Member:
    """What each rank tells the others when they meet."""

    rank: int
    host: str
    pid: int


class Session:
    """One process's view of the job, from `photinus.init()` until its end. Made by `init`, not by hand.

    Attributes:
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes that met.
        local_rank: index of this process on its host.
        local_world_size: number of the job's processes on this host.
        device: where this process computes.
        backend: name of the torch.distributed backend in use.
        host: name of this host.
        hosts: each rank's host name, by rank.
        launcher: who started the processes, "none" for a plain `python script.py`.
        seed: what the random generators were seeded with, None when they were not.
        aside_s: seconds spent in work beside training (validation), left out of the throughput.
    """

    def __init__(
        self, place: World, device: torch.device, backend: str, *, hosts: tuple[str, ...], seed: int | None, owned: bool
    ) -> None:
        self.rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self.local_world_size = place.local_world_size
        self.device = device
        self.backend = backend
        self.hosts = hosts
        self.host = hosts[place.rank]
        self.launcher = place.launcher
        self.seed = seed
        self.aside_s = 0.0
        self._owned = owned
        self._open = True
        self._outer: Session | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the one that logs and saves."""
        return self.rank == 0

    @property
    def exchange_device(self) -> torch.device:
        """Where small tensors for exchanges live: the host, or this rank's device for nccl, which knows no other."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._owned:
            _tell_peers(error)
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            # The first error is the one that counts; the second must not hide it, nor be lost.
            warnings.warn(f"rank {self.rank}: closing the process group failed too: {second}", stacklevel=2)

    def close(self) -> None:
        """Ends the session and destroys the process group if `init` made it. May be called again."""
        global _current
        if not self._open:
            return
        self._open = False
        if _current is self:
            _current = self._outer
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()

    def __repr__(self) -> str:
        return f"Session(rank={self.rank}, world_size={self.world_size}, device={self.device}, backend={self.backend})"

    # -- agreement between ranks: an error of one rank must not leave the others waiting ------------------------------

    def raise_together(self, error: Exception | None, doing: str) -> None:
        """Raises on every rank when any rank has an error; returns when none has. Every rank must call it.

        A rank with an error of its own raises that; the others raise one of the same class that names the first
        failing rank.

        Args:
            error: what went wrong on this rank, None for nothing.
            doing: what the ranks were doing, for the message ("evaluating").
        """
        if self.world_size == 1:
            if error is not None:
                raise error
            return
        mine = None if error is None else (type(error).__name__, str(error))
        told = self.gather(mine)
        if error is not None:
            raise error
        for rank, theirs in enumerate(told):
            if theirs is not None:
                name, text = theirs
                raise _error_class(name)(f"rank {rank} ({self.hosts[rank]}) failed while {doing}: {name}: {text}")

    def on_main(self, call: Callable[[], T], doing: str) -> T:
        """Runs `call` on rank 0 and returns its result on every rank; its error is raised on every rank."""
        result: T | None = None
        error: Exception | None = None
        if self.is_main:
            try:
                result = call()
            except Exception as caught:  # noqa: BLE001 - raised on every rank below
                error = caught
        self.raise_together(error, doing)
        return self.gather(result)[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank: of numbers, text, None, tensors, lists, tuples and dicts."""
        if self.world_size == 1:
            return [value]
        return [each["value"] for each in gather_per_rank({"value": value})]


_current: Session | None = None
_forks_are_safe = False


def init(
    backend: str = "auto",
    device: str | torch.device = "auto",
    seed: int | None = None,
    timeout_s: float | None = None,
) -> Session:
    """Joins the ranks of the job and returns this process's session, a context manager.

    Args:
        backend: "auto" or any torch.distributed backend: "photinus", "gloo", "nccl". "auto" takes PHOTINUS_BACKEND if
            that is set, else nccl for CUDA devices and photinus for CPUs (gloo where the engine is not built), and
            rank 0 says so in one line. A process group that is there already is kept, and left open at the end.
        device: "auto" (cuda:local_rank where CUDA is there, else cpu), "cpu", "cuda" (cuda:local_rank) or "cuda:i".
        seed: seeds Python's, numpy's and torch's generators, alike on all ranks, so that models and splits of the
            data made next are equal; a Loop then gives each rank numbers of its own. None leaves them alone.
        timeout_s: deadline in seconds of each collective; default PHOTINUS_TIMEOUT_S (300).

    Raises:
        DeviceError: CUDA was asked for and is absent, or this host runs more ranks than it has devices.
        WorldSizeError: the processes that met are not the world that the launcher meant.
        NotInitializedError: the launcher's variables do not say where the ranks meet (MASTER_ADDR, MASTER_PORT).
        ValueError: the backend is unknown, or the timeout is not above 0.
    """
    global _current
    _make_forks_safe()
    place = World.from_env()
    chosen_device, device_reason = choose_device(device, place)
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: needs a number of seconds above 0")
    owned = not dist.is_initialized()
    if owned:
        chosen_backend, backend_reason = choose_backend(backend, chosen_device)
        _share_cores(place)
        _make_group(place, chosen_backend, timedelta(seconds=timeout_s or env.TIMEOUT_S.get()))
    else:
        chosen_backend, backend_reason = str(dist.get_backend()), "the process group was there already"
    try:
        if chosen_device.type == "cuda" and (owned or place.launcher != "none"):
            torch.cuda.set_device(chosen_device)
        place, members = _meet(place)
        if not owned and place.launcher == "none":
            # Without a launcher only the ranks that met say which device is whose.
            chosen_device, device_reason = choose_device(device, place)
            if chosen_device.type == "cuda":
                torch.cuda.set_device(chosen_device)
        session = Session(
            place,
            chosen_device,
            chosen_backend,
            hosts=tuple(member.host for member in members),
            seed=seed,
            owned=owned,
        )
    except BaseException:
        if owned:
            dist.destroy_process_group()
        raise
    if seed is not None:
        from .rng import seed_everything

        seed_everything(seed)
    session._outer, _current = _current, session
    if session.is_main:
        ranks = f"{session.world_size} rank{'s' if session.world_size > 1 else ''}"
        hosts = len(set(session.hosts))
        say(
            f"photinus: {ranks} on {hosts} host{'s' if hosts > 1 else ''}, device {chosen_device.type} "
            f"({device_reason}), backend {chosen_backend} ({backend_reason})"
        )
    return session


def current_session() -> Session | None:
    """The session that is open, or None."""
    return _current


def require_session(what: str) -> Session:
    """The session in force; opens one for a process that is alone.

    An existing process group is adopted. A process that no launcher started is a world of one, and gets a session
    that lives until the process ends.

    Raises:
        NotInitializedError: a launcher started several processes and `photinus.init()` was not called.
    """
    if _current is not None:
        return _current
    if not dist.is_initialized():
        place = World.from_env()
        if place.world_size > 1:
            raise NotInitializedError(
                f"{what} was used before photinus.init(): {place.launcher} started {place.world_size} processes "
                f"(this is rank {place.rank}) and they have not met yet. Put the work inside "
                f"`with photinus.init() as world:`."
            )
    session = init()
    atexit.register(session.close)
    return session


def choose_device(
    device: str | torch.device, place: World, cuda_devices: int | None = None
) -> tuple[torch.device, str]:
    """The device of the rank at `place` and the reason in a few words.

    Args:
        device: "auto", "cpu", "cuda", "cuda:i" or a torch.device.
        place: the rank's place in the job.
        cuda_devices: number of CUDA devices here; None asks CUDA.

    Raises:
        DeviceError: CUDA was asked for and is absent, the index does not exist, or more ranks than devices.
        ValueError: not the name of a device.
    """
    if cuda_devices is None:
        cuda_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if str(device) == "auto":
        if cuda_devices == 0:
            return torch.device("cpu"), "no CUDA device here"
        reason = f"{cuda_devices} CUDA device{'s' if cuda_devices > 1 else ''} here"
        wanted = torch.device("cuda")
    else:
        try:
            wanted = torch.device(device)
        except RuntimeError as error:
            raise ValueError(f'device={device!r} is no device: use "auto", "cpu", "cuda" or "cuda:0"') from error
        reason = "as asked"
    if wanted.type != "cuda":
        return wanted, reason
    if cuda_devices == 0:
        build = "this build of torch has no CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        raise DeviceError(
            f"device={str(device)!r} was asked for on rank {place.rank}, but {build} "
            f'(CUDA_VISIBLE_DEVICES={os.environ.get("CUDA_VISIBLE_DEVICES", "not set")}). Use --device cpu, or "auto".'
        )
    if ":" in str(wanted):
        if wanted.index >= cuda_devices:
            raise DeviceError(f"device={str(device)!r} does not exist: {cuda_devices} CUDA devices are visible here")
        return wanted, reason
    # Every rank of the host checks the same numbers, so that all of them stop and none waits for the others.
    if place.local_world_size > cuda_devices:
        raise DeviceError(
            f"local rank {place.local_rank} of {place.local_world_size} ranks on this host, but only {cuda_devices} "
            f"CUDA device{' is' if cuda_devices == 1 else 's are'} visible. Start {cuda_devices} "
            f"(--nproc-per-node {cuda_devices}), or use --device cpu."
        )
    return torch.device("cuda", place.local_rank), reason


def choose_backend(backend: str, device: torch.device) -> tuple[str, str]:
    """The torch.distributed backend to use and the reason in a few words.

    Raises:
        ValueError: torch does not know a backend of this name.
    """
    reason = "as asked"
    if backend == "auto":
        backend, reason = env.BACKEND.get(), f"{env.BACKEND.name} is set"
    if backend == "auto":
        if device.type == "cuda":
            if dist.is_nccl_available():
                return "nccl", "the choice for CUDA devices"
            return "gloo", "this build of torch has no nccl"
        missing = _register_photinus()
        return ("gloo", f"photinus cannot be used: {missing}") if missing else ("photinus", "the choice for CPUs")
    missing = _register_photinus() if backend == "photinus" else None
    if missing:
        raise ValueError(f"backend 'photinus' cannot be used: {missing}. Build it with `make`, or use backend 'gloo'.")
    # A mixed name such as "cpu:gloo,cuda:nccl" is torch's own affair; it checks the parts.
    if ":" not in backend and not dist.is_backend_available(backend):
        raise ValueError(f"backend {backend!r} is not available; known here: {', '.join(_known_backends())}")
    return backend, reason


def _register_photinus() -> str | None:
    """Registers backend "photinus"; returns why that is impossible, None when it is done."""
    try:
        importlib.import_module("photinus.backend")
    except ImportError as error:
        return str(error)
    return None if dist.is_backend_available("photinus") else "photinus.backend did not register it"


def _known_backends() -> list[str]:
    names = {"auto", *dist.Backend.backend_list, "photinus"} - {"undefined", "fake"}
    return sorted(name for name in names if name in ("auto", "photinus") or dist.is_backend_available(name))


def _make_forks_safe() -> None:
    """Keeps the garbage collector of forked children (a data loader's workers) off what they inherit.

    A wrapped model or process group that is no longer used, but not yet collected, has threads that the child does not
    have: collecting it there ends in a segmentation fault (seen with gloo and torch 2.13).
    """
    global _forks_are_safe
    if not _forks_are_safe:
        _forks_are_safe = True
        os.register_at_fork(after_in_child=gc.freeze)


def _make_group(place: World, backend: str, timeout: timedelta) -> None:
    if place.world_size == 1:
        # Nobody to meet: a store in this process, so no port can be taken and no address is needed.
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise NotInitializedError(
            f"{place.launcher} started {place.world_size} processes, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set, so the ranks do not know where to meet. Start with "
            f"`photinus run` or torchrun, or export the address of rank 0's host and a free port."
        )
    dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout)


def _meet(place: World) -> tuple[World, list[_Member]]:
    """Lets every rank tell the others who it is, and checks that they are the world that the launcher meant."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if place.launcher != "none" and (place.rank, place.world_size) != (rank, world_size):
        raise WorldSizeError(
            f"{place.launcher} means rank {place.rank} of {place.world_size} processes, but the process group has "
            f"this process as rank {rank} of {world_size}. Do not set rank or world size by hand; give the launcher "
            f"the number you want."
        )
    mine = _Member(rank, socket.gethostname(), os.getpid())
    members = [_Member(**each) for each in gather_per_rank(asdict(mine))]
    met = {(member.host, member.pid) for member in members}
    if [member.rank for member in members] != list(range(world_size)) or len(met) != world_size:
        raise WorldSizeError(f"{world_size} ranks should have met, but these did: {members}")
    if place.launcher == "none" and world_size > 1:
        # The group was made by the script itself (mp.spawn and the like): the place on the host is counted.
        local = [member.rank for member in members if member.host == mine.host]
        place = World(rank, world_size, local.index(rank), len(local), launcher="none")
    return place, members


def _tell_peers(error: BaseException) -> None:
    """Lets the peers read why this rank goes away, where the backend can say so (photinus)."""
    fail = getattr(dist.group.WORLD, "fail", None) if dist.is_initialized() else None
    # A collective's error is known to the peers, with its cause; leaving by sys.exit(0) is no error.
    if fail is None or isinstance(error, CollectiveError) or (isinstance(error, SystemExit) and not error.code):
        return
    lines = str(error).splitlines()
    fail(f"raised {type(error).__name__}" + (f": {lines[0]}" if lines else ""))


def _share_cores(place: World) -> None:
    """Gives each rank of a host its share of the cores, unless the user said how many threads to use.

    torch starts a thread per core in every process; several ranks on one host then fight for the cores.
    """
    if place.local_world_size > 1 and not os.environ.get("OMP_NUM_THREADS"):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // place.local_world_size))


def _error_class(name: str) -> type[Exception]:
    """The class of a peer's error, if it is one of ours or a plain built-in one; PhotinusError otherwise."""
    ours = getattr(errors, name, None)
    if isinstance(ours, type) and issubclass(ours, PhotinusError):
        return ours
    built_in = getattr(builtins, name, None)
    if built_in in (ValueError, TypeError, OSError, FileNotFoundError, PermissionError, RuntimeError):
        return built_in  # type: ignore[no-any-return]
    return PhotinusError
