"""Checks what forty launch lines start: each whole answer is compared with golden_lines.txt beside this file.

A change of the launcher that should change nothing must leave that file as it is. To write it again after one that
should: GOLDEN=write python -m pytest tests/unit/test_golden_lines.py
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from photinus.cli.main import main

GOLDEN = Path(__file__).with_name("golden_lines.txt")
WRITE = os.environ.get("GOLDEN") == "write"
TORCHRUN = "RANK=1 LOCAL_RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"
SLURM = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 "
    "SLURM_STEP_NUM_NODES=2 SLURM_NNODES=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_NODEID=1 "
    "SLURM_STEP_NODELIST=node[1-2] SLURM_JOB_NODELIST=node[1-2] SLURMD_NODENAME=node2"
)
LINES = [
    # one host
    "run --nproc-per-node 2 --cpu train.py",
    "run --nproc_per_node=2 --cpu train.py --lr 0.1 --name 'two words'",
    "run --nproc-per-node 1 train.py -- --nproc-per-node 3",
    "run --nproc-per-node 3 --cpu --max-restarts 0 --stop-grace 5 train.py",
    "run --nproc-per-node 2 --cpu -m package.train --lr 0.1",
    "run --nproc-per-node 2 --cpu --no-python /bin/echo hello",
    "run --nproc-per-node 2 --cpu --role trainer train.py",
    "run --nproc-per-node 2 --cpu old.py --lr 0.1",
    "run --nproc-per-node 2 --cpu --use-env old.py --lr 0.1",
    "run --nproc-per-node 2 --cpu --log-dir logs --redirects 2 train.py",
    "run --nproc-per-node 2 --cpu --log-dir logs --tee 3 train.py",
    "run --nproc-per-node 2 --cpu --preempt-after 60 train.py",
    "run --standalone --nproc-per-node 2 --cpu --rdzv-backend c10d --rdzv-endpoint localhost:0 train.py",
    "run --nnodes=1:1 --nproc-per-node=2 --cpu --max-restarts=3 --rdzv-id=job train.py",
    "run --nproc-per-node 2 --cpu --ranks-per-gpu 2 train.py",
    "run --nproc-per-node 5 --cpu --oversubscribe train.py",
    "OMP_NUM_THREADS=4 run --nproc-per-node 2 --cpu train.py",
    "GLOO_SOCKET_IFNAME=eth7 run --nproc-per-node 2 --cpu train.py",
    "run --nproc-per-node 2 --cpu train.py --api_key sk-secret --password=hidden",
    # several hosts, the same command on each
    "run --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29511 --nproc-per-node 2 --cpu train.py",
    "run --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --nproc-per-node 2 --cpu train.py",
    "run --nnodes 3 --rdzv-endpoint 10.0.0.1:29400 --nproc-per-node 1 --cpu train.py",
    "run --nnodes 1:4 --rdzv-id job --rdzv-endpoint 10.0.0.1:29400 --rdzv-conf join_timeout=60,last_call_timeout=9 "
    "--nproc-per-node 1 --cpu train.py",
    f"{SLURM} run --nproc-per-node 2 --cpu train.py",
    # over ssh
    "run --hostfile hosts --cpu train.py --lr 0.1",
    "run --hostfile hosts --num-nodes 1 --cpu train.py",
    "run --hostfile hosts --include b:1 --cpu train.py",
    "FOO=1 BAR=2 run --hostfile hosts --exclude a --nproc-per-node 1 --ssh 'ssh -v' --ssh-port 2222 --export FOO,BAR "
    "--cpu train.py",
    # refused
    "run --nproc-per-node",
    "run",
    "run --nproc-per-node 2 --cpu absent.py",
    "run --nproc-per-node 0 --cpu train.py",
    "run --nproc-per-node 2 --gpus 3 train.py",
    "run --nproc-per-node two train.py",
    "run --nnodes 2:1 --cpu train.py",
    "run --nnodes 2 --node-rank 2 --master-addr a --cpu train.py",
    "run --include c --hostfile hosts --cpu train.py",
    "run --log-dir logs --redirects 7 --cpu train.py",
    f"{TORCHRUN} run --nproc-per-node 2 --cpu train.py",
    "PHOTINUS_TIMEOUT_S=soon run --nproc-per-node 2 --cpu train.py",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("print('trained')\n")
    (tmp_path / "old.py").write_text("parser.add_argument('--local_rank', type=int)\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("print('trained')\n")
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    monkeypatch.chdir(tmp_path)
    for name in set(os.environ) - {"PATH", "HOME"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else by the number of cores
    monkeypatch.setattr("photinus.process_memory.huge_pages", lambda: "")  # by the kernel
    monkeypatch.setattr(sys, "argv", ["photinus"])
    return tmp_path


def answer(line: str, place: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """What is printed, with what differs from machine to machine named."""
    words = shlex.split(line)
    with pytest.MonkeyPatch.context() as patch:
        while "=" in words[0]:
            patch.setenv(*words.pop(0).split("=", 1))
        words.insert(1, "--dry-run")
        patch.delenv("PHOTINUS_LAUNCH", raising=False)
        try:
            code: object = main(words)
        except SystemExit as error:
            code = error.code
        os.environ.pop("PHOTINUS_LAUNCH", None)
    out, err = capfd.readouterr()
    shown = f"{out}{err}exit code {code}\n"
    shown = shown.replace(sys.executable, "PYTHON").replace(str(place), "FOLDER").replace(socket.gethostname(), "HERE")
    return shown.replace("PYTHON -B", "PYTHON")  # where this Python writes no bytecode


def test_forty_launch_lines_start_what_they_started(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = "".join(f"$ photinus {line}\n{answer(line, place, capfd)}\n" for line in LINES)
    if WRITE:
        GOLDEN.write_text(shown)
    assert shown == GOLDEN.read_text()
