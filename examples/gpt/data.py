"""The data: a text, as numbers of its pieces (frequent words, else characters), cut into windows.

Without your own file, the text is sentences from the docstrings of the packages that this example needs. So it is on
every machine that can run the example.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

PACKAGES = ("torch", "numpy", "sympy", "networkx", "matplotlib")
COMMON_WORDS = 4000  # of which all sentences are; a text of yours is taken whole
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
MARKUP = re.compile(r":\w+:|[`*]")
SENTENCE = re.compile(r"(?:^|(?<=[.:] ))[A-Z][A-Za-z0-9 ,;'-]{25,}\.(?= |$)")
WORD = re.compile(r"[A-Za-z]+")

WORDS = 5000  # that are one piece each, with or without a space before; all others are spelt
PIECE = re.compile(r" ?[^\W\d_]+|\n+ *|.", re.DOTALL)  # a word with its space, line ends with what indents, a character


def read_text(path: str | None = None) -> str:
    """The text to learn.

    Args:
        path: a text file, or a folder whose *.txt files are taken in the order of their names; None: docstrings,
            the same wherever the same packages are installed.

    Raises:
        ValueError: nothing is there to read.
    """
    if path is None:
        return _docstrings()
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


def _docstrings() -> str:
    """Sentences of docstrings, each once, of common words alone: with few words to learn, a small model learns more."""
    found = filter(None, map(find_spec, PACKAGES))
    folders = [Path(spec.origin).parent for spec in found if spec.origin is not None]
    sentences: dict[str, None] = {}  # a set that keeps its order
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        for docstring in DOCSTRING.findall(file.read_text(encoding="utf-8", errors="replace")):
            for paragraph in MARKUP.sub("", docstring).split("\n\n"):
                sentences.update(dict.fromkeys(SENTENCE.findall(" ".join(paragraph.split()))))
    counts = Counter(word for sentence in sentences for word in WORD.findall(sentence))
    common = {word for word, _ in counts.most_common(COMMON_WORDS)}
    chosen = [sentence for sentence in sentences if common.issuperset(WORD.findall(sentence))]
    random.Random(0).shuffle(chosen)  # so that what is held out is like the rest
    return "\n".join(chosen)


class Alphabet:
    """The pieces of a text, and their numbers: all its characters, and its most frequent words."""

    def __init__(self, text: str, words: int = WORDS) -> None:
        counts = Counter(PIECE.findall(text))
        frequent = [piece for piece, count in counts.most_common(words) if len(piece) > 1 and count > 1]
        self.pieces = [*sorted({"\n", *text}), *frequent]
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
