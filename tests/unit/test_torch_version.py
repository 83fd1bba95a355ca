"""A PyTorch that is too old is told in one line, with what to type, before anything is tried on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.version import OLDEST, is_too_old
from tests.fork_server import REPOSITORY

SAID = r"OldTorchError: Photinus needs torch 2\.11 or newer, but torch 2\.7\.1\+cpu is installed: pip install --upgrade"

# A distribution's metadata in front of the real one, and the version that the imported torch tells.
PRETENDING = """
import sys
sys.path.insert(0, {folder!r})
import torch.version
torch.version.__version__ = "2.7.1+cpu"
import torch
torch.__version__ = torch.torch_version.TorchVersion("2.7.1+cpu")
"""

ENTRANCES = {
    "the backend": (
        "import torch.distributed as dist\n"
        "dist.init_process_group('photinus', store=dist.HashStore(), rank=0, world_size=1)"
    ),
    "our DDP": "import photinus; photinus.DistributedDataParallel",
    "the trainer": "from photinus import Loop",
    "the launcher": "from photinus.cli.main import main; sys.exit(main(['run', '--cpu', __file__]))",
}


@pytest.mark.parametrize("entrance", ENTRANCES)
@pytest.mark.seconds
def test_a_torch_that_is_too_old_is_told_in_one_line(entrance: str, tmp_path: Path) -> None:
    folder = tmp_path / "torch-2.7.1+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.7.1+cpu\n")
    script = tmp_path / "program.py"
    script.write_text(PRETENDING.format(folder=str(tmp_path)) + ENTRANCES[entrance])
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert run.returncode != 0
    assert re.search(SAID, run.stderr.splitlines()[-1]), run.stdout + run.stderr


def test_builds_and_prereleases_count_as_their_release() -> None:
    assert [is_too_old(v) for v in ("2.6.0", "2.10.1+cu126", "1.13.1", "2.11.0a0+git12", "2.14.0", "3.0")] == [
        *[True] * 3,
        *[False] * 3,
    ]
    assert not is_too_old("unknown")


def test_the_declared_range_begins_with_the_oldest_tested_release() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text()
    assert re.findall(r'"torch>=([\d.]+)"', text) == [".".join(map(str, OLDEST))]


def test_the_oldest_and_the_newest_declared_torch_are_tested_by_continuous_integration() -> None:
    oldest = ".".join(map(str, OLDEST))
    declared = re.search(r'"torch>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert declared is not None
    assert declared[1] == oldest
    tested = re.search(r"for version in (.+); do", (REPOSITORY / ".ci" / "versions").read_text(encoding="utf-8"))
    assert tested is not None
    versions = [tuple(map(int, version.split("."))) for version in tested[1].split()]
    pinned = re.search(r"^torch==([\d.]+)", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    assert min(versions)[:2] == OLDEST
    assert max(versions) > tuple(map(int, pinned[1].split(".")))


def test_another_torch_has_an_environment_of_its_own() -> None:
    words = ["make", "-n", "test", "TORCH=2.11.0", "TESTS=tests/parity"]
    shown = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True).stdout
    assert re.search(r"/photinus/torch2\.11\.0/bin/python -m pytest .*tests/parity", shown)
    assert ".venv/" not in shown
    assert "mypy" not in shown
