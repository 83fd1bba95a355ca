"""A script or manifest put into a file: whole, readable by its owner only, and never over one that is there."""

from __future__ import annotations

import os
from pathlib import Path

from ..command_line.usage import UsageError

__all__ = ["write_text"]


def write_text(target: str, text: str, *, executable: bool = False) -> Path:
    """Writes a new file.

    Args:
        target: its path; the folder has to exist.
        text: its content.
        executable: whether it is a script.

    Raises:
        UsageError: the file exists (with other content), or cannot be written.
    """
    path = Path(target)
    mode = 0o700 if executable else 0o600
    try:
        if path.is_file() and path.read_text() == text:
            return path
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"--output {target}: the file exists. Remove it, or name another.") from None
    except OSError as error:
        raise UsageError(f"--output {target}: cannot be written: {error.strerror}.") from None
    return path
