"""Parameters, gradients and optimizer states split over ranks, whatever strategy asks for it.

shard_units        which submodules of a model are sharded, gathered and dropped as units
sharded_optimizer  optimizers changed in place: to step other parameters, or (ZeRO stage 1) only this rank's part
split_gradients    gradients up to their exchange: hooks on parameters, losses that outputs do not show, sums to drop
split_states       states that lie on several ranks, made whole; and whole ones, split
split_values       slices through which users write, and numbers that count the parts of all ranks
watched_forwards   forwards of split models: the order of their units; writes into parameters, which would be lost
watched_steps      steps of optimizers over split models: what a forward gathered is dropped before
step_facts         what each rank did around its steps, compared, as no weight shows it where ranks split the work
"""
