"""The network: a small GPT, as in Radford et al., "Language Models are Unsupervised Multitask Learners" (2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Attention(nn.Module):
    """Each place looks at itself and those before it: [n, length, width] -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} cannot be split among heads={heads}")
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mixes the places."""
        n, length, width = x.shape
        parts = self.query_key_value(x).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # each [n, heads, length, width / heads]
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return y


class Block(nn.Module):
    """Attention and a perceptron, each added to what came in: [n, length, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads), nn.Dropout(dropout))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Adds both parts."""
        x = x + self.attention(x)
        y: Tensor = x + self.perceptron(x)
        return y


class GPT(nn.Module):
    """Pieces of text [n, length], int64, to scores of the pieces that follow, [n, length, alphabet].

    Args:
        alphabet: number of different pieces.
        context: longest length.
        width: of each place's vector.
        layers: number of blocks.
        heads: of the attention in each; divides the width.
        dropout: share of values left out in training.
    """

    def __init__(
        self,
        alphabet: int,
        *,
        context: int = 64,
        width: int = 96,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.context = context
        self.pieces = nn.Embedding(alphabet, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, alphabet, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.05)

    def forward(self, pieces: Tensor) -> Tensor:
        """The scores."""
        x = self.pieces(pieces) + self.places(torch.arange(pieces.shape[1], device=pieces.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.scores(self.norm(x))
        return scores


@torch.no_grad()
def write(model: GPT, pieces: Tensor, count: int, *, seed: int = 0, temperature: float = 0.6) -> Tensor:
    """Lets the model go on with a text.

    Draws from a generator of its own, so that training is not disturbed. Where the model is split over processes, all
    of them call this, and get the same.

    Args:
        pieces: the beginning, int64 [n] with n >= 1.
        count: how many pieces to add.
        seed: of the draws.
        temperature: below 1 the likely pieces are preferred.

    Returns:
        int64 [n + count], on the CPU.
    """
    training, device = model.training, next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = pieces.cpu()
    model.eval()
    for _ in range(count):
        scores = model(text[-model.context :].unsqueeze(0).to(device))[0, -1]
        chances = (scores.float().cpu() / temperature).softmax(dim=0)
        text = torch.cat((text, torch.multinomial(chances, 1, generator=generator)))
    model.train(training)
    return text


def loss_function(scores: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a piece, in nats: scores [n, length, alphabet], targets [n, length] -> []."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def accuracy(scores: Tensor, targets: Tensor) -> Tensor:
    """The share of each window's pieces that were guessed right -> [n]."""
    return (scores.argmax(dim=-1) == targets).float().mean(dim=1)
