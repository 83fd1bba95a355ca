"""The command-line options of train.py. Defaults come from config.ini, or from the file given by --config."""

from __future__ import annotations

import argparse
import configparser
from pathlib import Path

CONFIG = Path(__file__).resolve().with_name("config.ini")
NEEDED = ("epochs", "lr", "batch_size", "out")
BACKENDS = ("auto", "photinus", "nccl", "gloo", "mpi")


def options(description: str | None, words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of this run: from the command line, else the config file. `words` replace the command line.

    Besides the options there is `model`, the numbers of the config's section [model].
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--dataset", metavar="PATH", help="the data set; default: the one on this machine")
    add("--epochs", type=int, metavar="N", help="default %(default)s")
    add("--lr", type=float, metavar="RATE", help="learning rate; default %(default)s")
    add("--batch-size", type=int, metavar="N", help="samples of a step over all processes; default %(default)s")
    add("--out", metavar="DIR", help="folder for results; default %(default)s")
    resume = "a checkpoint or a run; auto (default): the newest in --out; never: start over"
    add("--resume", default="auto", metavar="PATH", help=resume)
    add("--save-every-steps", type=int, metavar="N", help="also save inside epochs; default: every ten minutes")
    add("--strategy", default="ddp", help="ddp (default), zero1, zero2, zero3, torch-ddp, or dp for one process")
    add("--backend", default="auto", choices=BACKENDS, help="default auto: the best one here")
    add("--device", default="auto", help="auto (default), cpu, cuda or cuda:0")
    add("--tensorboard", action="store_true", help="also write event files for TensorBoard, in OUT/tensorboard")
    add("--seed", type=int, default=0, metavar="N", help="default 0")
    add("--config", type=Path, default=CONFIG, metavar="FILE", help="default config.ini beside train.py")
    add("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # some launchers add it; the environment says the same

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path, default=CONFIG)
    path = first.parse_known_args(words)[0].config
    train, model = _read(path, parser)
    unknown = [name for name in train if name not in vars(parser.parse_args([]))]
    if unknown:
        parser.error(f"{path}, section [train]: train.py has no option {unknown[0]!r}")
    parser.set_defaults(**train)  # argparse converts them as it does what is typed
    args = parser.parse_args(words)
    missing = [name for name in NEEDED if getattr(args, name) is None]
    if missing:
        parser.error(f"neither the command line nor {path} has: {', '.join(missing)}")
    del args.local_rank
    args.model = model
    return args


def _read(path: Path, parser: argparse.ArgumentParser) -> tuple[dict[str, str | bool], dict[str, float]]:
    """Return the config's section [train] as defaults of options, and [model] as numbers."""
    file = configparser.ConfigParser(inline_comment_prefixes=("#",), interpolation=None)
    file.read_dict({"train": {}, "model": {}})
    try:
        if not file.read(path, encoding="utf-8"):
            parser.error(f"--config {path}: there is no such file")
        model = {name: _number(text) for name, text in file["model"].items()}
    except (configparser.Error, OSError, ValueError) as error:
        parser.error(f"--config {path}: {error}")
    answers = {"yes": True, "no": False}
    return {name.replace("-", "_"): answers.get(text, text) for name, text in file["train"].items()}, model


def _number(text: str) -> float:
    return float(text) if any(mark in text for mark in ".e") else int(text)
