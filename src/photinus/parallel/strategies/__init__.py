"""Ways of spreading a model over ranks, one class per file, and the choice by name.

choose         the strategies by name, and the one call that makes a model ready for them
ddp            "ddp": every rank holds the whole model; our DistributedDataParallel averages the gradients
dp             "dp": one process drives several devices with torch.nn.DataParallel
fully_sharded  what "zero2" and "zero3" share
strategy       what every way of spreading a model over ranks has in common: a small set of verbs
torch_ddp      "torch-ddp": torch's own DistributedDataParallel, the oracle
zero1          "zero1": as "ddp", and the optimizer's state is split
zero2          "zero2": gradients and optimizer states are split
zero3          "zero3": parameters, too; a unit is whole only while it computes
"""
