"""Find the place of `photinus run` when srun or mpirun started it once on each host."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import replace

from .. import env
from ..errors import LaunchError, NotInitializedError, UsageError
from ..job.own_address import own_address
from ..job.rendezvous import find_rendezvous
from ..job.slurm import reachable_address, slurm_job
from ..job.spec import HostSpec
from ..job.world import LauncherEnv, World, read_scheduler, read_torchrun


def place_hosts(hosts: HostSpec, environ: MutableMapping[str, str]) -> HostSpec:
    """Return the hosts of the job with what the scheduler around this process says of them, where the user did not.

    A secret that the job's processes share already is put into the environment, for the launchers to prove themselves.

    Raises:
        UsageError: the scheduler started several launchers on one host, each of which would start a whole job; or it
            holds several hosts, and this launcher was started on one of them only.
        LaunchError: the environment contradicts itself, or does not say where the hosts meet.
    """
    if hosts.nnodes is not None:
        return hosts
    if read_torchrun(environ) is not None and env.JOB_ID.name in environ:
        return hosts  # a worker of a launcher, which starts processes of its own
    try:
        if (scheduler := read_scheduler(environ)) is None:
            if (job := slurm_job(environ)) is None or job.hosts == 1:
                return hosts
            # In a batch script or the shell of salloc: the other hosts would stay idle.
            raise UsageError(
                f"Slurm job {job.job_id} has {job.hosts} hosts, but photinus run was started on this one only. Start "
                f"it on each host: `srun --ntasks-per-node=1 photinus run ...`. To use this host only: "
                f"`photinus run --nnodes 1 ...`."
            )
        world = World.from_env({name: value for name, value in environ.items() if name not in _OF_RANKS})
        _refuse_several_on_one_host(world, scheduler)
        if world.world_size == 1:
            return hosts
        # A typed leader wins. Else MASTER_ADDR and MASTER_PORT do, as for ranks without `photinus run`.
        place = None if hosts.leader is not None else find_rendezvous(world, environ)
    except NotInitializedError as error:
        raise LaunchError(str(error)) from error
    except UsageError:
        raise
    except ValueError as error:
        raise LaunchError(f"cannot read the place of this process from the environment: {error}") from error
    leader, port, job_id = hosts.leader, hosts.port, hosts.job_id
    if place is not None:
        leader = reachable_address(place.address)
        port = place.port if port is None else port
        job_id = job_id or (place.job or f"{place.address}:{place.port}").replace(" ", "-")
    assert leader is not None
    listen_on = hosts.local_address
    if listen_on is None and world.rank == 0:
        try:
            listen_on = own_address(leader, () if place is None else place.hosts[1:2])
        except OSError as error:
            raise LaunchError(
                f"this host, the first of {world.world_size} that {scheduler.launcher} chose, cannot resolve its own "
                f"name {leader}: {error.strerror or error}. Export MASTER_ADDR, an address that every host can resolve."
            ) from error
    # mpirun of Open MPI makes 128 random bits per job for its fast networks, and hands them to its own processes only.
    secret = env.JOB_SECRET.get(environ) or environ.get("OMPI_MCA_orte_precondition_transports")
    if secret:
        environ[env.JOB_SECRET.name] = secret
    nnodes = (world.world_size, world.world_size)
    return replace(
        hosts, nnodes=nnodes, node_rank=world.rank, leader=leader, port=port, local_address=listen_on, job_id=job_id
    )


# Variables of an outer or earlier launcher; what counts here is who started the launchers.
_OF_RANKS = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "PHOTINUS_WORLD_SIZE"}
)


def _refuse_several_on_one_host(world: World, scheduler: LauncherEnv) -> None:
    per_host = scheduler.step.tasks_per_host if scheduler.step is not None else ()
    most = max(per_host, default=world.local_world_size)
    if world.world_size == 1 or most == 1:
        return
    starter, once, direct = _WORDS.get(scheduler.launcher, _WORDS["MPICH"])
    raise UsageError(
        f"{starter} started `photinus run` {world.world_size} times, {most} of them on one host, and each would start "
        f"workers for the whole host. Start one launcher per host: `{once} photinus run ...`. Or start no launcher: "
        f"then {scheduler.launcher}'s processes are the ranks: `{direct.format(world.world_size)} python train.py`."
    )


_WORDS = {
    "Slurm": ("srun", "srun --ntasks-per-node=1", "srun --ntasks={}"),
    "Open MPI": ("mpirun", "mpirun --map-by ppr:1:node", "mpirun -np {}"),
    "MPICH": ("mpiexec", "mpiexec -ppn 1", "mpiexec -n {}"),
}
