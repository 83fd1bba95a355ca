"""Checks that imports and includes go down only. Exits 1 with each line that goes up.

The floors are those of docs/design.md, lowest first. A file may use its own floor and lower ones; on the native side a
folder may also use only what is listed for it.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "photinus"

# Python: room -> floor. Files directly in the package are rooms of their own.
FLOORS = {
    "errors": 0,
    "env": 1,
    "torch_version": 1,
    "heap": 1,
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
    "templates": 10,
    "ray": 10,
    "__main__": 10,
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
    "heap": {"torch"},
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


def room_of(path: Path) -> str:
    """The room in which a Python file of the package lies."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py").removesuffix(".pyi")


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, room or outside package) for each import of a Python file."""
    found: list[tuple[int, str]] = []
    package = list(path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names = alias.name.split(".")
                if names[0] == "photinus":
                    found.append((node.lineno, names[1] if len(names) > 1 else "__init__"))
                else:
                    found.append((node.lineno, names[0]))
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                base = [*package[: len(package) - node.level + 1], *base]
            elif base[:1] == ["photinus"]:
                base = base[1:]
            else:
                found.append((node.lineno, base[0]))
                continue
            found.extend((node.lineno, base[0] if base else alias.name) for alias in node.names)
    return found


def python_faults() -> list[str]:
    """Imports of the package that go up or are forbidden."""
    faults = []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = room_of(path)
        if room == "__init__":  # the front door names everything, and loads it late
            continue
        relative = path.relative_to(ROOT)
        for line, target in imports_of(path):
            if target in FORBIDDEN.get(room, set()):
                faults.append(f"{relative}:{line}: {room} may not import {target}")
            elif target in FLOORS and FLOORS[target] > FLOORS[room]:
                faults.append(f"{relative}:{line}: {room} (floor {FLOORS[room]}) imports {target} ({FLOORS[target]})")
    return faults


def native_faults() -> list[str]:
    """Includes of the engine that go up."""
    faults = []
    native = ROOT / "native"
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
                faults.append(f"{path.relative_to(ROOT)}:{number}: native/{folder} may not include {match[1]}")
    return faults


def main() -> int:
    """Prints every fault; 0 when there is none."""
    faults = python_faults() + native_faults()
    for fault in faults:
        print(fault)
    print(f"layers: {len(faults)} imports or includes go up" if faults else "layers: all imports and includes go down")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
