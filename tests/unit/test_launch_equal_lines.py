"""What several ranks print is shown once, and each rank's lines stay whole and in order."""

from __future__ import annotations

import re
import time

from hypothesis import given
from hypothesis import strategies as st

from photinus.run.local.equal_lines import HOLD_S, EqualLines, ranges
from tests.unit.test_launch_output import Pipes, write_and_close


def shown_to(rank: int, text: str) -> list[str]:
    """The lines of a rank, in order, in what was shown."""
    lines = []
    for line in text.splitlines():
        numbers, said = re.fullmatch(r"\[(?:\w+:)?([\d,-]+)\] (.*)", line).groups()
        spans = [part.split("-") for part in numbers.split(",")]
        if any(int(span[0]) <= rank <= int(span[-1]) for span in spans):
            lines.append(said)
    return lines


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("abc"), st.sampled_from([0.0, 0.1, 0.3])), max_size=60))
def test_no_order_of_lines_loses_doubles_or_turns_round_a_ranks_own(said):
    equal, shown, now_s = EqualLines(), b"", 0.0
    equal.ranks = {1, 2, 3, 4}
    for rank, text, pause_s in said:
        now_s += pause_s
        equal.add(rank, [text.encode()], now_s)
        shown += equal.take(now_s)
    shown += equal.take(float("inf"))
    for rank in range(1, 5):
        assert shown_to(rank, shown.decode()) == [text for who, text, _ in said if who == rank]


def test_a_line_that_all_ranks_say_is_shown_at_once_and_once():
    equal = EqualLines()
    equal.ranks = {1, 2, 3, 5}
    for rank in (5, 1, 2):
        equal.add(rank, [b"warning: old", b"  here"], 0.0)
        assert equal.take(0.0) == b""
    equal.add(3, [b"warning: old", b"  here"], 0.1)
    assert equal.take(0.1, "node2") == b"[node2:1-3,5] warning: old\n[node2:1-3,5]   here\n"
    assert equal.due_s() is None


def test_a_line_that_one_rank_says_waits_for_a_moment_only():
    equal = EqualLines()
    equal.ranks = {1, 2}
    equal.add(1, [b"alone"], 0.0)
    assert equal.take(HOLD_S / 2) == b""
    assert equal.due_s() == HOLD_S
    assert equal.take(HOLD_S) == b"[1] alone\n"
    equal.add(2, [b"alone"], HOLD_S)  # too late
    assert equal.take(2 * HOLD_S) == b"[2] alone\n"


def test_a_flood_of_lines_is_not_held():
    equal, began_s = EqualLines(), time.monotonic()
    equal.ranks = {1, 2}
    equal.add(1, [b"%d" % number for number in range(100_000)], 0.0)
    equal.add(2, [b"the same"] * 100_000, 0.0)
    assert equal.take(0.0).count(b"\n") >= 190_000
    assert time.monotonic() - began_s < 20


def test_numbers_in_short():
    assert ranges({3}) == "3"
    assert ranges({1, 2, 3, 5, 7, 8}) == "1-3,5,7-8"


def test_the_launchers_words_come_behind_what_the_workers_said_before():
    pipes = Pipes(same=True)
    ends = [pipes.output.ends_for(rank, rank) for rank in (1, 2, 3)]
    for out, err in ends:
        write_and_close(err, "the same\n")
        write_and_close(out, "")
    pipes.output.drain(10)
    pipes.output.say("photinus: it failed\n")
    assert pipes.finish()[0] == "[1-3] the same\nphotinus: it failed\n"


def test_with_several_hosts_the_host_stands_before_the_rank():
    pipes = Pipes(same=False)
    pipes.output.begin_attempt(0, "job", "node2")
    out, err = pipes.output.ends_for(4, 0)
    write_and_close(out, "hello\n")
    write_and_close(err, "")
    pipes.output.drain(10)
    assert pipes.finish()[0] == "[node2:4] hello\n"
