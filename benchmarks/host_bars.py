"""What figures on emulated hosts are compared with: the least bytes, the rate, others; and the bars, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import host_contestants as who
from emulated import bits_per_s, ranks_of
from harness import MIB, size_name

KIB = 1 << 10
GLOO, PLAIN, LEAST = "gloo / ours", "ours / bare", "ours / (bytes / rate)"
HALVED, HALVED_PAYLOAD = "gloo / ours in bfloat16", "payload in bfloat16 / least"
OPEN_MPI, MPICH = "Open MPI / ours", "MPICH / ours"
CARDS = "one card / two"
PAYLOAD, CARD, PROCESSOR = "payload / least", "card / least", "processor: ours / gloo"
SECONDS = "seconds"
RIVALS = {
    GLOO: who.GLOO,
    HALVED: who.HALVED,
    HALVED_PAYLOAD: who.HALVED,
    OPEN_MPI: who.OPEN_MPI,
    MPICH: who.MPICH,
    CARDS: who.ON_BOTH_CARDS,
    PLAIN: who.PLAIN,
    PROCESSOR: who.GLOO,
}
OF_TIME = (GLOO, HALVED, OPEN_MPI, MPICH, CARDS, PLAIN, LEAST)


def least_bytes(operation: str, case: str, size_bytes: int) -> float:
    """What must go over the card of the host, and in the direction, that has most: with hosts that add up before."""
    counts = ranks_of(case)
    hosts, ranks = len(counts), sum(counts)
    if operation == "all_reduce":
        return 2 * (hosts - 1) / hosts * size_bytes
    if operation == "broadcast":
        return size_bytes
    # One direction has the parts of all other ranks; the other has this host's parts, from each other host when they
    # are to be added, to each other host when they are gathered.
    return max(max(ranks - count, (hosts - 1) * count) for count in counts) / ranks * size_bytes


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """All that can be compared in a row, by name."""
    seconds = row["seconds"]
    found: dict[str, float] = {}
    least = least_bytes(row["operation"], row["case"], row["bytes"])
    ours = seconds.get(who.PHOTINUS)
    if ours is None:
        return found
    for name in (GLOO, OPEN_MPI, MPICH):
        if RIVALS[name] in seconds:
            found[name] = seconds[RIVALS[name]] / ours
    if who.HALVED in seconds:
        found[HALVED_PAYLOAD] = row["payload"][who.HALVED] / least
        if who.GLOO in seconds:
            found[HALVED] = seconds[who.GLOO] / seconds[who.HALVED]
    if who.ON_BOTH_CARDS in seconds:
        found[CARDS] = ours / seconds[who.ON_BOTH_CARDS]
    if who.PLAIN in seconds:
        found[PLAIN] = ours / seconds[who.PLAIN]
    if row["rate"] != "none":
        found[LEAST] = ours / (least * 8 / bits_per_s(row["rate"]))
    found[PAYLOAD] = row["payload"][who.PHOTINUS] / least
    found[CARD] = row["card"][who.PHOTINUS] / least
    if who.GLOO in row["processor_s"]:
        found[PROCESSOR] = row["processor_s"][who.PHOTINUS] / row["processor_s"][who.GLOO]
    found[SECONDS] = ours
    return found


@dataclass(frozen=True)
class Bar:
    """One bar: what of `ratios`, for sizes from `low` to `high` bytes, in these cases and at these rates."""

    what: str
    low: int
    high: int
    cases: tuple[str, ...]
    rates: tuple[str, ...]
    at_least: float = 0.0
    at_most: float = float("inf")

    def is_for(self, row: dict[str, Any]) -> bool:
        """Whether it says something about this row, in which those took part that it compares."""
        where = row["case"] in self.cases and row["rate"] in self.rates and row["operation"] == "all_reduce"
        took_part = RIVALS.get(self.what, who.PHOTINUS) in row["seconds"]
        return where and took_part and row["dtype"] == "float32" and self.low <= row["bytes"] <= self.high

    def verdict(self, row: dict[str, Any]) -> tuple[bool, str]:
        """Whether the row clears the bar, and a line about it."""
        value = ratios(row).get(self.what)
        wanted = f"at least {self.at_least:.4g}" if self.at_least else f"at most {self.at_most:.4g}"
        told = "not measured" if value is None else f"{value:.4g}"
        line = f"{row['case']}, rate {row['rate']}, {size_name(row['bytes'])}: {self.what} is {told}, {wanted} wanted"
        return value is not None and self.at_least <= value <= self.at_most, line


CASES = ("2x1", "2x2", "2x4", "3x2", "4x1", "4x2", "3+1")
LIMITED, FREE, FAR = ("100mbit", "1gbit"), ("none",), ("100mbit+20ms",)
BARS = (
    *(
        Bar(what, 64 * MIB, 64 * MIB, CASES, (*LIMITED, *FREE), at_most=most)
        for what, most in ((PAYLOAD, 1.002), (CARD, 1.02))
    ),
    *(
        Bar(what, 16 * MIB, 64 * MIB, CASES, LIMITED, at_most=most)
        for what, most in ((PLAIN, 1.03), (LEAST, 1.10), (PROCESSOR, 1.0))
    ),
    *(
        Bar(what, 16 * MIB, 64 * MIB, (case,), LIMITED, at_least=times * least)
        for case, least in (("2x2", 1.4), ("2x4", 1.6), ("4x2", 1.1))
        for what, times in ((GLOO, 1), (HALVED, 2))
    ),
    Bar(LEAST, 16 * MIB, 64 * MIB, CASES, FAR, at_most=1.15),
    Bar(CARDS, 16 * MIB, 64 * MIB, CASES, LIMITED, at_least=1.8),
    Bar(HALVED_PAYLOAD, 64 * MIB, 64 * MIB, CASES, (*LIMITED, *FREE), at_most=0.501),
    Bar(PLAIN, MIB, 64 * MIB, ("2x1", "2x2"), FREE, at_most=1.35),
    Bar(GLOO, 0, 64 * KIB, ("2x1", "2x2"), FREE, at_least=5),
    Bar(GLOO, MIB, 64 * MIB, ("2x1",), FREE, at_least=1.3),
    Bar(GLOO, MIB, 64 * MIB, ("2x2",), FREE, at_least=2),
    Bar(SECONDS, 4 * KIB, 4 * KIB, ("2x1",), FREE, at_most=20e-6),
    Bar(GLOO, 4 * KIB, 4 * KIB, ("4x1",), FREE, at_least=10),
    *(Bar(rival, 4 * KIB, 64 * MIB, CASES, FREE, at_least=1) for rival in (OPEN_MPI, MPICH)),
)
