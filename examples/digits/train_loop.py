"""The same as train.py with your own loop: DDP, SyncBatchNorm, validation, checkpoints and resume.

    python examples/digits/train_loop.py
    photinus run --nproc-per-node 2 examples/digits/train_loop.py --epochs 15

The loop handles the order of the samples, the random numbers, the position, the checkpoints and the resume.
"""

from __future__ import annotations

import torch
from data import digits
from model import DigitsNet, accuracy
from options import options
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR

import photinus

args = options(__doc__)
train_set, valid_set = digits(args.dataset)
with photinus.init(args.backend, args.device, seed=args.seed):
    model = DigitsNet()
    model, optimizer = photinus.wrap(model, torch.optim.AdamW(model.parameters(), lr=args.lr), strategy=args.strategy)
    scheduler = CosineAnnealingLR(optimizer, args.epochs)
    loop = photinus.Loop(model, optimizer, train_set, batch_size=args.batch_size, epochs=args.epochs, out=args.out,
        resume=args.resume, save=photinus.Saving(every_steps=args.save_every_steps), state={"scheduler": scheduler},
        report=photinus.Reporting(config=args))  # fmt: skip
    for images, targets in loop:
        loop.backward(cross_entropy(model(images), targets))
        optimizer.step()
        optimizer.zero_grad()
        if loop.epoch_ended:
            loop.log(accuracy=photinus.evaluate(model, valid_set, accuracy))
            scheduler.step()
