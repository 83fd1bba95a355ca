"""`config.json`: everything that says how a run came about, saved beside its results.

Also the check of a data folder, which belongs before any work starts.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ... import env
from ...runlog.files import plain_file, set_damaged_aside, write_atomically
from ...runlog.run import CONFIG, FORMAT
from ...words import mask, mask_words
from ..session.replicas import plain
from ..session.session import Session

_PREFIXES = (
    *("CUBLAS_", "CUDA_", "GLOO_", "HIP_", "KMP_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PHOTINUS_", "PYTHONHASHSEED"),
    *("PYTHONPATH", "PYTORCH_", "ROCR_", "TORCH_"),
)
_OF_ONE_START = (env.LAUNCH, env.EXPECTED_WORLD_SIZE, env.HOST_ID, env.WORKER_FILES)


def describe_start(
    session: Session, *, resumed_from: str | None, resumed_step: int, launch: Mapping[str, Any]
) -> dict[str, Any]:
    """One start of a run, as config.json has it: the one that is happening."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": mask_words(_command()),
        "started_with": env.LAUNCH.get() or shlex.join(mask_words(_command())),
        "folder": os.getcwd(),
        "resumed_from": resumed_from,
        "resumed_step": resumed_step,
        "launch": launch,
        "launcher": session.launcher,
        "attempt": env.ATTEMPT.get(),  # how often the launcher had restarted the workers
        "world_size": session.world_size,
        "hosts": list(session.hosts),
        "device": str(session.device),
        "backend": session.backend,
        "versions": _versions(),
        "environ": _notable(os.environ),
        "git": _git_state(Path(sys.argv[0]).resolve().parent if sys.argv and sys.argv[0] else Path.cwd()),
        "machine": _machine(session.device),
    }


def save_config(
    folder: Path, options: Mapping[str, Any], user: Mapping[str, Any], start: Mapping[str, Any], *, go_on: bool
) -> None:
    """Writes `config.json` into the folder, readable by this user alone unless its mode was changed; masks secrets.

    Args:
        options: what decides the run: batch size, epochs, seed, samples, strategy ...
        user: the script's own options (its parsed arguments), as far as JSON can carry them.
        start: what `describe_start` says; becomes the last of the starts.
        go_on: keep the starts that are listed already.
    """
    earlier = read_config(folder).get("starts", []) if go_on else []
    content = {"format": FORMAT, "options": plain(options, str), "user": mask(plain(user, str))}
    content["starts"] = [*earlier, start]
    path = folder / CONFIG
    mode = path.stat().st_mode & 0o777 if path.is_file() else 0o600  # a group that shares the folder changes it once
    write_atomically(path, json.dumps(content, indent=2) + "\n", mode=mode)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of the folder's `config.json`; empty when there is none.

    Raises:
        ValueError: the file is no JSON object.
        PermissionError: it is another user's, who does not share it.
    """
    path = folder / CONFIG
    try:
        with open(path, encoding="utf-8", opener=plain_file) as file:
            content = json.load(file)
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        why = "the run is another user's, who can share it (chmod g+r config.json)"
        raise PermissionError(error.errno, why, str(path)) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, but a run's config is an object")
    starts = content.get("starts", [])
    if not (isinstance(content.get("options", {}), dict) and isinstance(starts, list)):
        raise ValueError(f"{path} needs an object of options and a list of starts")
    return content


def set_damaged_config_aside(folder: Path) -> str:
    """Rename a config.json that cannot be read, because a run goes on without it; return a text for a warning."""
    try:
        read_config(folder)
    except ValueError as error:
        aside = set_damaged_aside(folder / CONFIG)
        return f"{error}. It is {aside} now, and the run goes on without its earlier starts"
    return ""


def user_options(options: Mapping[str, Any] | argparse.Namespace | None) -> dict[str, Any]:
    """A script's options as a dict: of an argparse.Namespace, a mapping or nothing. Raises TypeError for all else."""
    if options is None:
        return {}
    if not isinstance(options, (argparse.Namespace, Mapping)):
        raise TypeError(
            f"config is a {type(options).__name__}, but a dict or an argparse.Namespace is needed (of a dataclass, "
            f"dataclasses.asdict(config))"
        )
    return dict(vars(options) if isinstance(options, argparse.Namespace) else options)


def dataset_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a data set, checked before any work starts.

    Raises:
        ValueError: there is no such folder, it is a file, or nothing is in it.
    """
    folder = Path(path).expanduser()
    where = f"{str(path)!r} ({folder.resolve()})"
    if not folder.exists():
        raise ValueError(f"the data set's folder {where} does not exist; give the folder that holds the data")
    if not folder.is_dir():
        raise ValueError(f"the data set's folder {where} is a file; give the folder that holds it")
    if next(folder.iterdir(), None) is None:
        raise ValueError(f"the data set's folder {where} is empty")
    return folder


def _command() -> list[str]:
    """Return the arguments of Python: a script and its arguments, or -m and a module's name."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None or spec.name == "__main__":  # a script, or a folder with __main__.py
        return [sys.executable, *sys.argv]
    return [sys.executable, "-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]


def _notable(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that may change how a training runs, without what belongs to one start only."""
    left_out = {each.name for each in _OF_ONE_START}
    return dict(mask({n: environ[n] for n in sorted(environ) if n.startswith(_PREFIXES) and n not in left_out}))


def _versions() -> dict[str, str | None]:
    from ...version import __version__

    numpy = sys.modules.get("numpy")
    return {
        "photinus": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "numpy": None if numpy is None else str(numpy.__version__),
        "platform": platform.platform(),
    }


def _git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of the script's repository; None where there is no repository, no commit or no git, or it hangs."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()

    try:
        state: dict[str, Any] = {"commit": ask("rev-parse", "HEAD"), "changed": None}
    except (OSError, subprocess.SubprocessError):
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        state["changed"] = bool(ask("status", "--porcelain", "--untracked-files=no"))
    return state


def _machine(device: torch.device) -> dict[str, Any]:
    """Return the hardware and software of a run; facts that cannot be found out are left out, and nothing is measured.

    Returns:
        "processor" (its name), "cores" (usable by this process), "memory_bytes" (of the machine), "system", and for a
        CUDA device "gpu" (its name), "gpus" (how many are visible) and "gpu_memory_bytes" (of one).
    """
    facts: dict[str, Any] = {"system": f"{platform.system()} {platform.release()}", "processor": _processor()}
    facts["cores"] = len(os.sched_getaffinity(0))
    memory = _first_value("/proc/meminfo", "MemTotal")
    if memory and memory.split()[0].isdigit():
        facts["memory_bytes"] = int(memory.split()[0]) * 1024
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpus": torch.cuda.device_count()}
        facts["gpu_memory_bytes"] = properties.total_memory
    return facts


@functools.cache
def _processor() -> str:
    model = _first_value("/proc/cpuinfo", "model name") or platform.machine()
    return " ".join(model.split())


def describe_arithmetic(device: torch.device) -> dict[str, Any]:
    """Return what the bits of torch's kernels depend on: number of threads, processor, GPU, torch, instruction sets."""
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS")
    return {
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "GPU": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "torch": torch.__version__,
        "variables": " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ),
    }


def _first_value(path: str, name: str) -> str:
    """The value of the first line `name : value` of a file, "" when there is none."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        found = (line.partition(":") for line in file)
        return next((value.strip() for key, colon, value in found if colon and key.strip() == name), "")
    return ""
