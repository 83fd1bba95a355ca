"""Who am I among the processes of this job, and where do they meet: read from whichever launcher's variables are there.

    ranks        World: rank, local rank and world size, as the launcher says       (what users see)
    launchers    the variables of torchrun, Open MPI, MVAPICH2, MPICH, Intel MPI and Slurm
    slurm        a step of srun, and what its job asked for
    host_list    Slurm's short way to write many host names
    rendezvous   the address and port at which the ranks find each other
    hydra        which run of MPICH's mpiexec a process belongs to
    own_address  the address by which other hosts know this one
    ended        the ranks whose launcher saw them end well, for those that wait for them
    check_world  refuses a process that would train alone though others were started beside it

Torch-free. Reads the environment it is given, and refuses contradictions instead of guessing.
"""

from __future__ import annotations

from .check_world import check_company
from .ranks import World
from .rendezvous import Rendezvous, find_rendezvous

__all__ = ["Rendezvous", "World", "check_company", "find_rendezvous"]
