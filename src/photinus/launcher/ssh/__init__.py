"""A job on several hosts that is started from one place, over ssh.

command        how a host is reached: the command that starts `remote` there, and whether a host is this one
environ        which environment variables a host started over ssh is given
host           one host, seen from the place where the user typed: the command that reaches it, and what comes and goes
hostfile       the file of hosts, as DeepSpeed and Open MPI have it: a host on each line, and how many workers it takes
lines          the output of several hosts on one terminal: the first host's as it comes, the others' in whole lines
lifeline       the standard input of a `photinus run` that another host started: signals, and whether anybody is there
remote         what `photinus run --hostfile` and `photinus doctor --hosts` start on each host, over ssh
remote_probe   what a host answers to `photinus doctor --hosts`: versions, clock, and how well it reaches another host
selection      which hosts and devices a job gets (--include, --exclude, ...), and the words for each host
start_hosts    a job on several hosts, started from one place: `photinus run --hostfile FILE`
"""
