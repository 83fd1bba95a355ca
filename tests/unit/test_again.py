"""`photinus again`: what it makes of a run's config.json, and when it refuses."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import photinus
from photinus.launcher.again import plan
from photinus.launcher.cli import main
from photinus.launcher.command_line.usage import UsageError
from photinus.relaunch import Launch, notable

RUN = ("-m", "photinus", "run")


def run_folder(home: Path, *, resume: str = "auto", out: str = "runs/x", **start: Any) -> Path:
    """A run that was started in `home` with `python train.py --lr 0.1`, or as `start` says."""
    run = home / "runs/x"
    run.mkdir(parents=True)
    last = {
        "command": [sys.executable, "train.py", "--lr", "0.1"],
        "folder": str(home),
        "launcher": "none",
        "world_size": 1,
        "hosts": ["vm"],
        "versions": {"photinus": photinus.__version__},
        "git": None,
        "environ": {},
        "launch": None,
        **start,
    }
    starts = [{**last, "command": ["other"]}, last]
    (run / "config.json").write_text(json.dumps({"options": {"resume": resume, "out": out}, "starts": starts}))
    return run


def launched(*words: str, arguments: tuple[str, ...] = (), **environ: str) -> dict[str, Any]:
    return {"launcher": "torchrun", "launch": {"words": list(words), "arguments": list(arguments), "environ": environ}}


def test_a_script_that_ran_alone_is_started_as_it_was(tmp_path: Path) -> None:
    again = plan(run_folder(tmp_path, environ={"OMP_NUM_THREADS": "3"}), ["--epochs", "9"])
    assert again.command == (sys.executable, "train.py", "--lr", "0.1", "--epochs", "9")
    assert (again.folder, again.environ, again.notes) == (tmp_path, {"OMP_NUM_THREADS": "3"}, ())


def test_a_job_is_started_with_the_words_that_were_typed(tmp_path: Path) -> None:
    start = launched("--nproc-per-node", "2", "-m", "a.train", arguments=("--lr", "1"), CUDA_VISIBLE_DEVICES="3")
    command = [sys.executable, "-m", "a.train", "--local_rank=0", "--lr", "1"]
    again = plan(run_folder(tmp_path, command=command, world_size=2, hosts=["vm", "vm"], **start))
    assert again.command == (sys.executable, *RUN, "--nproc-per-node", "2", "-m", "a.train", "--lr", "1")
    assert again.environ == {"CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize("words", [("--hostfile", "hosts"), ("--hostfile=hosts",), ("-H", "hosts")])
def test_hosts_that_were_started_from_one_place_are_started_from_there(tmp_path: Path, words: tuple[str, ...]) -> None:
    again = plan(run_folder(tmp_path, hosts=["a", "a", "b", "b"], **launched(*words, "train.py")))
    assert again.command == (sys.executable, *RUN, *words, "train.py")


def test_a_module_that_ran_alone_is_started_as_a_module(tmp_path: Path) -> None:
    again = plan(run_folder(tmp_path, command=[sys.executable, "-m", "a.train", "--local-rank=0", "x"]), ["y"])
    assert again.command == (sys.executable, "-m", "a.train", "x", "y")


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        (["--resume", "never", "--lr", "1"], ["--resume", "auto", "--lr", "1"]),
        (["--lr", "1", "--resume=/runs/y"], ["--lr", "1", "--resume=auto"]),
    ],
)
def test_it_goes_on_although_the_run_began_anew(tmp_path: Path, arguments: list[str], given: list[str]) -> None:
    again = plan(run_folder(tmp_path, resume="never", command=[sys.executable, "train.py", *arguments]))
    assert again.command == (sys.executable, "train.py", *given)


@pytest.mark.parametrize(
    ("start", "told"),
    [
        ({"resume": "never"}, r"the script itself says resume='never'"),
        ({"folder": "/nowhere/at/all"}, r"was started in /nowhere/at/all, which is not there any more"),
        ({"out": "runs/y"}, r"was written to .*/runs/y, and has been moved or copied since"),
        ({"launcher": "Slurm", "world_size": 8}, r"this run had 8 processes, by Slurm: start it the same way"),
        (
            {"hosts": ["a", "b"], **launched("train.py")},
            r"had 2 hosts \(a, b\).* on a, in .* run train.py$",
        ),
        ({"command": []}, r"config.json does not say how the run was started \(ValueError"),
        ({"launch": {"words": "x"}}, r"does not say how the run was started .*no record of a launch"),
    ],
)
def test_what_cannot_be_started_again_is_refused_with_the_reason(
    tmp_path: Path, start: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        plan(run_folder(tmp_path, **start))


def test_a_folder_that_is_no_run_is_told_with_runs_nearby(tmp_path: Path) -> None:
    run = run_folder(tmp_path)
    with pytest.raises(UsageError, match=rf"is no run: it has no config.json. Did you mean {run}\?"):
        plan(run.parent)
    with pytest.raises(UsageError, match=r"there is no run at .*absent: it is not there"):
        plan(tmp_path / "absent")
    (run / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json cannot be read"):
        plan(run)
    (run / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"does not say how the run was started \(KeyError: 'starts'\)"):
        plan(run)


def test_what_has_changed_since_is_told(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "-C", tmp_path, *identity, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    gone = {"versions": {"photinus": "0.0.1"}, "git": {"commit": "1234567890abc"}, "command": ["/gone/python", "x.py"]}
    again = plan(run_folder(tmp_path, **gone))
    assert again.notes[0] == f"photinus was 0.0.1 and is {photinus.__version__} now"
    assert again.notes[1].startswith("the commit was 1234567890 and is ")
    assert again.notes[2] == f"/gone/python is not there any more; {sys.executable} takes its place"
    assert again.command == (sys.executable, "x.py")


def test_a_dry_run_says_the_command_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path, **launched("--cpu", "train.py", PHOTINUS_TIMEOUT_S="7"))
    assert main(["again", "--dry-run", str(run), "--name", "a b"]) == 0
    command = shlex.join(["env", "PHOTINUS_TIMEOUT_S=7", sys.executable, *RUN, "--cpu", "train.py", "--name", "a b"])
    assert capsys.readouterr().err == f"photinus: in {tmp_path}: {command}\n"
    assert main(["again"]) == 2
    assert main(["again", "--dryrun", "x"]) == 2
    assert "Did you mean --dry-run?" in capsys.readouterr().err


def test_a_launch_survives_being_written_down_and_secrets_are_not_written() -> None:
    environ = {"OMP_NUM_THREADS": "2", "PHOTINUS_JOB_SECRET": "x", "PHOTINUS_WORLD_SIZE": "2", "HOME": "/root"}
    environ |= {"NCCL_DEBUG": "INFO", "TORCH_API_TOKEN": "y", "PHOTINUS_LAUNCH": "{}"}
    launch = Launch(("--cpu", "train.py"), ("--lr", "1"), notable(environ))
    assert launch.environ == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2"}
    assert Launch.from_text(launch.text()) == launch
    for wrong in ("[]", '{"words": "a", "arguments": [], "environ": {}}', '{"words": [], "arguments": []}', "x"):
        with pytest.raises(ValueError, match=r"no record of a launch|Expecting value"):
            Launch.from_text(wrong)
