"""Checks the house: imports and includes go down only and not in a circle, each folder's list names its files, and no
room grows above its budget of lines of code.

Exits 1 with a line for each fault. The floors are those of docs/design.md, lowest first. A file may use its own floor
and lower ones; on the native side a folder may use only what is listed for it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Python: room -> floor. Files directly in the package are rooms of their own.
FLOORS = {
    "errors": 0,
    "words": 0,
    "version": 0,
    "env": 1,
    "job": 2,
    "backend_choice": 2,
    "_native": 2,
    "tracebacks": 2,
    "optimizer_steps": 1,
    "process_memory": 3,
    "waiting_time": 1,
    "runlog": 3,
    "arrays": 3,
    "engine": 5,
    "backend": 6,
    "parallel": 7,
    "trainer": 8,
    "run": 9,
    "cli": 10,
    "tools": 11,
    "compat": 12,
    "templates": 12,
    "__main__": 12,
}
# Python: room -> most lines of code (neither blank, nor comment, nor docstring). A commit that raises one says which
# promise the lines keep.
BUDGET = {
    "backend": 2244,
    "cli": 986,
    "compat": 607,
    "job": 2262,
    "parallel": 5414,
    "run": 3485,
    "runlog": 1212,
    "templates": 188,
    "tools": 2067,
    "top": 1046,
    "trainer": 9825,
}
# Folders inside a room, lowest first; the files directly in the room are above them all.
INSIDE = {
    "parallel": ["exchange", "tracing", "reducer", "ddp", "zero", "strategies"],
    "trainer": ["data", "checkpoint", "session", "record"],
    "run": ["local", "ssh"],
    "tools": ["view", "doctor"],
}
# What a room may not use although it lies below: the launcher only starts processes, and the tools look at them;
# parallel and trainer speak plain torch.distributed, so that each half of the project is the other's oracle; the engine
# works where torch is not installed. (That the command line starts without torch is tested by running it.)
FORBIDDEN = {
    "job": {"_native"},
    "cli": {"torch", "backend", "parallel", "trainer", "engine", "_native"},
    "run": {"backend", "parallel", "trainer", "engine", "_native"},
    "tools": {"backend", "trainer", "engine", "_native"},  # `doctor --model` trains, as a user's script does
    "trainer": {"engine", "_native"},
    "parallel": {"engine", "_native", "backend"},
    "arrays": {"torch"},
    "runlog": {"torch"},
    "tracebacks": {"torch"},
    "version": {"torch"},
    "backend_choice": {"torch"},
    "engine": {"torch"},
}

# C++: folder -> folders below it that it may include. tests/ and bench/ may include all.
INCLUDES: dict[str, set[str]] = {
    "base": set(),
    "peers": {"base"},
    "shm": {"base", "peers"},
    "net": {"base"},
    "hosts": {"base", "peers", "shm", "net"},
    "device": {"base"},
    "kernels": {"base"},
    "collectives": {"base", "peers", "kernels"},
    "progress": {"base", "peers", "shm"},
    "engine": {"base", "peers", "shm", "net", "hosts", "device", "kernels", "collectives", "progress"},
}

NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}

Module = tuple[str, ...]  # ("launcher", "hosts", "leader"); a folder's __init__ is the folder; () is the front door


class Package:
    """The files of src/photinus and who imports whom, wherever in a file the import stands."""

    def __init__(self, root: Path) -> None:
        self.root = root / "src" / "photinus"
        self.paths = {
            self._module(path): path
            for path in sorted(self.root.rglob("*.py"))
            if path.relative_to(self.root).parts[0] != "templates"  # programs of users
        }
        self.imports = {module: list(self._imports(module)) for module in self.paths}

    def _module(self, path: Path) -> Module:
        parts = path.relative_to(self.root).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    def _imports(self, module: Module) -> Iterator[tuple[int, Module | str]]:
        """(line, a module of ours, or the name of another package) for each import of a file."""
        path = self.paths[module]
        folder = list(path.relative_to(self.root).parts[:-1])
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    names = alias.name.split(".")
                    yield node.lineno, tuple(names[1:]) if names[0] == "photinus" else names[0]
            elif isinstance(node, ast.ImportFrom):
                names = (node.module or "").split(".") if node.module else []
                if node.level:
                    names = [*folder[: len(folder) - node.level + 1], *names]
                elif names[:1] == ["photinus"]:
                    names = names[1:]
                else:
                    yield node.lineno, names[0]
                    continue
                for alias in node.names:
                    full = (*names, alias.name)
                    yield node.lineno, full if full in self.paths or full == ("_native",) else tuple(names)


def lines_of_code(text: str) -> int:
    """Return the number of lines that are neither blank, nor comment, nor docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def faults_of_budget(package: Package) -> Iterator[str]:
    """Rooms with more lines of code than their budget, or without one. "top": the files directly in the package."""
    lines: Counter[str] = Counter()
    for path in package.root.rglob("*.py"):
        parts = path.relative_to(package.root).parts
        lines[parts[0] if len(parts) > 1 else "top"] += lines_of_code(path.read_text())
    for room, count in sorted(lines.items()):
        budget = BUDGET.get(room, 0)
        if count > budget:
            yield f"src/photinus/{room}: {count} lines of code, more than BUDGET in tools/check_layers.py: {budget}"


def faults_of_floors(package: Package) -> Iterator[str]:
    """Imports that go up, between rooms or inside one, or are forbidden."""
    for module, imports in package.imports.items():
        if not module:  # the front door names everything, and loads it late
            continue
        room = module[0]
        path = package.paths[module].relative_to(package.root)
        for line, target in imports:
            other = target if isinstance(target, str) else target[0] if target else "__init__"
            if other in FORBIDDEN.get(room, set()):
                yield f"{path}:{line}: {room} may not import {other}"
            elif isinstance(target, str):
                continue
            elif other == "__init__":
                yield f"{path}:{line}: {room} imports the front door"
            elif other == room and room in INSIDE:
                here, there = _height(module, package), _height(target, package)
                if there > here:
                    yield f"{path}:{line}: {'.'.join(module)} imports {'.'.join(target)}, which lies above it"
            elif FLOORS[other] > FLOORS[room]:
                yield f"{path}:{line}: {room} (floor {FLOORS[room]}) imports {other} ({FLOORS[other]})"


def _height(module: Module, package: Package) -> int:
    """On which floor of its room a module lies."""
    floors = INSIDE[module[0]]
    is_inside = len(module) > 2 or package.paths[module].parent.name == module[-1] != module[0]
    return floors.index(module[1]) if is_inside else len(floors)


def faults_of_circles(what: str, graph: Mapping[str, set[str]]) -> Iterator[str]:
    """One circle, over however many nodes, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"a circle of {what}: {' <- '.join(error.args[1])}"


def faults_of_lists(package: Package) -> Iterator[str]:
    """Folders whose `__init__` does not list exactly what is in them: a line for each, its name first."""
    for module, path in package.paths.items():
        if path.name != "__init__.py" or not module:
            continue
        there = {other[-1] for other in package.paths if other[:-1] == module}
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        listed = set(re.findall(r"^ *([a-z_0-9]+)/?  +\S", text, re.MULTILINE))
        for name in sorted(there - listed):
            yield f"{path.relative_to(package.root)}: {name} is not in the list"
        for name in sorted(listed - there):
            yield f"{path.relative_to(package.root)}: the list names {name}, which is not there"


def faults_of_includes(root: Path) -> Iterator[str]:
    """Includes of the engine that go up, and circles among its folders."""
    native = root / "native"
    used: dict[str, set[str]] = {folder: set() for folder in INCLUDES}
    for path in sorted([*native.rglob("*.h"), *native.rglob("*.cc")]):
        folder = path.relative_to(native).parts[0]
        if folder in ("tests", "bench"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'#include "([^"/]+)/[^"]+"', line)
            if not match or match[1] == folder:
                continue
            used.setdefault(folder, set()).add(match[1])
            if match[1] not in INCLUDES.get(folder, set()):
                yield f"{path.relative_to(root)}:{number}: native/{folder} may not include {line[10:-1]}"
    yield from faults_of_circles("includes", used)


def main(root: Path = ROOT) -> int:
    """Prints every fault; 0 when there is none."""
    package = Package(root)
    graph = {
        ".".join(module): {".".join(target) for _, target in imports if isinstance(target, tuple) and target != module}
        for module, imports in package.imports.items()
        if module  # the front door is imported by nobody of ours: see faults_of_floors
    }
    faults = [
        *faults_of_floors(package),
        *faults_of_circles("imports", graph),
        *faults_of_lists(package),
        *faults_of_includes(root),
        *faults_of_budget(package),
    ]
    for fault in faults:
        print(fault)
    print(f"layers: {len(faults)} faults" if faults else "layers: imports and includes go down, lists are complete")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
