"""`photinus doctor --model`: what it measures, predicts and advises."""

from __future__ import annotations

import json
import re
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from photinus.cli.main import main
from photinus.tools.doctor import model_rank
from photinus.tools.doctor.model import StepRow, _between_hosts, batch_value, exposed_s, verdict
from photinus.tools.doctor.model_rank import Times, Trial

ALONE = Times(0.1, 0.1, 0.0, 0.0, 8 << 20, 2 << 20, "AdamW", "cpu", {32: (0.055, 0.035), 64: (0.1, 0.06)})


def said(step_s: float, compute_s: float, alone: Times = ALONE) -> str:
    rows = [StepRow(1, 64, alone.step_s, alone.compute_s, "measured"), StepRow(2, 32, step_s, compute_s, "measured")]
    return " ".join(verdict(alone, rows, 64, cores=2, gpus=0))


def test_two_ranks_that_are_much_faster_pay() -> None:
    assert said(0.06, 0.055).startswith("Two ranks pay here: a step of the same batch is 1.67 times as fast")


def test_an_exchange_that_binds_is_named_with_the_batch_that_would_pay() -> None:
    text = said(0.13, 0.055)
    assert text.startswith("Two ranks are slower than one here. The cause is the exchange of 8.0 MiB of gradients")
    # k batches at once: k * 0.1 / (k * 0.055 + 0.075) is 1.5 at k = 6.4.
    assert "A batch about 6.4 times as large" in text
    assert "accumulating gradients over 7 batches" in text


def test_ranks_that_share_their_cores_are_told_so() -> None:
    assert re.search(r"pay little here \(1\.05 times.*share this machine's 2 cores.*second machine", said(0.095, 0.09))


def test_a_batch_too_small_to_split_is_named() -> None:
    alone = replace(ALONE, shares={**ALONE.shares, 32: (0.09, 0.06)})
    assert "The batch is too small to split" in said(0.095, 0.09, alone)


def test_data_that_take_long_to_make_are_named() -> None:
    assert "Data: a batch takes 50.0 ms to make" in said(0.06, 0.055, replace(ALONE, data_s=0.05))


def test_backward_hides_all_of_an_exchange_but_its_last_bucket() -> None:
    assert exposed_s(0.01, 0.1, 1 << 20) == pytest.approx(0.01)  # one bucket
    assert exposed_s(0.01, 0.1, 250 << 20) == pytest.approx(0.001)
    assert exposed_s(0.3, 0.1, 250 << 20) == pytest.approx(0.03 + 0.2 * 0.9)


def test_hosts_exchange_at_the_rate_of_their_network() -> None:
    size_bytes = 100 << 20
    assert _between_hosts(size_bytes, 2, 1, 30) == pytest.approx(size_bytes * 8e-9, rel=0.1)
    assert _between_hosts(size_bytes, 4, 1, 30) == pytest.approx(1.5 * size_bytes * 8e-9, rel=0.1)


@pytest.mark.parametrize(
    ("text", "value"),
    [("64,784", ((64, 784), 64)), ("8", ((8,), 8)), ("make_batch,32", ("make_batch", 32))],
)
def test_a_batch_is_a_shape_or_a_function(text: str, value: object) -> None:
    assert batch_value(text) == value


@pytest.mark.parametrize("text", ["", "0,3", "make_batch", "make_batch,0", "make_batch,3,4", "a b,3", "-1,3", "3.5"])
def test_another_batch_is_refused_with_what_is_needed(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"64,3,32,32.*make_batch,64"):
        batch_value(text)


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["--model", "train.py"], "needs FILE.py:FUNCTION"),
        (["--model", "nowhere.py:f", "--batch", "8,4"], "there is no file nowhere.py"),
        (["--model", f"{__file__}:siad", "--batch", "8,4"], "has no function siad. Did you mean said?"),
        (["--model", f"{__file__}:said", "--batch", "some_btach,4"], "no function some_btach"),
        (["--model", "torch:f"], "needs --batch too"),
        (["--batch", "8,4"], "--model"),
        (["--model", "a:b", "--batch", "8,4", "--backend", "mpi"], "photinus, gloo"),
        (["--model", "a:b", "--hosts", "a"], "--hosts"),
    ],
)
def test_wrong_use_is_refused_before_anything_starts(
    words: list[str], needed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert needed in capfd.readouterr().err


def test_the_loss_is_the_models_own_or_the_mean_square_of_its_first_output() -> None:
    class Output:
        loss = torch.tensor(3.0)

    assert model_rank._loss_of(Output()) == 3
    assert model_rank._loss_of({"loss": torch.tensor(2.0)}) == 2
    assert model_rank._loss_of(((torch.full((2, 2), 2.0), 1),)) == 4
    with pytest.raises(TypeError, match=r"a tensor or a \.loss is needed"):
        model_rank._loss_of(None)


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "not_models.py").write_text(
        "import torch\ndef number(): return 3\ndef empty(): return torch.nn.ReLU()\n"
    )
    for name, needed in (("number", "returned int, but a torch.nn.Module"), ("empty", "no parameters to train")):
        with pytest.raises((TypeError, ValueError), match=needed):
            model_rank._load(Trial(f"{tmp_path}/not_models.py:{name}", (8, 4), 8), torch.device("cpu"))


def test_a_function_that_makes_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    text = "import torch\ndef sixteen(samples):\n    return torch.ones(16, 4), torch.ones(16)\n"
    (tmp_path / "always.py").write_text(text)
    trial = Trial(f"{tmp_path}/always.py:model", "sixteen", 8)
    assert model_rank._make_batch(trial, 16, torch.device("cpu"))[0][0].shape == (16, 4)
    with pytest.raises(ValueError, match=r"sixteen\(8\) returned tensors of 16 samples, but 8 are needed"):
        model_rank._make_batch(trial, 8, torch.device("cpu"))


@pytest.mark.seconds
@pytest.mark.timeout(180)
def test_ranks_train_a_models_batches_and_the_figures_add_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make_model():\n"
        "    model = torch.nn.Linear(64, 8)\n"
        "    return model, torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def make_batch(samples):\n"
        "    return {'input': torch.ones(samples, 64)}\n"
    )
    words = ["--model", f"{tmp_path}/mine.py:make_model", "--batch", "make_batch,2", "--json", "--timeout", "60"]
    assert main(["doctor", *words]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["parameters"], found["gradient_bytes"], found["optimizer"]) == (520, 2080, "SGD")
    assert [(row["ranks"], row["samples"], row["how"]) for row in found["ranks"]] == [
        (1, 2, "measured"),
        (2, 1, "measured"),
    ]
    for row in (*found["ranks"], *found["hosts"]):
        assert row["step_s"] > 0
        assert row["speed_up"] == pytest.approx(found["ranks"][0]["step_s"] / row["step_s"])
    assert {row["gbit_per_s"] for row in found["hosts"]} == {1, 10, 100}
    assert found["verdict"]


@pytest.mark.seconds
@pytest.mark.timeout(120)
def test_a_model_that_raises_is_quoted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.py").write_text("def make_model():\n    raise KeyError('no weights')\n")
    assert main(["doctor", "--model", f"{tmp_path}/broken.py:make_model", "--batch", "8,4"]) == 1
    assert "rank 0 failed with KeyError: 'no weights'" in capfd.readouterr().err
