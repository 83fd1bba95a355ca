"""Trains a small GPT to write text: the same script for one process or many.

    python train.py                                  learns English from the docstrings of PyTorch and others
    python train.py --dataset shakespeare.txt
    photinus run train.py                            one process per GPU, or per core
    torchrun --nproc-per-node 2 train.py --steps 5000

Started again, it goes on where it was cut off, or says that it is finished and writes once more.
"""

from __future__ import annotations

import photinus
import torch
from torch.optim.lr_scheduler import LambdaLR

from data import Alphabet, read_text, windows
from model import GPT, accuracy, loss_function, write
from options import options

WARM_UP_STEPS = 50
VALIDATE_EVERY_STEPS = 500


def main() -> None:
    """Trains as the command line says, and writes a few lines."""
    args = options(__doc__, counts_steps=True)
    text = read_text(args.dataset)
    alphabet = Alphabet(text)
    with photinus.init(args.backend, args.device, seed=args.seed):
        model = GPT(len(alphabet), **args.model)
        train_set, valid_set = windows(text, alphabet, model.context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
        steps = args.steps or args.epochs * (len(train_set) // args.batch_size)
        trainer = photinus.Trainer(
            model,
            optimizer,
            loss_function,
            epochs=args.epochs,
            steps=args.steps,
            validate_every_steps=VALIDATE_EVERY_STEPS if args.steps else None,
            batch_size=args.batch_size,
            metrics={"accuracy": accuracy},
            scheduler=LambdaLR(optimizer, lambda step: rate(step, steps)),
            scheduler_every="step",
            clip_norm=1.0,
            strategy=args.strategy,
            out=args.out,
            resume=args.resume,
            save_every_steps=args.save_every_steps,
            tensorboard=args.tensorboard,
            best="-valid_loss",
            config=args,
        )
        result = trainer.fit(train_set, valid_set)
        written = write(model, alphabet.encode("\n").long(), 200)  # all processes: the model may be split
        if result.rank == 0:
            print(f"it writes:\n{alphabet.decode(written)}")


def rate(step: int, steps: int) -> float:
    """What the learning rate is multiplied with: soon 1, then down in a line to 0."""
    return min((step + 1) / WARM_UP_STEPS, 1 - step / steps)


if __name__ == "__main__":
    main()
