"""From a data set to the batches of this rank: order, worker processes, devices, random numbers.

arguments  what users give: numbers, data sets and DataLoaders, checked and taken apart
loader     batches of a dataset for this rank: shuffled, resumable, the same at every world size
own_counts  counts that an object without a length keeps itself while it is read
rng        random number generators: seeds that depend on nothing but what they are for, and states that can be saved
same_data  whether all ranks have the same data: a few samples, compared
sampler    which samples make a batch, and which of them a rank takes: pure functions of (seed, epoch, batch, rank)
stream     data without a length: which shards of them a rank reads, and reading one from any place on
workers    what runs where samples are fetched: in the rank itself, or in its worker processes
"""
