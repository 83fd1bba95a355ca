"""`photinus bench`: how fast collectives are here, over each backend, and what limits them.

options     what to measure, from the command line                       (no torch)
result      one measurement; bandwidths                                  (no torch)
table       the table of all measurements                                (rich)
explain     what limits a backend, and which one to choose               (no torch)
plot        a picture of the table                                       (matplotlib)
measure     the command: all contestants, all turns
"""
