"""Backends and other libraries that are measured: by `photinus doctor`, `photinus bench` and programs in benchmarks/.

contestant  the ranks of one of them, asleep unless it is their turn                                      (no torch)
rank        the program of a rank of torch.distributed; and the loop that every contestant's ranks run
"""
