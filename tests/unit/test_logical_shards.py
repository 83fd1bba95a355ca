"""Loops over logical shards in one process: what a body sees, and what is refused instead of trained in another way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import photinus
from photinus.errors import CheckpointError, PhotinusError
from tests.small_run import CLASSES, FEATURES, QUIET, Net, points, right


@pytest.fixture
def session() -> Iterator[photinus.Session]:
    with photinus.init("gloo", "cpu", seed=1, logical_shards=4) as session:
        yield session


def make(plain: nn.Module | None = None, **options: Any) -> photinus.Loop:
    plain = plain or nn.Linear(FEATURES, CLASSES)
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return photinus.Loop(model, optimizer, points(48), **{"batch_size": 12, "epochs": 1, "report": QUIET, **options})


def body(loop: photinus.Loop, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(loop.model(batch[0]), batch[1])


def train(loop: photinus.Loop) -> None:
    for batch in loop:
        loop.backward(body(loop, batch))
        if loop.step_due:
            loop._optimizer.step()
            loop._optimizer.zero_grad()


# -- what a body sees ------------------------------------------------------------------------------------------------


def test_shards_look_like_the_batches_of_accumulate(session: photinus.Session) -> None:
    loop = make(accumulate=3)  # 4 global batches: a step of three, and one of one
    seen = []
    for batch in loop:
        seen.append((loop.step, loop.micro_batch, loop.step_due, loop.whole_epoch_ended, len(batch[0])))
        loop.backward(body(loop, batch))
        if loop.step_due:
            loop._optimizer.step()
            loop._optimizer.zero_grad()
    assert [row[:2] for row in seen] == [(1, place) for place in range(1, 13)] + [(2, place) for place in range(1, 5)]
    assert [place for place, row in enumerate(seen) if row[2]] == [11, 15]
    assert [place for place, row in enumerate(seen) if row[3]] == [15]
    assert {row[4] for row in seen} == {3}
    assert loop.step == loop.steps == 2


def test_each_shard_draws_numbers_of_its_own_and_the_same_ones_again(session: photinus.Session) -> None:
    def drawn() -> list[float]:
        numbers = []
        loop = make()
        loop._shards._seed = 7  # type: ignore[union-attr] # a second loop of a session has another seed
        for batch in loop:
            numbers.append(float(torch.rand(())))
            loop.backward(body(loop, batch))
        return numbers

    numbers = drawn()
    assert len(set(numbers)) == len(numbers) == 16
    assert drawn() == numbers


def test_gradients_of_the_step_before_are_no_part_of_the_next_one(session: photinus.Session) -> None:
    loop, norms = make(batch_size=48, epochs=2), []
    for batch in loop:
        loop.backward(body(loop, batch))
        if loop.step_due:  # neither a step nor zero_grad()
            norms.append(float(loop.clip(1e9)))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_running_statistics_take_all_shards_in_their_order(session: photinus.Session) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(FEATURES, momentum=None), nn.Linear(FEATURES, CLASSES))
    with pytest.warns(UserWarning, match="statistics of 3 samples"):
        loop = make(plain)
    norm, means = plain[0], list[Tensor]()
    for inputs, targets in loop:
        means.append(inputs.mean(dim=0))
        loop.backward(cross_entropy(loop.model(inputs), targets))
        assert int(norm.num_batches_tracked) == (loop.step - 1) * 4
        if loop.step_due:
            loop._optimizer.step()
            assert int(norm.num_batches_tracked) == loop.step * 4
    assert torch.allclose(norm.running_mean, torch.stack(means).mean(dim=0), atol=1e-6)  # type: ignore[arg-type]


def test_running_statistics_with_a_momentum_take_the_last_shard_last(session: photinus.Session) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(FEATURES, momentum=0.5), nn.Linear(FEATURES, CLASSES))
    expected = torch.zeros(FEATURES)
    with pytest.warns(UserWarning, match="few"):
        loop = make(plain)
    for inputs, targets in loop:
        expected = 0.5 * expected + 0.5 * inputs.mean(dim=0)
        loop.backward(cross_entropy(loop.model(inputs), targets))
        if loop.step_due:
            loop._optimizer.step()
            assert torch.allclose(plain[0].running_mean, expected, atol=1e-6)  # type: ignore[arg-type]


def test_threads_and_deterministic_algorithms_are_as_before_when_the_session_ends() -> None:
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with photinus.init("gloo", "cpu", logical_shards=2):
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (1, True)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_the_trainer_opens_a_session_with_shards() -> None:
    plain = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    options: dict[str, Any] = {"epochs": 1, "batch_size": 12, "report": QUIET}
    trainer = photinus.Trainer(plain, optimizer, cross_entropy, logical_shards=4, **options)
    assert trainer.fit(points(48)).history[-1]["step"] == 4
    with photinus.init("gloo", "cpu"), pytest.raises(ValueError, match=r"Trainer\(logical_shards=4\)"):
        photinus.Trainer(plain, optimizer, cross_entropy, logical_shards=4, **options).fit(points(48))


# -- what is refused before anything starts --------------------------------------------------------------------------


def test_more_ranks_than_shards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "9")
    with pytest.raises(ValueError, match=r"logical_shards=8, but there are 9 ranks"):
        photinus.init("gloo", "cpu", logical_shards=8)


@pytest.mark.parametrize("shards", [0, -1, 2.5, "8"])
def test_shards_are_a_whole_number_above_zero(shards: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="logical_shards"):
        photinus.init("gloo", "cpu", logical_shards=shards)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 3}, "a batch has 3 samples, and each of logical_shards=4 needs one"),
        ({"batch_size": 3, "train_set": iter}, "batch_size=3 is fewer samples than 4 logical_shards"),
    ],
)
def test_data_that_cannot_be_cut_is_refused(session: photinus.Session, options: dict[str, Any], text: str) -> None:
    plain = nn.Linear(FEATURES, CLASSES)
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    train_set = (lambda shard, shards: iter(points(48))) if "train_set" in options else points(48)
    with pytest.raises(ValueError, match=text):
        photinus.Loop(model, optimizer, train_set, batch_size=options.get("batch_size", 12), epochs=1, report=QUIET)


def test_a_shard_for_which_a_short_batch_has_no_sample_does_not_count(session: photinus.Session) -> None:
    plain = nn.Linear(FEATURES, CLASSES)
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    loop = photinus.Loop(model, optimizer, points(14), batch_size=12, epochs=1, report=QUIET)
    expected = torch.zeros_like(plain.weight)
    for inputs, targets in loop:
        loop.backward(cross_entropy(model(inputs), targets))
        if loop.step == 2 and loop.micro_batch <= 2:
            assert len(inputs) == 1
            expected += torch.autograd.grad(cross_entropy(plain(inputs), targets) / 2, plain.weight)[0]
        if loop.step_due and loop.step == 2:
            torch.testing.assert_close(plain.weight.grad, expected)
        if loop.step_due:
            optimizer.step()
            optimizer.zero_grad()
    assert loop.history[-1]["samples"] == 14 if "samples" in loop.history[-1] else True


@pytest.mark.parametrize(
    ("plain", "options", "text"),
    [
        (Net(), {"strategy": "zero3"}, "strategy='zero3' adds gradients by ranks"),
        (Net(), {"strategy": "torch-ddp"}, "strategy='torch-ddp' adds gradients by ranks"),
        (Net(), {"wire_dtype": torch.bfloat16}, "wire_dtype: no option for logical_shards"),
        (Net(), {"static_graph": True, "nan_guard": True}, "nan_guard, static_graph: no option for logical_shards"),
        (nn.Sequential(nn.SyncBatchNorm(4)), {}, r"0 \(SyncBatchNorm\) exchanges by ranks"),
        (nn.Sequential(nn.Embedding(4, 2, sparse=True)), {}, "use sparse=False"),
    ],
)
def test_what_depends_on_the_number_of_ranks_is_refused_by_name(
    session: photinus.Session, plain: nn.Module, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1), **options)


def test_a_communication_hook_is_refused(session: photinus.Session) -> None:
    model = photinus.wrap(Net())
    with pytest.raises(PhotinusError, match="logical_shards is in force"):
        model.register_comm_hook(None, lambda state, bucket: None)


def test_join_is_refused(session: photinus.Session) -> None:
    model = photinus.wrap(Net())
    with pytest.raises(PhotinusError, match="with logical_shards each has its own"):
        model.join()


def test_a_model_that_was_not_wrapped_for_shards_is_refused(session: photinus.Session) -> None:
    plain = nn.Linear(FEATURES, CLASSES)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for model in (plain, photinus.DistributedDataParallel(plain)):
        with pytest.raises(ValueError, match="not wrapped"):
            photinus.Loop(model, optimizer, points(48), batch_size=12, epochs=1)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (4, None), (None, 4)])
def test_a_run_keeps_its_number_of_shards(tmp_path: Path, before: int | None, after: int | None) -> None:
    with photinus.init("gloo", "cpu", logical_shards=before):
        train(make(out=tmp_path))
    with (
        photinus.init("gloo", "cpu", logical_shards=after),
        pytest.raises(CheckpointError, match=rf"logical_shards={before or after}.*init\(logical_shards={before}\)"),
    ):
        make(out=tmp_path, epochs=2)


def test_a_resumed_run_has_the_threads_of_its_first_start(tmp_path: Path) -> None:
    with photinus.init("gloo", "cpu", logical_shards=4):
        torch.set_num_threads(2)
        train(make(out=tmp_path))
    with photinus.init("gloo", "cpu", logical_shards=4):
        make(out=tmp_path, epochs=2)
        assert torch.get_num_threads() == 2


def test_another_machine_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with photinus.init("gloo", "cpu", logical_shards=4):
        train(make(out=tmp_path))
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    with photinus.init("gloo", "cpu", logical_shards=4):
        make(out=tmp_path, epochs=2)
    lines = [line for line in capsys.readouterr().out.splitlines() if "may round in another way" in line]
    assert len(lines) == 1
    assert "variables ATEN_CPU_CAPABILITY=default (was none)" in lines[0]


# -- bodies that would train in another way --------------------------------------------------------------------------


def step_early(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    loop._optimizer.step()


def backward_twice(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    loop.backward(body(loop, batch))


def backward_in_parts(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch), share=0.5)


def backward_after_the_step(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    if loop.step_due:
        loop._optimizer.step()
        loop._optimizer.zero_grad()
        loop.backward(body(loop, batch))


def step_with_a_closure(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    if loop.step_due:
        loop._optimizer.step(lambda: 0.0)


def weigh_some(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch), weight=None if loop.micro_batch == 1 else 1.0)


def clear_in_each_body(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    loop._optimizer.zero_grad()


def clip_in_each_body(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    nn.utils.clip_grad_norm_(loop.model.parameters(), 0.01)


def write_weights(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    with torch.no_grad():
        next(loop.model.parameters()).mul_(0.5)


def write_weights_by_data(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    next(loop.model.parameters()).data.mul_(0.5)


def change_the_rate(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    loop._optimizer.param_groups[0]["lr"] *= 0.5


def leave_a_backward_out(loop: photinus.Loop, batch: Any) -> None:
    if loop.micro_batch != 2:
        loop.backward(body(loop, batch))


def leave_the_last_backward_out(loop: photinus.Loop, batch: Any) -> None:
    if not loop.step_due:
        loop.backward(body(loop, batch))


def evaluate_in_each_body(loop: photinus.Loop, batch: Any) -> None:
    loop.backward(body(loop, batch))
    photinus.evaluate(loop.model, points(16), right)


def evaluate_before_the_backward(loop: photinus.Loop, batch: Any) -> None:
    if loop.step_due:
        photinus.evaluate(loop.model, points(16), right)
    loop.backward(body(loop, batch))


def keep_the_graph(loop: photinus.Loop, batch: Any) -> None:
    body(loop, batch).backward(create_graph=True)  # type: ignore[no-untyped-call]


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    ("run", "text"),
    [
        (step_early, "step.. before the last batch of step 1"),
        (backward_twice, "a second backward in the body of a step's last shard"),
        (backward_in_parts, "a body has one backward"),
        (backward_after_the_step, "a backward after an optimizer's step, in step 1"),
        (step_with_a_closure, "computes losses inside of the step"),
        (weigh_some, "either all losses of a step have a weight, or none"),
        (keep_the_graph, "carries a graph"),
        (clear_in_each_body, "the body changed gradients before the last batch"),
        (clip_in_each_body, "the body changed gradients before the last batch"),
        (write_weights, "the body changed weights before the last batch"),
        (write_weights_by_data, "the body changed weights before the last batch"),
        (change_the_rate, "the body changed options of the optimizers before"),
        (leave_a_backward_out, "a body had no backward"),
        (leave_the_last_backward_out, "a body had no backward"),
        (evaluate_in_each_body, "an evaluation before the gradients of the step are averaged"),
        (evaluate_before_the_backward, "an evaluation before the gradients of the step are averaged"),
    ],
)
def test_a_body_that_shards_would_change_is_refused(
    session: photinus.Session, run: Callable[[photinus.Loop, Any], None], text: str
) -> None:
    loop = make()

    def run_all() -> None:
        for batch in loop:
            run(loop, batch)

    with pytest.raises((PhotinusError, ValueError), match=text):
        run_all()


@pytest.mark.parametrize(("at", "accumulate"), [(1, 1), (2, 1), (4, 1), (6, 2)])
def test_a_loop_that_was_left_begins_its_step_again(session: photinus.Session, at: int, accumulate: int) -> None:
    def trained(leaves: bool) -> list[float]:
        torch.manual_seed(1)
        plain = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(0.3), nn.Linear(FEATURES, CLASSES))
        with pytest.warns(UserWarning, match="few"):
            loop = make(plain, accumulate=accumulate)
        loop._shards._seed = 7  # type: ignore[union-attr] # a second loop of a session has another seed
        while not loop.finished:
            for inputs, targets in loop:
                loop.backward(cross_entropy(loop.model(inputs), targets), weight=float(len(inputs)))
                if leaves and loop.step == 2 - (accumulate > 1) and loop.micro_batch == at:
                    leaves = False
                    break
                if loop.step_due:
                    loop._optimizer.step()
        return [*plain[0].running_mean.tolist(), *plain[2].weight.flatten().tolist(), loop.history[-1]["loss"]]  # type: ignore[operator, union-attr]

    assert trained(leaves=True) == trained(leaves=False)


def test_what_is_drawn_after_a_loop_depends_on_its_steps_alone(session: photinus.Session) -> None:
    drawn = []
    for extra in (0, 3):
        loop = make()
        loop._shards._seed = 7  # type: ignore[union-attr]
        for batch in loop:
            torch.rand(extra * loop.micro_batch)
            loop.backward(body(loop, batch))
        drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1]


def test_an_evaluation_draws_numbers_of_its_own(session: photinus.Session) -> None:
    def noise(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.new_zeros(len(outputs)) + outputs[:, 0]

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return torch.rand(len(batch[0]), 1), batch[1]

    model = photinus.wrap(nn.Linear(FEATURES, CLASSES))
    before = torch.get_rng_state()
    first = photinus.evaluate(model, points(16), noise, batch_size=4, forward=forward)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert photinus.evaluate(model, points(16), noise, batch_size=4, forward=forward) == first


def test_a_loop_stops_at_a_step_that_no_clock_decides(session: photinus.Session) -> None:
    loop = make(batch_size=4, epochs=3)
    for batch in loop:
        loop.backward(body(loop, batch))
        if loop.step == 3:
            loop.stop()
    assert loop.step == 12  # at the epoch's end
    loop = make(batch_size=4, epochs=3)
    for batch in loop:
        loop.backward(body(loop, batch))
        if loop.step == 13:
            loop.stop()
    assert loop.step == 16


def test_losses_of_two_models_add_up_and_a_frozen_one_is_no_hindrance(session: photinus.Session) -> None:
    first, second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
    a, optimizer_a = photinus.wrap(first, torch.optim.SGD(first.parameters(), lr=0.1))
    b, optimizer_b = photinus.wrap(second, torch.optim.SGD(second.parameters(), lr=0.1))
    state = {"b": b, "optimizer_b": optimizer_b}
    loop = photinus.Loop(a, optimizer_a, points(48), batch_size=12, steps=2, report=QUIET, state=state)
    for inputs, targets in loop:
        loop.backward(cross_entropy(b(a(inputs).detach()), targets) * 0.0 + 1.0)
        b.requires_grad_(False)
        loop.backward(b(a(inputs)).sum() * 0.0 + 2.0)
        b.requires_grad_(True)
        if loop.step_due:
            optimizer_a.step()
            optimizer_b.step()
    assert loop.history[-1]["loss"] == pytest.approx(3.0)


def test_a_parameter_without_gradient_is_named_whichever_shard_it_is(session: photinus.Session) -> None:
    class Branch(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.linear(inputs, self.weight, self.bias if self.calls() else None)

        def calls(self) -> bool:
            self.count = getattr(self, "count", 0) + 1
            return self.count != 2

    loop = make(Branch(FEATURES, CLASSES))
    with pytest.raises(photinus.errors.MissingGradientError, match="bias"):
        train(loop)


def test_the_length_of_a_loader_counts_global_batches(session: photinus.Session) -> None:
    plain = nn.Linear(FEATURES, CLASSES)
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    batches = photinus.loader(points(48), batch_size=12)
    before = len(batches)
    train(photinus.Loop(model, optimizer, batches, epochs=1, report=QUIET))
    assert len(batches) == before == 4


class Counting(nn.Module):
    """Changes a buffer in each forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.how = how
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.how == "replaced":
            self.count = self.count + 1.0
        else:
            (self.count if self.how == "written" else self.count.data).add_(1.0)
        outputs: Tensor = self.layer(inputs)
        return outputs


@pytest.mark.parametrize("how", ["written", "written by .data", "replaced"])
def test_a_buffer_that_a_forward_changes_is_refused(session: photinus.Session, how: str) -> None:
    with pytest.raises(PhotinusError, match="the buffer count changed in the body"):
        train(make(Counting(how)))


def test_batch_norms_that_some_shards_do_not_use_are_refused(session: photinus.Session) -> None:
    class Sometimes(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self[1](self[0](inputs) if float(inputs[0, 0]) > 0 else inputs)
            return outputs

    plain = Sometimes(nn.BatchNorm1d(FEATURES, affine=False), nn.Linear(FEATURES, CLASSES))
    with pytest.warns(UserWarning, match="few"):
        loop = make(plain)
    with pytest.raises(PhotinusError, match="the batch norms of the model ran in another order"):
        train(loop)


def test_a_backward_outside_of_a_loop_is_refused(session: photinus.Session) -> None:
    model = photinus.wrap(nn.Linear(FEATURES, CLASSES))
    with pytest.raises(PhotinusError, match=r"in the body of a photinus\.Loop or by a photinus\.Trainer only"):
        model(torch.ones(2, FEATURES)).sum().backward()
