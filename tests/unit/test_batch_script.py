"""`photinus run --slurm`: the batch script that it writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from photinus.cli.flags import parse_run
from photinus.cli.sbatch import batch_script, main
from photinus.errors import UsageError


def written(*words: str) -> str:
    flags = parse_run(["--slurm", *words])
    return batch_script(flags, python="/opt/env/bin/python")


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_hosts_workers_and_limits_become_options_of_sbatch():
    text = written("--nnodes", "2", "--nproc-per-node", "4", "--time", "8:00:00", "--partition", "gpu", "train.py")
    assert options(text) == [
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--time=8:00:00",
        "--partition=gpu",
        "--gpus-per-node=4",
        "--cpus-per-task=4",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@60",
    ]
    assert text.startswith("#!/bin/bash\n")


def test_each_host_gets_one_launcher_with_the_users_words():
    text = written("--nproc-per-node", "2", "--cpu", "--max-restarts", "1", "train.py", "--name", "a b", "--lr=0.1")
    assert "srun --ntasks-per-node=1" in text
    assert "/opt/env/bin/python -m photinus run --nproc-per-node 2 --cpu --max-restarts 1" in text
    assert "--max-restarts 1 train.py --name 'a b'" in text.replace("\\\n", "").replace("    ", "")
    assert "--gpus-per-node" not in text


def test_words_that_are_no_utf_8_stand_in_the_script_as_they_were_typed(capsysbinary):
    flags = parse_run(["--slurm", "train.py", os.fsdecode(b"f\xfcr")])
    assert main(flags) == 0
    assert b"train.py 'f\xfcr'" in capsysbinary.readouterr().out


def test_waits_are_handed_over_as_typed_but_nobody_says_who_leads():
    text = written("--rdzv-conf", "join_timeout=60,heartbeat_timeout=9", "train.py")
    assert "photinus run --rdzv-conf join_timeout=60,heartbeat_timeout=9" in text
    with pytest.raises(UsageError, match="and --slurm are mutually exclusive: the first host of the job leads"):
        written("--rdzv-conf", "is_host=1", "train.py")


def test_the_role_of_the_workers_is_handed_over():
    assert "photinus run --role trainer train.py" in written("--role", "trainer", "--name", "n", "train.py")


def test_workers_as_many_as_devices_need_the_whole_host():
    assert "--exclusive" in options(written("train.py"))
    assert "--exclusive" not in options(written("--gpus-per-node", "8", "train.py"))


def test_hosts_that_may_come_and_go_are_a_range_for_sbatch():
    assert "--nodes=1-4" in options(written("--nnodes", "1:4", "--cpu", "train.py"))


def test_the_users_own_options_win_over_ours():
    own = ["--sbatch=--mem=64G", "--sbatch", "-J other", "--sbatch", "--cpus-per-task=32", "--sbatch=--no-requeue"]
    found = options(written("--nproc-per-node", "4", *own, "train.py"))
    assert found[-4:] == ["--mem=64G", "-J other", "--cpus-per-task=32", "--no-requeue"]
    assert not {"--job-name=train", "--cpus-per-task=4", "--requeue"} & set(found)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--sbatch", "--ntasks=8"], "use --nproc-per-node"),
        (["--sbatch", "-N 4"], "use --nnodes"),
        (["--sbatch", "mem=3"], "needs an option of sbatch"),
        (["--sbatch", "--mem=3\nrm -rf /"], "on one line"),
        (["--cpu", "--gpus-per-node", "2"], "are mutually exclusive"),
        (["--include", "localhost:0"], "the scheduler chooses hosts and devices"),
    ],
)
def test_options_that_make_no_sense_in_it_are_refused(words: list[str], complaint: str):
    with pytest.raises(UsageError, match=complaint):
        written(*words, "train.py")


@pytest.mark.parametrize(
    "words",
    [
        ["train.py"],
        ["--nnodes", "2", "--nproc-per-node", "4", "--name", "a 'strange' name", "my script.py", "$HOME", "it's"],
        ["--cpu", "-m", "pkg.train", *(f"--option-{n}=value" for n in range(20))],
    ],
    ids=["short", "strange words", "long"],
)
def test_the_script_is_good_bash(words: list[str], tmp_path: Path):
    path = tmp_path / "job.sh"
    path.write_text(written(*words))
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    if shutil.which("shellcheck") is None:
        pytest.skip("bash -n is content; shellcheck is not installed")
    checked = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


STAND_INS = {
    # Stand for Slurm's: srun starts the launcher as its child, scancel signals it.
    "srun": """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
"$@" & child=$!
echo $child > "$CHILD"
wait $child; code=$?
while kill -0 $child 2> /dev/null; do wait $child; code=$?; done
exit $code
""",
    "scancel": '#!/bin/bash\n[ "$*" = "--signal=TERM 4711.0" ] && kill -TERM "$(cat "$CHILD")"\n',
    "scontrol": '#!/bin/bash\necho "$@" > "$TOLD"\n',
    "python": """#!/bin/bash
if [ "$1" = -c ]; then echo 5ec4e7; exit; fi
echo "$PHOTINUS_JOB_SECRET $*" > "$SEEN"
trap 'exit 143' TERM
if [ "$PLAN" = leave ]; then kill -USR1 "$BATCH"; fi
for _ in $(seq 100); do [ "$PLAN" = leave ] || break; sleep 0.05; done
exit "${CODE:-0}"
""",
}


@pytest.mark.parametrize(
    ("plan", "code", "requeued"),
    [("end", "0", False), ("end", "3", False), ("leave", "143", True)],
    ids=["trained to the end", "failed", "asked to leave"],
)
def test_a_job_that_is_asked_to_leave_is_queued_again_and_no_other(
    plan: str, code: str, requeued: bool, tmp_path: Path
):
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    flags = parse_run(["--slurm", "--nproc-per-node", "2", "--cpu", "train.py", "a b"])
    text = batch_script(flags, python=str(tmp_path / "python"))
    script = tmp_path / "job.sh"
    script.write_text(text.replace("set -u\n", "set -u\nexport BATCH=$$\n", 1))
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOLD": str(tmp_path / "told"),
        "SEEN": str(tmp_path / "seen"),
        "CHILD": str(tmp_path / "child"),
        "SLURM_JOB_ID": "4711",
        "PLAN": plan,
        "CODE": code,
    }
    ended = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == (int(code)), ended.stderr
    assert (tmp_path / "seen").read_text() == "5ec4e7 -m photinus run --nproc-per-node 2 --cpu train.py a b\n"
    assert (tmp_path / "told").exists() == requeued
    if requeued:
        assert (tmp_path / "told").read_text() == "requeue 4711\n"


def test_the_script_goes_to_a_file_that_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "job.sh"
    flags = parse_run(["--slurm", "--cpu", "--output", str(target), "train.py"])
    assert main(flags) == 0
    assert f"sbatch {target}" in capsys.readouterr().err
    assert os.access(target, os.X_OK)
    assert main(flags) == 0  # the same again
    target.write_text("mine")
    with pytest.raises(UsageError, match="the file exists"):
        main(flags)
    assert target.read_text() == "mine"
