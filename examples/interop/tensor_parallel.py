"""Tensor parallelism: a DeviceMesh, DTensor and parallelize_module; each rank computes with its part of every layer.

torchrun --nproc-per-node 2 examples/interop/tensor_parallel.py
photinus run --nproc-per-node 2 examples/interop/tensor_parallel.py --backend gloo
"""

import torch
import torch.distributed as dist
from digits import check_world_size, digits, options, report
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class GatedNetwork(nn.Module):
    """[N, 64] -> [N, 10], with the gated layer of today's transformers in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.gate, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(nn.functional.silu(self.gate(x)) * self.up(x)))


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    check_world_size(dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))

    train_set, valid_set = digits()
    model = parallelize_module(
        GatedNetwork(),
        mesh["tensor"],
        {
            "up": ColwiseParallel(),  # no exchange: each rank has its columns
            "gate": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(0)),  # reduce_scatter: each rank adds up its samples
            "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),  # all_gather, twice
        },
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    order = torch.Generator().manual_seed(0)  # every rank sees the whole batch
    loader = DataLoader(train_set, batch_size=64, shuffle=True, drop_last=True, generator=order)
    for epoch in range(args.epochs):
        total = 0.0
        for images, targets in loader:
            loss = cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        report(epoch=epoch, loss=total / len(loader))

    images, targets = valid_set.tensors
    with torch.no_grad():
        report(accuracy=(model(images).argmax(1) == targets).float().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
