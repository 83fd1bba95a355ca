"""B: haiscale.ddp, ported: the import and the backend's name are other ones; accumulation by no_sync, reducer.stop().

torchrun --nproc-per-node 2 haiscale.py | python haiscale.py --init_method tcp://127.0.0.1:29511 --rank 0 --world_size 2
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from clouds import CLASSES, FEATURES, clouds
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from photinus import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--init_method", default="env://")
parser.add_argument("--rank", type=int, default=int(os.environ.get("RANK", "0")))
parser.add_argument("--world_size", type=int, default=int(os.environ.get("WORLD_SIZE", "1")))
args = parser.parse_args()

refused = {}


def refuse(name, make):
    try:
        make()
    except (RuntimeError, ValueError) as error:
        refused[name] = str(error)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, CLASSES))


refuse("no group", lambda: DistributedDataParallel(network()))
dist.init_process_group("photinus", args.init_method, rank=args.rank, world_size=args.world_size)
rank = dist.get_rank()
refuse("two devices", lambda: DistributedDataParallel(network(), device_ids=[0, 1]))
refuse("lazy", lambda: DistributedDataParallel(nn.LazyLinear(3)))

torch.manual_seed(rank)  # other weights on each rank, until the wrapper is made
model = network()
model.register_buffer("mine", torch.tensor(float(rank)))
model._ddp_params_and_buffers_to_ignore = ["mine"]
ddp = DistributedDataParallel(model, device_ids=None, broadcast_buffers=True, find_unused_parameters=False)
first = model[0].weight.detach().clone()
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
sampler = DistributedSampler(clouds(96))
loss_fn = nn.CrossEntropyLoss()


def gathered(tensor: torch.Tensor) -> list[list[float]]:
    found = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(found, tensor.detach().contiguous())
    return [each.flatten().tolist() for each in found]


ddp.reducer.sync_grad = False  # the reducer's own switch, which no_sync() turns for a block
loss_fn(ddp(torch.full((2, FEATURES), 1.0 + rank)), torch.tensor([0, 1])).backward()
switched_off = gathered(model[0].bias.grad)
ddp.reducer.sync_grad = True
optimizer.zero_grad()

local = together = None
for epoch in range(2):
    sampler.set_epoch(epoch)
    for step, (points, targets) in enumerate(DataLoader(clouds(96), 8, sampler=sampler)):
        if step % 2 == 0:  # the gradients of two batches make one step
            try:
                with ddp.no_sync():
                    loss_fn(ddp(points), targets).backward()
                    local = gathered(model[0].bias.grad)
                    raise KeyError("leaves the block as it was")
            except KeyError:
                continue
        loss = loss_fn(ddp(points), targets)
        ddp.reducer.filter_unused_parameters(loss)
        loss.backward()
        together = gathered(model[0].bias.grad)
        optimizer.step()
        optimizer.zero_grad()
facts = {
    "rank": rank,
    "world_size": dist.get_world_size(),
    "refused": refused,
    "first": gathered(first),
    "switched_off": switched_off,
    "local": local,
    "together": together,
    "weights": gathered(model[3].weight),
    "mine": gathered(model.mine.reshape(1)),
    "loss": loss.item(),
}
ddp.reducer.stop()
print(json.dumps(facts))
dist.destroy_process_group()
