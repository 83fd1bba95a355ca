"""`photinus bench`: how fast collectives are here, over each backend, and what limits them.

options     what to measure, from the command line
result      one measurement; bandwidths; what limits a backend, and which one to choose
gpu_model   what an all_reduce through the host can reach on GPUs, and what binds, from counted bytes
table       all measurements as a table (rich), and as a picture (matplotlib)
explain     what each call would do, and why, without measuring
measure     the command: all contestants, all turns; the choice on GPUs is kept for backend "auto"
"""
