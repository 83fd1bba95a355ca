"""Which scripts are given --local_rank: those whose text has it, found without running them."""

from __future__ import annotations

from pathlib import Path

import pytest

from photinus.job.spec import Program
from photinus.run.local.program import add_local_rank

UNDERSCORE = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank', type=int)\n"
DASH = UNDERSCORE.replace("--local_rank", "--local-rank")
NEW_STYLE = "import os\n# --local_rank was an option once\nlocal_rank = int(os.environ['LOCAL_RANK'])\n"
IN_WORDS = '"""Give --local_rank=0 to this."""\nprint("--local_rank is not known")\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        (UNDERSCORE, "--local_rank"),
        (DASH, "--local-rank"),
        (UNDERSCORE + DASH, "--local_rank"),
        ("#!/usr/bin/env python\n# coding: latin-1\nname = '\xe9'\n" + UNDERSCORE, "--local_rank"),
        (NEW_STYLE, None),
        (IN_WORDS, None),
        ("def broken(:\n    '--local_rank'\n", None),
        ("", None),
    ],
)
def test_a_script_is_given_the_spelling_that_its_text_has(folder: Path, text: str, flag: str | None) -> None:
    (folder / "train.py").write_bytes(text.encode("latin-1"))
    program = add_local_rank(Program("script", "train.py", ("--lr", "0.1")))
    assert program.local_rank_flag == flag
    given = () if flag is None else (f"{flag}=3",)
    assert program.arguments_of(3) == (*given, "--lr", "0.1")


@pytest.mark.parametrize("words", [("--local_rank", "0"), ("--local-rank=0",), ("x", "--local_rank=1")])
def test_what_the_user_gave_already_is_not_given_again(folder: Path, words: tuple[str, ...]) -> None:
    (folder / "train.py").write_text(UNDERSCORE)
    assert add_local_rank(Program("script", "train.py", words)).arguments_of(1) == words


@pytest.mark.parametrize("target", ["package.train", "package", "package.inner"])
def test_a_module_is_read_and_nothing_of_it_is_imported(folder: Path, target: str) -> None:
    for place in (folder / "package", folder / "package" / "inner"):
        place.mkdir()
        (place / "__init__.py").write_text("raise RuntimeError('imported')")
        (place / "__main__.py").write_text(UNDERSCORE)
    (folder / "package" / "train.py").write_text(UNDERSCORE)
    assert add_local_rank(Program("module", target)).local_rank_flag == "--local_rank"


@pytest.mark.parametrize("target", ["json.tool", "sys", "package.absent"])
def test_a_module_without_it_or_without_source_is_left_alone(folder: Path, target: str) -> None:
    (folder / "package").mkdir()
    program = Program("module", target)
    assert add_local_rank(program) == program


def test_a_folder_is_read_at_its_main_and_a_program_not_at_all(folder: Path) -> None:
    (folder / "__main__.py").write_text(DASH)
    assert add_local_rank(Program("script", str(folder))).local_rank_flag == "--local-rank"
    (folder / "tool").write_text(DASH)
    assert add_local_rank(Program("program", "./tool")).local_rank_flag is None
