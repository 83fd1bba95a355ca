"""What it costs in accuracy when gradients travel between hosts in 16 bits: the digits, and a small GPT.

    .venv/bin/python benchmarks/wire_accuracy.py --out benchmarks/results/wire_accuracy.json

Two ranks, each a host of its own by PHOTINUS_HOST_ID, train both examples as their scripts do, once for each
seed and type. No speed is measured, so anything may run beside.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import report

import photinus

RANKS = 2
ENVIRONMENT = {"LOCAL_RANK": "0", "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
TYPES = ("float32", "bfloat16", "float16")
FOLDERS = {name: Path(__file__).resolve().parent.parent / "examples" / name for name in ("digits", "gpt")}
LENGTHS = {"digits": {"epochs": 15}, "gpt": {"steps": 400}}


def train(example: str, wire: str, seed: int) -> dict[str, float]:
    """Runs on every rank; the last row of the training's numbers."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(FOLDERS[example]))
    import data
    import model as parts

    options = {} if wire == "float32" else {"wire_dtype": getattr(torch, wire)}
    common: dict[str, Any] = {**LENGTHS[example], "report": photinus.Reporting(progress=False)}
    with photinus.init("photinus", seed=seed):
        if example == "digits":
            sets = data.digits()
            net = parts.DigitsNet()
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
            loss = torch.nn.functional.cross_entropy
            common["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, common["epochs"])
            common["batch_size"] = 64
        else:
            alphabet = data.Alphabet(text := data.read_text())
            net = parts.GPT(len(alphabet), context=64, width=128, layers=3, heads=4)
            sets = data.windows(text, alphabet, net.context)
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.004, betas=(0.9, 0.99))
            loss = parts.loss_function
            common |= {"batch_size": 16, "clip_norm": 1.0, "scheduler_every": "step"}
            common["scheduler"] = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: min((step + 1) / 50, 1 - step / common["steps"])
            )
        net, optimizer = photinus.wrap(net, optimizer, **options)
        trainer = photinus.Trainer(net, optimizer, loss, metrics={"accuracy": parts.accuracy}, **common)
        return trainer.fit(*sets).metrics


def trained(example: str, wire: str, seed: int) -> dict[str, float]:
    """The numbers of one training on several ranks."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        common = {**os.environ, **ENVIRONMENT, "MASTER_PORT": str(held.getsockname()[1])}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", example, wire, str(seed), folder],
                env={**common, "RANK": str(rank), "PHOTINUS_HOST_ID": f"host {rank}"},
            )
            for rank in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"{example} in {wire} from seed {seed} failed; see above")
        found: dict[str, float] = json.loads(Path(folder, "0").read_text())
        return found


def tables(kept: dict[str, Any]) -> str:
    """Markdown: for each example and type, mean and standard deviation over the seeds."""
    rows = kept["rows"]
    text = ["# Gradients that travel between hosts in 16 bits", f"{kept['date']}, `{kept['command']}`"]
    for example in dict.fromkeys(row["example"] for row in rows):
        lines = []
        for wire in TYPES:
            of_type = [row for row in rows if (row["example"], row["wire"]) == (example, wire)]
            plain = {row["seed"]: row for row in rows if (row["example"], row["wire"]) == (example, TYPES[0])}
            apart = max(abs(row["valid_loss"] / plain[row["seed"]]["valid_loss"] - 1) for row in of_type)
            lines.append([wire, *(_spread([row[name] for row in of_type]) for name in _NUMBERS), f"{apart:.2%}"])
        seeds = len({row["seed"] for row in rows if row["example"] == example})
        text += [
            f"## {example}, {seeds} seeds: mean ± standard deviation",
            report.table(["travels as", *_NUMBERS, _APART], lines),
        ]
    return "\n\n".join(text) + "\n"


_APART = "valid_loss and that of the seed in float32: apart at most"
_NUMBERS = ("loss", "valid_loss", "accuracy")


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}" if len(values) > 1 else f"{values[0]:.4f}"


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        example, wire, seed, folder = sys.argv[2:]
        Path(folder, os.environ["RANK"]).write_text(json.dumps(train(example, wire, int(seed))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", nargs="+", choices=list(FOLDERS), default=list(FOLDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument(
        "--out", type=Path, help="write the figures to this .json file, and the tables to .md beside it"
    )
    arguments = parser.parse_args()
    rows = []
    for example in arguments.examples:
        for seed in arguments.seeds:
            for wire in TYPES:
                rows.append({"example": example, "seed": seed, "wire": wire, **trained(example, wire, seed)})
                print(rows[-1], flush=True)
    kept = {**harness.record({}, [], rows), "unit": "loss per sample, share of samples that are right"}
    text = tables(kept)
    print(text)
    if arguments.out:
        harness.write(arguments.out, kept, text)


if __name__ == "__main__":
    main()
