"""Learn to tell ten kinds of clothes apart: 70 000 pictures of 28x28 pixels. One device or many, CPU or GPU.

python train.py
photinus run --nproc-per-node 2 train.py

The pictures come with Debian (apt install dataset-fashion-mnist), or from a folder: --data FOLDER.
"""

import argparse
import gzip
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import photinus


def read_idx(path: Path) -> torch.Tensor:
    """Read an IDX file: two zero bytes, a type (8: uint8), the number of dimensions, their sizes, the values."""
    if not path.exists() and not path.with_suffix("").exists():
        raise SystemExit(f"{path} is missing: apt install dataset-fashion-mnist, or give --data FOLDER")
    content = gzip.decompress(path.read_bytes()) if path.exists() else path.with_suffix("").read_bytes()
    if content[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is not an IDX file of bytes: it begins with {content[:3].hex()}, not 000008")
    start = 4 + 4 * content[3]
    sizes = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).view(sizes)


def pictures(folder: Path, part: str) -> TensorDataset:
    """Return (picture float32 [1, 28, 28] in 0..1, kind int64 []) of the part "train" or "t10k"."""
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz").unsqueeze(1).float() / 255
    return TensorDataset(images, read_idx(folder / f"{part}-labels-idx1-ubyte.gz").long())


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, default="/usr/share/datasets/fashion-mnist", help="default %(default)s")
parser.add_argument("--epochs", type=int, default=3, help="default %(default)s")
parser.add_argument("--out", default="runs/fashion_mnist", help="folder for results; default %(default)s")
args = parser.parse_args()

photinus.init(seed=0)
train_set, test_set = pictures(args.data, "train"), pictures(args.data, "t10k")
model = nn.Sequential(
    nn.Conv2d(1, 32, kernel_size=5, stride=2, padding=2),  # [n, 32, 14, 14]
    nn.SiLU(),
    nn.Conv2d(32, 64, kernel_size=3, stride=2, padding=1),  # [n, 64, 7, 7]
    nn.SiLU(),
    nn.Flatten(),
    nn.Linear(64 * 7 * 7, 128),
    nn.SiLU(),
    nn.Linear(128, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

model, optimizer = photinus.wrap(model, optimizer)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
state, report = {"scheduler": scheduler}, photinus.Reporting(config=args)
loop = photinus.Loop(
    model, optimizer, train_set, batch_size=128, epochs=args.epochs, out=args.out, state=state, report=report
)
for images, kinds in loop:
    loss = nn.functional.cross_entropy(model(images), kinds)
    loop.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if loop.epoch_ended:
        loop.log(accuracy=photinus.evaluate(model, test_set, lambda scores, kinds: scores.argmax(1) == kinds))
        scheduler.step()
