"""The script that every kind of start runs in these tests: each rank writes down what it sees.

tell.py FOLDER [anything]
"""

from __future__ import annotations

import json
import os
import sys

import torch

import photinus

with photinus.init(device="cpu", timeout_s=60) as world:
    total = torch.tensor([float(world.rank + 1)])
    torch.distributed.all_reduce(total)
    seen = {
        "rank": world.rank,
        "world_size": world.world_size,
        "local_rank": world.local_rank,
        "local_world_size": world.local_world_size,
        "sum": total.item(),
        "device": str(world.device),
        "launcher": world.launcher,
        "arguments": sys.argv[2:],
        "node": os.environ.get("SLURMD_NODENAME"),
    }
    with open(os.path.join(sys.argv[1], f"{world.rank}.json"), "w") as file:
        json.dump(seen, file)
