"""Masks what is named like a secret, wherever a command line, an environment or options are shown or kept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_MASK = "***"
# HF_TOKEN, --wandb-api-key, db.password, AWS_SECRET_ACCESS_KEY; not max_tokens or tokenizer, nor pad_token.
_SECRET = re.compile(
    r"(?!(.*[-_.])?(pad|bos|eos|unk|sep|cls|mask|image|special|start|end)[-_]?token$)"
    r"(.*[-_.]|hf)?(secret|token|passw(or)?d|passphrase|credentials?|(api|access|private|secret|wandb)[-_]?key)",
    re.I,
)


def mask(value: Any, name: str = "") -> Any:
    """Returns text of this name, or of such names inside of it, masked; all else as it is."""
    if isinstance(value, Mapping):
        return {key: mask(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [mask(each, name) for each in value]
    return _MASK if value and isinstance(value, str) and _SECRET.fullmatch(name) else value


def mask_words(words: Sequence[str]) -> list[str]:
    """Returns a command line's words with the values of --token VALUE, --token=VALUE and token=VALUE masked."""
    masked: list[str] = []
    for word, before in zip(words, ("", *words), strict=False):
        name, equals, value = word.partition("=")
        is_value = before.startswith("-") and not word.startswith("-")
        shown = f"{name}{equals}{mask(value, name.lstrip('-+'))}"  # also --env HF_TOKEN=VALUE
        masked.append(mask(shown, before.lstrip("-")) if is_value else shown)
    return masked
