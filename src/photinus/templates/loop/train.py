"""Trains a small network on handwritten digits with a loop of its own: the same script for one process or many.

    python train.py
    photinus run train.py                            one process per GPU, or per core
    torchrun --nproc-per-node 2 train.py --epochs 20

The loop's body is yours. `photinus.Loop` gives it each batch of each epoch, this process's part on its device, and
keeps what is hard to keep right: the order of the samples, random numbers, checkpoints, exact resuming.
"""

from __future__ import annotations

import math

import photinus
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

from data import digits
from model import DigitsNet, accuracy
from options import options

WARM_UP_STEPS = 20


def main() -> None:
    """Trains as the command line says."""
    args = options(__doc__)
    train_set, valid_set = digits(args.dataset)
    with photinus.init(args.backend, args.device, seed=args.seed):
        network = DigitsNet(**args.model)
        optimizer = torch.optim.AdamW(network.parameters(), lr=args.lr)
        model, optimizer = photinus.wrap(network, optimizer, strategy=args.strategy)
        steps = args.epochs * (len(train_set) // args.batch_size)
        scheduler = LambdaLR(optimizer, lambda step: rate(step, steps))
        loop = photinus.Loop(
            model,
            optimizer,
            train_set,
            batch_size=args.batch_size,
            epochs=args.epochs,
            out=args.out,
            resume=args.resume,
            save_every_steps=args.save_every_steps,
            tensorboard=args.tensorboard,
            scheduler=scheduler,
            best="accuracy",
            config=args,
        )
        for images, targets in loop:
            loop.backward(cross_entropy(model(images), targets))
            loop.clip(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if loop.epoch_ended:  # all processes validate, each sample exactly once
                measured = {"accuracy": accuracy, "valid_loss": loss_of_each}
                loop.log(**photinus.evaluate(model, valid_set, measured))


def rate(step: int, steps: int) -> float:
    """What the learning rate is multiplied with: up in a line, then down along a cosine to a tenth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS))))


def loss_of_each(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample: scores [n, 10], targets [n] -> [n]."""
    return cross_entropy(scores, targets, reduction="none")


if __name__ == "__main__":
    main()
