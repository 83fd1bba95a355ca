"""The `photinus` command: what all commands share, and flags, values and program of `photinus run`.

main         finds the subcommand, shows help and errors
parser       what the command lines of all commands have in common: argparse, with errors that say what to type instead
flag_table   the flags of `photinus run`: what stands behind them, what they do, and the names that other launchers use
flag_values  what stands behind a flag, read and checked: types for argparse
flags        what the user asked `photinus run` to do, read from the command line
program      the user's program: a script by path or a module by name, looked at before anything starts
new          `photinus new`: a project made of the files in photinus/templates
completion   `photinus completion`: a script that completes words in bash, zsh or fish
"""
