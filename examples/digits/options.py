"""The options of both training scripts, with the names that older scripts use."""

from __future__ import annotations

import argparse


def options(description: str | None, *, tensorboard: bool = False, deepspeed: bool = False) -> argparse.Namespace:
    """The command line's options; `--tensorboard` and `--deepspeed` where the script has a use for them."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--epochs", "--epoch", "--num-epochs", "--num_epochs", type=int, default=15, help="default 15")
    add("--lr", "--learning-rate", "--learning_rate", type=float, default=0.003, help="default 0.003")
    add("--batch-size", "--batch_size", type=int, default=64, help="samples of a step over all processes; default 64")
    add("--out", "--log-path", "--log_path", default="runs/digits", help="folder for results; default runs/digits")
    add("--resume", default="auto", help="auto (default), never, or a checkpoint's or run's path")
    add(
        "--save-every-steps", "--save_every_steps", type=int, help="also save inside epochs; default: every ten minutes"
    )
    add("--strategy", default="ddp", help="ddp (default), zero1, zero2, zero3, torch-ddp, or dp for one process")
    add("--backend", "--dist-backend", "--dist_backend", default="auto", help="auto (default), photinus, gloo or nccl")
    add("--device", default="auto", help="auto (default), cpu, cuda or cuda:0")
    if tensorboard:
        add("--tensorboard", action="store_true", help="also write event files for TensorBoard, in OUT/tensorboard")
    if deepspeed:
        add("--deepspeed", "--deepspeed_config", metavar="JSON", required=True, help="a DeepSpeed configuration")
    add("--seed", type=int, default=0, help="default 0")
    add("--dataset", "--data", metavar="FOLDER", help="folder of digits.csv.gz; default: inside scikit-learn")
    # torch.distributed.launch hands this to scripts; the environment says the same.
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()
