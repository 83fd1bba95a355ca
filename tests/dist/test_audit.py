"""A rank that computes wrong is named by an audit: the other ranks compute the same batch, with the same bits."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import photinus
from photinus.errors import PhotinusError
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, Net, points

STEP = 5


def train(
    rank: int,
    world_size: int,
    *,
    shards: int,
    wrong: int = 0,
    when: str = "own",
    strategy: str = "ddp",
    accumulate: int = 1,
    is_stream: bool = False,
    every: int = 1,
    weighs: bool = False,
    body: str = "",
) -> str:
    """Train with a bit flipped in step 5; return the error.

    Args:
        when: in whose batches the rank computes wrong: its own ones, those of others, or both; or "state", where each
            body has another result; or "never".
        body: "writes" into its batch, "scales" losses and gets an infinite gradient, "last" has another loss where a
            step is due, gets "views"; or "leaves" the loop in another rank's batch, and
            goes on; or makes "two forwards", the second without a backward; or "skips" other ranks' batches.
    """
    with photinus.init(device="cpu", seed=5, logical_shards=shards):
        plain = Net()
        model, optimizer = photinus.wrap(plain, torch.optim.Adam(plain.parameters(), lr=0.01), strategy=strategy)
        data: Any = stream if is_stream else points(96)
        batches = photinus.loader(data, batch_size=24, collate_fn=views if body == "views" else None)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if body == "scales" else None
        loop = photinus.Loop(
            model, optimizer, batches, steps=9, accumulate=accumulate, report=QUIET, audit_every=every,
            state={} if scaler is None else {"scaler": scaler},
        )  # fmt: skip
        bodies = 0

        def flip(gradient: Tensor) -> Tensor:
            is_own = loop.micro_batch > 0
            if when == "state" or (
                rank == wrong and loop.step == STEP and when in ("both", "own" if is_own else "other")
            ):
                gradient = gradient.clone()
                gradient.view(torch.int32).view(-1)[3] ^= 1 << (bodies + rank) % 20 if when == "state" else 1 << 9
                gradient *= math.inf if scaler is not None else 1.0
            return gradient

        weight = dict(plain.named_parameters())["0.weight"]
        weight.register_hook(flip)
        before = weight.detach().clone()
        try:
            for is_again in (False, True):
                for inputs, targets in loop:
                    if body == "leaves" and loop.step == STEP and not is_again:
                        break
                    bodies += 1
                    if body == "skips" and not loop.micro_batch:
                        continue
                    inputs *= 0.5 if body == "writes" else 1.0
                    loss = cross_entropy(model(inputs), targets)
                    loss = loss * inputs.sum() if body == "views" else loss
                    loss = loss + weight.square().sum() if body == "last" and loop.step_due else loss
                    loop.backward(loss, weight=2.0 * len(targets) if weighs else None, scaler=scaler)
                    if loop.step_due:
                        before = weight.detach().clone()
                        if scaler is None:
                            optimizer.step()
                        else:
                            scaler.step(optimizer)
                            scaler.update()
                        optimizer.zero_grad()
                        if body == "two forwards":
                            model(inputs)
        except PhotinusError as error:
            text = f"{type(error).__name__}: {error}"
        else:
            return "finished"
        if world_size > 2:
            assert torch.equal(weight, before), "the weights have made a step"
        if body == "skips":
            return text
        with pytest.raises(PhotinusError, match=r"^audit of step"):  # it would go on with what may be wrong
            next(iter(loop))
        return text


def stream(shard: int, shards: int) -> Iterator[Any]:
    data = points(96)
    return (data[index] for index in range(shard, 96, shards))


def views(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """A batch whose sum is rounded in another way if its elements lie beside each other."""
    wide = torch.stack([inputs for inputs, _ in samples]).t().repeat_interleave(2, 0)
    return [wide[::2].t(), torch.stack([targets for _, targets in samples])]


def errors(ranks: int, **options: Any) -> list[str]:
    return list(
        values(run_ranks(f"{__name__}:train", world_size=ranks, backend="photinus", arguments=options, timeout_s=90))
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (3, {"shards": 3, "wrong": 1}),
        (3, {"shards": 3, "wrong": 0, "when": "other"}),
        (3, {"shards": 3, "wrong": 2, "when": "both", "weighs": True}),
        (3, {"shards": 8, "wrong": 2, "strategy": "zero1"}),
        (3, {"shards": 4, "wrong": 1, "accumulate": 2, "when": "both"}),
        (4, {"shards": 4, "wrong": 3, "is_stream": True, "every": 5}),
        (5, {"shards": 5, "wrong": 0}),
        (3, {"shards": 3, "wrong": 1, "body": "writes"}),
        (3, {"shards": 3, "wrong": 1, "body": "scales"}),
    ],
)
def test_the_rank_that_computes_wrong_is_named_on_all_ranks(ranks: int, options: dict[str, Any]) -> None:
    wrong = options["wrong"]
    for rank, text in enumerate(errors(ranks, **options)):
        kind = "FaultyHardwareError" if rank == wrong else "PeerLostError"
        names = rf"rank {wrong} \(host [^)]*, cpu\) computed other gradients of the same batch than ranks"
        assert re.match(rf"{kind}: audit of step {STEP}: {names}.*\(parameter 0.weight\)", text), text


def test_of_two_ranks_nobody_can_tell_which_is_wrong() -> None:
    for text in errors(2, shards=2, wrong=1):
        both = r"rank 0 \(host [^)]*\) and rank 1 \(host [^)]*\) computed other gradients"
        assert re.match(rf"FaultyHardwareError: audit of step {STEP}: {both}.*nobody can tell", text), text


def test_a_body_with_a_state_of_its_own_is_blamed_on_no_rank() -> None:
    for text in errors(3, shards=3, when="state"):
        assert re.match("FaultyHardwareError: audit of step 1: .*keeps a state of its own", text), text


def test_a_body_that_differs_where_a_step_is_due_is_blamed_on_no_rank() -> None:
    for text in errors(3, shards=3, when="never", body="last"):
        assert re.match("FaultyHardwareError: audit of step 1: .*do not agree on which is wrong", text), text


def test_steps_before_a_loop_was_left_count_as_not_audited() -> None:
    for text in errors(3, shards=3, wrong=1, every=STEP, body="leaves"):
        assert "Those since step 0 may be wrong" in text, text


def test_a_body_that_skips_the_batches_of_other_ranks_is_told_to_compute_them() -> None:
    for text in errors(2, shards=2, when="never", body="skips"):
        assert re.match(r"PhotinusError: the body made no loop.backward for another rank's batch", text), text


@pytest.mark.parametrize("body", ["views", "two forwards"])
def test_ranks_that_compute_alike_pass_whatever_batches_and_bodies_are(body: str) -> None:
    assert set(errors(3, shards=3, when="never", body=body)) == {"finished"}


def test_a_step_without_an_audit_is_not_compared() -> None:
    assert set(errors(3, shards=3, wrong=1, every=4)) == {"finished"}


def train_with_a_slow_audit(rank: int, world_size: int) -> list[int]:
    with photinus.init(device="cpu", seed=5, logical_shards=2):
        plain = torch.nn.Linear(6, 1)
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
        loop = photinus.Loop(model, optimizer, points(96), batch_size=24, steps=70, report=QUIET, audit_every="auto")
        audited = []
        for inputs, _ in loop:
            if loop.micro_batch == 0:
                audited.append(loop.step)
                time.sleep(1.0 if len(audited) == 1 else 0.0)
            loop.backward(model(inputs).mean())
            if loop.step_due:
                optimizer.step()
                optimizer.zero_grad()
        return audited


def test_one_slow_audit_is_followed_by_others() -> None:
    function = f"{__name__}:train_with_a_slow_audit"
    for audited in values(run_ranks(function, world_size=2, backend="photinus", timeout_s=60)):
        assert audited == [16, 64]


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


class Own:
    def __init__(self, samples: list[Tensor]) -> None:
        self.samples = torch.stack(samples)


def train_on_objects(rank: int, world_size: int) -> str:
    with photinus.init(device="cpu", seed=5, logical_shards=2):
        plain = torch.nn.Linear(4, 1)
        model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.01))
        data = photinus.loader(Samples(), batch_size=4, collate_fn=Own)
        loop = photinus.Loop(model, optimizer, data, steps=2, report=QUIET, audit_every=1000)
        with pytest.raises(TypeError) as caught:
            next(iter(loop))
        return str(caught.value)


def test_a_batch_that_cannot_travel_is_refused_with_what_can() -> None:
    function = f"{__name__}:train_on_objects"
    for text in values(run_ranks(function, world_size=2, backend="photinus", timeout_s=60)):
        assert "This batch (Own) has something else" in text
