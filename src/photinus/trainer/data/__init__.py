"""From a data set to the batches of this rank: order, worker processes, devices, random numbers.

arguments  what users give: numbers, data sets and DataLoaders, checked and taken apart
loader     batches of a dataset for this rank: shuffled, resumable, the same at every world size
rng        random number generators: seeds that depend on nothing but what they are for, and states that can be saved
same_data  comparing a few samples of all ranks, which must have the same data
sampler    which samples make a batch, and which of them a rank takes: pure functions of (seed, epoch, batch, rank)
stream     data without a length: the shards of it that a rank reads, and reading one from any place on
workers    fetching samples, in the rank itself or in its worker processes
"""
