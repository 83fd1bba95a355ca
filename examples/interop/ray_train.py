"""Ray Train: torch's DistributedDataParallel in workers that Ray starts, on one machine or a cluster.

    python examples/interop/ray_train.py
    python examples/interop/ray_train.py --backend gloo --num-workers 3

The backend is an argument of Ray's TorchConfig. The losses are those of torch_ddp.py with the same number of processes.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from digits import Network, digits, options, report
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def train(config: dict[str, Any]) -> None:
    """Runs on each worker, where Ray has made the process group."""
    assert dist.get_backend() == config["backend"]
    train_set, valid_set = digits()
    sampler = DistributedSampler(train_set, seed=0)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(Network(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for images, targets in loader:
            loss = cross_entropy(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total, dist.ReduceOp.AVG)
        images, targets = valid_set.tensors
        with torch.no_grad():
            accuracy = (model(images).argmax(1) == targets).float().mean().item()
        numbers = {"epoch": epoch, "loss": total.item() / len(loader), "accuracy": accuracy}
        with tempfile.TemporaryDirectory() as folder:  # Ray keeps numbers with checkpoints, and rank 0's is enough
            checkpoint = None
            if dist.get_rank() == 0:
                torch.save(model.module.state_dict(), Path(folder, "model.pt"))
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(numbers, checkpoint=checkpoint)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--num-workers", type=int, default=2, help="default 2")
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"), help="for Ray's results, default runs/ray")
    args = parser.parse_args()
    # So that the workers find this folder's digits.py.
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}}
    ray.init(num_cpus=args.num_workers, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    trainer = TorchTrainer(
        train,
        train_loop_config={"backend": args.backend, "epochs": args.epochs},
        torch_config=TorchConfig(backend=args.backend),
        scaling_config=ScalingConfig(num_workers=args.num_workers),
        run_config=RunConfig(storage_path=str(args.folder.absolute())),
    )
    kept = trainer.fit().best_checkpoints or []
    by_epoch = sorted((numbers for _, numbers in kept), key=lambda numbers: numbers["epoch"])
    for numbers in by_epoch:
        report(epoch=numbers["epoch"], loss=numbers["loss"])
    report(accuracy=by_epoch[-1]["accuracy"])
    ray.shutdown()


if __name__ == "__main__":
    main()
