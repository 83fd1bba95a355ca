"""`photinus run` where something else gives out the hosts: Slurm, Open MPI.

detect_scheduler  inside srun or mpirun: which hosts, which of them is this one, where to meet
sbatch            `photinus run --slurm`: writes the batch script (batch.sh.j2), and submits it
"""
