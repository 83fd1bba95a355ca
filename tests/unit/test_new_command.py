"""`photinus new`: the projects that it makes, their command lines, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from photinus.cli.main import main

EVERY = ["train.py", "model.py", "data.py", "config.ini", "options.py", "test_train.py", "README.md", ".gitignore"]
_OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PHOTINUS_WORLD_SIZE")


def made(folder: Path) -> Path:
    assert main(["new", str(folder)]) == 0
    return folder


def python(project: Path, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in _OF_A_LAUNCHER}
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, cwd=project, env=environ
    )


def parsed(project: Path, *lines: list[str]) -> list[dict[str, object]]:
    """What the project's options.py makes of each of these command lines."""
    code = "import json, sys; from options import options; " + (
        "print(json.dumps([vars(options(None, words)) for words in json.loads(sys.argv[1])], default=str))"
    )
    done = python(project, code, json.dumps(lines))
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def test_a_project_has_all_its_files_and_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "my project")
    assert sorted(path.name for path in folder.iterdir()) == sorted(EVERY)
    told = capsys.readouterr().out
    assert f"cd '{folder}'\n" in told
    assert "photinus run train.py" in told
    assert max(len(line) for line in told.splitlines() if str(folder) not in line) <= 80
    assert (folder / "README.md").read_text().startswith("# my project\n")
    assert "PROJECT" not in (folder / "README.md").read_text()


def test_options_come_from_the_command_line(tmp_path: Path) -> None:
    project = made(tmp_path / "project")
    typed = "--dataset d --epochs 3 --batch-size 32 --out o --lr=0.1 --resume p --backend gloo --local_rank=1"
    found, by_default = parsed(project, typed.split(), [])
    wanted = {"dataset": "d", "lr": 0.1, "epochs": 3, "batch_size": 32, "out": "o", "resume": "p", "backend": "gloo"}
    assert {name: found[name] for name in wanted} == wanted
    assert (by_default["resume"], by_default["backend"], by_default["strategy"]) == ("auto", "auto", "ddp")
    assert (by_default["dataset"], by_default["tensorboard"]) == (None, False)


def test_help_tells_the_options_with_the_config_files_values(tmp_path: Path) -> None:
    project = made(tmp_path / "project")
    config = project / "config.ini"
    config.write_text(config.read_text().replace("epochs = ", "epochs = 70"))
    code = "from options import options; options('Trains.')"
    told = python(project, code, "--help").stdout
    assert "Trains." in told
    assert "--epochs N            default 70" in told
    for option in ("--dataset PATH", "--resume PATH", "--backend {auto,photinus,nccl,gloo,mpi}"):
        assert option in told


def test_the_config_file_says_what_the_command_line_does_not(tmp_path: Path) -> None:
    project = made(tmp_path / "project")
    (project / "other.ini").write_text(
        "[train]\nepochs = 4\nlr = 0.5\nbatch_size = 8\nout = x # y\ntensorboard = yes\n[model]\nwidth = 7\n"
    )
    first, second = parsed(project, ["--config", "other.ini"], ["--config=other.ini", "--lr", "0.25"])
    assert (first["epochs"], first["lr"], first["out"], first["model"]) == (4, 0.5, "x", {"width": 7})
    assert (second["epochs"], second["lr"], second["tensorboard"]) == (4, 0.25, True)


@pytest.mark.parametrize(
    ("config", "words", "told"),
    [
        ("[train]\nepochs=1\nfoo=1", [], "config.ini, section [train]: train.py has no option 'foo'"),
        ("[train]\nepochs=few", [], "argument --epochs: invalid int value: 'few'"),
        ("[train]\nepochs=1\nlr=1", [], "config.ini has: batch_size, out"),
        ("epochs=1", [], "contains no section headers"),
        (None, ["--config", "nowhere.ini"], "--config nowhere.ini: there is no such file"),
        (None, ["--backend", "ncl"], "invalid choice: 'ncl'"),
        (None, ["--epohcs", "3"], "unrecognized arguments: --epohcs"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_told_in_a_line(
    config: str | None, words: list[str], told: str, tmp_path: Path
) -> None:
    project = made(tmp_path / "project")
    if config is not None:
        (project / "config.ini").write_text(config)
    done = python(project, "from options import options; options(None)", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("notes.txt", *"abcdef"):
        (tmp_path / name).write_text("mine")
    assert main(["new", str(tmp_path)]) == 2
    assert "is not empty: a, b, c, d, e and 2 more are in it. Give a new folder." in capsys.readouterr().err
    assert main(["new", str(tmp_path / "notes.txt")]) == 2
    assert "notes.txt is a file" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == 7


def test_an_empty_folder_or_repository_is_filled_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["new", "."]) == 0
    assert "cd " not in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text().startswith(f"# {tmp_path.name}\n")


def test_a_folder_that_cannot_be_written_is_named_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["new", str(tmp_path / "file" / "project")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
