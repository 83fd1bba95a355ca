"""This host's part of a job: its workers started, watched and ended, their output and store, its place in the job.

join         who leads a job on several hosts, and this host's way into it
job          a job as decided before anything starts, and the environment that a worker finds
program      the program that each worker runs, looked at before anything starts
devices      how many workers this host gets: one per GPU, one per usable core, or as many as the user says
processes    the worker processes of one attempt on this host: started, watched and ended
worker       runs in each worker before the script: a file of its own, imports nothing of Photinus
start_method  whether workers are forked, or each is a new Python
fork_server  the process that has imported torch, from which workers are forked
store        the store of an attempt: torch's TCPStore on the loopback interface, in a child process of the launcher
output       the workers' lines on the launcher's terminal, and in log files
equal_lines  shows once what several ranks print
logs         the workers' output in files: DIR/JOB/attempt_K/RANK/stdout.log and stderr.log, torchrun's layout
interrupts   Ctrl-C, SIGTERM and their like, noted when they come and acted upon at safe points
guard        ends everything that outlives a killed launcher, and adopts what outlives a worker
"""
