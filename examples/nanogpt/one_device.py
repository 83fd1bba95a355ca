"""Train a small GPT on the characters of a text, in the style of nanoGPT's train.py: plain PyTorch, on one device.

python one_device.py
"""

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default="/usr/share/common-licenses/GPL-3", help="text file; default %(default)s")
parser.add_argument("--out", default="runs/nanogpt", help="folder for the checkpoint; default %(default)s")
parser.add_argument("--steps", type=int, default=200, help="optimizer steps; default %(default)s")
args = parser.parse_args()

batch_size, accumulate, block_size = 16, 2, 64  # 32 windows of 64 characters in each optimizer step
n_layer, n_head, n_embd = 4, 4, 128
max_lr, min_lr, warmup_steps, clip_norm = 3e-3, 3e-4, 20, 1.0
eval_interval, eval_batches = 50, 20
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1337)

text = Path(args.data).read_text()
characters = sorted(set(text))
numbers = torch.tensor([characters.index(each) for each in text])
cut = len(numbers) * 9 // 10
data = {"train": numbers[:cut], "val": numbers[cut:]}


def get_batch(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows at random places of the text, and the same windows one character later."""
    starts = torch.randint(len(data[split]) - block_size, (batch_size,))
    x, y = (torch.stack([data[split][i + k : i + k + block_size] for i in starts]) for k in (0, 1))
    return x.to(device), y.to(device)


class GPT(nn.Module):
    """Characters [n, block_size] and the ones that follow them, to the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(characters), n_embd), nn.Embedding(block_size, n_embd)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = (nn.TransformerEncoderLayer(n_embd, n_head, 4 * n_embd, **options) for _ in range(n_layer))
        self.blocks, self.ln_f = nn.ModuleList(blocks), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(characters), bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size), persistent=False)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(x) + self.wpe.weight
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits = self.lm_head(self.ln_f(hidden))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    """Return the mean loss over some batches of each split."""
    model.eval()
    means = {split: sum(model(*get_batch(split)).item() for _ in range(eval_batches)) / eval_batches for split in data}
    model.train()
    return means


def get_lr(step: int) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine."""
    if step < warmup_steps:
        return max_lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, args.steps - warmup_steps)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, betas=(0.9, 0.99), weight_decay=0.1)

checkpoint, best = Path(args.out) / "ckpt.pt", math.inf
checkpoint.parent.mkdir(parents=True, exist_ok=True)
for step in range(args.steps + 1):
    if step % eval_interval == 0 or step == args.steps:
        losses = estimate_loss()
        shown = ", ".join(f"{split} loss {loss:.4f}" for split, loss in losses.items())
        print(f"step {step}: {shown}")
        if losses["val"] < best:
            best = losses["val"]
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, checkpoint)
    if step == args.steps:
        break
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    for _ in range(accumulate):
        x, y = get_batch("train")
        loss = model(x, y) / accumulate
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad()
