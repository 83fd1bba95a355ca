"""The `photinus` command: what all commands share, and everything that decides what `photinus run` starts where.

main              finds the subcommand, shows help and errors
parser            what the command lines of all commands have in common: argparse, with errors that say what to type
run               `photinus run`: reads the words, looks at the program, resolves a JobSpec, starts the job
flags             the flags of `photinus run`, in one table, and what the user typed, as a value
flag_values       how the value of a flag is read and checked: types for argparse
selection         which hosts and devices a job gets (--include, --exclude, ...), and the words for each host
detect_scheduler  inside srun or mpirun: which hosts, which of them is this one, where to meet
new               `photinus new`: a project made of the files in photinus/templates
"""
