"""Words that users type: the likely meaning of unknown ones, and masks for secrets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_MASK = "***"
# HF_TOKEN, --wandb-api-key, db.password, AWS_SECRET_ACCESS_KEY; not max_tokens or tokenizer, nor pad_token.
_SECRET = re.compile(
    r"(?!(.*[-_.])?(pad|bos|eos|unk|sep|cls|mask|image|special|start|end)[-_]?token$)"
    r"(.*[-_.]|hf)?(secret|token|passw(or)?d|passphrase|credentials?|(api|access|private|secret|wandb)[-_]?key)",
    re.I,
)


def closest(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known word most like `word`; None if none is similar (difflib's ratio is below `cutoff`)."""
    found = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return found[0] if found else None


def hint(
    word: str, choices: Iterable[str], otherwise: str = "", *, show: Callable[[str], str] = str, cutoff: float = 0.6
) -> str:
    """Return ` Did you mean X?`, or `otherwise` if no word is similar. `show`: repr for names in Python."""
    near = closest(word, choices, cutoff)
    return otherwise if near is None else f" Did you mean {show(near)}?"


def mask(value: Any, name: str = "") -> Any:
    """Return a value with secrets masked: texts whose name, or key inside of the value, is that of a secret."""
    if isinstance(value, Mapping):
        return {key: mask(each, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [mask(each, name) for each in value]
    return _MASK if value and isinstance(value, str) and _SECRET.fullmatch(name) else value


def mask_words(words: Sequence[str]) -> list[str]:
    """Return a command line's words with the values of --token VALUE, --token=VALUE and token=VALUE masked."""
    masked: list[str] = []
    for word, before in zip(words, ("", *words), strict=False):
        name, equals, value = word.partition("=")
        is_value = before.startswith("-") and not word.startswith("-")
        text = f"{name}{equals}{mask(value, name.lstrip('-+'))}"  # also --env HF_TOKEN=VALUE
        masked.append(mask(text, before.lstrip("-")) if is_value else text)
    return masked
