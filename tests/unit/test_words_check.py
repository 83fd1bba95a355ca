"""tools/check_words.py counts each kind of foreign English, and fails when a room has more of it than before."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fork_server import REPOSITORY


def check(root: Path, *flags: str) -> tuple[int, str]:
    """Run the check on a package with one room that has no figure yet, so that nothing is allowed there."""
    command = [sys.executable, REPOSITORY / "tools" / "check_words.py", root, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.returncode, done.stdout


def write(root: Path, text: str) -> None:
    room = root / "src/photinus/fresh"
    room.mkdir(parents=True)
    (room / "file.py").write_text(text)


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ('"""What a file is about."""', "openings", "What a file is about."),
        ('def f():\n    """Whether it works.\n\n    More.\n    """', "openings", "Whether it works."),
        ('class A:\n    async def f(self):\n        """Who waits."""', "openings", "Who waits."),
        ('raise ValueError(f"{x}: the ranks meet at {y}")', "messages", "meet"),
        ('def f():\n    return LaunchError("so many " + "words")', "messages", "so many"),
        ('warnings.warn("the loop begins anew", stacklevel=2)', "messages", "anew"),
        ('self._say("photinus: for want of a port")', "messages", "for want of"),
        ('parser.add_argument("--n", help="leave out the rest")', "messages", "leave out"),
        ('_Flag("--n N", "a folder of another run")', "messages", "of another"),
        ('logger.warning("%s is no port", text)', "messages", "is no"),
        ("told = 1", "participles", "told"),
        ("a, _wanted = 1, 2", "participles", "_wanted"),
        ("self.made = 1", "participles", ".made"),
        ("for given in flags: pass", "participles", "given"),
    ],
)
def test_each_kind_is_found(tmp_path: Path, text: str, kind: str, place: str) -> None:
    write(tmp_path, text)
    code, output = check(tmp_path, "--list", "fresh")
    assert code == 1
    line = next(line for line in output.splitlines() if line.startswith("src/photinus/fresh/file.py:"))
    assert f": {kind}: {place}" in line
    assert f"fresh: 1 {kind}, at most 0: see tools/check_words.py --list fresh" in output


@pytest.mark.parametrize(
    "text",
    [
        '"""Return whether it works."""',
        'raise ValueError("there is no folder a; as many as 3 are there, and rank 1 is no longer one of them")',
        'key = "told"',
        "print(told.left)",
    ],
)
def test_good_english_passes(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    code, output = check(tmp_path)
    assert (code, "fresh" in output) == (0, False)


def test_a_room_that_got_better_is_named(tmp_path: Path) -> None:
    write(tmp_path, "")
    code, output = check(tmp_path)
    assert code == 0
    assert "before: lower LIMITS in tools/check_words.py" in output


def test_what_the_troubleshooting_page_quotes_stands_in_the_messages() -> None:
    sources = [path for kind in ("src/**/*.py", "native/**/*.cc", "native/**/*.h") for path in REPOSITORY.glob(kind)]
    # Messages go over several lines: without the quotes in between they are one text.
    text = " ".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in sources)
    quotes, is_quoting = [], False
    for line in (REPOSITORY / "docs" / "troubleshooting.md").read_text().splitlines():
        if line.startswith("| it says"):
            is_quoting = True
        elif not line.startswith("|"):
            is_quoting = False
        elif is_quoting and not line.startswith("|--"):
            quotes += line.split("|")[1].split(",")
    assert len(quotes) > 20
    # Numbers and names are in the message by a variable; the words about a missing module are Python's.
    own = r"\d+|\bSIG[A-Z]+|\bN\b|…|manifest\.json|libcuda\.so\.1|with a metric|No module named .*"
    pieces = [piece.strip() for quote in quotes for piece in re.split(own, quote)]
    assert [piece for piece in pieces if piece and piece not in text] == []


def test_a_line_of_code_in_a_page_is_at_most_88_wide_and_output_is_quoted_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "src/photinus").mkdir(parents=True)
    wide, double = "x" * 89, "界" * 45
    page = ["text " + wide, "```text", wide, "```", "```console", "$ a \\", "  b", wide, "$ c # " + "x" * 82, "```"]
    (tmp_path / "docs/page.md").write_text("\n".join([*page, "```python", "x" * 88, "```", ""]))
    assert check(tmp_path)[0] == 0
    page += ["```python", wide, double, "```", "```console", "$ a \\", wide, "$ c # " + "x" * 83, wide, "```", ""]
    (tmp_path / "docs/page.md").write_text("\n".join(page))
    code, output = check(tmp_path)
    assert code == 1
    assert [line.split(":")[:2] for line in output.splitlines()[:-1] if line.startswith("docs/")] == [
        ["docs/page.md", str(number)] for number in (12, 13, 17, 18)
    ]
    assert "docs/page.md:13: a line of code is 90 wide, at most 88" in output
