"""The command line, and the launcher that starts a script once per device and keeps it going.

cli             `photinus`: finds the command, shows help and errors           (no torch)
flags           flags of `photinus run`: spellings, help, suggestions          (no torch)
usage           wrong use: the error and the closest right word                (no torch)
program         the script or module that each worker runs                     (no torch)
local_rank      whether it takes --local_rank                                  (no torch)
devices         how many workers this host gets                                (torch in a child process)
cgroup          limits and out-of-memory kills of this process's control group (no torch)
environment     the environment variables that a worker finds                  (no torch)
job             a job as decided before anything starts                        (no torch)
run             `photinus run`: help, wrong use, then the job                  (no torch)
dry_run         what a job would start, as text                                (no torch)
supervise       one job from start to exit code
  store         a fresh store for the workers of each attempt                  (torch in a child process)
  colleagues    what the agent needs from the other hosts, and the case of one (no torch)
  agent         the attempts: meet, start, watch, and again where it may help  (no torch)
  processes     the worker processes of one attempt: start, watch, end         (no torch)
  output        the workers' lines on the launcher's terminal                  (no torch)
  logs          the same in files, and what goes where                         (no torch)
  interrupts    Ctrl-C and other signals, taken at safe points                 (no torch)
  guard         ends everything when the launcher itself was killed            (no torch)
  report        which rank failed first, and the words for it                  (no torch)
new             `photinus new`: projects made of the files in photinus/templates (no torch)
again           `photinus again`: a run once more, from its config.json        (no torch)
completion      `photinus completion`: commands and flags for the shell        (no torch)
worker          runs in each worker before the script: a file of its own, imports nothing of Photinus
from_python     `photinus.launch`: one function in several processes, from a script or a notebook
  function      the program of each of its ranks
schedulers/     inside srun and mpirun; batch scripts, manifests for Kubernetes          (no torch)
doctor/         `photinus doctor`: looks at this machine, and tries every backend        (torch in child processes)
bench/          `photinus bench`: collectives over each backend, and what limits them    (torch in child processes)
"""
