"""C: a script for torch.distributed.launch on several machines. Nothing of it was changed but the backend's name.

photinus run --nproc_per_node 1 --nnodes 2 --node_rank 0 --master_addr node1 --master_port 29500 launched.py --lr 0.1
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from clouds import CLASSES, FEATURES, clouds
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--backend", default="photinus")
parser.add_argument("--lr", type=float, default=0.01)
args = parser.parse_args()

dist.init_process_group(args.backend)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(FEATURES, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
dataset = clouds(64)
sampler = DistributedSampler(dataset)
losses = []
for epoch in range(4):
    sampler.set_epoch(epoch)
    for points, targets in DataLoader(dataset, batch_size=16, sampler=sampler):
        loss = torch.nn.functional.cross_entropy(model(points), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
print(
    json.dumps(
        {
            "rank": dist.get_rank(),
            "world_size": dist.get_world_size(),
            "argument": args.local_rank,
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "pid": os.getpid(),
            "lr": args.lr,
            "backend": dist.get_backend(),
            "losses": losses,
            "weights": model.module.weight.flatten().tolist(),
        }
    )
)
dist.destroy_process_group()
