"""Ways of spreading a model over ranks, chosen by name.

choose         the strategies by name, the call that makes a model ready, and the comparison of models of all ranks
ddp            "ddp", "torch-ddp" and "zero1": every rank holds the whole model; "dp": one process with several devices
fully_sharded  "zero2" and "zero3": gradients and optimizer states are split, and parameters too
strategy       what every way of spreading a model over ranks has in common: a small set of verbs
"""
