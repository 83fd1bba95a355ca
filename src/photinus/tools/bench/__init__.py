"""`photinus bench`: how fast collectives are here, over each backend, and what limits them.

options     what to measure, from the command line
result      measurements: bandwidths, what limits a backend, which one to choose; as a table and as a picture
measure     the command: all contestants, all turns; the choice on GPUs is kept for backend "auto"; `--explain`
"""
