"""This process in its job: device, process group, wrapped models, preemption, what a person is told.

gpu_backend  over which backend ranks on GPUs exchange: what a bench found here, else by what they share
length       how long a run is: so many epochs, or so many steps, counted from its very start
loss         checks of a loss, and backward for people who own their loop
placement    which device a rank computes on, over which backend, and why
preemption   asked to suspend (SIGTERM, SIGUSR1), all ranks finish the same step, save, and leave
progress     what a person sees while a model trains: one bar on a terminal, one line per epoch, on rank 0 only
rank_store   how ranks find each other that srun or mpirun started, without a launcher of ours
replicas     do all ranks still train the same model, with the same hyperparameters?
session      a session: this process's place in the job, its device, and the process group that joins the ranks
wrapping     from a plain model to one that trains in unison, and back
"""
