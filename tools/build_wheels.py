"""Builds the sdist, and from it wheels for every Linux with glibc 2.28 or newer: `make wheel` calls this.

Zig, which PyPI has as ziglang, brings Clang, a C++ library to link statically, and the symbols of each glibc. So this
needs no container, and builds for the other processor, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
GLIBC = "2.28"
# Up to 3.13, Python ends threads at exit by pthread_exit, which unwinds with the system's libgcc_s. Exception handling
# in the module must call the same library: Zig's own unwinder would misread its frames.
UNWINDER = (
    "DeleteException ForcedUnwind GetCFA GetDataRelBase GetIP GetIPInfo GetLanguageSpecificData GetRegionStart "
    "GetTextRelBase RaiseException Resume Resume_or_Rethrow SetGR SetIP"
)


def main() -> None:
    """Build for the Pythons and the processor that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="+", help="versions, like 3.10; 3.12 makes the wheel for all from 3.12 on")
    parser.add_argument("--arch", choices=["x86_64", "aarch64"], default=platform.machine())
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build(options.pythons, options.arch, options.out, Path(folder))


def build(pythons: list[str], arch: str, out: Path, folder: Path) -> None:
    """Put the sdist and a wheel for each Python into `out`."""
    run(BIN / "uv", "build", "--sdist", "--out-dir", folder, REPOSITORY)
    (sdist,) = folder.glob("*.tar.gz")
    environ = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **compiler_for(arch, folder)}
    # auditwheel knows other processors' platforms by looking at the wheel alone.
    tag = f"manylinux_{GLIBC.replace('.', '_')}_{arch}" if arch == platform.machine() else "auto"
    for python in pythons:
        if arch != platform.machine():
            environ["SETUPTOOLS_EXT_SUFFIX"] = f".cpython-{python.replace('.', '')}-{arch}-linux-gnu.so"
        built = folder / python
        run(BIN / "uv", "build", "--wheel", "--python", python, "--out-dir", built, sdist, env=environ)
        (wheel,) = built.glob("*.whl")
        run(BIN / "auditwheel", "repair", "--only-plat", "--plat", tag, "--wheel-dir", out, wheel, env=environ)
    shutil.copy2(sdist, out)


def compiler_for(arch: str, folder: Path) -> dict[str, str]:
    """Return the variables that make CMake and scikit-build-core build for a processor and that glibc."""
    target = ["-target", f"{arch}-linux-gnu.{GLIBC}"]
    zig = BIN / "python-zig"
    stub = folder / "libgcc_s.so.1"
    source = folder / "unwinder.c"
    source.write_text("".join(f"void _Unwind_{name}(void) {{}}\n" for name in UNWINDER.split()))
    run(zig, "cc", *target, "-w", "-shared", "-nostdlib", f"-Wl,-soname,{stub.name}", "-o", stub, source)
    environ = {
        "CXX": " ".join([f"{zig}", "c++", *target]),
        "CXXFLAGS": "-include stdio.h",  # nanobind 3.1 relies on other headers for it, of which libc++'s have none
        "LDFLAGS": str(stub),
    }
    if arch != platform.machine():
        environ["_PYTHON_HOST_PLATFORM"] = f"linux-{arch}"
        environ["CMAKE_ARGS"] = f"-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={arch}"
    return environ


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command, and end with its exit code where it fails."""
    print("$", *command, flush=True)
    done = subprocess.run([str(word) for word in command], env=env, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
