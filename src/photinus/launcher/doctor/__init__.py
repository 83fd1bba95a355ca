"""`photinus doctor`: what works on this machine, found by trying it.

finding     what one look found                                     (no torch)
table       the findings on the terminal                            (rich)
hosts       several hosts, over ssh: versions, and every pair tried both ways
load        how busy this host is, and what patience that asks for  (no torch)
host        processors, memory, limits, the engine's needs          (no torch)
network     interfaces, addresses, the host's own name              (no torch)
software    Python, torch, launchers, GPUs; asked in child processes
backends    every backend of torch.distributed, really tried: two processes, an all_reduce, a deadline
examine     the command: options, all looks, exit code
"""
