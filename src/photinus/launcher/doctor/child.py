"""Other programs, asked with a deadline: one that cannot start, fails or hangs is a finding, not the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from .host import LATE

__all__ = ["ask_child", "output_of"]


def ask_child(words: Sequence[str], timeout_s: float) -> tuple[dict[str, Any] | None, str]:
    """The JSON that a program of this Python prints last; or None, and why not."""
    try:
        asked = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, LATE.format(timeout_s)
    last = asked.stdout.strip().splitlines()[-1:]
    if asked.returncode == 0 and last:
        answer: dict[str, Any] = json.loads(last[0])
        return answer, ""
    said = asked.stderr.strip().splitlines()[-1:] or [f"ended with code {asked.returncode} and said nothing"]
    return None, said[0]


def output_of(command: Sequence[str], timeout_s: float) -> str:
    """What a program prints, or why it cannot be asked."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
