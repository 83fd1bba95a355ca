"""Every launch line that people bring along, with one small script: which ranks, world, devices and arguments it sees.

One row a line, as they are typed: by hand with environment variables, torch.distributed.launch, torchrun, DeepSpeed,
srun, mpirun. Machines with GPUs are played by a launcher that believes in four of them (the workers look at their
environment only).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.dist.test_run import DEADLINE_S
from tests.dist.test_run_hosts import free_port

SCRIPT = """
import json, os, sys
from pathlib import Path
from photinus import World
world = World.from_env()
names = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE")
note = {name: os.environ.get(name) for name in names}
note |= {"rank": world.rank, "world_size": world.world_size, "local_rank": world.local_rank, "arguments": sys.argv[1:]}
Path(os.environ["NOTES"], f"{os.getpid()}.json").write_text(json.dumps(note))
"""
OLD_SCRIPT = (
    SCRIPT
    + """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--lr", type=float)
options = parser.parse_args()
assert options.local_rank == (world.local_rank if "expect" in os.environ.get("LOCAL_RANK_ARGUMENT", "") else -1)
"""
)
FOUR_GPUS = """
import os, sys
def device_count(kind, environ):
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return 4 if visible is None else len([name for name in visible.split(",") if name])
from photinus.run import supervise
supervise.count_gpus = device_count
from photinus.cli.main import main
main()
"""


@dataclass(frozen=True)
class Line:
    """A row of the table.

    Attributes:
        row: of the table of what people rely on.
        lines: what is typed, one for each host (or for each process, where there is no launcher). PORT, HOSTFILE are
            filled in; `photinus run` is ours, `python` the one that runs this.
        ranks: (rank, world size, local rank) that the processes see.
        gpus: what each sees of CUDA_VISIBLE_DEVICES; None: not looked at.
        arguments: what the script gets.
        environ: around the launcher.
        machine: "cpu", or "gpus": with four.
    """

    row: str
    lines: Sequence[str]
    ranks: Sequence[tuple[int, int, int]]
    gpus: str | None = None
    arguments: Sequence[str] = ("--lr", "0.1")
    environ: dict[str, str] = field(default_factory=dict)
    machine: str = "cpu"
    old: bool = False
    slow: bool = False


TWO = [(0, 2, 0), (1, 2, 1)]
FOUR = [(rank, 4, rank) for rank in range(4)]
TABLE = [
    # C: torch.distributed.launch on several machines
    Line(
        "C1",
        [
            f"photinus run --nproc_per_node=2 --nnodes=2 --node_rank={host} --master_addr=127.0.0.1 --master_port=PORT "
            f"train.py --lr 0.1"
            for host in (0, 1)
        ],
        [(0, 4, 0), (1, 4, 1), (2, 4, 0), (3, 4, 1)],
    ),
    Line("C1", ["photinus run --nproc-per-node 2 --nnodes 1 --node-rank 0 --master-port PORT train.py --lr 0.1"], TWO),
    Line(
        "C2",
        ["photinus run --nproc_per_node=2 old.py --lr 0.1"],
        TWO,
        arguments=("--local_rank=RANK", "--lr", "0.1"),
        environ={"LOCAL_RANK_ARGUMENT": "expected"},
        old=True,
    ),
    Line("C2", ["photinus run --use_env --nproc_per_node=2 old.py --lr 0.1"], TWO, old=True),
    Line("C3", ["photinus run train.py --lr 0.1"], FOUR, machine="gpus", slow=True),
    # D: environment variables
    Line(
        "D1",
        [f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=2 python train.py --lr 0.1" for rank in (0, 1)],
        TWO,
    ),
    Line("D1", ["python train.py --lr 0.1"], [(0, 1, 0)]),
    Line("D1", ["RANK=-1 WORLD_SIZE=1 python train.py --lr 0.1"], [(0, 1, 0)]),
    Line(
        "D1 Slurm",
        [
            f"SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID={rank} SLURM_LOCALID={rank} SLURM_NTASKS=2 "
            f"SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0 "
            f"SLURM_STEP_NODELIST=localhost python train.py --lr 0.1"
            for rank in (0, 1)
        ],
        TWO,
    ),
    Line(
        "D1 Open MPI",
        [
            f"OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK={rank} "
            f"OMPI_COMM_WORLD_LOCAL_SIZE=2 python train.py --lr 0.1"
            for rank in (0, 1)
        ],
        TWO,
    ),
    Line("D5", ["photinus run --device 0 train.py --lr 0.1"], [(0, 1, 0)], gpus="0", machine="gpus", slow=True),
    Line("D5", ["photinus run --device 0,3 train.py --lr 0.1"], TWO, gpus="0,3", machine="gpus", slow=True),
    Line(
        "D5",
        ["photinus run --device 0,3 train.py --lr 0.1"],
        TWO,
        gpus="4,7",
        environ={"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
        machine="gpus",
    ),
    # E4: DeepSpeed
    Line(
        "E4",
        ["photinus run --include localhost:1,2 --master_port PORT train.py --lr 0.1"],
        TWO,
        gpus="1,2",
        machine="gpus",
    ),
    Line("E4", ["photinus run --exclude localhost:0,3 train.py --lr 0.1"], TWO, gpus="1,2", machine="gpus", slow=True),
    Line("E4", ["photinus run --num_gpus 2 --master_port=PORT train.py --lr 0.1"], TWO, machine="gpus", slow=True),
    Line("E4", ["photinus run --hostfile HOSTFILE --cpu train.py --lr 0.1"], TWO),
    Line("E4", ["photinus run --hostfile HOSTFILE --num_nodes 1 --cpu train.py --lr 0.1"], TWO, slow=True),
    Line(
        "E4", ["photinus run --hostfile HOSTFILE --include localhost:1 --cpu train.py --lr 0.1"], [(0, 1, 0)], slow=True
    ),
    Line(
        "E4", ["photinus run --hostfile HOSTFILE --exclude localhost:0 --cpu train.py --lr 0.1"], [(0, 1, 0)], slow=True
    ),
    # E6: torchrun
    Line("E6", ["photinus run --standalone --nproc-per-node auto train.py --lr 0.1"], FOUR, machine="gpus", slow=True),
    Line("E6", ["photinus run --standalone --nproc-per-node gpu train.py --lr 0.1"], FOUR, machine="gpus", slow=True),
    Line("E6", ["photinus run --standalone --nproc-per-node 2 -m train --lr 0.1"], TWO, slow=True),
    Line(
        "E6", ["photinus run --nnodes=1 --nproc-per-node=2 --max-restarts=3 --master_port PORT train.py --lr 0.1"], TWO
    ),
    Line(
        "E6",
        [
            "photinus run --nnodes=1:4 --nproc-per-node=1 --max-restarts=3 --rdzv-id=job --rdzv-backend=c10d "
            "--rdzv-endpoint=127.0.0.1:PORT --rdzv-conf last_call_timeout=20,join_timeout=60 train.py --lr 0.1"
        ]
        * 4,
        [(rank, 4, 0) for rank in range(4)],
        slow=True,
    ),
]


def fill(line: str, port: int, hostfile: Path, machine: str) -> tuple[list[str], dict[str, str]]:
    words = shlex.split(line.replace("PORT", str(port)).replace("HOSTFILE", str(hostfile)))
    environ = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        environ[name] = value
    program = words.pop(0)
    if program == "python":
        return [sys.executable, *words], environ
    start = ["-c", FOUR_GPUS] if machine == "gpus" else ["-m", "photinus"]
    return [sys.executable, *start, *words], environ


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{line.row} {line.lines[0][-70:]}", marks=[pytest.mark.slow] if line.slow else [])
        for line in TABLE
    ],
)
def test_a_launch_line_gives_each_process_its_place(tmp_path, line):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "old.py").write_text(OLD_SCRIPT)
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("localhost slots=2\n")
    folder, port = tmp_path / "notes", free_port()
    folder.mkdir()
    processes = []
    for typed in line.lines:
        words, environ = fill(typed, port, hostfile, line.machine)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "NOTES": str(folder), **line.environ, **environ}
        processes.append(
            subprocess.Popen(
                words,
                cwd=tmp_path,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    shown = []
    for process in processes:
        try:
            out, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
        shown.append(f"exit code {process.returncode}\n{out.decode(errors='replace')}")
    told = "\n".join(shown)
    assert all(process.returncode == 0 for process in processes), told
    found = sorted((json.loads(file.read_text()) for file in folder.iterdir()), key=lambda note: note["rank"])
    assert [(note["rank"], note["world_size"], note["local_rank"]) for note in found] == list(line.ranks), told
    for note in found:
        wanted = [word.replace("RANK", str(note["local_rank"])) for word in line.arguments]
        assert note["arguments"] == wanted, told
        if line.gpus is not None:
            assert note["CUDA_VISIBLE_DEVICES"] == line.gpus, told


REFUSED = [
    # On this machine no GPU can be expected: both numbers are told before anything starts.
    ("D5", "photinus run --device 0,3 train.py", "--device 0,3 names 2 GPUs, but torch sees 0 of them here"),
    ("E4", "photinus run --num_gpus 2 train.py", "0"),
    ("E4", "photinus run --include localhost:1,2 train.py", "0"),
    ("E6", "photinus run --nproc-per-node gpu train.py", "torch sees 0 GPUs here"),
    ("D1", "RANK=0 WORLD_SIZE=2 PHOTINUS_WORLD_SIZE=4 python train.py", "expects a world of 4 processes"),
    ("D1", "RANK=3 WORLD_SIZE=2 python train.py", "RANK=3 and WORLD_SIZE=2"),
]


@pytest.mark.parametrize(("row", "typed", "told"), REFUSED, ids=[f"{row} {typed}" for row, typed, _ in REFUSED])
def test_a_launch_line_that_cannot_be_kept_is_refused_with_both_numbers(tmp_path, row, typed, told):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    (tmp_path / "train.py").write_text(SCRIPT)
    words, environ = fill(typed, 0, tmp_path, "cpu")
    environ = {**os.environ, "NOTES": str(tmp_path), **environ}
    ended = subprocess.run(
        words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL
    )
    assert ended.returncode != 0
    assert told in ended.stderr, ended.stderr
    assert list(tmp_path.glob("*.json")) == []
