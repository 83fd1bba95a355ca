"""tools/check_layers.py finds one planted fault of each kind."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import REPOSITORY


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of what the check reads."""
    for folder in ("src/photinus", "native"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return tmp_path


def check(house: Path) -> str:
    """What it says of a house; fails where its exit code says something else."""
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tools" / "check_layers.py", house], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.returncode == (0 if done.stdout.startswith("layers: imports and includes go down") else 1)
    return done.stdout


def plant(house: Path, file: str, line: str) -> None:
    path = house / file
    path.write_text(path.read_text() + line + "\n")


def test_a_sound_house_passes(house: Path) -> None:
    assert check(house) == "layers: imports and includes go down, lists are complete\n"


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("job/world.py", "from ..backend import name", "job (floor 2) imports backend (6)"),
        (
            "parallel/exchange/works.py",
            "from ..reducer import buckets",
            "parallel.exchange.works imports parallel.reducer.buckets, which lies above it",
        ),
        (
            "run/local/output.py",
            "from ..supervise import supervise",
            "run.local.output imports run.supervise, which lies above it",
        ),
        ("runlog/files.py", "def late() -> None:\n    import torch", "runlog may not import torch"),
        ("compat/__init__.py", "# a comment\n" * 500 + "more = 1\n" * 500, "lines of code, more than BUDGET"),
        ("trainer/loop.py", "from .. import __version__", "trainer imports the front door"),
        (
            "runlog/files.py",
            "def late() -> None:\n    from .events import EVENTS",
            "a circle of imports: runlog.",
        ),
        ("job/new_file.py", "", "job/__init__.py: new_file is not in the list"),
    ],
    ids=["up", "up inside a room", "onto a roof", "forbidden", "budget", "front door", "circle", "list"],
)
def test_a_planted_fault_of_python_is_named(house: Path, file: str, line: str, said: str) -> None:
    path = house / "src/photinus" / file
    path.touch()
    plant(house, f"src/photinus/{file}", line)
    assert said in check(house)


def test_a_file_that_is_gone_but_listed_is_named(house: Path) -> None:
    (house / "src/photinus/job/relay.py").unlink()
    assert "job/__init__.py: the list names relay, which is not there" in check(house)


def test_an_include_that_goes_up_is_named(house: Path) -> None:
    plant(house, "native/base/clock.h", '#include "kernels/reduce.h"')
    assert "native/base may not include kernels/reduce.h" in check(house)


def test_native_folders_that_include_each_other_are_named(house: Path) -> None:
    plant(house, "native/peers/posts.h", '#include "shm/segment.h"')
    faults = check(house)
    assert "circle" in faults
    assert "shm" in faults.split("circle", 1)[1]
    assert "peers" in faults.split("circle", 1)[1]
