"""Checks the house: imports and includes go down only and not in a circle, and each folder's list names its files.

Exits 1 with a line for each fault. The floors are those of docs/design.md, lowest first. A file may use its own floor
and lower ones; on the native side a folder may also use only what is listed for it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Python: room -> floor. Files directly in the package are rooms of their own.
FLOORS = {
    "errors": 0,
    "version": 0,
    "env": 1,
    "torch_version": 1,
    "malloc": 1,
    "world": 2,
    "relaunch": 2,
    "status": 2,
    "_native": 2,
    "tracebacks": 2,
    "waiting_time": 2,
    "runlog": 3,
    "arrays": 3,
    "group": 4,
    "engine": 5,
    "backend": 6,
    "parallel": 7,
    "trainer": 8,
    "launcher": 9,
    "compat": 10,
    "templates": 10,
    "__main__": 10,
}
# Folders inside a room, lowest first; the files directly in the room are above them all.
INSIDE = {
    "parallel": ["exchange", "tracing", "reducer", "ddp", "zero", "strategies"],
    "trainer": ["data", "checkpoint", "session", "record"],
    "launcher": ["command_line", "viewing", "workers", "hosts", "schedulers", "ssh", "doctor", "bench"],
}
# What a room may not use although it lies below: the launcher only starts processes; parallel and trainer speak plain
# torch.distributed, so that each half of the project is the other's oracle; the engine works where torch is not
# installed. (That the command line starts without torch is tested by running it.)
FORBIDDEN = {
    "launcher": {"backend", "parallel", "trainer", "engine", "_native"},
    "trainer": {"engine", "_native"},
    "parallel": {"engine", "_native", "backend"},
    "arrays": {"torch"},
    "runlog": {"torch"},
    "tracebacks": {"torch"},
    "waiting_time": {"torch"},
    "torch_version": {"torch"},
    "malloc": {"torch"},
    "group": {"torch"},
    "engine": {"torch"},
}

# C++: folder -> folders that it may include ("" is the roof beside them).
INCLUDES = {
    "base": {"base"},
    "memory": {"base", "memory"},
    "device": {"base", "device"},
    "topology": {"base", "topology"},
    "transport": {"base", "memory", "transport"},
    "kernels": {"base", "kernels"},
    "collectives": {"base", "memory", "topology", "kernels", "collectives"},
    "progress": {"base", "memory", "progress"},
    "": {"base", "memory", "device", "topology", "transport", "kernels", "collectives", "progress", ""},
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


def faults_of_circles(graph: Mapping[Module, set[Module]]) -> Iterator[str]:
    """Files that import each other, over however many others."""
    for circle in _strongly_connected(graph):
        if len(circle) > 1:
            yield "a circle of imports: " + " <-> ".join(sorted(".".join(m) or "__init__" for m in circle))


def _strongly_connected(graph: Mapping[Module, set[Module]]) -> list[list[Module]]:
    """Tarjan's algorithm (SIAM Journal on Computing 1, 1972)."""
    index: dict[Module, int] = {}
    low: dict[Module, int] = {}
    stack: list[Module] = []
    found: list[list[Module]] = []

    def visit(node: Module) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(stack[at:])
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return found


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
    """Includes of the engine that go up."""
    native = root / "native"
    for path in sorted([*native.rglob("*.h"), *native.rglob("*.cc")]):
        folder = path.relative_to(native).parts[0] if path.parent != native else ""
        if folder in ("tests", "bench"):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'#include "([^"]+)"', line)
            if not match:
                continue
            target = match[1].split("/")[0] if "/" in match[1] else ""
            if target not in INCLUDES[folder]:
                yield f"{path.relative_to(root)}:{number}: native/{folder} may not include {match[1]}"


def main(root: Path = ROOT) -> int:
    """Prints every fault; 0 when there is none."""
    package = Package(root)
    graph = {
        module: {target for _, target in imports if isinstance(target, tuple) and target != module}
        for module, imports in package.imports.items()
        if module  # the front door is imported by nobody of ours: see faults_of_floors
    }
    faults = [
        *faults_of_floors(package),
        *faults_of_circles(graph),
        *faults_of_lists(package),
        *faults_of_includes(root),
    ]
    for fault in faults:
        print(fault)
    print(f"layers: {len(faults)} faults" if faults else "layers: imports and includes go down, lists are complete")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
