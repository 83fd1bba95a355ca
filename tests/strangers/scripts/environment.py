"""D: a script that reads RANK, LOCAL_RANK and WORLD_SIZE, -1 or 1 where there are none; logs and draws a bar on rank 0.

RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python environment.py (and RANK=1 ...)
"""

from __future__ import annotations

import json
import logging
import os
import warnings

import torch
from clouds import CLASSES, FEATURES, clouds
from tqdm import tqdm

import photinus

RANK = int(os.getenv("RANK", "-1"))
LOCAL_RANK = int(os.getenv("LOCAL_RANK", "-1"))
WORLD_SIZE = int(os.getenv("WORLD_SIZE", "1"))
logging.basicConfig(level=logging.INFO if RANK in (-1, 0) else logging.WARNING, format="%(message)s")
logger = logging.getLogger("environment")

with photinus.init(device="cpu", seed=0) as world:
    assert (world.rank, world.world_size) == (max(RANK, 0), WORLD_SIZE)
    logger.info("training on %d process(es)", WORLD_SIZE)
    if RANK == 1:
        warnings.warn("rank 1 has something to say", stacklevel=1)
    net = torch.nn.Sequential(torch.nn.Linear(FEATURES, CLASSES))
    model, optimizer = photinus.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    loader = photinus.loader(clouds(62), batch_size=8, drop_last=False)  # was: a sampler, or None with one process
    seen, losses = 0, []
    for epoch in range(2):
        for batch in tqdm(loader.epoch(epoch), total=len(loader), disable=RANK not in (-1, 0)):
            points, targets = batch.data
            loss = torch.nn.functional.cross_entropy(model(points), targets)
            photinus.backward(loss, weight=batch.weight)
            optimizer.step()
            optimizer.zero_grad()
            seen += batch.samples
            losses.append(loss.item() * batch.weight)
    print(
        json.dumps(
            {
                "rank": world.rank,
                "world_size": world.world_size,
                "local_rank": LOCAL_RANK,
                "seen": seen,
                "losses": losses,
                "weights": net[0].weight.flatten().tolist(),
            }
        )
    )
