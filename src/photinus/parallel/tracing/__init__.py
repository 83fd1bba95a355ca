"""When things happened on this process, and the picture of them for all ranks.

device_clock  time on a GPU: when its stream comes by a place, not when Python does
spans         spans that a profiler shows of a training step: forward, backward, the exchange of each bucket
trace         a picture of some steps on all ranks, from torch.profiler: these spans, operators and kernels
"""
