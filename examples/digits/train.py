"""Train a small network on handwritten digits with the Trainer: the same script for one process or many.

    python examples/digits/train.py
    photinus run --nproc-per-node 2 examples/digits/train.py --epochs 15
    torchrun --nproc-per-node 2 examples/digits/train.py --out runs/digits

If you start it again, it continues from its last checkpoint, or prints that it is finished.
"""

from __future__ import annotations

import torch
from data import digits
from model import DigitsNet, accuracy
from options import options
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import photinus

args = options(__doc__, tensorboard=True)
train_set, valid_set = digits(args.dataset)
loggers = [photinus.TensorBoard()] if args.tensorboard else []
with photinus.init(args.backend, args.device, seed=args.seed):
    model = DigitsNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    trainer = photinus.Trainer(model, optimizer, cross_entropy, epochs=args.epochs, batch_size=args.batch_size,
        metrics={"accuracy": accuracy}, scheduler=CosineAnnealingLR(optimizer, args.epochs), strategy=args.strategy,
        out=args.out, resume=args.resume, save=photinus.Saving(every_steps=args.save_every_steps),
        report=photinus.Reporting(loggers=loggers, config=args))  # fmt: skip
    trainer.fit(train_set, valid_set)
