"""This process in its job: device, process group, wrapped models, preemption, what a person is told.

placement    which device a rank computes on, over which backend, and why; for GPUs all ranks choose together
preemption   asked to suspend (SIGTERM, SIGUSR1), all ranks finish the same step, save, and leave
progress     what a person sees while a model trains: one bar on a terminal, one line per epoch, on rank 0 only
rank_store   how ranks find each other that no launcher of ours started: rank 0 serves a store
replicas     do all ranks still train the same model, with the same hyperparameters?
session      a session: this process's place in the job, its device, and the process group that joins the ranks
wrapping     from a plain model to one that trains in unison, and back
"""
