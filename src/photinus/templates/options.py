"""The command-line options of train.py, with the names that older scripts use.

Defaults come from config.ini, or from the file given by --config.
"""

from __future__ import annotations

import argparse
import configparser
import os
import sys
from pathlib import Path
from typing import Any

from photinus import World

CONFIG = Path(__file__).resolve().with_name("config.ini")
SWITCHES = ("--ddp", "--tensorboard")  # yes or no in the config file
NEEDED = ("epochs", "lr", "batch_size", "out")
OLD_NAMES = """\
Dashes and underscores are the same. Older names work too: --epoch and --num-epochs, --learning-rate,
--log-path for --out, --data for --dataset, --dist-backend"""


def options(description: str | None, words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of this run: from the command line, else the config file. `words` replace the command line.

    Besides the options there is `model`, the numbers of the config's section [model].
    """
    parser = argparse.ArgumentParser(
        description=description,
        epilog=OLD_NAMES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(*names: str, **about: Any) -> None:
        """Add an option. Help shows its first name; each name works with underscores too."""
        dest = names[0].removeprefix("--").replace("-", "_")
        spellings = {**dict.fromkeys(names), **dict.fromkeys("--" + name[2:].replace("-", "_") for name in names)}
        spelling, *others = spellings
        parser.add_argument(spelling, dest=dest, **about)
        if others:
            parser.add_argument(*others, dest=dest, **{**about, "help": argparse.SUPPRESS})

    add("--dataset", "--data", metavar="PATH", help="the data set; default: the one on this machine")
    add("--epochs", "--epoch", "--num-epochs", type=int, metavar="N", help="default %(default)s")
    add("--lr", "--learning-rate", type=float, metavar="RATE", help="learning rate; default %(default)s")
    add("--batch-size", type=int, metavar="N", help="samples of a step over all processes; default %(default)s")
    add("--out", "--log-path", metavar="DIR", help="folder for results; default %(default)s")
    add(
        "--resume",
        default="auto",
        metavar="PATH",
        help="a checkpoint or a run; auto (default): the newest in --out; never: start over",
    )
    add("--save-every-steps", type=int, metavar="N", help="also save inside epochs; default: every ten minutes")
    add("--strategy", default="ddp", help="ddp (default), zero1, zero2, zero3, torch-ddp, or dp for one process")
    backends = ("auto", "photinus", "nccl", "gloo", "mpi")
    add("--backend", "--dist-backend", default="auto", choices=backends, help="default auto: the best one here")
    add("--device", default="auto", help="auto (default), cpu, cuda or cuda:0")
    add("--tensorboard", action="store_true", help="also write event files for TensorBoard, in OUT/tensorboard")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add("--ddp", action="store_true", help="start one process per device, as `photinus run train.py` does")
    add("--port", type=int, metavar="N", help="with --ddp: port of the rendezvous; default: a free port")
    add("--rank", type=int, metavar="N", help="the GPU of a run with one process, like --device cuda:N")
    add("--config", default=str(CONFIG), metavar="FILE", help="default config.ini beside train.py")
    # Old launchers hand this to scripts; the environment says the same.
    add("--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("path", nargs="?", help=argparse.SUPPRESS)  # the data set by its place, as in old scripts

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, default=CONFIG)
    config, model = _read(first.parse_known_args(words)[0].config, parser)
    parser.set_defaults(**config)
    args = parser.parse_args(words)
    if args.path is not None and args.dataset is not None and args.path != config["dataset"]:
        parser.error(f"two data sets are given: {args.path} and --dataset {args.dataset}")
    args.dataset = args.path or args.dataset
    missing = [name for name in NEEDED if getattr(args, name) is None]
    if missing:
        parser.error(f"neither the command line nor {args.config} has: {', '.join(missing)}")
    del args.path, args.local_rank
    args.model = model
    if World.from_env().launcher == "none":
        _place(args)
    return args


def _read(path: Path, parser: argparse.ArgumentParser) -> tuple[dict[str, Any], dict[str, float]]:
    """The config's section [train] as options, and [model] as numbers."""
    file = configparser.ConfigParser(inline_comment_prefixes=("#",), interpolation=None)
    try:
        if not file.read(path, encoding="utf-8"):
            parser.error(f"--config {path}: there is no such file")
        model = {name: _number(text) for name, text in file["model"].items()} if file.has_section("model") else {}
    except (configparser.Error, OSError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    train = file["train"] if file.has_section("train") else {}
    words = []
    for name, text in train.items():
        word = f"--{name.replace('_', '-')}"
        if word in SWITCHES and text in ("yes", "no"):
            words += [word] if text == "yes" else []
        else:
            words.append(f"{word}={text}")
    found, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(f"{path}, section [train]: train.py has no option {unknown[0].partition('=')[0][2:]!r}")
    return vars(found), model


def _place(args: argparse.Namespace) -> None:
    """Without a launcher: starts one if --ddp asks for it, else takes the GPU of --rank."""
    if args.ddp:
        port = [] if args.port is None else ["--master-port", str(args.port)]
        os.execv(sys.executable, [sys.executable, "-m", "photinus", "run", *port, *sys.argv])
    if args.rank is not None and args.device == "auto":
        import torch

        if torch.cuda.is_available():
            args.device = f"cuda:{args.rank}"


def _number(text: str) -> float:
    return float(text) if any(mark in text for mark in ".e") else int(text)
