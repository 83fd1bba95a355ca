"""The user's program: a script by path or a module by name, with its arguments, looked at before anything starts."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from .usage import UsageError, closest

__all__ = ["Program", "check_program"]


@dataclass(frozen=True)
class Program:
    """What each worker runs.

    Attributes:
        kind: "script" (`target` is a path, run as `python target` would), "module" (a name, as `python -m`) or
            "program" (anything executable, found as a shell would find it).
        target: the path or name as the user typed it.
        arguments: what the program finds in sys.argv[1:].
        local_rank_flag: "--local_rank" or "--local-rank" when the program is to be given that as well.
    """

    kind: str
    target: str
    arguments: tuple[str, ...] = ()
    local_rank_flag: str | None = None

    def arguments_of(self, local_rank: int | str) -> tuple[str, ...]:
        """What the worker with this number on its host finds in sys.argv[1:]."""
        if self.local_rank_flag is None:
            return self.arguments
        return (f"{self.local_rank_flag}={local_rank}", *self.arguments)


def check_program(program: Program) -> None:
    """Raises UsageError when the program cannot be started: found now, told once, instead of once per worker."""
    if program.kind == "module":
        _check_module(program.target)
    elif program.kind == "program":
        _check_executable(program.target)
    else:
        _check_script(program.target)


def _check_script(target: str) -> None:
    path = Path(target)
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(f"{target} is a folder without __main__.py; give the script inside it that is to run.")
        return
    if not path.exists():
        folder = path.parent
        hint = ""
        if not folder.is_dir():
            hint = f" Its folder {folder} does not exist either."
        else:
            near = closest(path.name, [script.name for script in folder.glob("*.py")])
            if near:
                hint = f" Did you mean {folder / near}?"
            elif target.replace(".", "").isidentifier() and _found(target.partition(".")[0]):
                hint = f" There is a module of that name: did you mean -m {target}?"
        raise UsageError(f"script {target} does not exist (looked in {os.getcwd()}).{hint}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {target} exists but may not be read by this user.")


def _check_executable(target: str) -> None:
    if shutil.which(target) is not None:
        return
    path = Path(target)
    if path.is_file():
        start = " Leave out --no-python to run it as a Python script." if path.suffix == ".py" else ""
        raise UsageError(f"{target} is no program: it is not executable (chmod +x).{start}")
    raise UsageError(f"program {target} was not found (looked in {os.getcwd()} and PATH).")


def _check_module(target: str) -> None:
    if target.endswith(".py"):
        raise UsageError(f"-m takes a module's name, and {target} looks like a file; leave out -m.")
    # Only the first part: looking deeper would import the user's package into the launcher.
    top = target.partition(".")[0]
    if not _found(top):
        raise UsageError(
            f"module {target} was not found: there is no {top} in {os.getcwd()}, in PYTHONPATH or installed in "
            f"{sys.executable}."
        )


def _found(top: str) -> bool:
    """Whether a module or package of that name can be imported from the working directory or sys.path."""
    import importlib.machinery
    import importlib.util

    if importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) is not None:
        return True
    return importlib.util.find_spec(top) is not None  # editable installs have finders of their own
