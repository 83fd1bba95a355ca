"""A job of several processes: who they are, where they meet, and what their launchers tell each other. Torch-free.

    world           World: rank, local rank and world size, as the variables of its launcher say
    slurm           a step of srun, what its job asked for, and Slurm's short way to write many host names
    rendezvous      the address and port at which the ranks find each other
    cgroup          what the kernel says about this control group: CPU quota, memory, kills
    own_address     the addresses by which other hosts know this one, and listening on one of them
    worker_files    the memory files between a worker and its launcher, and the heads of snapshots
    status          what a worker shows its launcher while it runs
    deaths          how workers ended, which of them was the first cause, and the words for it. Pure functions
    restart_policy  after a failed attempt: what is said, and whether there is another
    membership      the rules by which hosts start, stop, start again and end. No sockets, clock, processes
    spec            what to start where: resolved once, the only thing that leaves the command line
    attempt         one attempt at a job: who takes part, which ranks have ended, and what an agent asks of its peers
    channel         launchers' connections: both ends prove that they know the job's secret, then send JSON
    relay           brings this host's workers to the store on the leader's host
    server          the leading host's end, in a thread of its own: one port, behind which hosts meet and the store is
    client          a host's end: dials the leader, proves itself, and is the `Peers` of this host's agent

Reads the environment it is given, and refuses contradictions instead of guessing.
"""

from __future__ import annotations
