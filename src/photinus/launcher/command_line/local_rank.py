"""Scripts that take --local_rank, as torch.distributed.launch and DeepSpeed gave it to them.

Whether a script takes it is read from its text, which is not run: an option is a string constant, spelled out.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from .program import Program

__all__ = ["add_local_rank"]

_SPELLINGS = ("--local_rank", "--local-rank")


def add_local_rank(program: Program) -> Program:
    """The program with the flag that its text knows, unless the user's own arguments hold it already."""
    if any(word.partition("=")[0] in _SPELLINGS for word in program.arguments):
        return program
    source = _source(program)
    flag = None if source is None else _flag_in(source)
    return program if flag is None else replace(program, local_rank_flag=flag)


def _flag_in(source: Path) -> str | None:
    try:
        text = source.read_bytes()
        if b"local_rank" not in text and b"local-rank" not in text:
            return None  # the usual case, without reading it as Python
        constants = {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    except (OSError, ValueError, SyntaxError, RecursionError):  # the worker will say what is wrong with it
        return None
    return next((spelling for spelling in _SPELLINGS if spelling in constants), None)


def _source(program: Program) -> Path | None:
    """The file that is run as __main__; None when it is no Python, or cannot be found without importing anything."""
    if program.kind == "script":
        path = Path(program.target)
        return path / "__main__.py" if path.is_dir() else path
    return _module_source(program.target) if program.kind == "module" else None


def _module_source(name: str) -> Path | None:
    """Goes down from the first package; `importlib.util.find_spec` would import those above the module."""
    top, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    for number, _ in enumerate(rest, start=2):
        if spec is None or spec.submodule_search_locations is None:
            return None
        full_name = ".".join(name.split(".")[:number])
        spec = importlib.machinery.PathFinder.find_spec(full_name, spec.submodule_search_locations)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.machinery.PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
