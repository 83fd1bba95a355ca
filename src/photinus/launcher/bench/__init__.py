"""`photinus bench`: how fast collectives are here, over each backend, and what limits them.

options     what to measure, from the command line                       (no torch)
rank        the program of each rank: a file of its own
contestant  the ranks of one backend, asleep unless it is their turn     (no torch)
result      one measurement; bandwidths, and the table                   (no torch)
explain     what limits a backend, and which one to choose               (no torch)
plot        a picture of the table                                       (matplotlib)
measure     the command: all contestants, all turns
"""
