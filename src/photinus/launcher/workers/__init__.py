"""The worker processes of one host: started, watched, ended; their output, their store, how they failed.

cgroup          what the kernel says about this control group: CPU quota, memory limit, kills
devices         how many workers this host gets: one per GPU, one per usable core, or as many as the user says
deaths          how workers ended, which of them was the first cause, and the words for it. Pure functions
guard           ends everything when the launcher itself is killed
interrupts      Ctrl-C, SIGTERM and their like, noted when they come and acted upon at safe points
job             a job as decided before anything starts, one attempt at it, and the environment that a worker finds
logs            the workers' output in files: DIR/JOB/attempt_K/RANK/stdout.log and stderr.log, torchrun's layout
output          the workers' lines on the launcher's terminal, and in log files
ports           listening on one address of this host
processes       the worker processes of one attempt on this host: started, watched and ended
store           the store of an attempt: torch's TCPStore on the loopback interface, in a child process of the launcher
worker          runs in each worker before the script: a file of its own, imports nothing of Photinus
"""
