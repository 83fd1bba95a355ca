"""The words of `photinus run`: flags, their values, the program, and wrong use of them.

flag_table   the flags of `photinus run` with their words, the help made of them, and the names that other launchers use
flag_values  what stands behind a flag, read and checked
flags        what the user asked `photinus run` to do, and the parser that reads it from the command line
local_rank   scripts that take --local_rank, as torch.distributed.launch and DeepSpeed gave it to them
program      the user's program: a script by path or a module by name, looked at before anything starts
usage        wrong use of the command line: the error, and what was probably meant
"""
