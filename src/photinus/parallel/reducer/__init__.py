"""Averages gradients while backward is still computing: buckets, the order they leave in, what is checked on the way.

bucket_exchange    how one bucket travels: averaged, by a hook, or in another precision
bucket_launcher    starts the exchanges of buckets: when complete, always in the same order on all ranks
bucket_maker       makes a reducer's buckets: which gradients lie together, and what travels with them
buckets            which parameter's gradient lies where: the pure assignment of parameters to buckets
comm_hooks         communication hooks: the user's function in place of the average of each bucket
gradient_memory    where gradients lie while they are reduced: flat buckets, and each parameter's place in them
graph              autograd graphs: leaves below outputs, nested backwards, averages that keep their graph
nan_guard          which rank made the first gradient that is not a finite number?
options            how a reducer works
rank_facts         what the ranks tell each other of themselves with each exchange of gradients
reducer            averages gradients over the ranks while backward is still computing others
round_errors       what went wrong with a backward: said at its end, or, where code expects it so, at the next forward
sparse_gradients   averages of sparse gradients, by dense collectives only
static_graph       a model that promises to use the same parameters in the same way in every step
streams            streams of a GPU, as far as a reducer has to know of them
timeline           when forward, backward and exchange of each iteration began and ended, as this process saw it
used_parameters    which parameters got a gradient, and on how many ranks
"""
