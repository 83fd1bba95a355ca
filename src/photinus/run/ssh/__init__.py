"""A job on several hosts that is started from one place, over ssh.

command        the command that starts `remote` on a host, the environment it gets there, and whether a host is this one
host           one host, seen from where the user typed: the connection to it, and what goes there and comes back
hostfile       the file of hosts, as DeepSpeed and Open MPI have it: a host on each line, and how many workers it takes
lifeline       the standard input of a `photinus run` that another host started: signals, and whether anybody is there
screen         the terminal of a job on several hosts, in whole lines
start_hosts    a job on several hosts, started from one place: `photinus run --hostfile FILE`
"""
