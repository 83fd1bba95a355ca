"""Which environment variables a host started over ssh is given (docs/how-to/ssh.md): not those that describe a host."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ... import env
from ..command_line.flag_values import VARIABLE_NAME
from ..command_line.usage import UsageError

_FAMILIES = (
    *("NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "PHOTINUS_", "PYTHON", "HF_", "TRANSFORMERS_"),
    *("WANDB_", "CUDA_", "UCX_", "MLFLOW_"),
)
_SINGLE = ("LD_LIBRARY_PATH", "LOGLEVEL", "NO_COLOR", "TERM", "COLORTERM")
# Of one host, or of a job inside of which this may run; and all of TORCHELASTIC_.
_OF_A_JOB = (env.STARTED_AS, env.HOST_ID, env.JOB_SECRET, env.LISTEN_FD, env.EXPECTED_WORLD_SIZE)
_NEVER = ("CUDA_VISIBLE_DEVICES", *(each.name for each in _OF_A_JOB))
_FILE = ".deepspeed_env"


def exported_variables(
    environ: Mapping[str, str], export: Sequence[str] = (), files: Sequence[Path] = ()
) -> dict[str, str]:
    """The variables for the other hosts. What --export names wins over the files, and these over the rest.

    Raises:
        UsageError: --export names a variable that is not set, or a line of a file is wrong.
    """
    chosen = {
        name: value
        for name, value in environ.items()
        if (name.startswith(_FAMILIES) or name in _SINGLE) and not (name in _NEVER or name.startswith("TORCHELASTIC_"))
    }
    for file in files:
        chosen |= _read_variables(file)
    for name in export:
        if name not in environ:
            raise UsageError(f"--export {name}: {name} is not set here. Set it, or leave it out.")
        chosen[name] = environ[name]
    return chosen


def variable_files(home: Path, here: Path) -> tuple[Path, ...]:
    """DeepSpeed's files of variables that exist, the one that wins last: the home folder's, then this folder's."""
    candidates = dict.fromkeys([(home / _FILE).resolve(), (here / _FILE).resolve()])
    return tuple(file for file in candidates if os.path.isfile(file))  # HOME may be another user's, after sudo


def _read_variables(file: Path) -> dict[str, str]:
    """The variables of lines NAME=VALUE; quotes around a value are no part of it. UsageError: a line is not so."""
    variables = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not VARIABLE_NAME.fullmatch(name):
            raise UsageError(f"{file}:{number}: {line.strip()!r} is not understood. A line reads NAME=VALUE.")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        variables[name] = value
    return variables
