"""Train a small GPT to write text: the same script for one process or many. Two minutes on two cores.

    python examples/gpt/train.py                     learns English from the docstrings of PyTorch and others
    python examples/gpt/train.py --dataset shakespeare.txt
    photinus run examples/gpt/train.py               one process per GPU, or per core
    torchrun --nproc-per-node 2 examples/gpt/train.py --steps 5000
    photinus run examples/gpt/train.py --strategy zero3   splits a model too large for one device

If you start it again, it continues from its last checkpoint, or prints that it is finished and writes text again.
"""

from __future__ import annotations

import argparse

import torch
from data import Alphabet, read_text, windows
from model import GPT, accuracy, loss_function, write
from torch.optim.lr_scheduler import LambdaLR

import photinus

WARM_UP_STEPS = 50
VALIDATE_EVERY_STEPS = 500


def main() -> None:
    """Trains as the command line says, and writes a few lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", metavar="PATH", help="a text file; default: docstrings of installed packages")
    parser.add_argument("--steps", type=int, default=1500, help="batches; default %(default)s")
    parser.add_argument("--lr", type=float, default=0.004, help="learning rate; default %(default)s")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of a step over all processes; default 16")
    parser.add_argument("--out", default="runs/gpt", metavar="DIR", help="folder for results; default %(default)s")
    parser.add_argument("--strategy", default="ddp", help="ddp (default), zero1, zero2 or zero3")
    args = parser.parse_args()
    text = read_text(args.dataset)
    alphabet = Alphabet(text)
    with photinus.init(seed=0):
        model = GPT(len(alphabet), width=128)
        train_set, valid_set = windows(text, alphabet, model.context)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99))
        trainer = photinus.Trainer(
            model,
            optimizer,
            loss_function,
            steps=args.steps,
            validate_every_steps=VALIDATE_EVERY_STEPS,
            batch_size=args.batch_size,
            metrics={"accuracy": accuracy},
            scheduler=LambdaLR(optimizer, lambda step: rate(step, args.steps)),
            scheduler_every="step",
            clip_norm=1.0,
            strategy=args.strategy,
            out=args.out,
            save=photinus.Saving(best="-valid_loss"),
            report=photinus.Reporting(config=args),
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
