"""Reach a host: the command that starts `remote` there, and whether a host is this one."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ... import env
from ...env import VARIABLE_NAME
from ...errors import UsageError
from ...job.own_address import local_addresses_of
from ..local.worker import python_command
from .hostfile import Host

CONNECT_S = 8
MARK = b"\x00photinus here\x00"
"""What comes from a host before all else, behind what a shell's start-up files may have printed."""
_RESOLVE_S = 5.0
_REMOTE = "photinus.run.remote"
# After the user's own words: of an option that is given twice, ssh takes the first.
_OPTIONS = (
    "-T",  # no terminal: bytes pass as they are
    "-x",
    *("-o", "BatchMode=yes"),  # nobody is there to type a password
    *("-o", f"ConnectTimeout={CONNECT_S}"),
    *("-o", "ServerAliveCountMax=3"),
    *("-o", "ControlMaster=no"),  # uses a master connection, but is none: it may be killed
    *("-o", "LogLevel=ERROR"),  # no banners
)


def safe_path() -> list[str]:
    """Return the option that keeps the working directory off sys.path, where this Python has that option.

    A folder named photinus in the working directory is not this package. Workers are started without the option.
    """
    return ["-P"] if sys.version_info >= (3, 11) else []


def remote_command(host: Host, *, here: bool, ssh: str = "ssh", silence_s: float = 30.0) -> list[str]:
    """The command that starts `remote` on a host, with the Python that runs here (same path on all hosts)."""
    if here:
        return [*python_command(), *safe_path(), "-m", _REMOTE]
    alive = ["-o", f"ServerAliveInterval={max(1, math.ceil(silence_s / 3))}"]
    # A file in the home folder must not be taken for a module: Python looks in the working directory first.
    there = f"cd /; exec {shlex.join([*python_command(), '-m', _REMOTE])}"
    return [*shlex.split(ssh), *_OPTIONS, *alive, host.destination, there]


def ssh_command(ssh: str, port: int | None, *, needed: bool) -> str:
    """The command that reaches hosts: --ssh and --ssh-port. UsageError: it is needed, and cannot be started."""
    command = ssh if port is None else f"{ssh} -p {port}"
    if not needed:
        return command
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise UsageError(f"--ssh {ssh!r}: {error}.") from None
    if not words:
        raise UsageError("--ssh needs a command, like `ssh -i key`.")
    if shutil.which(words[0]) is None:
        more = " Install it (Debian: openssh-client), or give another command with --ssh." if words[0] == "ssh" else ""
        raise UsageError(f"--ssh: program {words[0]} was not found.{more}")
    return command


def is_here(host: Host) -> bool:
    """Return whether a host is this one, and needs no ssh: by its name, or because its address can be bound here."""
    if host.user is not None:  # another account, perhaps
        return False
    if host.name in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
        return True
    try:
        return bool(local_addresses_of(host.name))
    except (OSError, UnicodeError):  # a name that only ssh knows, or nobody
        return False


def find_here(hosts: Sequence[Host]) -> list[bool]:
    """Return, for each host, whether it is this one. Names are looked up in parallel: name servers may be slow."""
    pool = ThreadPoolExecutor(len(hosts))
    looks = [pool.submit(is_here, host) for host in hosts]
    found, _ = wait(looks, _RESOLVE_S)
    pool.shutdown(wait=False)  # a look that takes longer is left alone
    return [look in found and look.result() for look in looks]


_FAMILIES = (
    *("NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "PHOTINUS_", "PYTHON", "HF_", "TRANSFORMERS_"),
    *("WANDB_", "CUDA_", "UCX_", "MLFLOW_", "THP_"),
)
_SINGLE = ("LD_LIBRARY_PATH", "LOGLEVEL", "NO_COLOR", "TERM", "COLORTERM")
# Of one host, or of a job inside of which this may run; and all of TORCHELASTIC_.
_OF_A_JOB = (env.HOST_ID, env.JOB_SECRET, env.EXPECTED_WORLD_SIZE)
_NEVER = ("CUDA_VISIBLE_DEVICES", *(each.name for each in _OF_A_JOB))
_FILE = ".deepspeed_env"


def exported_variables(
    environ: Mapping[str, str], export: Sequence[str] = (), files: Sequence[Path] = ()
) -> dict[str, str]:
    """The variables for the other hosts. What --export names wins over the files, and these over the rest.

    Raises:
        UsageError: --export names a variable that is not set, or a line of a file is wrong.
    """
    variables = {
        name: value
        for name, value in environ.items()
        if (name.startswith(_FAMILIES) or name in _SINGLE) and not (name in _NEVER or name.startswith("TORCHELASTIC_"))
    }
    for file in files:
        variables |= _read_variables(file)
    for name in export:
        if name not in environ:
            raise UsageError(f"--export {name}: {name} is not set here. Set it, or remove it from --export.")
        variables[name] = environ[name]
    return variables


def variable_files(home: Path, here: Path) -> tuple[Path, ...]:
    """DeepSpeed's files of variables that exist, the one that wins last: the home folder's, then this folder's."""
    candidates = dict.fromkeys([(home / _FILE).resolve(), (here / _FILE).resolve()])
    return tuple(file for file in candidates if os.path.isfile(file))  # HOME may be another user's, after sudo


def _read_variables(file: Path) -> dict[str, str]:
    """The variables of lines NAME=VALUE; quotes around a value are no part of it. UsageError: a line is not so."""
    variables = {}
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="surrogateescape").splitlines(), 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not VARIABLE_NAME.fullmatch(name):
            raise UsageError(f"{file}:{number}: {line.strip()!r} is not valid. Write NAME=VALUE.")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        variables[name] = value
    return variables
