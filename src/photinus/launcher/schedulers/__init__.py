"""`photinus run` where something else gives out the hosts: Slurm, Open MPI, Kubernetes.

surroundings    inside srun or mpirun: which hosts, which of them is this one, where to meet   (no torch)
sbatch          `photinus run --slurm`: writes the batch script, and submits it                (no torch)
kubernetes      `photinus run --kubernetes`: writes the manifest                               (no torch)
  pytorch_job   ... as a PyTorchJob of Kubeflow's training operator
  job_set       ... as a JobSet
  pods          what both have in common: the pod of one host, its secret, its shared memory
  yaml          plain data as YAML text
inside          the command line that either of them starts on each host
"""
