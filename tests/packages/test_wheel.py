"""The packages as users get them: built as for a release, installed without a compiler, by pip and by uv."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import photinus
from tests.fork_server import REPOSITORY
from tests.strangers.documents import blocks
from tests.strangers.test_tutorial import FIRST, typed

BIN = Path(sys.executable).parent
needs_tools = pytest.mark.skipif(
    not (BIN / "uv").exists() or not (BIN / "python-zig").exists(),
    reason="uv or ziglang is missing: `make wheel` installs them",
)
pytestmark = [pytest.mark.slow, needs_tools, pytest.mark.timeout(1500)]


def run(command: Sequence[str | Path], *, cwd: Path = REPOSITORY, **environ: str) -> str:
    """What a command prints; AssertionError with it if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1400,
    )
    assert done.returncode == 0, f"$ {command}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of this Python."""
    out = tmp_path_factory.mktemp("dist")
    python = "{}.{}".format(*sys.version_info)
    run([sys.executable, "tools/build_wheels.py", python, "--out", out], UV_PYTHON_DOWNLOADS="never")
    return out


@pytest.fixture
def wheel(packages: Path) -> Path:
    (wheel,) = packages.glob("*.whl")
    return wheel


def test_the_wheel_runs_where_glibc_is_2_28(wheel: Path, tmp_path: Path) -> None:
    from elftools.elf.elffile import ELFFile
    from elftools.elf.gnuversions import GNUVerSymSection
    from elftools.elf.sections import SymbolTableSection

    assert re.search(r"-manylinux_2_28_\w+\.whl$", wheel.name), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (module,) = (name for name in archive.namelist() if name.endswith(".so"))
        path = Path(archive.extract(module, tmp_path))
    with path.open("rb") as file:
        elf = ELFFile(file)
        symbols, versions = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
        assert isinstance(symbols, SymbolTableSection)
        assert isinstance(versions, GNUVerSymSection)
        # A function that glibc 2.28 lacks has no version here, which auditwheel does not mind: it is only found missing
        # when the module is loaded there.
        unknown = {
            symbol.name
            for symbol, version in zip(symbols.iter_symbols(), versions.iter_symbols(), strict=True)
            if symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and version["ndx"] in ("VER_NDX_LOCAL", "VER_NDX_GLOBAL")
        }
    assert {name for name in unknown if not name.startswith(("Py", "_Py", "_Unwind_"))} == set()


def test_the_sdist_has_sources_and_nothing_else(packages: Path) -> None:
    (sdist,) = packages.glob("*.tar.gz")
    assert sdist.name == f"photinus-{photinus.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    tracked = set(run(["git", "ls-files", "--cached", "--others", "--exclude-standard"]).splitlines())
    assert files - tracked == {"PKG-INFO"}
    assert {"LICENSE", "README.md", "pyproject.toml", "native/CMakeLists.txt", "tests/conftest.py"} <= files
    assert not any(name.startswith((".ci", ".github", "benchmarks/results")) for name in files)


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_tutorials_first_page_runs_where_a_wheel_was_installed_without_a_compiler(
    installer: str, wheel: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    python = environment / "bin/python"
    given = [wheel, "--constraint", REPOSITORY / "constraints.txt"]
    bare = {"PATH": str(environment / "bin"), "OMP_NUM_THREADS": "1"}
    if installer == "pip":
        run([sys.executable, "-m", "venv", environment])
        run([python, "-m", "pip", "install", "--quiet", *given], **bare)
    else:
        # Where this machine's pip finds its PyTorch: uv reads no such variable.
        links = [word for place in os.environ.get("PIP_FIND_LINKS", "").split() for word in ("--find-links", place)]
        run([BIN / "uv", "venv", "--python", sys.executable, environment])
        run([BIN / "uv", "pip", "install", "--quiet", "--python", python, *links, *given], **bare)
    script, *_ = (block.text for block in blocks(FIRST) if block.language == "python")
    (tmp_path / "train.py").write_text(script)
    for command, lines in typed(FIRST):
        shown = run(["/bin/bash", "-c", command], cwd=tmp_path, **bare)
        assert [line for line in lines if line.startswith("finished: ") and line not in shown] == []
    assert (tmp_path / "compared.html").stat().st_size > 10_000
