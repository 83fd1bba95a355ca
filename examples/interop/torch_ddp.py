"""torch's own DistributedDataParallel. It imports nothing of Photinus: the backend's name is enough.

torchrun --nproc-per-node 2 examples/interop/torch_ddp.py
photinus run --nproc-per-node 2 examples/interop/torch_ddp.py --backend gloo
"""

import torch
import torch.distributed as dist
from digits import Network, check_world_size, digits, options, report
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    args = options(__doc__).parse_args()
    dist.init_process_group(args.backend)
    check_world_size(dist.get_world_size())

    train_set, valid_set = digits()
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, targets in loader:
            loss = cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        report(epoch=epoch, loss=total.item() / len(loader))

    images, targets = valid_set.tensors
    with torch.no_grad():
        report(accuracy=(model(images).argmax(1) == targets).float().mean().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
