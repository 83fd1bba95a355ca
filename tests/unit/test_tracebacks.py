"""What an uncaught error shows in a process of its own, and under the launcher: the user's lines, and the sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_forked

ON_PURPOSE = """
import photinus, torch
from torch.utils.data import TensorDataset
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
photinus.Loop(model, optimizer, TensorDataset(torch.ones(4, 2)), batch_size=0, epochs=1)  # the user's line
"""
IN_A_DATA_SET = """
import photinus, torch
class Broken(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return undefined  # the user's second line
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = photinus.Trainer(model, optimizer, torch.nn.MSELoss(), batch_size=4, epochs=1)
trainer.fit(Broken())  # the user's line
"""
UNEXPECTED = """
import photinus.trainer.loop, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
photinus.trainer.loop.check_options = None  # a defect of ours
photinus.Loop(model, optimizer, [1, 2, 3, 4], batch_size=2, epochs=1)  # the user's line
"""


def shown(tmp_path: Path, program: str, **environ: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(program)
    done = run_forked(script, environ=environ)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


def own_frames(text: str) -> int:
    return len(re.findall(r'File ".*/photinus/(?:trainer|parallel|backend|launcher)/', text))


@pytest.mark.seconds
def test_an_error_on_purpose_shows_the_users_line_and_the_sentence(tmp_path: Path) -> None:
    text = shown(tmp_path, ON_PURPOSE)
    assert "# the user's line" in text
    assert "ValueError: batch_size=0 is too small" in text
    assert own_frames(text) == 0
    assert own_frames(shown(tmp_path, ON_PURPOSE, PHOTINUS_FULL_TRACEBACK="1")) > 0


@pytest.mark.seconds
def test_an_error_in_a_data_set_shows_the_users_lines_on_both_sides(tmp_path: Path) -> None:
    text = shown(tmp_path, IN_A_DATA_SET)
    assert text.index("# the user's line") < text.index("# the user's second line") < text.index("NameError")
    assert own_frames(text) == 0
    assert "dataloader.py" not in text  # torch's frames between ours


UNWRITABLE = """
import photinus, torch
from torch.utils.data import TensorDataset
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
photinus.Loop(model, optimizer, TensorDataset(torch.ones(4, 2)), batch_size=2, epochs=1, out="/proc/no/folder")
"""


@pytest.mark.seconds
def test_the_systems_error_that_a_message_quotes_has_no_traceback_of_its_own(tmp_path: Path) -> None:
    text = shown(tmp_path, UNWRITABLE)
    assert "HostError: rank 0 cannot write into /proc/no/folder on host " in text
    assert text.count("Traceback (most recent call last)") == 1
    assert shown(tmp_path, UNWRITABLE, PHOTINUS_FULL_TRACEBACK="1").count("Traceback (most recent call last)") > 1


@pytest.mark.seconds
def test_what_nobody_meant_keeps_every_frame(tmp_path: Path) -> None:
    text = shown(tmp_path, UNEXPECTED)
    assert "TypeError" in text
    assert own_frames(text) == 2  # of the check of its arguments' names, and of the loop


@pytest.mark.slow
def test_the_launcher_shows_the_same(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_PURPOSE)
    command = [sys.executable, "-m", "photinus", "run", "--nproc-per-node", "1", "--max-restarts", "0", "train.py"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path).stderr
    assert "# the user's line" in text
    assert "ValueError: batch_size=8" in text
    assert own_frames(text) == 0
