"""The user's program is looked at before any worker starts."""

from __future__ import annotations

import os
import re
import zipfile

import pytest

from photinus.errors import UsageError
from photinus.job.spec import Program
from photinus.run.local.program import check_program, missing_packages


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('not to be imported by the launcher')")
    (tmp_path / "package" / "train.py").write_text("")
    (tmp_path / "runnable").mkdir()
    (tmp_path / "runnable" / "__main__.py").write_text("")
    return tmp_path


@pytest.mark.parametrize("target", ["train.py", "package/train.py", "./train.py", "runnable"])
def test_a_script_or_runnable_folder_is_accepted(target):
    check_program(Program("script", target))


@pytest.mark.parametrize("target", ["package.train", "package", "json.tool", "sys"])
def test_a_module_of_the_working_directory_or_installed_is_accepted_without_importing_it(target):
    check_program(Program("module", target))


@pytest.mark.parametrize(
    ("kind", "target", "told"),
    [
        ("script", "trian.py", r"script trian.py does not exist \(looked in .*\)\. Did you mean train.py\?"),
        ("script", "package/trin.py", r"Did you mean package/train.py\?"),
        ("script", "nowhere/train.py", r"Its folder nowhere does not exist either"),
        ("script", "package.train", r"did you mean -m package.train\?"),
        ("script", "package", r"package is a folder without __main__.py"),
        ("script", "zzz", r"script zzz does not exist"),
        ("module", "nosuch.module", r"module nosuch.module was not found: there is no nosuch in "),
        ("module", "train.py", r"-m takes a module's name, and train.py looks like a file"),
    ],
)
def test_what_cannot_be_started_is_told_with_what_was_probably_meant(kind, target, told):
    with pytest.raises(UsageError, match=told):
        check_program(Program(kind, target))


@pytest.mark.parametrize(
    ("name", "content", "mode", "told"),
    [
        ("go.sh", b"#!/bin/bash\nif true; then\n  ls\nfi\n", 0o755, "photinus run --no-python ./go.sh"),
        ("go.sh", b"ls\n", 0o644, "photinus run --no-python bash go.sh"),
        ("go", b"#!/usr/bin/env perl\nuse strict;\n", 0o644, "photinus run --no-python /usr/bin/env perl go"),
        ("package/train", b"\x7fELF\2\1\1\0\0", 0o755, "photinus run --no-python package/train"),
        ("job.yaml", b"a: [1\n", 0o644, "job.yaml is not a Python script."),
        ("n.ipynb", b"{}", 0o644, "convert it: `jupyter nbconvert --to script n.ipynb`."),
    ],
)
def test_what_is_not_python_is_refused_with_the_way_to_start_it(folder, name, content, mode, told):
    (folder / name).write_bytes(content)
    (folder / name).chmod(mode)
    with pytest.raises(UsageError, match=re.escape(told) + "$"):
        check_program(Program("script", name))


def test_python_of_any_name_is_a_script(folder):
    # As pip writes them where the path of Python is long.
    (folder / "train").write_bytes(b"#!/bin/sh\n'''exec' python \"$0\"\n' '''\nimport os\n")
    (folder / "train.txt").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe4'\n")
    with zipfile.ZipFile(folder / "train.app", "w") as archive:
        archive.writestr("__main__.py", "")
    (folder / "broken.py").write_text("if")  # the worker shows where
    for name in ("train", "train.txt", "train.app", "broken.py"):
        check_program(Program("script", name))


@pytest.mark.parametrize("target", ["pipe", "/dev/stdin", "/dev/null"])
def test_a_script_that_only_one_process_could_read_is_refused(folder, target):
    os.mkfifo(folder / "pipe")  # as bash's <(...)
    with pytest.raises(UsageError, match="each worker has to read it, so it has to be a file with a name of its own"):
        check_program(Program("script", target))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_script_that_may_not_be_read_is_told(folder):
    (folder / "train.py").chmod(0)
    with pytest.raises(UsageError, match="this user may not read it"):
        check_program(Program("script", "train.py"))


def test_a_program_is_found_as_a_shell_finds_it(tmp_path):
    check_program(Program("program", "bash"))
    with pytest.raises(UsageError, match="program no-such-program was not found"):
        check_program(Program("program", "no-such-program"))


def test_a_file_that_is_not_executable_is_no_program(tmp_path):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(UsageError, match=r"not executable. If it is a program: chmod \+x. Remove --no-python"):
        check_program(Program("program", str(tmp_path / "train.py")))


@pytest.mark.parametrize(
    ("header", "missing"),
    [
        (
            '# /// script\n# dependencies = ["torch>=2", \'einops-none\', "Nope_1.x==3"]\n# ///\n',
            ["einops-none", "Nope_1.x"],
        ),
        (
            '# /// script\n# dependencies = [\n#   "torch",\n#\n#   "a-b[c]",\n# ]\n# ///\n',
            ["a-b"],
        ),
        ("# /// script\n# dependencies = [\"only-there; sys_platform == 'win32'\"]\n# ///\n", []),
        ("# /// script\n# ///\n", []),
        ('# dependencies = ["no-header"]\n', []),
    ],
)
def test_packages_of_a_scripts_own_header_that_are_missing_are_known(header, missing, tmp_path):
    (tmp_path / "train.py").write_text(f"#!/usr/bin/env python\n{header}print(1)\n")
    assert missing_packages(Program("script", str(tmp_path / "train.py"))) == missing
