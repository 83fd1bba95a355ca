from __future__ import annotations

import pytest

from photinus.backend.engine_moves import missing_ranks, monitored_text


def engine_says(who: str) -> str:
    return f"barrier #4 in group world: rank 0 of 4 waited 2.0 s for {who}, which is alive but has not come: ..."


@pytest.mark.parametrize(
    ("rank", "missing", "wait_all_ranks", "beginning"),
    [
        (
            0,
            "rank 1",
            False,
            "Rank 1 failed to pass monitoredBarrier in 2000 ms, so Rank 0 timed out in monitoredBarrier: ",
        ),
        (
            0,
            "ranks 2, 3",
            False,
            "Rank 2 failed to pass monitoredBarrier in 2000 ms, so Rank 0 timed out in monitoredBarrier: ",
        ),
        (
            0,
            "ranks 2, 3",
            True,
            "Ranks 2, 3 failed to pass monitoredBarrier in 2000 ms, so Rank 0 timed out in monitoredBarrier: ",
        ),
        (
            0,
            "rank 12",
            True,
            "Rank 12 failed to pass monitoredBarrier in 2000 ms, so Rank 0 timed out in monitoredBarrier: ",
        ),
        (1, "rank 0", False, "Rank 1 timed out in monitoredBarrier: "),
        (1, "ranks 0, 3", True, "Rank 1 timed out in monitoredBarrier: "),
        (
            1,
            "ranks 2, 10",
            False,
            "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for ",
        ),
    ],
)
def test_the_error_begins_with_gloos_words_and_goes_on_with_ours(
    rank: int, missing: str, wait_all_ranks: bool, beginning: str
) -> None:
    text = monitored_text(rank, 2.0, wait_all_ranks, missing_ranks(engine_says(missing)), engine_says(missing))
    assert text.startswith(beginning)
    assert text.endswith(engine_says(missing))


def test_a_rank_that_was_let_down_by_a_peer_says_that_it_came_itself() -> None:
    text = monitored_text(2, 1.0, False, [], "rank 0 left because it had waited 1.0 s in vain")
    assert text.startswith("Rank 2 successfully reached monitoredBarrier, but received errors")
    assert "rank 0 left" in text


def test_the_missing_are_read_from_the_error_of_a_rank_that_gave_up_first_too() -> None:
    error = (
        f"rank 1 (pid 7 on host) gave up: {engine_says('ranks 2, 3')} Rank 0 of 4 waited 2.00 s for rank 2 in barrier"
    )
    assert missing_ranks(error) == [2, 3]
    assert missing_ranks("rank 1 (pid 7 on host) was killed by SIGKILL.") == []
