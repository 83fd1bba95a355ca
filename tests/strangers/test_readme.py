"""The README to the letter: its commands, in its order, in an empty folder, with an environment that has nothing yet.

PyTorch comes in the version of constraints.txt, from where pip is told to look on this machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.runlog.tables import read_rows
from tests.fork_server import REPOSITORY
from tests.strangers.documents import blocks, commands, outputs
from tests.strangers.test_tutorial import run

NOT_HERE = {  # commands of the README that need more than this machine, and the tests that have it
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": (
        "an index of its own for what pip is told to find here: tests/strangers/test_readme.py"
    ),
}
TRAINED = r"epoch 15/15  .*accuracy 0\.9\d"
SCRIPT = "examples/first/train.py"
SHOWN = {  # what some of the others say at their end; the exit code is looked at for all
    f"python {SCRIPT} runs/one": TRAINED,
    f"photinus run --nproc-per-node 2 {SCRIPT} runs/two": rf"2 ranks on 1 host(?s:.*){TRAINED}",
}
AFTER = {  # what its text says, typed after its commands
    f"torchrun --nproc-per-node 2 {SCRIPT} runs/torchrun": rf"2 ranks on 1 host(?s:.*){TRAINED}",
    f"photinus run --nproc-per-node 4 {SCRIPT} runs/four": rf"4 ranks on 1 host(?s:.*){TRAINED}",
    "photinus top runs/four": r"four  finished  4 ranks",
    "photinus new project": "",
    "photinus doctor": r"photinus\s+works: (?s:.*)\n(All well|\d+ of \d+ )",
    "photinus bench": r"Choose \w+: ",
    "make demo": rf"{TRAINED}(?s:.*)results in runs/digits",
}
_TIMES = re.compile(r"[\d ]+ samples/s +[\d.]+ s")
ENGINE_ALONE = "pip install --no-deps . && pip install numpy"


class Stranger:
    """Somebody who types commands in a folder, with an environment of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", folder.parent / f"{folder.name}-venv"], check=True)
        home = folder.parent / "home"
        home.mkdir(exist_ok=True)
        self.environ = {
            **{name: os.environ[name] for name in os.environ if name.startswith(("PIP_", "SSL_", "HTTP", "LANG"))},
            "PIP_CONSTRAINT": str(REPOSITORY / "constraints.txt"),
            "PATH": f"{folder.parent / f'{folder.name}-venv' / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "TERM": "xterm",
        }

    def type(self, command: str, *codes: int, timeout_s: float = 600.0) -> str:
        """What a command shows, both streams; AssertionError with it unless it ends with one of the codes (0)."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode in (codes or (0,)), f"$ {command}\nexit code {done.returncode}\n{done.stdout}"
        return done.stdout


def checkout(folder: Path) -> Path:
    """What a clone would have, with changes that are not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    ).stdout.split(b"\0")
    for name in filter(None, (each.decode() for each in listed)):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    return folder


def packages(listed: str) -> set[str]:
    """Names in what `pip list` shows, below its two lines of heading."""
    return {line.split()[0].lower() for line in listed.splitlines()[2:]}


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_readme_is_followed_to_the_letter(tmp_path: Path) -> None:
    stranger = Stranger(checkout(tmp_path / "photinus"))
    for command in [*(each for each in commands("README.md") if each not in NOT_HERE), *AFTER]:
        # On a busy machine `doctor` may find nothing wrong and yet not judge everything.
        shown = stranger.type(command, *([0, 1] if command == "photinus doctor" else []))
        assert re.search({**SHOWN, **AFTER}.get(command, ""), shown), f"$ {command}\n{shown}"
    runs = {
        name: read_rows(stranger.folder / "runs" / name / "losses.csv") for name in ("one", "two", "torchrun", "four")
    }
    for other in ("two", "torchrun", "four"):  # the same loss curve at every number of processes
        pairs = list(zip(runs["one"], runs[other], strict=True))
        assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs[:63]) < 1e-4
    assert (stranger.folder / "compared.html").stat().st_size > 10_000
    assert not {"mypy", "hypothesis", "clang-format", "pytest"} & packages(stranger.type(".venv/bin/pip list"))
    assert (stranger.folder / "project/train.py").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_engine_alone_needs_numpy_and_nothing_else(tmp_path: Path) -> None:
    assert ENGINE_ALONE in commands("docs/how-to/backend.md")
    stranger = Stranger(checkout(tmp_path / "photinus"))
    stranger.type(ENGINE_ALONE)
    (program,) = (block for block in blocks("docs/engine.md") if block.language == "python")
    (stranger.folder / "ranks.py").write_text(program.text)
    assert "0 3.0 " in stranger.type("python ranks.py")
    assert packages(stranger.type("pip list")) <= {"photinus", "numpy", "pip", "setuptools"}
    said = stranger.type("python -c 'import photinus; photinus.init()'", 1)
    assert "photinus.init needs torch, which " in said.splitlines()[-1]


def applied(diff: str, script: str) -> str:
    """The script after the diff. Lines of the script that the diff leaves out stay; the others have to be there."""
    lines, made = iter(script.splitlines()), []
    for change in diff.splitlines():
        sign, text = change[:1], change[1:]
        if sign == "+":
            made.append(text)
        elif text != "...":
            for line in lines:
                if line == text:
                    break
                made.append(line)
            else:
                raise AssertionError(f"one_device.py does not have, at this place: {text!r}")
            made += [text] if sign != "-" else []
    return "\n".join([*made, *lines]) + "\n"


def test_the_readmes_diff_turns_one_script_into_the_other_and_the_result_prints_what_the_readme_shows(
    tmp_path: Path,
) -> None:
    (diff,) = (each.text for each in blocks("README.md") if each.language == "diff")
    old, new = (
        (REPOSITORY / "examples" / "first" / name).read_text().split('"""\n\n', 1)[1]
        for name in ("one_device.py", "train.py")
    )
    assert applied(diff, old) == new
    (tmp_path / "train.py").write_text(applied(diff, old))
    shown = outputs("README.md")
    places = {name: name.removeprefix("README.md: ").replace(SCRIPT, "train.py") for name in shown if SCRIPT in name}
    places = {name: command for name, command in places.items() if command.split()[-1] in ("runs/one", "runs/two")}
    assert [command.split()[0] for command in places.values()] == ["python", "photinus"]
    for name, command in places.items():
        printed = {_TIMES.sub("", line) for line in run(command, tmp_path).splitlines()}
        assert {_TIMES.sub("", line) for line in shown[name]} <= printed, f"$ {command}\n" + "\n".join(sorted(printed))


def test_a_diff_that_does_not_fit_the_script_is_found() -> None:
    assert applied("+import sys\n import torch\n-x = 1\n+x = 2\n", "import torch\ny = 0\nx = 1\n") == (
        "import sys\nimport torch\ny = 0\nx = 2\n"
    )
    with pytest.raises(AssertionError, match="x = 3"):
        applied("-x = 3\n", "import torch\nx = 1\n")


def test_no_reason_outlives_its_command_and_each_names_a_test_that_is_there() -> None:
    typed = commands("README.md")
    assert {*NOT_HERE, *SHOWN} <= set(typed)
    assert len(NOT_HERE) < len(typed) / 3
    assert [why for why in NOT_HERE.values() if not (REPOSITORY / why.split(": ")[1]).is_file()] == []
