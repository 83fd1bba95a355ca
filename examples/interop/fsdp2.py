"""FSDP2: fully_shard; each rank holds its part of the parameters, gradients and optimizer state.

torchrun --nproc-per-node 2 examples/interop/fsdp2.py
photinus run --nproc-per-node 2 examples/interop/fsdp2.py --backend gloo
"""

import torch
import torch.distributed as dist
from digits import Network, check_world_size, digits, options, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    check_world_size(dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    train_set, valid_set = digits()
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = Network()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, targets in loader:
            loss = cross_entropy(model(images), targets)
            loss.backward()
            # over the whole gradient, of which each rank holds a part
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        report(epoch=epoch, loss=total.item() / len(loader))

    images, targets = valid_set.tensors
    with torch.no_grad():
        report(accuracy=(model(images).argmax(1) == targets).float().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
