"""The arguments of audits, and how the digests of three ranks show which one is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import photinus
from photinus.trainer.audit import Doubt
from photinus.trainer.record.digests import steps_apart
from tests.small_run import QUIET, Net, points


@pytest.fixture
def session() -> Iterator[photinus.Session]:
    with photinus.init("gloo", "cpu", logical_shards=2) as session:
        yield session


def loop(every: Any) -> photinus.Loop:
    plain = Net()
    model, optimizer = photinus.wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    return photinus.Loop(model, optimizer, points(16), batch_size=8, steps=2, report=QUIET, audit_every=every)


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "often"])
def test_steps_from_audit_to_audit_are_a_whole_number_above_zero_or_auto(session: Any, every: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="audit_every"):
        loop(every)


def test_audits_without_shards_are_refused() -> None:
    with (
        photinus.init("gloo", "cpu"),
        pytest.raises(ValueError, match=r"audit_every=2 .*init\(logical_shards=\.\.\.\)"),
    ):
        loop(2)


def test_one_process_says_that_it_makes_no_audits(session: Any, capfd: pytest.CaptureFixture[str]) -> None:
    bodies = 0
    alone = loop(1)
    for inputs, _ in alone:
        alone.backward(alone.model(inputs).sum())
        bodies += 1
    assert bodies == 4
    assert "audit_every=1 makes no audits, since no other process is there" in capfd.readouterr().out


@pytest.mark.parametrize(("by_third", "wrong"), [((1, 2), 1), ((1, 5), 0), ((4, 5), None)])
def test_the_rank_with_which_the_third_does_not_agree_is_wrong(by_third: tuple[int, ...], wrong: int | None) -> None:
    doubt = Doubt(owner=1, auditor=0, by_owner=(1, 5), by_auditor=(1, 2))
    assert doubt.wrong(by_third) == wrong
    assert doubt.differing == [1]
    assert [doubt.third(ranks) for ranks in (3, 4)] == [2, 3]


def test_a_cost_comes_so_seldom_that_it_takes_its_share_of_the_time() -> None:
    assert [steps_apart(cost_s, 0.1, 0.01) for cost_s in (0.0, 0.001, 0.0011, 0.1)] == [1, 1, 2, 128]
    assert steps_apart(1.0, 0.0, 0.01) == 1 << 16
