"""Messages between ranks beside gradients, over plain torch.distributed.

agreement         small things that all ranks have to know alike, over plain torch.distributed and without pickle
broadcast         tensors of one rank of a group, copied to all ranks in few large pieces
collectives       calls of a process group, the same for gloo, nccl, photinus and others
shard_tree        the tree in which the values of logical shards are added, whichever rank holds them
tensors           tensors inside nested values, and how a tensor lies in memory
verify_models     do all ranks hold the same model, the same weights later on, and GPUs of their own?
"""
