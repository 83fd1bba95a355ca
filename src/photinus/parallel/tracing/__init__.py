"""When things happened on this process, and the picture of them for all ranks.

device_clock  time on a GPU: when its stream comes by a place, not when Python does
recording     what happened when on this process: the spans that a trace is drawn from
trace         a picture of some steps on all ranks: forward, backward, each bucket, and what was waited for
"""
