"""What has to be kept of a start so that the same can be started once more. Torch-free.

`photinus run` hands its own words to the workers (PHOTINUS_LAUNCH), the run writes them into config.json, and
`photinus again` reads them there.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import env

_PREFIXES = (
    "CUBLAS_",
    "CUDA_",
    "GLOO_",
    "HIP_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "OPENBLAS_",
    "PHOTINUS_",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTORCH_",
    "ROCR_",
    "TORCH_",
)
# What each start makes anew, or nobody else may read: a run's folder is copied and shown.
_LEFT_OUT = re.compile(
    rf"{env.LAUNCH.name}|{env.EXPECTED_WORLD_SIZE.name}|{env.LISTEN_FD.name}|{env.HOST_ID.name}"
    r"|.*(SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|_KEY).*"
)


def notable(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may change how a training runs, without secrets and what belongs to one start only."""
    return {
        name: environ[name] for name in sorted(environ) if name.startswith(_PREFIXES) and not _LEFT_OUT.fullmatch(name)
    }


@dataclass(frozen=True)
class Launch:
    """A start by `photinus run`, as the user typed it.

    Attributes:
        words: what stood between `photinus run` and the arguments of the script, the script's name included.
        arguments: of the script.
        environ: notable variables of the launcher's environment.
    """

    words: tuple[str, ...]
    arguments: tuple[str, ...]
    environ: Mapping[str, str]

    def text(self) -> str:
        """For the environment, and for config.json."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Launch:
        """Reads what `text` wrote.

        Raises:
            ValueError: it is something else.
        """
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: Any) -> Launch:
        """From the object in JSON. Raises ValueError when it is something else."""
        try:
            parts = [fields[name] for name in ("words", "arguments")]
            environ = {str(name): str(value) for name, value in fields["environ"].items()}
            if not all(isinstance(part, list) and all(isinstance(word, str) for word in part) for part in parts):
                raise TypeError("words are strings")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no record of a launch: {error}") from error
        return cls(tuple(parts[0]), tuple(parts[1]), environ)


def ask_git(folder: Path, *words: str) -> str | None:
    """What git says in a folder; None without git, repository or commit, or where it is too slow to wait for."""
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
