"""The tutorial to the letter: its script and its commands, page by page, and what it says that they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from photinus.runlog.tables import read_rows
from tests.strangers.documents import blocks, unwrapped

FIRST, FAILURES, LARGER = (f"docs/tutorial/{name}.md" for name in ("first-run", "failures", "larger-models"))
_VARIES = re.compile(r"[\d ]+ samples/s +[\d.]+ s|\(no CUDA device here\)")
_ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def typed(page: str) -> list[tuple[str, list[str]]]:
    """Each command of a page, with the lines that the page shows below it."""
    found: list[tuple[str, list[str]]] = []
    for block in blocks(page):
        for line in unwrapped(block.text).splitlines() if block.language == "console" else ():
            if line.startswith("$ "):
                found.append((re.split(r"\s+#\s", line[2:])[0], []))
            else:
                found[-1][1].append(line)
    return found


def alike(line: str) -> str:
    """The line without what differs from run to run: pids, ranks, steps, times, names of hosts."""
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r"of host [^,]+", "of host a", line))


def run(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=_ENVIRON,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout}"
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    script, *_ = (block.text for block in blocks(FIRST) if block.language == "python")
    (tmp_path / "train.py").write_text(script)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_command_of_the_first_page_prints_what_the_page_shows(folder: Path) -> None:
    for command, shown in typed(FIRST):
        lines = {_VARIES.sub("", line) for line in run(command, folder).splitlines()}
        missing = [line for line in shown if _VARIES.sub("", line) not in lines]
        assert missing == [], f"$ {command}\n" + "\n".join(sorted(lines))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_ends_as_one_that_nobody_killed_and_says_what_the_page_shows(folder: Path) -> None:
    """With 100 epochs, which is enough here: the page takes 1000, so that a person has more time for the kill."""
    (start, _), (find, rows), (kill, _), (again, shown) = typed(FAILURES)
    assert start == again
    script = folder / "train.py"
    script.write_text(script.read_text().replace("epochs=15", "epochs=100"))
    run(start.replace("runs/killed", "runs/whole"), folder)
    log = folder / "log"
    with log.open("w") as file:
        launcher = subprocess.Popen(start.split(), cwd=folder, env=_ENVIRON, stdout=file, stderr=subprocess.STDOUT)
        try:
            deadline, picture = time.monotonic() + 60, ""
            while rows[0].split() not in map(str.split, picture.splitlines()):  # before the first times only pids
                assert time.monotonic() < deadline, log.read_text() + picture
                picture = run(find, folder) if "epoch   3/100" in log.read_text() else ""
            pids = {line.split()[0]: line.split()[1] for line in picture.splitlines() if re.match(r" +\d+ +\d+ ", line)}
            subprocess.run([*kill.split()[:-1], pids["1"]], check=True)
            assert launcher.wait(timeout=120) == 0, log.read_text()
        finally:
            launcher.kill()
            launcher.wait()
    text = log.read_text()
    (shows,) = (block.text for block in blocks(FAILURES) if block.language == "text")
    found = {alike(line) for line in text.splitlines()}
    # The launcher may end the other rank before that one notices the loss. Where the epoch's checkpoint is newer than
    # the last snapshot, it is resumed from.
    may_lack = {
        "as a consequence",
        *({"resumed from memory"} if "resumed from runs/killed/checkpoints" in text else ()),
    }
    missing = [line for line in shows.splitlines() if alike(line) not in found]
    assert [line for line in missing if not any(words in line for words in may_lack)] == []
    losses = [[row["loss"] for row in read_rows(folder / "runs" / name / "losses.csv")] for name in ("whole", "killed")]
    assert losses[0] == losses[1]
    said = [line for line in run(again, folder).splitlines() if line.startswith("finished already")]
    assert [alike(line) for line in shown] == [alike(line) for line in said]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sharded_script_trains_to_the_same_losses(folder: Path) -> None:
    (change,) = (block.text.splitlines() for block in blocks(LARGER) if block.language == "diff")
    old, new = (next(line[1:] for line in change if line[0] == sign) for sign in "-+")
    run("photinus run --nproc-per-node 2 train.py runs/plain", folder)
    script = (folder / "train.py").read_text()
    assert script.count(old) == 1
    (folder / "train.py").write_text(script.replace(old, new))
    ((command, _),) = typed(LARGER)
    run(command, folder)
    losses = [
        [row["loss"] for row in read_rows(folder / "runs" / name / "losses.csv")] for name in ("plain", "sharded")
    ]
    assert losses[0] == losses[1]
