"""The batch script of examples/slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "examples" / "slurm" / "job.sh"


def test_the_script_is_good_bash():
    checked = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    if shutil.which("shellcheck") is None:
        pytest.skip("bash -n is content; shellcheck is not installed")
    checked = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
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
    "photinus": """#!/bin/bash
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
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.read_text().replace("set -u\n", "set -u\nexport BATCH=$$\n", 1))
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TOLD": str(tmp_path / "told"),
        "SEEN": str(tmp_path / "seen"),
        "CHILD": str(tmp_path / "child"),
        "SLURM_JOB_ID": "4711",
        "PLAN": plan,
        "CODE": code,
    }
    words = ["bash", script, "--nproc-per-node", "2", "train.py", "a b", "$HOME"]
    ended = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == (int(code)), ended.stderr
    assert re.fullmatch(r"[0-9a-f]{64} run --nproc-per-node 2 train.py a b \$HOME\n", (tmp_path / "seen").read_text())
    assert (tmp_path / "told").exists() == requeued
    if requeued:
        assert (tmp_path / "told").read_text() == "requeue 4711\n"
