"""Runs a job's workers on this host: `photinus run` and `photinus.launch`. Never imports torch.

local/       this host's workers, and its place among the hosts of a job
ssh/         several hosts, started from one place
from_python  `photinus.launch`: one function in several processes, from a script or a notebook
function     runs one rank of `photinus.launch`
exit_code    the end of a command: its exit code, and one line for an error
remote       what `photinus run --hostfile` starts on each host, over ssh
plan         the job of this host: a JobSpec becomes a Job, or an error that says what to type instead
supervise    one job on this host, from its start to its exit code: opens what it needs
agent        the attempts of a job: meet, start, watch, and again where it may help
"""
