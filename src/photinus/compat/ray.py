"""`photinus.compat.ray.launch`: one function on several workers of a Ray cluster, as the ranks of one job.

    import photinus.compat.ray

    accuracies = photinus.compat.ray.launch(train, num_workers=4, args=(0.1,), gpus_per_worker=1)

For people who have a Ray cluster; nothing else of Photinus needs Ray. Each rank is an actor of its own. The first one
keeps the store at which the ranks meet, on a port that it has bound itself, so no port can be taken in between.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import LaunchError
from ..launcher.workers.deaths import Raised
from ..launcher.workers.job import Formation, worker_environ
from ..launcher.workers.worker import describe

T = TypeVar("T")
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SETTLE_S = 1.0
_STORE_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class _Where:
    """What an actor says about where it runs."""

    node: str
    address: str
    host: str
    pid: int
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class _Failed:
    """How a rank failed, as it says itself (chain and text), or as Ray says of a worker that is gone."""

    rank: int
    raised: Raised
    seen_at_s: float


def launch(
    main: Callable[..., T],
    *,
    num_workers: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    cpus_per_worker: float = 1,
    gpus_per_worker: int = 0,
    strategy: str = "PACK",
    start_timeout_s: float = 300.0,
) -> list[T]:
    """Calls `main(*args, **kwargs)` on every rank and returns what each rank returned, in rank order.

    Ranks find their place as under `photinus run`. Ranks of one host have consecutive numbers. Without a running Ray
    (`ray.init(...)` before, or RAY_ADDRESS), one is started on this host, and stays.

    Args:
        main: any function that Ray can pickle; the ranks run it in its actors' processes.
        num_workers: number of ranks.
        args, kwargs: its arguments, the same on every rank.
        cpus_per_worker: cores that Ray reserves for each.
        gpus_per_worker: 1 or 0; a rank computes on one GPU.
        strategy: of Ray's placement group: "PACK" (on as few hosts as possible), "SPREAD", "STRICT_PACK" (all on one
            host), "STRICT_SPREAD" (each on another).
        start_timeout_s: seconds to wait for the cluster to have room.

    Raises:
        ImportError: Ray is not installed.
        TypeError, ValueError: an argument that cannot be right.
        LaunchError: the cluster has no room in time, or a rank failed; names the first rank that did, with host, pid
            and traceback. The others are ended.
    """
    _check(main, num_workers, cpus_per_worker, gpus_per_worker, strategy)
    ray = _import_ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=True)
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": cpus_per_worker, **({"GPU": gpus_per_worker} if gpus_per_worker else {})}
    group = placement_group([bundle] * num_workers, strategy=strategy)
    try:
        if not group.wait(start_timeout_s):
            raise LaunchError(_no_room(ray, num_workers, bundle, strategy, start_timeout_s))
        make = ray.remote(num_cpus=cpus_per_worker, num_gpus=gpus_per_worker, max_restarts=0)(_Rank)
        actors = [
            make.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            ).remote()
            for index in range(num_workers)
        ]
        try:
            return _run(ray, actors, main, tuple(args), dict(kwargs or {}))
        finally:
            for actor in actors:
                ray.kill(actor)
    finally:
        remove_placement_group(group)


def _check(main: object, num_workers: object, cpus: float, gpus: int, strategy: str) -> None:
    if not callable(main):
        raise TypeError(f"launch needs a function, got {type(main).__name__}; pass its arguments as args=(...)")
    if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
        raise ValueError(f"num_workers={num_workers!r}: needs a whole number above 0")
    if cpus < 0 or gpus not in (0, 1):
        raise ValueError(
            f"cpus_per_worker={cpus}, gpus_per_worker={gpus}: a rank needs 0 or more cores, and one GPU or none"
        )
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r}: needs one of {', '.join(_STRATEGIES)}")


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"photinus.compat.ray.launch needs Ray, which {sys.executable} does not have: pip install ray. "
            f"Without a Ray cluster, use photinus.launch(...)."
        ) from error
    return ray


def _no_room(ray: Any, num_workers: int, bundle: Mapping[str, float], strategy: str, waited_s: float) -> str:
    wanted = ", ".join(f"{count:g} {name}" for name, count in bundle.items())
    total, free = ray.cluster_resources(), ray.available_resources()
    there = ", ".join(f"{total.get(name, 0):g} {name} ({free.get(name, 0):g} free)" for name in bundle)
    return (
        f"the Ray cluster did not find room in {waited_s:.0f} s for {num_workers} workers of {wanted} each "
        f"(strategy {strategy}): it has {there} on {len(ray.nodes())} hosts. Ask for less, or add hosts."
    )


def _run(ray: Any, actors: list[Any], main: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[T]:
    where: list[_Where] = ray.get([actor.where.remote() for actor in actors])
    # Ranks of one host one after the other, in the order in which the hosts first come.
    nodes = list(dict.fromkeys(each.node for each in where))
    order = sorted(range(len(actors)), key=lambda index: nodes.index(where[index].node))
    actors, where = [actors[index] for index in order], [where[index] for index in order]
    port: int = ray.get(actors[0].open_store.remote())
    running = {}
    for rank, actor in enumerate(actors):
        here = [each for each in where if each.node == where[rank].node]
        formation = Formation(
            workers=tuple(sum(each.node == node for each in where) for node in nodes),
            host_rank=nodes.index(where[rank].node),
            attempt=0,
            job_id=f"ray-{where[0].pid}-{port}",
            store_port=port,
            store_address=where[0].address,
        )
        # Ray shows each actor its own GPUs only; ranks number those of their host.
        gpus = ",".join(gpu for each in here for gpu in each.gpus)
        running[actor.run.remote(formation, here.index(where[rank]), gpus, main, args, kwargs)] = rank
    return _gather(ray, running, where)


def _gather(ray: Any, running: dict[Any, int], where: list[_Where]) -> list[Any]:
    """What the ranks return; when one fails, names the one that failed first."""
    values: dict[int, Any] = {}
    failed: list[_Failed] = []
    settled_at = None
    while running and (settled_at is None or time.monotonic() < settled_at):
        done, _ = ray.wait(list(running), timeout=None if settled_at is None else 0.1)
        for reference in done:
            rank = running.pop(reference)
            try:
                good, value = ray.get(reference)
            except ray.exceptions.RayError as error:  # the process is gone, or the call did not get there
                failed.append(_Failed(rank, Raised(((type(error).__name__, str(error)),), ""), time.monotonic()))
            else:
                if good:
                    values[rank] = value
                else:
                    failed.append(_Failed(rank, Raised(tuple(value[0]), value[1]), time.monotonic()))
        if failed and settled_at is None:
            settled_at = time.monotonic() + _SETTLE_S  # others may say that they only lost this one, or why
    if not failed:
        return [values[rank] for rank in range(len(where))]
    cause = min(failed, key=lambda each: (each.raised.lost_a_peer, each.seen_at_s))
    place = where[cause.rank]
    what = "\n".join([f"{cause.raised.type_name}: {cause.raised.text}", *cause.raised.traceback.splitlines()])
    others = sorted(each.rank for each in failed if each is not cause)
    after = f" Ranks {others} failed after it." if others else ""
    raise LaunchError(f"rank {cause.rank} of {len(where)} (pid {place.pid} on {place.host}) failed with {what}{after}")


class _Rank:
    """One rank, in a process of Ray's."""

    def __init__(self) -> None:
        self._store: Any = None

    def where(self) -> _Where:
        """Where this actor runs, and on which GPUs."""
        ray = _import_ray()
        return _Where(
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
            host=socket.gethostname(),
            pid=os.getpid(),
            gpus=tuple(map(str, ray.get_gpu_ids())),
        )

    def open_store(self) -> int:
        """Keeps the job's store in this process, on the address by which the other hosts know this one; its port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address = _import_ray().util.get_node_ip_address()
        with socket.create_server((address, 0)) as listener:
            port: int = listener.getsockname()[1]
            self._store = TCPStore(
                address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=_STORE_TIMEOUT,
                master_listen_fd=listener.detach(),
            )
        return port

    def run(
        self,
        formation: Formation,
        local_rank: int,
        gpus: str,
        main: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[bool, Any]:
        """Calls the function as this rank: (True, what it returned), or (False, (chain of its error, traceback))."""
        cores = max(1, len(os.sched_getaffinity(0)))
        environ = worker_environ(
            formation, local_rank, os.environ, max_restarts=0, usable_cores=cores, cpu_only=False, error_file=""
        )
        environ.pop("TORCHELASTIC_ERROR_FILE")
        if gpus:
            environ["CUDA_VISIBLE_DEVICES"] = gpus
        os.environ.update(environ)
        try:
            return True, main(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - told to the caller, who names the rank
            chain = describe(error, "", 1, 0.0)["photinus"]["chain"]
            return False, (tuple(map(tuple, chain)), "".join(traceback.format_exception(error)))
