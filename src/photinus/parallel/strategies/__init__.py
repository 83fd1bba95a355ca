"""Ways of spreading a model over ranks, chosen by name.

choose         the strategies by name, and the one call that makes a model ready for them
compare        do the ranks hold one model, and have they made the same steps?
ddp            "ddp", "torch-ddp" and "zero1": every rank holds the whole model; "dp": one process with several devices
fully_sharded  "zero2" and "zero3": gradients and optimizer states are split, and parameters too
strategy       what every way of spreading a model over ranks has in common: a small set of verbs
"""
