"""The Trainer's accumulation and precision: several batches make one step, and the logged loss stays whole."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.nn.functional import cross_entropy

import photinus
from photinus.runlog.tables import read_rows
from tests.small_run import FEATURES, QUIET, points


def fit(*, batch_size, accumulate, out=None, epochs=2, **options):
    with photinus.init("gloo", "cpu", seed=3):
        model = torch.nn.Linear(FEATURES, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        trainer = photinus.Trainer(
            model, optimizer, cross_entropy, epochs=epochs, batch_size=batch_size, accumulate=accumulate, out=out,
            report=QUIET, **options,
        )  # fmt: skip
        result = trainer.fit(points(48), points(12))
    return result.model.weight.detach().clone(), result


def test_four_small_batches_step_like_one_large_one():
    large, whole = fit(batch_size=16, accumulate=1)
    small, parts = fit(batch_size=4, accumulate=4)
    torch.testing.assert_close(small, large)
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-5)


def accumulated(cleared=None, *, to_none=True, clip=False):
    """A loop over 12 batches, 3 to a step, that clears gradients in the batch `cleared` of a step ("all": in each)."""
    with photinus.init("gloo", "cpu"):
        model = torch.nn.Linear(FEATURES, 3)
        model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loop = photinus.Loop(model, optimizer, points(48), batch_size=4, accumulate=3, epochs=1, report=QUIET)
        for inputs, targets in loop:
            if cleared in ("all", loop.micro_batch):
                optimizer.zero_grad(set_to_none=to_none)
            loop.backward(cross_entropy(model(inputs), targets))
            if clip:
                loop.clip(1.0)
            if loop.step_due:
                optimizer.step()
        return loop.finished


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_cleared_before_the_last_batch_of_a_step_are_an_error(to_none):
    with pytest.raises(photinus.PhotinusError, match="step 1 were cleared before its last batch"):
        accumulated("all", to_none=to_none)
    assert accumulated(1, to_none=to_none)  # before the first


def with_two_optimizers(clears, steps=("first", "second")):
    """A loop over 4 batches, 2 to a step. `clears(loop, place)`: whether an optimizer clears before its backward."""
    with photinus.init("gloo", "cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.Linear(4, 3))
        pair = {
            "first": torch.optim.SGD(model[0].parameters(), lr=0.1),
            "second": torch.optim.AdamW(model[1].parameters()),
        }
        loop = photinus.Loop(
            model, pair["first"], points(16), batch_size=4, accumulate=2, epochs=1, report=QUIET,
            state={"second": pair["second"]},
        )  # fmt: skip
        for inputs, targets in loop:
            for name, optimizer in pair.items():
                if clears(loop, name):
                    optimizer.zero_grad()
                loop.backward(cross_entropy(model(inputs), targets))
            for name in steps if loop.step_due else ():
                pair[name].step()
        return loop.finished


def test_with_two_optimizers_gradients_cleared_before_the_last_batch_are_an_error_too():
    cleared = "of {} of step 1 were cleared before its last batch"
    with pytest.raises(photinus.PhotinusError, match=cleared.format("SGD")):
        with_two_optimizers(lambda loop, name: True)
    with pytest.raises(photinus.PhotinusError, match=cleared.format("AdamW")):
        with_two_optimizers(lambda loop, name: name == "second")  # between the two backwards of a body
    assert with_two_optimizers(lambda loop, name: loop.micro_batch == 1)
    # What another's loss left where this one does not step.
    assert with_two_optimizers(lambda loop, name: name == "second" or loop.micro_batch == 1, steps=["first"])


def test_a_clip_before_the_last_batch_of_a_step_is_an_error():
    with pytest.raises(photinus.PhotinusError, match=r"loop\.clip before the last batch of step 1"):
        accumulated(1, clip=True)


def by_hand(way, optimizers=1):
    """A loop over 6 batches whose body accumulates three of them by itself."""
    with photinus.init("gloo", "cpu"):
        model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.Linear(4, 3))
        model = torch.nn.parallel.DistributedDataParallel(model) if way == "no_sync" else model
        parts = [model.parameters()] if optimizers == 1 else [each.parameters() for each in model]
        first, *others = [torch.optim.SGD(part, lr=0.1) for part in parts]
        state = {f"optimizer{number}": each for number, each in enumerate(others)}
        loop = photinus.Loop(model, first, points(24), batch_size=4, epochs=1, report=QUIET, state=state)
        for inputs, targets in loop:
            due = loop.step % 3 == 0
            with model.no_sync() if way == "no_sync" and not due else nullcontext():
                loss = cross_entropy(model(inputs), targets)
                if way == "record":
                    (loss * loop.weight / 3).backward()
                    loop.record(loss, share=1 / 3)
                else:
                    loop.backward(loss, share=1 / 3)
            for optimizer in (first, *others) if due else ():
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("way", "optimizers", "step"), [("share", 1, 2), ("no_sync", 1, 2), ("record", 1, 3), ("share", 2, 3)]
)
def test_a_body_that_accumulates_by_itself_is_told_what_to_write(way, optimizers, step):
    words = rf"step {step} adds to gradients of a step before, .* write photinus\.Loop\(\.\.\., accumulate=N\)"
    with pytest.raises(photinus.PhotinusError, match=words):
        by_hand(way, optimizers)
    with photinus.init("gloo", "cpu"):
        model = torch.nn.Linear(FEATURES, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = photinus.Loop(model, optimizer, points(24), batch_size=4, epochs=1, report=QUIET)
        for _ in loop:
            with pytest.raises(photinus.PhotinusError, match=r"write photinus\.Loop\(\.\.\., accumulate=N\)"):
                loop.no_sync()
            break


STEP_OUT = {
    "first body evaluates": lambda step, place: step > 1,
    "every third is left out": lambda step, place: step % 3 != 0,
    "a generator in every third": lambda step, place: place == 1 or step % 3 == 0,
    "in turns": lambda step, place: step % 2 == place,
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("early", [True, False])  # clears before the backward, or behind the step
@pytest.mark.parametrize("name", STEP_OUT)
def test_bodies_that_leave_steps_out_and_add_nothing_up_are_right(name, early, to_none):
    with photinus.init("gloo", "cpu"):
        model = torch.nn.ModuleList([torch.nn.Linear(FEATURES, 3), torch.nn.Linear(FEATURES, 3)])
        pair = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
        loop = photinus.Loop(
            model, pair[0], points(32), batch_size=4, epochs=1, report=QUIET, state={"second": pair[1]}
        )
        for inputs, targets in loop:
            for place, optimizer in enumerate(pair):
                if not STEP_OUT[name](loop.step, place) and name != "every third is left out":
                    continue
                if early:
                    optimizer.zero_grad(set_to_none=to_none)
                outputs = model[0](inputs) + model[1](inputs) if place == 0 else model[1](inputs)
                loop.backward(cross_entropy(outputs, targets))
                if place == 0:
                    pair[1].zero_grad(set_to_none=to_none)  # as a generator's loss leaves them to the critic
                if STEP_OUT[name](loop.step, place):
                    optimizer.step()
                if not early:
                    optimizer.zero_grad(set_to_none=to_none)
        assert loop.finished


def test_a_step_that_is_left_out_of_backwards_by_hand_is_right_where_its_gradients_are_cleared():
    with photinus.init("gloo", "cpu"):
        model = torch.nn.Linear(FEATURES, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = photinus.Loop(model, optimizer, points(32), batch_size=4, epochs=1, report=QUIET)
        for inputs, targets in loop:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            (loss * loop.weight).backward()
            loop.record(loss)
            if loop.step % 3 != 1:
                optimizer.step()
        assert loop.finished


class Counting:
    """A scheduler that counts its steps."""

    def __init__(self):
        self.steps = 0

    def step(self):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_a_scheduler_by_step_counts_steps_of_the_optimizer():
    counting = Counting()
    fit(batch_size=4, accumulate=4, scheduler=counting, scheduler_every="step")
    assert counting.steps == 2 * 48 // 16


def test_the_batches_left_at_an_epochs_end_make_a_step_on_their_mean(tmp_path):
    counting = Counting()
    small, result = fit(batch_size=8, accumulate=4, epochs=1, out=tmp_path, scheduler=counting, scheduler_every="step")
    assert (counting.steps, result.history[-1]["step"], len(read_rows(tmp_path / "losses.csv"))) == (2, 2, 2)
    with photinus.init("gloo", "cpu", seed=3):
        model = torch.nn.Linear(FEATURES, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        halves = [*photinus.loader(points(48), batch_size=8)]
        for part in (halves[:4], halves[4:]):
            inputs, targets = (torch.cat(each) for each in zip(*part, strict=True))
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    torch.testing.assert_close(small, model.weight.detach())


@pytest.mark.parametrize("done", [1, 4])  # inside an epoch of 3 steps, the second time after one
def test_where_accumulate_changes_the_steps_go_on_with_as_many_samples(tmp_path, done):
    counted, samples = [], [0]

    def loss_fn(outputs, targets):
        samples[0] += len(targets)
        return cross_entropy(outputs, targets)

    for steps, batch_size, accumulate in ((done, 16, 2), (done + 4, 8, 4)):  # half the ranks, say
        with photinus.init("gloo", "cpu", seed=3):
            model = torch.nn.Linear(FEATURES, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.register_step_pre_hook(lambda *_: counted.append(samples[0]))
            options = {"out": tmp_path, "report": QUIET}
            trainer = photinus.Trainer(
                model, optimizer, loss_fn, steps=steps, batch_size=batch_size, accumulate=accumulate, **options
            )
            result = trainer.fit(points(96))
    assert counted == [32 * (number + 1) for number in range(done + 4)]
    assert [row["step"] for row in read_rows(tmp_path / "losses.csv")] == list(range(1, done + 5))
    assert [row["step"] for row in result.history] == [*range(3, done + 4, 3), done + 4]


def test_a_loop_counts_steps_of_the_optimizer_and_batches_inside_each(tmp_path):
    seen, losses = [], []
    with photinus.init("gloo", "cpu", seed=3):
        model = torch.nn.Linear(FEATURES, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        save = photinus.Saving(every_steps=2, keep_last=9)
        loop = photinus.Loop(
            model, optimizer, points(40), batch_size=8, accumulate=2, steps=5, out=tmp_path, save=save, report=QUIET
        )
        assert (loop.steps, loop.steps_per_epoch, loop.epochs) == (5, 3, 2)
        for x, y in loop:
            loss = cross_entropy(model(x), y)
            loop.backward(loss)
            losses.append(loss.item())
            seen.append((loop.epoch, loop.step, loop.micro_batch, loop.step_due, loop.epoch_ended))
            if loop.step_due:
                optimizer.step()
                optimizer.zero_grad()
        assert (loop.step, loop.micro_batch) == (5, 0)
    assert seen == [
        (1, 1, 1, False, False), (1, 1, 2, True, False), (1, 2, 1, False, False), (1, 2, 2, True, False),
        (1, 3, 1, True, True),
        (2, 4, 1, False, False), (2, 4, 2, True, False), (2, 5, 1, False, False), (2, 5, 2, True, True),
    ]  # fmt: skip
    rows = [(row["step"], row["loss"]) for row in read_rows(tmp_path / "losses.csv")]
    pairs = [losses[0:2], losses[2:4], losses[4:5], losses[5:7], losses[7:9]]
    assert rows == [(step, pytest.approx(sum(each) / len(each))) for step, each in enumerate(pairs, 1)]
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == [f"step-{step:08d}" for step in (2, 3, 4, 5)]


def test_a_step_before_its_last_batch_is_an_error():
    with photinus.init("gloo", "cpu"):
        model = torch.nn.Linear(FEATURES, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = photinus.Loop(model, optimizer, points(16), batch_size=4, accumulate=2, epochs=1, report=QUIET)
        for x, y in loop:
            loop.backward(cross_entropy(model(x), y))
            with pytest.raises(photinus.errors.PhotinusError, match=r"SGD\.step\(\) before the last batch of step 1"):
                optimizer.step()
            break


def test_bfloat16_computes_otherwise_and_keeps_parameters_in_float32():
    exact, _ = fit(batch_size=16, accumulate=1)
    rough, result = fit(batch_size=16, accumulate=1, precision="bfloat16")
    assert rough.dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0.005)
    assert result.metrics["valid_loss"] > 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": 0}, "accumulate"),
        ({"accumulate": 1, "precision": "half"}, "precision='half': needs 'float32', 'bfloat16', 'float16' or"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        fit(batch_size=16, **options)
