"""The user's program: a script by path or a module by name, with its arguments, looked at before anything starts.

Some scripts take --local_rank, as torch.distributed.launch and DeepSpeed gave it to them. Whether one does is read from
its text, which is not run: an option is a string constant, spelled out.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import zipfile
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

from ...errors import UsageError
from ...job.spec import Program
from ...words import closest

_PYTHON = (".py", ".pyw", ".pyc", ".pyz")
_HEAD_BYTES = 1024
_OF_ONE_PROCESS = ("/dev/stdin", "/dev/fd/", "/proc/self/")
_LOCAL_RANK = ("--local_rank", "--local-rank")
# A script's own list of packages, PEP 723: comments between `# /// script` and `# ///`, with TOML in them.
_HEADER = re.compile(r"(?m)^# /// script$\s(?P<lines>(^#(| .*)$\s)+)^# ///$")
_DEPENDENCIES = re.compile(r"""(?m)^dependencies\s*=\s*\[(?P<words>(?:\s*(?:"[^"]*"|'[^']*'),?)*)\s*\]""")
_PACKAGE = re.compile(r"""["']\s*([A-Za-z0-9][A-Za-z0-9._-]*)([^"']*)["']""")


def check_program(program: Program) -> None:
    """Raises UsageError when the program cannot be started: found now, told once, instead of once per worker."""
    {"module": _check_module, "program": _check_executable, "script": _check_script}[program.kind](program.target)


def _check_script(target: str) -> None:
    if not target:
        raise UsageError("the name of the script is empty. Is a shell variable not set?")
    path = Path(target)
    if path.is_dir():
        if not (path / "__main__.py").exists():
            raise UsageError(f"{target} is a folder without __main__.py; name the script inside it.")
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
            elif target.replace(".", "").isidentifier() and _find(target.partition(".")[0]) is not None:
                hint = f" There is a module of that name: did you mean -m {target}?"
        raise UsageError(f"script {target} does not exist (looked in {os.getcwd()}).{hint}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {target} exists, but this user may not read it.")
    if not path.is_file() or target.startswith(_OF_ONE_PROCESS):
        raise UsageError(f"script {target}: each worker has to read it, so it has to be a file with a name of its own.")
    if path.suffix not in _PYTHON:
        _check_is_python(target, path)


def _check_is_python(target: str, path: Path) -> None:
    """Raises UsageError for programs, shell scripts and notebooks: Python would show a SyntaxError for each worker."""
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{target} is a notebook. Call photinus.launch in it, or convert it: `jupyter nbconvert --to "
            f"script {target}`."
        )
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        if path.suffix != ".sh" and (zipfile.is_zipfile(path) or (b"\0" not in head and ast.parse(path.read_bytes()))):
            return
    shell = "bash" if path.suffix == ".sh" else ""
    by = head.partition(b"\n")[0][2:].decode("utf-8", "replace").strip() if head.startswith(b"#!") else shell
    start = (target if "/" in target else f"./{target}") if os.access(path, os.X_OK) else f"{by} {target}" if by else ""
    advice = f" To run it as a program: photinus run --no-python {start}" if start else ""
    raise UsageError(f"{target} is not a Python script.{advice}")


def _check_executable(target: str) -> None:
    if shutil.which(target) is not None:
        return
    path = Path(target)
    if path.is_file():
        start = " Remove --no-python to run it as a Python script." if path.suffix == ".py" else ""
        raise UsageError(f"{target} is not executable. If it is a program: chmod +x.{start}")
    raise UsageError(f"program {target} was not found (looked in {os.getcwd()} and PATH).")


def _check_module(target: str) -> None:
    if target.endswith(".py"):
        raise UsageError(f"-m takes a module's name, and {target} looks like a file; remove -m.")
    # Only the first part: looking deeper would import the user's package into the launcher.
    top = target.partition(".")[0]
    if _find(top) is None:
        raise UsageError(
            f"module {target} was not found: there is no {top} in {os.getcwd()}, in PYTHONPATH or installed in "
            f"{sys.executable}."
        )


def add_local_rank(program: Program) -> Program:
    """The program with the flag that its text knows, unless the user's own arguments hold it already."""
    if any(word.partition("=")[0] in _LOCAL_RANK for word in program.arguments):
        return program
    source = source_of(program)
    flag = None if source is None else _local_rank_flag(source)
    return program if flag is None else replace(program, local_rank_flag=flag)


def _local_rank_flag(source: Path) -> str | None:
    try:
        text = source.read_bytes()
        if b"local_rank" not in text and b"local-rank" not in text:
            return None  # the usual case, without reading it as Python
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    except (OSError, ValueError, SyntaxError, RecursionError):  # the worker will say what is wrong with it
        return None
    return next((spelling for spelling in _LOCAL_RANK if any(node.value == spelling for node in nodes)), None)


def missing_packages(program: Program) -> list[str]:
    """The packages that a script's own header (PEP 723) names and this Python lacks. Versions are not compared."""
    source = source_of(program)
    if source is None or not source.is_file():
        return []
    header = _HEADER.search(source.read_text(encoding="utf-8", errors="replace"))
    if header is None:
        return []
    found = _DEPENDENCIES.search(re.sub(r"(?m)^# ?", "", header["lines"]))
    missing = []
    for name, rest in _PACKAGE.findall(found["words"]) if found is not None else ():
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if ";" not in rest:  # a marker may leave it out here
                missing.append(name)
    return missing


def source_of(program: Program) -> Path | None:
    """The file that is run as __main__; None when it is no Python, or cannot be found without importing anything."""
    if program.kind == "script":
        path = Path(program.target)
        return path / "__main__.py" if path.is_dir() else path
    if program.kind == "program":
        return None
    # Down from the first package: `importlib.util.find_spec` would import those above the module.
    top, *rest = program.target.split(".")
    spec, name = _find(top), top
    for part in rest:
        name += f".{part}"
        spec = _find_inside(spec, name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_inside(spec, f"{name}.__main__")
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _find(top: str) -> ModuleSpec | None:
    """The module or package of that name in the working directory or sys.path; editable installs have own finders."""
    return importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)


def _find_inside(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if package is None or package.submodule_search_locations is None:
        return None
    return importlib.machinery.PathFinder.find_spec(name, package.submodule_search_locations)
