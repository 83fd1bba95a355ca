"""The Trainer with batches of any structure: a function of a whole step, or a model that returns its loss."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import photinus
from photinus.parallel.exchange.tensors import move_tensors
from tests.small_run import CLASSES, FEATURES, QUIET, points, right


@dataclass(frozen=True)
class Pair:
    points: torch.Tensor
    kinds: torch.Tensor


def pairs(samples):
    return Pair(*(torch.stack(each) for each in zip(*samples, strict=True)))


STRUCTURES = {
    "dict": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"])),
    "three": (lambda x, y: (x, y, y), lambda batch: (batch[0], batch[2])),
    "nested": (lambda x, y: {"in": [x, {"kinds": y}]}, lambda batch: (batch["in"][0], batch["in"][1]["kinds"])),
    "dataclass": (lambda x, y: (x, y), lambda batch: (batch.points, batch.kinds)),
}


def model_and_optimizer():
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fit(data, *functions, collate_fn=None, **options):
    model, optimizer = model_and_optimizer()
    options = {"epochs": 2, "report": QUIET, "accumulate": 2, **options}
    with photinus.init("gloo", "cpu", seed=3):
        batches = photinus.loader(data, batch_size=8, collate_fn=collate_fn)
        trainer = photinus.Trainer(model, optimizer, *functions, **options)
        return trainer.fit(batches, photinus.loader(data, batch_size=8, collate_fn=collate_fn, train=False))


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_step_takes_batches_of_any_structure(name):
    make, parts = STRUCTURES[name]

    def step(model, batch):
        inputs, targets = parts(batch)
        return cross_entropy(model(inputs), targets)

    data = [make(*points(40)[i]) for i in range(40)]
    usual = fit(points(40), cross_entropy)
    found = fit(data, step=step, collate_fn=pairs if name == "dataclass" else None)
    assert [row["loss"] for row in found.history] == [row["loss"] for row in usual.history]
    assert found.metrics["valid_loss"] == pytest.approx(usual.metrics["valid_loss"])
    torch.testing.assert_close(found.model.weight, usual.model.weight, rtol=0, atol=0)


def test_a_step_returns_the_weight_of_its_mean():
    weights = torch.tensor([1.0, 0.0, 4.0])

    def step(model, batch):
        inputs, targets = batch
        return cross_entropy(model(inputs), targets, weights), weights[targets].sum()

    usual, found = fit(points(40), nn.CrossEntropyLoss(weights)), fit(points(40), step=step)
    assert found.metrics == pytest.approx(usual.metrics)
    torch.testing.assert_close(found.model.weight, usual.model.weight)


class Returning(nn.Module):
    """As a model of Transformers: it takes a batch's values by name, and returns its loss if they have labels."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, input_ids, labels=None):
        scores = self.table(input_ids)
        if labels is None:
            return SimpleNamespace(logits=scores)
        scores, labels = (scores[:, :-1], labels[:, 1:]) if isinstance(self, Shifting) else (scores, labels)
        return SimpleNamespace(logits=scores, loss=cross_entropy(scores.transpose(1, 2), labels))


class BartForCausalLM(Returning):
    """Its labels are those of the same tokens, as Bart's."""


class Shifting(Returning):
    """Each token predicts the next one."""


@pytest.mark.parametrize("kind", [BartForCausalLM, Shifting])
def test_a_model_that_returns_its_loss_needs_no_function_and_counts_its_labels(kind):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, (24, 6), generator=generator)
    labels = torch.where(torch.arange(6) < torch.randint(1, 7, (24, 1), generator=generator), tokens, -100)
    data = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]

    def one_step(size):
        model = kind()
        nn.init.zeros_(model.table.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with photinus.init("gloo", "cpu", seed=3):
            trainer = photinus.Trainer(
                model, optimizer, epochs=1, batch_size=size, accumulate=24 // size, strategy="ddp", report=QUIET
            )
            return trainer.fit(data, data)

    small, large = one_step(4), one_step(24)
    torch.testing.assert_close(small.model.table.weight, large.model.table.weight)
    assert small.metrics == pytest.approx(large.metrics)
    whole = small.model(tokens, labels).loss.item()
    assert small.metrics["valid_loss"] == pytest.approx(whole)


class Transcribing(Returning):
    """A mean over samples, each of the mean over its labels; without labels there is a loss, too (CTC)."""

    def forward(self, input_ids, labels):
        losses = cross_entropy(self.table(input_ids).transpose(1, 2), labels, reduction="none")
        return SimpleNamespace(loss=((1 + losses.sum(1)) / (labels != -100).sum(1).clamp(min=1)).mean())


class OverAll(Returning):
    """A mean over all places, those of padding too."""

    def forward(self, input_ids, labels):
        losses = cross_entropy(self.table(input_ids).transpose(1, 2), labels, reduction="none")
        return SimpleNamespace(loss=losses.mean())


class Classifying(Returning):
    """One label for each sequence."""

    def forward(self, input_ids, labels):
        return SimpleNamespace(
            loss=cross_entropy(self.table(input_ids).mean(1), labels[:, 0] if labels.dim() > 1 else labels)
        )


UNFIT = {
    "of samples": (
        Transcribing,
        r"\(rank 0: it is .* where all labels are -100\)\. If it is a mean over samples, .* step=f",
    ),
    "of all places": (
        OverAll,
        r"not a mean over the labels that are not -100 \(rank 0: of two rows with \[6, 2\] labels",
    ),
    "of classes": (Classifying, r"2 of 4 labels are -100, which the loss ignores: step=f .* \(loss, weight\)"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_models_loss_that_is_another_mean_is_refused_with_what_to_write(name):
    kind, words = UNFIT[name]
    tokens = torch.arange(24).reshape(4, 6) % 5
    labels = torch.where(torch.arange(6) < torch.tensor([[6], [2], [3], [4]]), tokens, -100)
    labels = torch.tensor([0, -100, 1, -100]) if kind is Classifying else labels
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
    with photinus.init("gloo", "cpu", seed=3):
        trainer = photinus.Trainer(model, optimizer, epochs=1, batch_size=4, report=QUIET)
        with pytest.raises(ValueError, match=words):
            trainer.fit(data)


def test_what_does_not_fit_together_is_refused_when_the_trainer_is_made():
    model, optimizer = model_and_optimizer()

    def refused(error, words, *functions, **options):
        with pytest.raises(error, match=words):
            photinus.Trainer(model, optimizer, *functions, epochs=1, **options)

    refused(TypeError, "give loss_fn or step, not both", cross_entropy, step=cross_entropy)
    refused(TypeError, "step is a int, but a function", step=3)
    refused(ValueError, "metrics take outputs and targets, which only loss_fn gives", metrics={"right": right})
    trainer = photinus.Trainer(model, optimizer, epochs=1, batch_size=8, report=QUIET)
    with pytest.raises(
        TypeError, match=r"the model returned a Tensor without a loss: give Trainer a loss_fn, or step="
    ):
        trainer.fit(torch.randn(8, FEATURES))
    trainer = photinus.Trainer(model, optimizer, cross_entropy, epochs=1, batch_size=8, report=QUIET)
    with pytest.raises(
        TypeError, match=r"loss_fn needs batches \(inputs, targets\), but got a dict: give step=f instead"
    ):
        trainer.fit([{"x": each} for each in torch.randn(8, FEATURES)])
    trainer = photinus.Trainer(
        model, optimizer, step=lambda m, b: (m(b).sum(), 1, 2), epochs=1, batch_size=8, report=QUIET
    )
    with pytest.raises(TypeError, match=r"step returned \(Tensor, int, int\)"):
        trainer.fit(torch.randn(8, FEATURES))


def test_tensors_of_a_dataclass_move_into_a_new_one():
    data = Pair(torch.zeros(2), torch.ones(2))
    moved = move_tensors({"batch": data}, torch.device("meta"))["batch"]
    assert (moved.points.device.type, data.points.device.type) == ("meta", "cpu")
