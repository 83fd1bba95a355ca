"""Says in one line what this machine lacks to build Photinus; make runs it with the system's Python first."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig


def lacks() -> str | None:
    """What is missing and how to get it, or None."""
    if not sys.platform.startswith("linux"):
        return f"the engine needs Linux (memfd, futex); this is {sys.platform}"
    if tuple(sys.version_info) < (3, 10):
        return f"needs Python 3.10 or newer, found {sys.version.split()[0]}; choose one with: make PYTHON=python3.12"
    compiler = os.environ.get("CXX", "c++")
    if not any(shutil.which(name) for name in (compiler, "c++", "g++", "clang++")):
        return "no C++ compiler found; install one (Debian and Ubuntu: apt install g++) or point CXX at it"
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        return (
            f"Python's headers are missing ({header}); install them (Debian and Ubuntu: apt install python3-dev, "
            f"Fedora: dnf install python3-devel)"
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        return "Python's venv module is missing; install it (Debian and Ubuntu: apt install python3-venv)"
    return None


if __name__ == "__main__":
    lacking = lacks()
    if lacking:
        sys.exit(f"photinus: {lacking}")
