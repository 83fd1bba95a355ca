"""`photinus doctor`: what works on this machine, found by trying it.

finding       what one look found; all of it as the user sees it, by section
plan          plans of measurements for the ranks that a command starts, and the messages that they send back
rounds        backends measured in rounds, in the same ranks, which `photinus.launch` starts
backend_rank  one of these ranks
host          processors, memory, limits, the engine's needs, the host's own name
software      Python, torch, the engine: other programs, asked with a deadline; every backend, really tried
gpus          GPUs, whether copies to the host work, and which GPUs reach each other
hosts         several hosts, over ssh: versions, and every pair tried both ways
host_rank     the rank of each of these hosts, which `photinus run --hostfile` starts
model         `--model`: whether more devices pay for a model, measured and predicted, and what limits its speed
model_rank    one of the ranks that train it for a moment
examine       the command: options, all looks, exit code
"""
