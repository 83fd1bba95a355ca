"""What a monitored barrier says when ranks are missing: gloo's words, which programs look for, and then ours."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WAITED_FOR = re.compile(r" s for ranks? (\d+(?:, \d+)*), which ")


def missing_ranks(error: str) -> list[int]:
    """Whom the engine's error, of this rank or of one that gave up before it, says to have been waited for in vain."""
    found = _WAITED_FOR.search(error)
    return [int(number) for number in found.group(1).split(", ")] if found else []


def monitored_text(rank: int, timeout_s: float, wait_all_ranks: bool, missing: Sequence[int], error: str) -> str:
    """The error's text for one rank.

    Rank 0 names who is missing: the first rank, or all of them with `wait_all_ranks`, as gloo does; our own words,
    which follow, name all in any case. Another rank blames rank 0 if that is missing, else says that it came itself.
    """
    timed_out = f"Rank {rank} timed out in monitoredBarrier: {error}"
    if rank == 0 and missing:
        named = missing if wait_all_ranks else missing[:1]
        who = f"Rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
        # gloo says one of the two: the first if it was waiting for that rank, the second between two ranks.
        return f"{who} failed to pass monitoredBarrier in {timeout_s * 1000:.0f} ms, so {timed_out}"
    if 0 in missing or rank == 0:
        return timed_out
    return (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank "
        f"0. Please check rank 0 logs for faulty rank: {error}"
    )
