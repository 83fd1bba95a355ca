"""README.zh-CN.md: its diffs run on two ranks, and it shows the same as README.md and docs/coming-from.md."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from photinus import env
from photinus.cli.main import main
from tests.strangers.documents import Block, blocks, unwrapped

PAGE = "README.zh-CN.md"
GIVEN = """
import os, torch, torch.distributed as dist, photinus
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = torch.nn.functional.cross_entropy
train_set = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
"""
SHOWN = "print('ranks', photinus.World.from_env().world_size, sum(p.sum().item() for p in model.parameters()))\n"
DIFFS = [block for block in blocks(PAGE) if block.language == "diff"]


def side(block: Block, sign: str) -> str:
    """One side of a diff."""
    return unwrapped("\n".join(line[1:] for line in block.text.splitlines() if line[0] in (sign, " ")))


def scripts() -> list[Block]:
    commands = ("photinus run", "torchrun", "python -m")
    return [each for each in DIFFS[1:] if not side(each, "+").startswith((*commands, "torch.dist"))]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", scripts(), ids=lambda block: block.text.splitlines()[-1][:40])
def test_the_new_side_of_each_diff_runs_on_two_ranks(block: Block, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GIVEN + side(block, "+") + "\n" + SHOWN)
    keys = {"train_batch_size": 16, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
    (tmp_path / "ds_config.json").write_text(json.dumps(keys))
    command = [str(Path(sys.executable).with_name("photinus")), "run", "--cpu", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in (done.stdout + done.stderr).splitlines() if "ranks 2 " in line]
    assert len({line.rpartition(" ")[2] for line in found}) == 1, done.stdout  # equal weights on both ranks


def test_the_new_side_of_each_command_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", env.LAUNCH.name):  # put back: a launch in this process changes them
        monkeypatch.setenv(name, "1")
    commands = [side(each, "+") for each in DIFFS if side(each, "+").startswith("photinus run")]
    assert len(commands) == 2
    for command in commands:
        assert main([*shlex.split(command)[1:2], "--dry-run", *shlex.split(command)[2:]]) == 0, command
        assert "train.py" in capsys.readouterr().out


def test_both_readmes_show_the_same_commands_and_the_same_first_diff() -> None:
    english, chinese = (list(blocks(page)) for page in ("README.md", PAGE))
    assert [each.text for each in english if each.language == "diff"] == [DIFFS[0].text]
    shown = [
        [line.split("  #")[0] for each in page if each.language == "console" for line in each.text.splitlines()]
        for page in (english, chinese)
    ]
    assert shown[0] == shown[1]


def test_the_page_for_users_of_other_tools_has_the_same_diffs() -> None:
    assert [each.text for each in blocks("docs/coming-from.md") if each.language == "diff"] == [
        each.text for each in DIFFS[1:]
    ]
