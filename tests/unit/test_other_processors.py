"""The engine on processors that are not here: cross-compiled and run in an emulator, against the naive reference."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parent.parent.parent / "native"
PACKAGES = {
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "qemu-aarch64-static": "qemu-user-static",
    "qemu-x86_64-static": "qemu-user-static",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _need(*tools: str) -> None:
    missing = sorted({PACKAGES[tool] for tool in tools if shutil.which(tool) is None})
    if missing:
        pytest.skip(f"needs Debian's {', '.join(missing)} (apt-get install {' '.join(missing)})")


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def _build(folder: Path, *options: str, targets: tuple[str, ...]) -> None:
    # make test-all brings its own, beside the interpreter.
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("needs cmake")
    _run(cmake, "-S", NATIVE, "-B", folder, *options)
    _run(cmake, "--build", folder, "--parallel", "2", "--target", *targets)


def test_kernels_and_plans_give_the_naive_results_on_arm(tmp_path: Path) -> None:
    _need("aarch64-linux-gnu-g++", "qemu-aarch64-static")
    _build(tmp_path, "--toolchain", "cmake/aarch64.cmake", targets=("kernels_test", "plans_test"))
    for test in ("kernels_test", "plans_test"):
        assert " passed, 0 failed" in _run("qemu-aarch64-static", tmp_path / "tests" / test)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="what is built here is not for x86-64")
def test_kernels_give_the_naive_results_on_a_processor_without_avx(tmp_path: Path) -> None:
    _need("qemu-x86_64-static")
    _build(tmp_path, targets=("kernels_test",))
    test = tmp_path / "tests" / "kernels_test"
    assert " passed, 0 failed" in _run("qemu-x86_64-static", "-cpu", "Nehalem", test)
