"""Train a small convolutional network on handwritten digits: the same script for one process or many.

    python train.py
    photinus run train.py                            one process per GPU, or per core
    torchrun --nproc-per-node 2 train.py --epochs 20

If you start it again, it continues from its last checkpoint, or prints that it is finished.
"""

from __future__ import annotations

from typing import Any

import photinus
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from data import digits
from model import DigitsNet, accuracy
from options import options


def main() -> None:
    """Train with the options of the command line."""
    args = options(__doc__)
    train_set, valid_set = digits(args.dataset)
    with photinus.init(args.backend, args.device, seed=args.seed):
        model = DigitsNet(**args.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        common = {
            "epochs": args.epochs,
            "batch_size": args.batch_size,
            "out": args.out,
            "resume": args.resume,
            "save": photinus.Saving(every_steps=args.save_every_steps, best="accuracy"),
            "report": photinus.Reporting(loggers=[photinus.TensorBoard()] if args.tensorboard else [], config=args),
        }
        train = with_trainer  # or with_loop: the same training, in a loop of your own
        train(model, optimizer, train_set, valid_set, args.strategy, common)


def with_trainer(model: Any, optimizer: Any, train_set: Any, valid_set: Any, strategy: str, common: Any) -> None:
    """Trains in one call."""
    scheduler = CosineAnnealingLR(optimizer, common["epochs"])
    trainer = photinus.Trainer(
        model,
        optimizer,
        cross_entropy,
        metrics={"accuracy": accuracy},
        strategy=strategy,
        scheduler=scheduler,
        **common,
    )
    trainer.fit(train_set, valid_set)


def with_loop(model: Any, optimizer: Any, train_set: Any, valid_set: Any, strategy: str, common: Any) -> None:
    """Trains in a loop whose body is yours."""
    model, optimizer = photinus.wrap(model, optimizer, strategy=strategy)
    scheduler = CosineAnnealingLR(optimizer, common["epochs"])
    loop = photinus.Loop(model, optimizer, train_set, state={"scheduler": scheduler}, **common)
    for images, targets in loop:  # this process's part of each batch; saves, resumes
        loop.backward(cross_entropy(model(images), targets))
        optimizer.step()
        optimizer.zero_grad()
        if loop.epoch_ended:  # all processes validate, each sample exactly once
            loop.log(**photinus.evaluate(model, valid_set, {"accuracy": accuracy, "valid_loss": loss_of_each}))
            scheduler.step()


def loss_of_each(scores: Tensor, targets: Tensor) -> Tensor:
    """The loss of each sample: scores [n, 10], targets [n] -> [n]."""
    return cross_entropy(scores, targets, reduction="none")


if __name__ == "__main__":
    main()
