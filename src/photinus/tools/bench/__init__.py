"""`photinus bench`: how fast collectives are here, over each backend, and what limits them.

result      measurements: bandwidths, what limits a backend, which one to choose; as a table
measure     the command: flags, all contestants, all turns; the choice on GPUs is kept for backend "auto"
"""
