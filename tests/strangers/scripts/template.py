"""A: the hand-written DDP template, ported: its argparse stays, what it did by hand is a loop now.

python template.py --epoch 3 | photinus run template.py --epoch 3 | python template.py --gpus 2 (was mp.spawn)
"""

from __future__ import annotations

import argparse
import json

import torch
from clouds import CLASSES, FEATURES, clouds
from torch import nn

import photinus


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", default="clouds")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epoch", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--log_path", default="runs/template")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--backend", default="photinus", choices=["photinus", "nccl", "gloo", "mpi"])
    parser.add_argument("--port", default="29500")
    parser.add_argument("--gpus", type=int, default=0)
    return parser.parse_args()


def right(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return scores.argmax(dim=1) == targets


def main(args: argparse.Namespace) -> dict[str, object]:
    with photinus.init(args.backend, "cpu", seed=0) as world:
        model = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, CLASSES))
        model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9))
        batches = photinus.loader(clouds(101), batch_size=args.batch_size, drop_last=False)
        loop = photinus.Loop(
            model, optimizer, batches, epochs=args.epoch,
            out=args.log_path, resume=args.resume or "auto", report=photinus.Reporting(curves=False, config=args),
        )  # fmt: skip
        for points, targets in loop:
            loop.backward(nn.functional.cross_entropy(model(points), targets))
            optimizer.step()
            optimizer.zero_grad()
            if loop.epoch_ended:
                loop.log(accuracy=photinus.evaluate(model, clouds(51, seed=1), right))
                photinus.save(
                    f"{args.log_path}/last.pt",
                    model=model,
                    optimizer=optimizer,
                    epoch=loop.epoch,
                    global_step=loop.step,
                )
        return {"rank": loop.rank, "world_size": world.world_size, "accuracy": loop.history[-1]["accuracy"]}


if __name__ == "__main__":
    args = options()
    if args.gpus:
        for result in photinus.launch(main, nprocs=args.gpus, args=(args,)):
            print(json.dumps(result))
    else:
        print(json.dumps(main(args)))
