"""The data: a text, as numbers of its pieces (frequent words, else characters), cut into windows.

Without a file of yours it is Python's own standard library, which lies on every machine that can run this.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

CHARACTERS_AT_MOST = 1_500_000  # of the standard library; a text of yours is taken whole
WORDS = 1500  # that are one piece each; all others are spelt
PIECE = re.compile(r" ?[^\W\d_]+|\n+ *|.", re.DOTALL)  # a word with its space, line ends with what indents, a character


def read_text(path: str | None = None) -> str:
    """The text to learn.

    Args:
        path: a text file, or a folder whose *.txt files are taken in the order of their names; None: the sources of
            Python's standard library, the same for every start of the same Python.

    Raises:
        ValueError: nothing is there to read.
    """
    if path is None:
        return _standard_library()
    place = Path(path).expanduser()
    if not place.exists():
        raise ValueError(
            f"there is no text at {path} ({place.resolve()}); give a text file, or a folder of *.txt files"
        )
    files = sorted(place.glob("*.txt")) if place.is_dir() else [place]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    if not text:
        raise ValueError(f"{path} holds no text: {'no *.txt file is in it' if place.is_dir() else 'it is empty'}")
    return text


def _standard_library() -> str:
    sources: list[str] = []
    for file in sorted(Path(os.__file__).parent.glob("*.py")):
        source = file.read_text(encoding="utf-8", errors="replace")
        if source.isascii():
            sources.append(source)
        if sum(map(len, sources)) >= CHARACTERS_AT_MOST:
            break
    if not sources:
        raise ValueError("Python's sources are not on this machine: give a text with --dataset FILE")
    return "".join(sources)[:CHARACTERS_AT_MOST]


class Alphabet:
    """The pieces of a text, and their numbers: all its characters, and its most frequent words."""

    def __init__(self, text: str, words: int = WORDS) -> None:
        counts = Counter(PIECE.findall(text))
        frequent = [piece for piece, count in counts.most_common(words) if len(piece) > 1 and count > 1]
        self.pieces = [*sorted(set(text)), *frequent]
        self._numbers = {piece: number for number, piece in enumerate(self.pieces)}

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> Tensor:
        """The numbers of the text's pieces, int32 [n]."""
        numbers: list[int] = []
        for piece in PIECE.findall(text):
            known = self._numbers.get(piece)
            numbers += [self._numbers[character] for character in piece] if known is None else [known]
        return torch.tensor(numbers, dtype=torch.int32)

    def decode(self, numbers: Tensor) -> str:
        """The text of these numbers [n]."""
        return "".join(self.pieces[number] for number in numbers.tolist())


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Parts of a text that lie side by side: (its pieces, the pieces that follow them), each int64 [length]."""

    def __init__(self, numbers: Tensor, length: int) -> None:
        if len(numbers) <= length:
            raise ValueError(f"a text of {len(numbers)} pieces is too short for windows of {length}")
        self.numbers, self.length = numbers, length

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.numbers[index * self.length : (index + 1) * self.length + 1].long()
        return window[:-1], window[1:]


def windows(text: str, alphabet: Alphabet, length: int) -> tuple[Windows, Windows]:
    """The training set (the first 90 % of the text) and the held-out set (the rest)."""
    numbers = alphabet.encode(text)
    cut = len(numbers) * 9 // 10
    return Windows(numbers[:cut], length), Windows(numbers[cut:], length)
