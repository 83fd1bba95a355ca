"""Parameters, gradients and optimizer states split over ranks, whatever strategy asks for it.

units              submodules that are sharded, gathered and dropped as units; what is watched in their forwards
sharded_optimizer  optimizers changed in place: to step other parameters, or (ZeRO stage 1) only this rank's part
split_parts        the parts that ranks hold: hooks of users, sums to drop, steps over them
split_states       states that lie on several ranks, made whole; and whole ones, split
split_values       slices through which users write, and numbers that count the parts of all ranks
step_facts         what each rank did around its steps, compared, as no weight shows it where ranks split the work
"""
