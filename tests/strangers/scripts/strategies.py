"""E: torchrun's, DeepSpeed's and Hugging Face's way: one flag chooses DDP or a ZeRO stage, a JSON file says the rest.

torchrun --nproc-per-node 2 strategies.py --deepspeed ds_config.json --strategy ddp zero1 zero2 zero3
"""

from __future__ import annotations

import argparse
import json

import torch
from clouds import CLASSES, FEATURES, clouds

import photinus

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", required=True)
parser.add_argument("--strategy", nargs="+", default=["ddp"])
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()

with photinus.init("photinus", "cpu", seed=0) as world:
    weights = {}
    for strategy in args.strategy:
        config = photinus.deepspeed_config(args.deepspeed, auto={"lr": 0.01})
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, 16), torch.nn.BatchNorm1d(16), torch.nn.SiLU(), torch.nn.Linear(16, CLASSES)
        )
        optimizer = config.make_optimizer(model.parameters())
        chosen = config.trainer_options() | {"strategy": strategy}
        trainer = photinus.Trainer(
            model, optimizer, torch.nn.functional.cross_entropy, epochs=2, out=f"runs/{strategy}-{world.world_size}",
            scheduler=config.make_scheduler(optimizer), report=photinus.Reporting(progress=False), **chosen,
        )  # fmt: skip
        trainer.fit(photinus.loader(clouds(64), **config.loader_options()))
    print(json.dumps({"rank": world.rank, "world_size": world.world_size, "argument": args.local_rank}))
