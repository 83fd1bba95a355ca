"""Lightning Fabric: your own loop with Fabric's launcher, loaders, backward, reductions and checkpoints.

    torchrun --nproc-per-node 2 examples/interop/lightning_fabric.py
    photinus run --nproc-per-node 2 examples/interop/lightning_fabric.py --backend gloo

The backend is an argument of the strategy: DDPStrategy(process_group_backend="photinus").
"""

import os
import tempfile
from pathlib import Path

import torch
from digits import Network, check_world_size, digits, options, report
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    args = options(__doc__).parse_args()
    strategy = DDPStrategy(process_group_backend=args.backend, gradient_as_bucket_view=True)
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy=strategy)
    fabric.launch()
    check_world_size(fabric.world_size)

    train_set, valid_set = digits()
    model = Network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.003))
    fabric.seed_everything(0)
    train_loader, valid_loader = fabric.setup_dataloaders(
        DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(valid_set, batch_size=60)
    )

    for epoch in range(args.epochs):
        total = torch.zeros(())
        for step, (images, targets) in enumerate(train_loader):
            accumulating = step % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating):
                loss = cross_entropy(model(images), targets)
                fabric.backward(loss)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        report(epoch=epoch, loss=fabric.all_reduce(total, reduce_op="mean").item() / len(train_loader))

    with tempfile.TemporaryDirectory(prefix="fabric-") as own_folder:
        path = Path(fabric.broadcast(own_folder), "state.ckpt")
        fabric.save(path, {"model": model, "optimizer": optimizer})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        fabric.load(path, {"model": model, "optimizer": optimizer})
        fabric.barrier()

    right = torch.zeros((), dtype=torch.int64)
    with torch.no_grad():
        for images, targets in valid_loader:  # 360 samples: even parts for 2, 3 and 4 processes
            right += (model(images).argmax(1) == targets).sum()
    report(accuracy=fabric.all_reduce(right, reduce_op="sum").item() / len(valid_set))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
