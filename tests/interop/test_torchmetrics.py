"""torchmetrics' objects in `photinus.evaluate`: one process's bits at every number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

import photinus
from tests.ranks import run_ranks, values

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: pip install torchmetrics")
SAMPLES = 1797


def measure() -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = photinus.wrap(torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)))
    of = torchmetrics.classification
    several = torchmetrics.MetricCollection(
        {"recall": of.MulticlassRecall(10), "precision": of.MulticlassPrecision(10)}
    )
    objects = {
        "f1": of.MulticlassF1Score(10),
        "auroc": of.MulticlassAUROC(10),
        "confusion": of.MulticlassConfusionMatrix(10),
        "several": several,
        "accuracy": lambda scores, targets: scores.argmax(1) == targets,
    }
    found = photinus.evaluate(model, digits, objects, batch_size=64)
    order = photinus.predict(model, digits, batch_size=64, forward=lambda model, batch: batch[1])
    return {
        "numbers": {name: found[name].hex() for name in ("f1", "auroc", "accuracy")},
        "several": {name: float(value).hex() for name, value in found["several"].items()},
        "confusion": found["confusion"].tolist(),
        "labels": None if order is None else order.tolist() == labels.tolist(),
    }


def on_ranks(rank: int, world_size: int) -> dict[str, Any]:
    with photinus.init("auto", "cpu"):
        return measure()


@pytest.mark.timeout(240)
def test_f1_auroc_and_confusion_are_those_of_one_process() -> None:
    with photinus.init("gloo", "cpu"):
        alone = measure()
    assert sum(map(sum, alone["confusion"])) == SAMPLES
    for world_size in (2, 3, 4):
        function = "tests.interop.test_torchmetrics:on_ranks"
        ranks = values(run_ranks(function, world_size=world_size, backend="photinus", timeout_s=100))
        assert ranks[0] == alone
        assert all({**each, "labels": True} == alone for each in ranks[1:])
