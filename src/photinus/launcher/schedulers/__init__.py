"""`photinus run` where something else gives out the hosts: Slurm, Open MPI, Kubernetes.

detect_scheduler  inside srun or mpirun: which hosts, which of them is this one, where to meet
sbatch            `photinus run --slurm`: writes the batch script (batch.sh.j2), and submits it
kubernetes        `photinus run --kubernetes`: writes the manifest (manifest.yaml.j2), a PyTorchJob or a JobSet
inside            what the two have in common: the words that they start on each host, templates, the file
"""
