"""Losses that are means over something else than samples, in one process: `loop.backward(weight=)` and the Trainer."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import TensorDataset

import photinus
from photinus.errors import PhotinusError
from photinus.parallel.tracing.device_clock import DeviceClock
from photinus.runlog.tables import read_rows
from photinus.trainer.objective import Objective
from tests.small_run import FEATURES, QUIET, points


@pytest.fixture(autouse=True)
def world():
    with photinus.init("gloo", "cpu", seed=3) as session:
        yield session


def make_loop(samples=16, **options):
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return photinus.Loop(model, optimizer, points(samples), **{"batch_size": 4, "epochs": 1, "report": QUIET} | options)


def gradients(loop):
    return [each.grad.clone() for each in loop.model.parameters()]


def test_batches_count_by_their_weights(tmp_path):
    loop, weights = make_loop(accumulate=4, out=tmp_path), [3.0, 0.0, 0.5, 7.0]
    batches, wanted = [], None
    for (inputs, targets), weight in zip(loop, weights, strict=True):
        batches.append((inputs, targets))
        loss = cross_entropy(loop.model(inputs), targets)
        loop.backward(loss / 0.0 if weight == 0 else loss, weight=weight)
        if loop.step_due:
            found, norm = gradients(loop), loop.clip(1e-3).item()
            loop._optimizer.zero_grad()
            losses = [
                cross_entropy(loop.model(*batch[:1]), batch[1]) * w for batch, w in zip(batches, weights, strict=True)
            ]
            wanted = sum(losses) / sum(weights)
            wanted.backward()
            torch.testing.assert_close(found, gradients(loop))
            assert norm == pytest.approx(torch.nn.utils.get_total_norm(found).item())
            loop._optimizer.step()
    assert [row["loss"] for row in read_rows(tmp_path / "losses.csv")] == [pytest.approx(wanted.item())]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_anything_to_count_gradients_are_zero_and_no_loss_is_logged(tmp_path, accumulate):
    loop = make_loop(accumulate=accumulate, out=tmp_path)
    mask = torch.zeros(4)
    for inputs, targets in loop:
        losses = cross_entropy(loop.model(inputs), targets, reduction="none")
        loop.backward((losses * mask).sum() / mask.sum(), weight=mask.sum())
        if loop.step_due:
            assert all(each.eq(0).all() for each in gradients(loop))
            loop._optimizer.step()
    assert read_rows(tmp_path / "losses.csv") == []
    assert math.isnan(loop.history[0]["loss"])


@pytest.mark.parametrize("kind", ["plain", "compiled", "checkpointed"])
def test_a_mean_of_nothing_has_zero_gradients_whatever_the_model_is(kind):
    loop = make_loop()
    layer = nn.Sequential(nn.Linear(FEATURES, 3), nn.Tanh())
    call = torch.compile(layer, backend="eager") if kind == "compiled" else layer
    for inputs, _ in loop:
        hidden = loop.model(inputs) + (
            torch.utils.checkpoint.checkpoint(call, inputs.requires_grad_(), use_reentrant=True)
            if kind == "checkpointed"
            else call(inputs)
        )
        loop.backward((hidden / 0.0).square().sum() / 0.0, weight=0)
        assert all(each.eq(0).all() for each in gradients(loop))
        assert all(each.grad.eq(0).all() for each in layer.parameters())
        break


def test_a_scaler_and_a_closure_take_weighted_losses():
    loop, scaler = make_loop(), torch.amp.GradScaler("cpu", init_scale=8.0)
    for inputs, targets in loop:
        loop.backward(cross_entropy(loop.model(inputs), targets), weight=2, scaler=scaler)
        scaler.unscale_(loop._optimizer)
        found = gradients(loop)
        loop._optimizer.zero_grad()
        cross_entropy(loop.model(inputs), targets).backward()
        torch.testing.assert_close(found, gradients(loop))
        break
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.LBFGS(model.parameters())
    loop = photinus.Loop(model, optimizer, points(8), batch_size=8, epochs=1, report=QUIET)
    for inputs, targets in loop:
        first = cross_entropy(model(inputs), targets).item()

        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)  # noqa: B023 - called in this body
            loop.backward(loss, weight=len(targets))  # noqa: B023
            return loss

        optimizer.step(closure)
    assert loop.history[0]["loss"] == pytest.approx(first)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf, "many", torch.ones(2)])
def test_a_weight_that_cannot_be_right_is_refused(weight):
    loop = make_loop()
    for inputs, targets in loop:
        with pytest.raises(ValueError, match=r"loop\.backward: weight="):
            loop.backward(cross_entropy(loop.model(inputs), targets), weight=weight)
        break


def test_losses_that_make_no_mean_together_are_refused():
    loop = make_loop(accumulate=2)
    for inputs, targets in loop:
        loss = cross_entropy(loop.model(inputs), targets)
        loop.backward(loss, weight=1)
        with pytest.raises(ValueError, match="a second weighted loss"):
            loop.backward(loss, weight=1)
        with pytest.raises(ValueError, match="either all losses of a step have a weight, or none has"):
            loop.backward(loss)
        break
    loop = make_loop()
    bodies = iter(loop)
    inputs, targets = next(bodies)
    loop.backward(cross_entropy(loop.model(inputs), targets), weight=4, share=1 / 4)
    with pytest.raises(PhotinusError, match=r"add up to 0\.25, but 1 is needed"):
        next(bodies)


def test_the_gradients_of_another_models_loss_are_not_scaled():
    critic = nn.Linear(FEATURES, 1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    loop = make_loop(accumulate=2, state={"critic": critic, "critic_optimizer": critic_optimizer})
    seen = []
    for inputs, targets in loop:
        seen.append((inputs, targets))
        (critic(inputs).mean() * loop.weight).backward()
        loop.backward(cross_entropy(loop.model(inputs), targets), weight=len(seen))
        if loop.step_due:
            break
    (first, one), (second, two) = seen
    torch.testing.assert_close(critic.weight.grad[0], torch.cat([first, second]).mean(0))
    before = gradients(loop)
    loop.model.zero_grad()
    (cross_entropy(loop.model(first), one) / 3 + cross_entropy(loop.model(second), two) * 2 / 3).backward()
    torch.testing.assert_close(before, gradients(loop))


def test_the_parts_of_a_mean_may_train_different_models():
    second = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    loop = make_loop(state={"second": second, "optimizer": optimizer})
    bodies = iter(loop)
    inputs, targets = next(bodies)
    for weight, model in ((1, loop.model), (3, second)):
        loop.backward(cross_entropy(model(inputs), targets), weight=weight, share=1 / 2)
    found = [model.weight.grad.clone() for model in (loop.model, second)]
    for model in (loop.model, second):
        model.zero_grad()
    (cross_entropy(loop.model(inputs), targets) / 4 + cross_entropy(second(inputs), targets) * 3 / 4).backward()
    torch.testing.assert_close(found, [model.weight.grad for model in (loop.model, second)])


def test_evaluate_takes_sums_with_weights():
    model = nn.Linear(FEATURES, 3)
    inputs, targets = points(10).tensors

    def heavy(scores, targets):
        losses = cross_entropy(scores, targets, reduction="none")
        return (losses * (targets == 1)).sum(), (targets == 1).sum()

    right = cross_entropy(model(inputs), targets, reduction="none")[targets == 1].mean().item()
    found = photinus.evaluate(model, points(10), {"heavy": heavy, "plain": lambda s, t: s.argmax(1) == t}, batch_size=4)
    assert found["heavy"] == pytest.approx(right)
    assert math.isnan(photinus.evaluate(model, points(10), lambda s, t: (s.sum() * 0, 0)))
    with pytest.raises(TypeError, match=r"metric 'metric' returned \(Tensor, int, int\)"):
        photinus.evaluate(model, points(10), lambda s, t: (s, 1, 2))


WEIGHTS = torch.tensor([1.0, 0.0, 5.0])
KNOWN = {
    "weights": (nn.CrossEntropyLoss(WEIGHTS), [0, 2, 2], 11.0),
    "weights of nothing": (nn.CrossEntropyLoss(WEIGHTS), [1, 1, 1], 0.0),
    "ignored": (nn.CrossEntropyLoss(ignore_index=1), [0, 1, 2], 2),
    "both": (nn.NLLLoss(WEIGHTS, ignore_index=2), [0, 2, 1], 1.0),
    "function": (partial(cross_entropy, weight=WEIGHTS, ignore_index=0), [0, 2, 1], 5.0),
    "compiled": (torch.compile(nn.CrossEntropyLoss(WEIGHTS), backend="eager"), [0, 2, 2], 11.0),
    "compiled function": (
        partial(torch.compile(cross_entropy, backend="eager"), weight=WEIGHTS, ignore_index=0),
        [0, 2, 1],
        5.0,
    ),
    "plain": (nn.CrossEntropyLoss(), [0, 1, 2], None),
    "plain function": (cross_entropy, [0, 1, 2], None),
    "squares": (nn.MSELoss(), [0, 1, 2], None),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_losses_of_torch_are_known_by_what_they_divide_by(name):
    function, targets, weight = KNOWN[name]
    scores = torch.randn(3, 3)
    aims = torch.tensor(targets)
    aims = nn.functional.one_hot(aims, 3).float() if name == "squares" else aims
    loss, found = Objective(function)(scores, aims)
    assert found == weight
    if weight:
        names = {"weight": WEIGHTS} if name != "ignored" else {}
        ignored = getattr(function, "ignore_index", 0 if "function" in name else -100)
        losses = (nn.functional.nll_loss if name == "both" else cross_entropy)(
            scores, aims, reduction="none", ignore_index=ignored, **names
        )
        assert (loss * found).item() == pytest.approx(losses.sum().item(), rel=1e-5)


def test_targets_that_torch_ignores_by_default_are_counted_where_they_are_tokens_and_else_refused():
    tokens = torch.tensor([[0, 1, -100], [2, -100, -100]])
    assert Objective(nn.CrossEntropyLoss())(torch.randn(2, 3, 3), tokens)[1] == 3
    with pytest.raises(ValueError, match=r"1 of 3 targets are -100, torch's ignore_index by default"):
        Objective(nn.CrossEntropyLoss())(torch.randn(3, 3), torch.tensor([0, 1, -100]))
    assert Objective(nn.CrossEntropyLoss(WEIGHTS))(torch.randn(3, 3), torch.rand(3, 3))[1] is None


OWN = {
    "weights": lambda scores, targets: cross_entropy(scores, targets, WEIGHTS),
    "ignored": lambda scores, targets: cross_entropy(scores, targets, ignore_index=2),
    "tokens": lambda scores, targets: cross_entropy(scores[..., None], targets[:, None], ignore_index=2),
}


@pytest.mark.parametrize("name", OWN)
def test_a_function_of_ones_own_whose_cross_entropy_counts_otherwise_is_asked_for_its_weight(name):
    loss, scores = Objective(OWN[name]), torch.randn(3, 3, requires_grad=True)
    with pytest.raises(
        ValueError, match=r"divides by \d, and it has 3 targets: .* Return \(sum, weight\) from loss_fn"
    ):
        loss(scores, torch.tensor([0, 1, 2]))
    for dtype, targets in ((torch.float32, 3), (torch.float32, 1027), (torch.bfloat16, 1027)):  # no bfloat16 is 1027
        many = torch.randn(targets, 3, dtype=dtype, requires_grad=True)
        assert Objective(lambda s, t: cross_entropy(s, t))(many, torch.zeros(targets, dtype=torch.long))[1] is None


def test_targets_that_torch_ignores_are_refused_without_a_wait_for_the_gpu(monkeypatch):
    device_is_there = []
    event = SimpleNamespace(query=lambda: bool(device_is_there))
    monkeypatch.setattr("photinus.trainer.objective.clock_of", lambda device: DeviceClock(lambda: event))
    loss, scores = Objective(nn.CrossEntropyLoss()), torch.randn(3, 3)
    loss(scores, torch.tensor([0, 1, -100]))
    loss(scores, torch.tensor([0, 1, 2]))
    device_is_there.append(True)
    with pytest.raises(ValueError, match=r"1 of 3 targets are -100, torch's ignore_index by default"):
        loss(scores, torch.tensor([0, 1, 2]))


class Summed(nn.MSELoss):
    def __init__(self):
        super().__init__(reduction="sum")


@pytest.mark.parametrize("function", [nn.MSELoss(reduction="sum"), Summed()])
def test_a_sum_is_trained_and_logged_as_the_sum_of_the_global_batch(tmp_path, function):
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = photinus.Trainer(model, optimizer, function, epochs=1, batch_size=8, out=tmp_path, report=QUIET)
    inputs, targets = points(8).tensors
    wide = nn.functional.one_hot(targets, 3).float()
    loss = mse_loss(model(inputs), wide, reduction="sum").item()
    result = trainer.fit(TensorDataset(inputs, wide), TensorDataset(inputs, wide))
    assert result.metrics["loss"] == pytest.approx(loss)
    after = mse_loss(model(inputs), wide, reduction="sum").item() / 8
    assert result.metrics["valid_loss"] == pytest.approx(after)


def test_a_loss_function_that_returns_something_else_is_told_what_is_needed(tmp_path):
    model = nn.Linear(FEATURES, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = photinus.Trainer(model, optimizer, lambda s, t: (s.sum(), 1, 2), epochs=1, batch_size=8, report=QUIET)
    with pytest.raises(TypeError, match=r"loss_fn returned \(Tensor, int, int\), but a tensor is needed, or"):
        trainer.fit(points(8))
