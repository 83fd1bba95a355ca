"""`photinus run` where something else gives out the hosts: Slurm, Open MPI, Kubernetes.

detect_scheduler  inside srun or mpirun: which hosts, which of them is this one, where to meet
sbatch            `photinus run --slurm`: writes the batch script, and submits it
kubernetes        `photinus run --kubernetes`: writes the manifest
  pytorch_job     ... as a PyTorchJob of Kubeflow's training operator
  job_set         ... as a JobSet
  pods            what both have in common: the pod of one host, its secret, its shared memory
  yaml_text       plain data as YAML text
inside            the command line that either of them starts on each host
written           a script or manifest put into a file, never over one that is there
"""
