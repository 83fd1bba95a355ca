"""Parameters, gradients and optimizer states split over ranks, whatever strategy asks for it.

shard_units        which submodules of a model are sharded, gathered and dropped as units
sharded_optimizer  ZeRO stage 1: an optimizer that remembers and steps only this rank's part of the parameters
split_states       states that lie on several ranks, made whole; and whole ones, split
swap_parameters    an optimizer that was made over one set of parameters, changed in place so that it steps another
unused_parameters  what FSDP2 makes of parameters that no rank used, taken away
"""
