"""Averages gradients while backward is still computing: buckets, the order they leave in, what is checked on the way.

bucket_exchange    how one bucket travels: averaged, by a hook, or in another precision
bucket_launcher    a reducer's buckets: which gradients lie together, and when each exchange starts
buckets            which parameter's gradient lies where: the pure assignment of parameters to buckets
gradient_memory    where gradients lie while they are reduced: flat buckets, and each parameter's place in them
graph              autograd graphs: leaves below outputs, nested backwards, averages that keep their graph
options            how a reducer works
rank_facts         what the ranks tell each other of themselves with each exchange of gradients
reducer            averages gradients over the ranks while backward is still computing others
round_errors       what went wrong with a backward: gradients that are missing, or not finite
sparse_gradients   averages of sparse gradients, by dense collectives only
streams            streams of a GPU, as far as a reducer has to know of them
timeline           when forward, backward and exchange of an iteration began and ended, for torch's logging data
used_parameters    which parameters got a gradient, on how many ranks, and whether these are always the same
"""
