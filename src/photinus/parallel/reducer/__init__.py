"""Averages gradients while backward is still computing: buckets, the order they leave in, what is checked on the way.

autograd           what a reducer has to know of torch.autograd: backwards inside others, graphs, streams of a GPU
bucket_exchange    how one bucket travels: averaged, by a hook, or in another precision
buckets            which gradients lie together, in which memory, and when each exchange starts
checks             do all ranks do the same, has each parameter a gradient, is each gradient finite
options            how a reducer works
reducer            averages gradients over the ranks while backward is still computing others
shard_sums         the exchange of gradients of logical shards: the same bits on any number of ranks
sparse_gradients   averages of sparse gradients, by dense collectives only
timeline           when forward, backward and exchange of an iteration began and ended, for torch's logging data
used_parameters    which parameters got a gradient, on how many ranks, and whether these are always the same
"""
