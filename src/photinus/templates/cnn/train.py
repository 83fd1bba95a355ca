"""Trains a small convolutional network on handwritten digits: the same script for one process or many.

    python train.py
    photinus run train.py                            one process per GPU, or per core
    torchrun --nproc-per-node 2 train.py --epochs 20

Started again, it goes on where it was cut off, or says that it is finished.
"""

from __future__ import annotations

import photinus
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

from data import digits
from model import DigitsNet, accuracy
from options import options


def main() -> None:
    """Trains as the command line says."""
    args = options(__doc__)
    train_set, valid_set = digits(args.dataset)
    with photinus.init(args.backend, args.device, seed=args.seed):
        model = DigitsNet(**args.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        trainer = photinus.Trainer(
            model,
            optimizer,
            cross_entropy,
            epochs=args.epochs,
            batch_size=args.batch_size,
            metrics={"accuracy": accuracy},
            scheduler=CosineAnnealingLR(optimizer, args.epochs),
            strategy=args.strategy,
            out=args.out,
            resume=args.resume,
            save_every_steps=args.save_every_steps,
            tensorboard=args.tensorboard,
            best="accuracy",
            config=args,
        )
        trainer.fit(train_set, valid_set)


if __name__ == "__main__":
    main()
