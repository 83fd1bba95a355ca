"""The fastest backend on this host's GPUs, as `photinus bench --device cuda` measured it: written and read.

There is a file in the user's cache for each set of GPUs and number of ranks. It records the versions with which the
backends were measured. A file of other versions does not count, and the reason says which versions changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import HostError
from .version import __version__

COMMAND = "photinus bench --device cuda"
"""The command that measures and writes the choice."""


@dataclass(frozen=True)
class Setting:
    """The facts on which a measured choice depends.

    Attributes:
        gpus: the identity (UUID) of each rank's GPU, in any order: ranks that share one name it several times.
        driver: of the GPUs.
        torch: version, with its build ("2.13.0+cu130"); NCCL and gloo come with it.
        photinus: version.
    """

    gpus: tuple[str, ...]
    driver: str
    torch: str
    photinus: str = __version__


@dataclass(frozen=True)
class BackendChoice:
    """A backend, and why it is chosen.

    Attributes:
        backend: its name; "" where no measured choice counts.
        why: the reason in a few words; without a backend the reason why a file does not count, if there is one.
        advice: a line for the user, or "".
    """

    backend: str
    why: str
    advice: str = ""


def driver_version(root: Path = Path("/")) -> str:
    """That of NVIDIA's driver in the kernel; "" where it does not say. `root` is where /sys is (for tests)."""
    with contextlib.suppress(OSError):
        return (root / "sys/module/nvidia/version").read_text(encoding="utf-8").strip()
    return ""


def write_choice(setting: Setting, backend: str, why: str, environ: Mapping[str, str] | None = None) -> Path:
    """Write the choice in place of an earlier one for these GPUs; return the file.

    Raises:
        OSError: the user's cache cannot be written. HostError: the user has no home folder.
    """
    path = _path(setting, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**asdict(setting), "gpus": sorted(setting.gpus), "backend": backend, "why": why}, indent=1)
    descriptor, written = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.replace(written, path)
    except OSError:
        os.unlink(written)
        raise
    return path


def read_choice(setting: Setting, environ: Mapping[str, str] | None = None) -> BackendChoice:
    """Return the choice that was measured in this setting. A stale or unreadable file does not count."""
    try:
        path = _path(setting, environ)
        read = json.loads(path.read_text(encoding="utf-8"))
        versions = {name: str(read[name]) for name in ("driver", "torch", "photinus")}
        found = BackendChoice(str(read["backend"]), str(read["why"]))
    except (FileNotFoundError, HostError):
        return BackendChoice("", "")
    except (OSError, ValueError, KeyError, TypeError) as error:
        return BackendChoice("", f"the verdict in {path} cannot be read ({type(error).__name__}: {error})")
    now = {"driver": setting.driver, "torch": setting.torch, "photinus": setting.photinus}
    changed = [name for name in now if versions[name] != now[name]]
    if changed:
        changes = (f"{name} {versions[name] or 'unknown'}, now {now[name] or 'unknown'}" for name in changed)
        return BackendChoice("", f"that of `{COMMAND}` is of {'; '.join(changes)}")
    return found


def _path(setting: Setting, environ: Mapping[str, str] | None) -> Path:
    environ = os.environ if environ is None else environ
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser(f"{environ.get('HOME') or '~'}/.cache")
    if cache.startswith("~"):  # as in a container whose user has a number and no name
        raise HostError("this user has no home folder. To save a verdict, set HOME or XDG_CACHE_HOME")
    digest = hashlib.sha256("\n".join(sorted(setting.gpus)).encode()).hexdigest()[:16]
    return Path(cache, "photinus", f"backend-{digest}.json")
