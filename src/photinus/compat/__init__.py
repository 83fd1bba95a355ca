"""Configurations of other tools (DeepSpeed's), and weights for them.

deepspeed            DeepSpeed's JSON configuration as what `wrap`, `Loop` and `Trainer` take
deepspeed_keys       its keys: which are read, which have no effect here and why, which are refused and why
deepspeed_schedules  its learning-rate schedules, as torch schedulers
export               the command `photinus export`: a run's weights as a safetensors file
"""
