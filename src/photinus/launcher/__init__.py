"""The command line, and the launcher that starts a script once per device and keeps it going. Never imports torch.

command_line/  the words of `photinus run`
viewing/       `photinus top` and `photinus report`
workers/       the worker processes of one host
hosts/         one job on several hosts: they find one another, and learn of failures
schedulers/    under Slurm, mpirun
ssh/           several hosts, started from one place
contestants/   backends and other libraries that are measured, by doctor, bench and the programs in benchmarks/
doctor/        `photinus doctor`: what works here, found by trying it
bench/         `photinus bench`: how fast collectives are here
agent          the attempts of a job: meet, start, watch, and again where it may help
supervise      one job on this host, from its start to its exit code; `--dry-run`
run            `photinus run`: reads the words, looks at the program, starts the job
new            `photinus new`: projects made of the files in photinus/templates
completion     `photinus completion`: a script that completes words in bash, zsh or fish
cli            `photinus`: finds the subcommand, shows help and errors
from_python    `photinus.launch`: one function in several processes, from a script or a notebook
function       runs one rank of `photinus.launch`
"""
