"""The wrapper DistributedDataParallel and what it is made of, above the reducer.

buffer_sync      the wrapped module's buffers (BatchNorm's running statistics, …): which ones are kept equal, and how
checks           what can be wrapped, on which device, and what the wrapper's arguments mean
ddp              DistributedDataParallel: one model, a copy on every rank, gradients averaged while backward runs
held_parameters  the parameters that a wrapper averages: no other wrapper does, and none comes or goes later
mixed_precision  forward and backward in low precision, parameters and gradients in full
sync_batch_norm  batch normalisation over the whole global batch, on CPU and GPU, over plain torch.distributed
torch_surface    what torch's own tools ask of a wrapper beside its public interface, and `join` for uneven inputs
"""
