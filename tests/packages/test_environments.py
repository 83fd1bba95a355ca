"""`photinus run` where people keep their Python: projects and scripts of uv, odd places, user site, a module system."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.packages.test_wheel import run

SITE = sysconfig.get_path("purelib")  # has torch
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
UV = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
SCRIPT = """
import torch, photinus
with photinus.init() as world:
    torch.distributed.all_reduce(total := torch.ones(1))
    print("rank", world.rank, "of", world.world_size, "found", int(total), "in", photinus.__file__)
"""
needs_uv = pytest.mark.skipif(UV is None, reason="uv is missing (pip install uv)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel for this machine: what `pip install .` makes."""
    out = tmp_path_factory.mktemp("wheel")
    run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", out, "."])
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A program of two ranks."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with Photinus, and with this one's packages beside it."""
    run([sys.executable, "-m", "venv", folder])
    run([folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", wheel])
    (folder / f"lib/python{PYTHON}/site-packages/more.pth").write_text(f"{SITE}\n")
    return folder


def check(shown: str, place: Path) -> None:
    """Both ranks ran, with the Photinus of that place."""
    for rank in range(2):
        assert f"rank {rank} of 2 found 2 in {place}" in shown


START = ["run", "--nproc-per-node", "2", "--cpu"]


def test_an_environment_on_another_disk_with_a_space_in_its_name_moved_and_linked(
    wheel: Path, script: Path, tmp_path: Path
) -> None:
    first = environment(tmp_path / "a disk" / "venv", wheel)
    check(run([first / "bin/photinus", *START, script]), first)
    (tmp_path / "link").symlink_to(first)
    check(run([tmp_path / "link/bin/photinus", *START, script]), first)
    moved = first.rename(tmp_path / "moved")
    check(run([moved / "bin/python", "-m", "photinus", *START, script]), moved)


def test_packages_of_a_module_system_and_of_the_user(wheel: Path, script: Path, tmp_path: Path) -> None:
    base = getattr(sys, "_base_executable", sys.executable)
    tree, user = tmp_path / "tree", tmp_path / "user"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", wheel]
    run([*install, "--target", tree])
    check(run([base, "-m", "photinus", *START, script], PYTHONPATH=f"{tree}{os.pathsep}{SITE}"), tree)
    site = user / f"lib/python{PYTHON}/site-packages"
    run([*install, "--target", site])
    (site / "more.pth").write_text(f"{SITE}\n")
    check(run([base, "-m", "photinus", *START, script], PYTHONUSERBASE=str(user)), site)


@needs_uv
def test_uv_runs_it_in_a_project(wheel: Path, script: Path, tmp_path: Path) -> None:
    project = f'[project]\nname = "mine"\nversion = "0"\nrequires-python = ">={PYTHON}"\n'
    (tmp_path / "pyproject.toml").write_text(project)
    own = environment(tmp_path / ".venv", wheel)
    check(
        run(
            [UV, "run", "--no-sync", "photinus", *START, script.name],
            cwd=tmp_path,
            VIRTUAL_ENV="",
            TMPDIR=str(tmp_path),
        ),
        own,
    )


@needs_uv
def test_the_environment_that_uv_makes_of_a_scripts_header(wheel: Path, script: Path, tmp_path: Path) -> None:
    header = f'# /// script\n# requires-python = "=={PYTHON}.*"\n# dependencies = [\n#   "einops-none",\n# ]\n# ///\n'
    script.write_text(header + SCRIPT)
    own = environment(tmp_path / "other", wheel)
    shown = run([own / "bin/photinus", *START, script])  # runs, and says what will be missing
    check(shown, own)
    assert f"lists packages in its header (PEP 723) that {own}/bin/python lacks: einops-none. `photinus run`" in shown
    offline = {
        "TMPDIR": str(tmp_path),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(wheel.parent),
    }
    script.write_text(header.replace('"einops-none",', "") + SCRIPT)
    run([UV, "sync", "--quiet", "--script", script, "--python", sys.executable], **offline)
    python = Path(run([UV, "python", "find", "--script", script], **offline).strip().splitlines()[-1])
    run([UV, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel], **offline)
    made = python.parent.parent
    (made / f"lib/python{PYTHON}/site-packages/more.pth").write_text(f"{SITE}\n")
    check(run([python, "-m", "photinus", *START, script]), made)
