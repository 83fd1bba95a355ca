"""The worker processes of one host: started, watched, ended; their output, their store, how they failed.

cgroup          what the kernel says about this control group: CPU quota, memory limit, kills
devices         how many workers this host gets: one per GPU, one per usable core, or as many as the user says
environment     the environment variables that a worker finds: torchrun's, and the world size that the launcher means
deaths          how workers ended, and which of them was the first cause. Pure functions over plain records
failure_text    the words for workers that failed, or suspended themselves. Pure functions
guard           ends everything when the launcher itself is killed
interrupts      Ctrl-C, SIGTERM and their like, noted when they come and acted upon at safe points
job             a job as decided before anything starts: what the command line, the devices and the environment come to
logs            the workers' output in files: DIR/JOB/attempt_K/RANK/stdout.log and stderr.log, torchrun's layout
output          the workers' lines on the launcher's terminal, and in log files
ports           listening on one address, and naming the process that holds a port which is taken
private_folder  a folder in the temporary directory that is gone when its owners are, however they end
processes       the worker processes of one attempt on this host: started, watched and ended
store           the store of an attempt: torch's TCPStore on the loopback interface, in a child process of the launcher
worker          runs in each worker before the script: a file of its own, imports nothing of Photinus
"""
