"""The digits example with a DeepSpeed configuration: the same training on one process and on two."""

from __future__ import annotations

import pytest

from photinus.runlog.tables import read_rows
from tests.dist.test_run import run_job
from tests.fork_server import REPOSITORY

DIGITS = REPOSITORY / "examples" / "digits"


@pytest.mark.slow
def test_the_digits_example_trains_the_same_by_a_deepspeed_configuration_on_one_and_two_processes(tmp_path):
    losses = []
    for count in (1, 2):
        out = tmp_path / str(count)
        words = ["--cpu", "--nproc-per-node", str(count), DIGITS / "train_deepspeed.py", "--epochs", "2", "--out", out]
        ended = run_job(*words, "--deepspeed", DIGITS / "ds_config.json")
        assert ended.code == 0, ended.out + ended.err
        losses.append([row["loss"] for row in read_rows(out / "losses.csv")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[0][-1] < losses[0][0] / 3


@pytest.mark.slow
def test_a_configuration_for_another_world_size_is_refused_before_any_training(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 32, "gradient_accumulation_steps": 2}')
    ended = run_job("--cpu", "--nproc-per-node", "2", DIGITS / "train_deepspeed.py", "--deepspeed", path)
    assert ended.code == 1
    assert "and 2 ranks do not fit together: train_batch_size 64 must be" in ended.err
    assert "not restarting: ValueError before the first training step would happen again" in ended.err
