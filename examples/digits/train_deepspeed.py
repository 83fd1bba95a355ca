"""The same as train.py, with optimizer, schedule, batch sizes, precision and ZeRO stage from a DeepSpeed configuration.

    photinus run --nproc-per-node 2 examples/digits/train_deepspeed.py --deepspeed examples/digits/ds_config.json

Values that are "auto" in the configuration come from the options: --lr, and --batch-size for an optimizer step.
"""

from __future__ import annotations

from data import digits
from model import DigitsNet, accuracy
from options import options
from torch.nn.functional import cross_entropy

import photinus

args = options(__doc__, deepspeed=True)
train_set, valid_set = digits(args.dataset)
with photinus.init(args.backend, args.device, seed=args.seed):
    steps = args.epochs * (len(train_set) // args.batch_size)
    config = photinus.deepspeed_config(args.deepspeed,
        auto={"lr": args.lr, "train_batch_size": args.batch_size, "total_num_steps": steps})  # fmt: skip
    model = DigitsNet()
    optimizer = config.make_optimizer(model.parameters())
    model, optimizer = photinus.wrap(model, optimizer, **config.wrap_options())
    trainer = photinus.Trainer(model, optimizer, cross_entropy, epochs=args.epochs, metrics={"accuracy": accuracy},
        scheduler=config.make_scheduler(optimizer), out=args.out, resume=args.resume,
        report=photinus.Reporting(config=args), save=photinus.Saving(every_steps=args.save_every_steps),
        **config.trainer_options())  # fmt: skip
    trainer.fit(photinus.loader(train_set, **config.loader_options()), valid_set)
