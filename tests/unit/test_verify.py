"""`photinus verify`, and the digests that it compares."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import photinus
from photinus.cli.main import main
from photinus.runlog.digests import DIGESTS, DigestFile, read_digests
from photinus.trainer.record.digests import element_digest
from tests.small_run import points

Q = {"progress": False, "curves": False}


def run(
    out: Path,
    *,
    steps: int = 40,
    every: int | None = 1,
    slower_at: int | None = None,
    seed: int = 1,
    extra: bool = False,
    batch_size: int = 8,
) -> Path:
    with photinus.init("gloo", "cpu", seed=seed):
        plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3), *([nn.Linear(3, 3)] if extra else []))
        model, optimizer = photinus.wrap(plain, torch.optim.Adam(plain.parameters(), lr=0.01))
        report = photinus.Reporting(**Q, digest_every=every)  # type: ignore[arg-type]
        options: dict[str, Any] = {"steps": steps, "out": out, "report": report, "batch_size": batch_size}
        loop = photinus.Loop(model, optimizer, points(48), validate_every_steps=10, **options)
        for inputs, targets in loop:
            loop.backward(nn.functional.cross_entropy(model(inputs), targets))
            if loop.step == slower_at:
                optimizer.param_groups[0]["lr"] = 0.005
            optimizer.step()
            optimizer.zero_grad()
    return out


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "first")


def verify(first: Path, second: Path) -> int:
    return main(["verify", str(first), str(second)])


def test_equal_runs_have_the_same_bits(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(first, run(tmp_path / "second", every=16)) == 0
    counts = "3 of 40 digests of 4 parameters and their states, 40 losses, 4 rows of metrics"
    assert f"the same bits: {counts}; the last one is step 40" in capsys.readouterr().out


def test_the_first_step_that_differs_is_named_with_parameters_and_states(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(first, run(tmp_path / "second", slower_at=37)) == 1
    text = capsys.readouterr().out
    assert "different at step 37: parameter 0.weight, 0.bias, 2.weight and 1 more" in text
    assert "the optimizer's state" not in text  # gradients were still those of the same weights
    assert "the last step that is known to be equal: 36" in text


def test_one_flipped_bit_of_a_state_is_named(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = shutil.copytree(first, tmp_path / "second")
    file = second / DIGESTS
    data = bytearray(file.read_bytes())
    data[-3] ^= 1  # of the last state in the last step
    file.write_bytes(data)
    assert verify(first, second) == 1
    assert "different at step 40: the optimizer's state of 2.bias\n" in capsys.readouterr().out


def test_a_row_of_metrics_that_differs_is_named_with_both_values(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = shutil.copytree(first, tmp_path / "second")
    text = (second / "metrics.csv").read_text()
    (second / "metrics.csv").write_text(text.replace(",0.01,", ",0.02,", 1))
    assert verify(first, second) == 1
    assert "different at step 10: learning_rate 0.01 and 0.02" in capsys.readouterr().out


def test_a_metric_that_only_one_run_has_is_a_difference(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = shutil.copytree(first, tmp_path / "second")
    names, *rows = (second / "metrics.csv").read_text().splitlines()
    (second / "metrics.csv").write_text("\n".join([f"{names},right", *(f"{row},0.5" for row in rows)]) + "\n")
    assert (verify(first, second), verify(second, first)) == (1, 1)
    text = capsys.readouterr().out
    assert "different at step 10: right None and 0.5\n" in text
    assert "different at step 10: right 0.5 and None\n" in text


def test_what_a_damaged_file_lacks_is_in_the_answer(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = shutil.copytree(first, tmp_path / "second")
    (second / DIGESTS).write_bytes(b"")
    losses = (second / "losses.csv").read_bytes()
    (second / "losses.csv").write_bytes(losses[: losses.index(b"\n31,") + 1])
    (second / "metrics.csv").write_text("step,loss\n1," + "9" * 200_000 + "\n")  # more than csv's limit
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps({"options": config["options"], "starts": "none"}))
    assert verify(first, second) == 0
    text = f"the same bits: no digests (none can be read in {second}), 30 of 40 losses, 0 of 4 rows of metrics"
    assert f"{text}; the last one is step 30" in capsys.readouterr().out
    (second / "config.json").write_text('{"options": []}')
    assert verify(first, second) == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 2}, "another seed (1 and 2)"),
        ({"batch_size": 6}, "another batch_size (8 and 6)"),
    ],
)
def test_runs_on_other_batches_are_not_compared(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], text: str
) -> None:
    assert verify(first, run(tmp_path / "second", steps=2, **options)) == 2
    assert text in capsys.readouterr().out


def test_runs_of_other_models_differ_from_the_start(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(first, run(tmp_path / "second", steps=2, extra=True)) == 1
    assert "different at step 0: the models have other parameters: 3.bias, 3.weight" in capsys.readouterr().out


def test_runs_without_a_step_in_common_are_not_compared(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    for name in ("config.json", "events.jsonl"):
        shutil.copy(first / name, second / name)
    assert verify(first, second) == 2
    assert "no step in common" in capsys.readouterr().out


def test_other_numbers_of_processes_are_a_hint(first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = run(tmp_path / "second", slower_at=5)
    config = json.loads((second / "config.json").read_text())
    config["starts"][0]["world_size"] = 4
    (second / "config.json").write_text(json.dumps(config))
    assert verify(first, second) == 1
    assert "the runs began with 1 and 4 processes" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["a"], ["a", "b", "c"]])
def test_two_runs_are_needed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *words]) == 2
    assert "two are needed" in capsys.readouterr().err


def test_a_resumed_run_drops_later_records_and_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", steps=20)
    parts = run(tmp_path / "parts", steps=10)
    run(parts, steps=20)
    assert read_digests(parts) == read_digests(whole)
    file = DigestFile(parts, ["other"], 10)
    file.add(11, [1, 2**64 - 1])
    found = read_digests(parts)
    assert found is not None
    assert found.records.keys() == {11}


def test_steps_are_powers_of_two_apart_and_the_last_one_counts(tmp_path: Path) -> None:
    found = read_digests(run(tmp_path / "run", steps=37, every=None))
    assert found is not None
    steps = sorted(found.records)
    assert steps[0] == 1
    assert steps[-1] == 37
    assert read_digests(run(tmp_path / "none", steps=3, every=0)).records == {}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.bool, torch.complex64]
)
def test_digests_of_parts_add_up_and_every_bit_counts(dtype: torch.dtype) -> None:
    whole = torch.randn(101).to(dtype)
    parts = [element_digest(part) for part in whole.split([1, 50, 7, 43])]
    assert (sum(map(int, parts)) - int(element_digest(whole))) % 2**64 == 0
    turned = whole.flip(0)
    strided = int(element_digest(turned[::2])) + int(element_digest(turned[1::2]))
    assert (strided - int(element_digest(whole))) % 2**64 == 0
    before = int(element_digest(whole))
    data = whole.view(torch.uint8)
    for byte, bit in ((0, 0), (len(data) // 2, 3), (len(data) - 1, 0 if dtype == torch.bool else 7)):
        data[byte] ^= 1 << bit
        assert int(element_digest(whole)) != before
        data[byte] ^= 1 << bit
