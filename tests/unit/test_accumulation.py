"""The Trainer's accumulation and precision: several batches make one step, and the logged loss stays whole."""

from __future__ import annotations

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


DIVIDED = {
    "/ 4": lambda loss: loss / 4,
    "* 0.25": lambda loss: loss * 0.25,
    "/= 4": lambda loss: loss.div_(4),
    "/ tensor": lambda loss: loss / torch.tensor(4.0),
}


@pytest.mark.parametrize("written", [*DIVIDED, "another constant", "each its own step"])
def test_a_loss_that_is_divided_by_the_batches_of_a_step_is_logged_whole(tmp_path, written, capsys):
    def logged(name, divided, every=4, **options):
        torch.manual_seed(3)
        model = torch.nn.Linear(FEATURES, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with photinus.init("gloo", "cpu"):
            loop = photinus.Loop(model, optimizer, points(48), batch_size=4, steps=22, out=tmp_path / name,
                                 report=QUIET)  # fmt: skip
            for x, y in loop:
                loop.backward(divided(cross_entropy(model(x), y)), **options)
                if loop.step % every == 0 or loop.epoch_ended:
                    optimizer.step()
                    optimizer.zero_grad()
        return [row["loss"] for row in read_rows(tmp_path / name / "losses.csv")]

    if written == "each its own step":  # then it is the loss that is meant
        whole = logged("whole", lambda loss: loss, every=1, share=0.25)
        assert logged("divided", lambda loss: loss / 4, every=1) == pytest.approx([loss / 4 for loss in whole])
    elif written == "another constant":  # which says nothing of the batches; known from the second step on
        whole = logged("whole", lambda loss: loss, share=1 / 8)
        assert logged("divided", lambda loss: loss / 8)[4:] == pytest.approx([loss / 8 for loss in whole[4:]])
    else:
        whole = logged("whole", lambda loss: loss, share=0.25)
        assert logged("divided", DIVIDED[written]) == pytest.approx(whole)
    notes = capsys.readouterr().out.count(
        "note: the loss is logged times 4: your body divides it by the 4 batches of a step"
    )
    assert notes == (written in DIVIDED)


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


def test_every_batch_counts_where_a_run_ends_before_a_step_has_all_of_its_own_and_goes_on(tmp_path):
    large, _ = fit(batch_size=8, accumulate=1, epochs=None, steps=2)
    parts = []
    for steps in (2, 4):  # the one step that all four would make becomes two, of two batches each
        counting = Counting()
        small, _ = fit(
            batch_size=4,
            accumulate=4,
            out=tmp_path,
            epochs=None,
            steps=steps,
            scheduler=counting,
            scheduler_every="step",
        )
        parts.append((small, counting.steps))
    torch.testing.assert_close(parts[0][0], fit(batch_size=8, accumulate=1, epochs=None, steps=1)[0])
    torch.testing.assert_close(parts[1][0], large)
    assert [steps for _, steps in parts] == [0, 1]


@pytest.mark.parametrize("done", [2, 6])
def test_where_accumulate_changes_the_steps_go_on_with_as_many_samples(tmp_path, done):
    counted, samples = [], [0]

    def loss_fn(outputs, targets):
        samples[0] += len(targets)
        return cross_entropy(outputs, targets)

    for steps, batch_size, accumulate in ((done, 16, 2), (done + 8, 8, 4)):  # half the ranks, say
        with photinus.init("gloo", "cpu", seed=3):
            model = torch.nn.Linear(FEATURES, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.register_step_pre_hook(lambda *_: counted.append(samples[0]))
            options = {"out": tmp_path, "report": QUIET}
            trainer = photinus.Trainer(
                model, optimizer, loss_fn, steps=steps, batch_size=batch_size, accumulate=accumulate, **options
            )
            trainer.fit(points(96))
    assert counted == [32 * (number + 1) for number in range(done // 2 + 2)]


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
        ({"accumulate": 1, "precision": "float16"}, "precision='float16': needs 'float32' or 'bfloat16'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        fit(batch_size=16, **options)
