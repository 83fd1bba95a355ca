"""The models whose steps are timed: random weights, random data, the sizes of the well-known ones.

A name is MODEL:BATCH, where BATCH is sequences x tokens for the GPTs and images for the others.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A Transformer block as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [batch, tokens, width]
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """Returns the loss of predicting each next token."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Bottleneck(nn.Module):
    """A residual block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        changes = stride != 1 or inputs != 4 * width
        self.short: nn.Module = nn.Conv2d(inputs, 4 * width, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.short(x))


class Basic(nn.Module):
    """A residual block of ResNet-18."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        changes = stride != 1 or inputs != width
        self.short: nn.Module = nn.Conv2d(inputs, width, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + self.short(x))


def resnet(depth: int) -> nn.Module:
    block, growth, counts = (Basic, 1, (2, 2, 2, 2)) if depth == 18 else (Bottleneck, 4, (3, 4, 6, 3))
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
    inputs = 64
    for width, count in zip((64, 128, 256, 512), counts, strict=True):
        for index in range(count):
            layers.append(block(inputs, width, 2 if index == 0 and width > 64 else 1))
            inputs = growth * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def vgg_16() -> nn.Module:
    """138 M parameters whatever the images' size: the last maps are stretched to 7 x 7."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0):
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
        inputs = width
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head)


class Many(nn.Module):
    """2,000 small parameters, with next to no work: what a wrapper costs for each."""

    def __init__(self, count: int = 2000) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(16)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x.mean()


IMAGE_PIXELS = 32


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model of a name like vgg-16:8, and the inputs of a step; the model's first output is the loss.

    Raises:
        ValueError: there is none of that name.
    """
    kind, _, batch = name.partition(":")
    vocabulary = 16384
    torch.manual_seed(0)
    if kind == "gpt-20m":
        model: nn.Module = GPT(16384, 128, 384, 8)
    elif kind == "gpt-10m":  # nanoGPT's for single letters
        model, vocabulary = GPT(65, 256, 384, 6), 65
    elif kind == "gpt-2-small":
        model = GPT(50257, 128, 768, 12)
    elif kind == "many-small":
        return Many(), (torch.ones(16),)
    elif kind in ("vgg-16", "resnet-18", "resnet-50"):
        net = vgg_16() if kind == "vgg-16" else resnet(int(kind[-2:]))
        return Classifier(net), (torch.randn(int(batch), 3, IMAGE_PIXELS, IMAGE_PIXELS),)
    else:
        raise ValueError(f"there is no model {name!r}")
    sequences, tokens = map(int, batch.split("x"))
    return model, (torch.randint(vocabulary, (sequences, tokens)),)


class Classifier(nn.Module):
    """The loss of a net of images, of made-up classes."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(images), torch.arange(len(images), device=images.device) % 1000)
