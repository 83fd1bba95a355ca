"""What a fresh machine lacks is said in one line before anything is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import REPOSITORY

CHECK = REPOSITORY / "tools" / "check_machine.py"


def _check(prelude: str, path: str) -> subprocess.CompletedProcess[str]:
    code = f"{prelude}\nimport runpy; runpy.run_path({str(CHECK)!r}, run_name='__main__')"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("prelude", "said"),
    [
        ("", "no C++ compiler found"),
        ("import sys; sys.platform = 'darwin'", "the engine needs Linux (memfd, futex); this is darwin"),
        (
            "import sys; sys.version_info = (3, 8, 1); sys.version = '3.8.1 x'",
            "needs Python 3.10 or newer, found 3.8.1",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, prelude: str, said: str) -> None:
    ended = _check(prelude, str(tmp_path))
    assert ended.returncode == 1
    assert said in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_missing_headers_are_said_with_the_package_that_has_them(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    ended = _check("import sysconfig; sysconfig.get_paths = lambda: {'include': '/nowhere'}", str(tmp_path))
    assert ended.returncode == 1
    assert "Python's headers are missing (/nowhere/Python.h)" in ended.stderr
    assert "apt install python3-dev" in ended.stderr
