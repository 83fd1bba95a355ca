"""A session: this process's place in the job, its device, and the process group that joins the ranks.

One process without a launcher is a world of one: the same code, a process group of size 1 and no port. Several
processes come from a launcher (`photinus run`, torchrun, Slurm, Open MPI), which says rank and world size.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import os
import secrets
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from ... import env, tracebacks
from ...errors import CollectiveError, NotInitializedError, WorldSizeError
from ...job.own_address import interface_of, own_address, reaches_from
from ...job.rendezvous import find_rendezvous
from ...job.world import World, check_company
from ...parallel.exchange.agreement import gather_per_rank
from ...parallel.exchange.verify_models import refuse_shared_gpus
from ...process_memory import reuse_memory
from ..checkpoint.statefile import finish_writing
from ..data import rng
from ..data.arguments import explains_unknown, whole_number
from . import preemption
from .placement import Gpu, agree_on_backend, choose_backend, choose_device, gather_gpus, missing_on_gpus
from .progress import say
from .rank_store import open_store


@dataclass(eq=False, repr=False)
class Session:
    """This process's view of the job, from `photinus.init()`, which creates it, until its end.

    Attributes:
        rank: rank of this process, 0 <= rank < world_size.
        world_size: number of processes in the job.
        local_rank: index of this process on its host.
        local_world_size: number of the job's processes on this host.
        device: device on which this process computes.
        backend: name of the torch.distributed backend in use.
        hosts, pids: host name and process of each rank, by rank.
        launcher: name of the launcher; "none" for a plain `python script.py`.
        seed: seed of the random generators, or None.
        suspends: whether loops with `out` save and exit on SIGTERM and SIGUSR1.
        logical_shards: into how many shards loops cut each batch for the same bits on any number of ranks; 0: they cut
            it into the ranks' parts.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str
    hosts: tuple[str, ...]
    pids: tuple[int, ...]
    launcher: str
    seed: int | None
    suspends: bool
    logical_shards: int
    _owned: bool
    aside_s: float = 0.0  # seconds of work beside training (validation), not counted in the throughput
    loops: int = 0  # created so far
    switching: list[Any] = field(default_factory=list)  # optimizers with train() and eval(), of loops whose bodies run
    before_evaluation: list[Callable[[], None]] = field(default_factory=list)  # of loops whose bodies run
    # What a notebook's or a prompt's error before this session left behind: it does not end the runs of this one.
    _error_before: BaseException | None = field(default_factory=lambda: getattr(sys, "last_value", None))
    _open: bool = True
    _outer: Session | None = None
    _at_end: list[Callable[[BaseException | None], None]] = field(default_factory=list)

    @property
    def host(self) -> str:
        """Return the name of this host."""
        return self.hosts[self.rank]

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, the rank that logs and saves."""
        return self.rank == 0

    @property
    def exchange_device(self) -> torch.device:
        """Return the device for small tensors to exchange: this rank's GPU with nccl, else the CPU."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def at_end(self, tell: Callable[[BaseException | None], None]) -> None:
        """Call `tell` once when the session ends, with the error that ended it, or None."""
        self._at_end.append(tell)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._owned:
            _tell_peers(error)
        self._tell_end(error)
        try:
            self.close()
        except Exception as second:
            if error is None:
                raise
            # The first error is the one that counts; the second must not hide it, nor be lost.
            warnings.warn(f"rank {self.rank}: closing the process group failed too: {second}", stacklevel=2)

    def close(self) -> None:
        """End the session, and destroy the process group if `init` created it. A second call does nothing."""
        global _current
        if not self._open:
            return
        self._open = False
        self._tell_end(None)
        atexit.unregister(self._tell_end_at_exit)
        if _current is self:
            _current = self._outer
            rng.session_seed = (_current and _current.seed) or 0
        preemption.close()
        if self._owned and dist.is_initialized():
            dist.destroy_process_group()
        finish_writing()

    def close_at_exit(self) -> None:
        """Close the session when the interpreter exits, perhaps because of an error that nobody caught."""
        self._tell_end_at_exit()
        self.close()

    def _tell_end_at_exit(self) -> None:
        if os.getpid() == self.pids[self.rank]:  # a child that the script forked is no rank
            self._tell_end(error if (error := getattr(sys, "last_value", None)) is not self._error_before else None)

    def _tell_end(self, error: BaseException | None) -> None:
        tells, self._at_end = self._at_end, []
        for tell in tells:
            tell(error)

    def __repr__(self) -> str:
        return f"Session(rank={self.rank}, world_size={self.world_size}, device={self.device}, backend={self.backend})"


_current: Session | None = None


@explains_unknown
def init(
    backend: str = "auto",
    device: str | torch.device = "auto",
    seed: int | None = None,
    timeout_s: float | None = None,
    suspend: bool = True,
    logical_shards: int | None = None,
) -> Session:
    """Join the ranks of the job and return this process's session, a context manager.

    Args:
        backend: "auto", or a backend of torch.distributed such as "photinus", "gloo" or "nccl". "auto" takes
            PHOTINUS_BACKEND if that is set. Otherwise it takes photinus on CPUs (gloo if the engine is not built). On
            CUDA devices it takes the backend that `photinus bench --device cuda` found fastest on this machine; without
            that nccl, or photinus if ranks share a GPU. Rank 0 logs the choice. An existing process group is used, and
            stays open.
        device: "auto" (cuda:LOCAL_RANK if there is CUDA, else cpu), "cpu", "cuda" (cuda:LOCAL_RANK) or "cuda:i".
        seed: seeds the generators of Python, numpy and torch. The seed is the same on all ranks, so models and splits
            of the data are equal; a Loop then gives each rank its own numbers. It is also the seed of the order of the
            samples. Default: the generators are not seeded, and the order is that of seed 0.
        timeout_s: timeout of each collective in seconds. Default: PHOTINUS_TIMEOUT_S (300).
        suspend: let a Loop or Trainer with `out` handle SIGTERM and SIGUSR1: after such a signal to any rank, all
            ranks finish the same step, save, and exit (`photinus.Suspended`), to be resumed later. False leaves both
            signals alone. `photinus.suspend_requested` handles them in any case. Default: True.
        logical_shards: cut each batch of a Loop or Trainer into V shards, computed one by one, so that a run has the
            same bits on 1 to V ranks, and may go on with another number. See docs/how-to/exact.md. While the session
            is open, torch uses deterministic algorithms, and one thread on each rank (call torch.set_num_threads after
            `init` for more, with the same number for every run to compare). Default: each rank computes one part.

    Raises:
        DeviceError: there is no CUDA device but one was asked for; this host has more ranks than devices; or ranks
            share a device (`photinus run --ranks-per-gpu` allows it, but not with nccl).
        WorldSizeError: the ranks that joined are not the launcher's world; or this process would train alone beside
            others.
        NotInitializedError: the launcher's variables name no rendezvous address, or the ranks could not join there.
        ValueError: the backend or device is unknown, timeout_s is not above 0, or there are more ranks than
            logical_shards.
    """
    global _current
    tracebacks.install()
    _make_forks_safe()
    place = World.from_env()
    shards = 0 if logical_shards is None else whole_number("logical_shards", logical_shards, least=1)
    _check_shards(shards, dist.get_world_size() if dist.is_initialized() else place.world_size)
    chosen_device, device_reason = choose_device(device, place)
    if chosen_device.type == "cpu":
        reuse_memory()
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: needs a number of seconds above 0")
    owned = not dist.is_initialized()
    if owned:
        if place.launcher == "none":
            check_company(os.environ)
        chosen_backend, backend_reason = choose_backend(backend, chosen_device)
        _share_cores(place)
        if chosen_device.type == "cuda":
            torch.cuda.set_device(chosen_device)  # first: a group may ask which device is this process's
        timeout = timedelta(seconds=timeout_s or env.TIMEOUT_S.get())
        chosen_backend, backend_reason = _make_group(place, chosen_device, chosen_backend, backend_reason, timeout)
    else:
        chosen_backend, backend_reason = str(dist.get_backend()), "the process group was there already"
    try:
        if not owned and chosen_device.type == "cuda" and place.launcher != "none":
            torch.cuda.set_device(chosen_device)
        place, members = _meet(place)
        if not owned and place.launcher == "none":
            # Without a launcher only the ranks that met say which device is whose.
            chosen_device, device_reason = choose_device(device, place)
            if chosen_device.type == "cuda":
                torch.cuda.set_device(chosen_device)
        if not owned and chosen_device.type == "cuda" and dist.get_world_size() > 1:
            store, timeout = dist.distributed_c10d._get_default_store(), timedelta(seconds=env.TIMEOUT_S.get())
            gpus = gather_gpus(store, place.rank, place.world_size, chosen_device, timeout)
            _check_gpus(gpus, chosen_backend)
        hosts, pids = (tuple(member[what] for member in members) for what in ("host", "pid"))
        session = Session(
            place.rank, place.world_size, place.local_rank, place.local_world_size, chosen_device, chosen_backend,
            hosts, pids, place.launcher, seed, suspends=suspend, logical_shards=shards, _owned=owned,
        )  # fmt: skip
    except BaseException:
        if owned:
            dist.destroy_process_group()
        raise
    rng.begin_session(seed)
    if shards:
        session.at_end(_compute_exactly())
    session._outer, _current = _current, session
    atexit.register(session._tell_end_at_exit)
    if session.is_main:
        ranks = f"{session.world_size} rank{'s' if session.world_size > 1 else ''}"
        count = len(set(session.hosts))
        say(
            f"photinus: {ranks} on {count} host{'s' if count > 1 else ''}, device {chosen_device.type} "
            f"({device_reason}), backend {chosen_backend} ({backend_reason})"
        )
        if seed is None and session.world_size > 1:
            what = "what the script draws at random, such as a split of the data, may differ on each rank"
            say(f"note: photinus.init() has no seed=, so {what}")
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
                f"{what} was used before photinus.init(): {place.launcher} started this as rank {place.rank} of "
                f"{place.world_size} processes, which are not connected yet. Put the work inside "
                f"`with photinus.init(seed=0) as world:`."
            )
    session = init()
    atexit.register(session.close_at_exit)
    return session


@functools.cache
def _make_forks_safe() -> None:
    """Keeps the garbage collector of forked children (a data loader's workers) off what they inherit.

    A wrapped model or process group that is no longer used, but not yet collected, has threads that the child does not
    have: collecting it there ends in a segmentation fault (seen with gloo and torch 2.13).
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _make_group(place: World, device: torch.device, backend: str, reason: str, timeout: timedelta) -> tuple[str, str]:
    """Makes the process group; returns its backend and the reason for it, which ranks on GPUs agree on here."""
    rendezvous = find_rendezvous(place, os.environ) if place.world_size > 1 else None
    store: Any = None
    if rendezvous is None:
        # Nobody to meet: a store in this process, so no port can be taken and no address is needed.
        store = dist.HashStore()  # type: ignore[attr-defined]
    elif rendezvous.given and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        # What init_process_group does by itself where it is given no store.
        store = next(torch_rendezvous("env://", place.rank, place.world_size, timeout=timeout))[0]
        store.set_timeout(timeout)
    else:
        if not rendezvous.given and rendezvous.address == "127.0.0.1":
            # gloo would look for the interface of the host's name, which may not resolve, and listen for the network.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = open_store(place, rendezvous, timeout.total_seconds())
    if device.type == "cuda":
        gpus = gather_gpus(store, place.rank, place.world_size, device, timeout)
        if backend == "auto":
            backend, reason = agree_on_backend(store, place, gpus, missing_on_gpus(), timeout)
        _check_gpus(gpus, backend)
    over_network = place.local_world_size < place.world_size
    if rendezvous is not None and rendezvous.given and over_network and "gloo" in backend:
        _name_interface_for_gloo(rendezvous.address)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size, timeout=timeout)
    return backend, reason


def _check_gpus(gpus: Sequence[Gpu], backend: str) -> None:
    refuse_shared_gpus([gpu.identity for gpu in gpus], backend, env.RANKS_PER_GPU.get())


def _name_interface_for_gloo(meeting_place: str) -> None:
    """Without it gloo takes the address of the host's own name, which is often 127.0.1.1, or none."""
    with contextlib.suppress(OSError):  # no such name: torch's store says so
        interface = interface_of(reaches_from(own_address(meeting_place)))
        if interface not in (None, "lo"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _meet(place: World) -> tuple[World, list[dict[str, Any]]]:
    """Lets every rank tell the others who it is, and checks that they are the world that the launcher meant."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if place.launcher != "none" and (place.rank, place.world_size) != (rank, world_size):
        raise WorldSizeError(
            f"{place.launcher} means rank {place.rank} of {place.world_size} processes, but the process group has "
            f"this process as rank {rank} of {world_size}. Do not set rank or world size by hand; give the launcher "
            f"the number you want."
        )
    own = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "process": secrets.token_hex(8)}
    members = gather_per_rank(own)
    processes = {member["process"] for member in members}  # two containers may have one host name, and both pid 1
    if [member["rank"] for member in members] != list(range(world_size)) or len(processes) != world_size:
        raise WorldSizeError(f"{world_size} ranks were expected, but these joined: {members}")
    if place.launcher == "none" and world_size > 1:
        # The group was made by the script itself (mp.spawn and the like): the place on the host is counted.
        local = [member["rank"] for member in members if member["host"] == members[rank]["host"]]
        place = World(rank, world_size, local.index(rank), len(local), launcher="none")
    return place, members


def _tell_peers(error: BaseException) -> None:
    """Lets the peers read why this rank goes away, where the backend can say so (photinus)."""
    fail = getattr(dist.group.WORLD, "fail", None) if dist.is_initialized() else None
    # A collective's error is known to the peers, with its cause; leaving by sys.exit(0) or suspended is no error.
    if (
        fail is None
        or isinstance(error, (CollectiveError, preemption.Suspended))
        or (isinstance(error, SystemExit) and not error.code)
    ):
        return
    lines = str(error).splitlines()
    fail(f"raised {type(error).__name__}" + (f": {lines[0]}" if lines else ""))


def _check_shards(shards: int, world_size: int) -> None:
    if shards and world_size > shards:
        raise ValueError(
            f"logical_shards={shards}, but there are {world_size} ranks, and each needs a shard of every batch: start "
            f"at most {shards}, or set logical_shards={world_size} for a new run"
        )


def _compute_exactly() -> Callable[[object], None]:
    """Lets torch compute the same bits each time; returns what sets it back."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    benchmark = torch._C._get_cudnn_benchmark()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses; read when it is first used
    torch.set_num_threads(1)  # sums are cut into as many parts, and a launcher gives fewer ranks more threads
    torch.use_deterministic_algorithms(True)
    # It chooses by time. torch.backends refuses to set it after `disable_global_flags`.
    torch._C._set_cudnn_benchmark(False)
    memory.fill_uninitialized_memory = False  # costs a pass over all that is allocated

    def set_back(_: object) -> None:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch._C._set_cudnn_benchmark(benchmark)
        memory.fill_uninitialized_memory = fill

    return set_back


def _share_cores(place: World) -> None:
    """Gives each rank of a host its share of the cores, unless the user said how many threads to use.

    torch starts a thread per core in every process; several ranks on one host then fight for the cores.
    """
    if place.local_world_size > 1 and not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.local_world_size))
