"""The engine's results equal a naive reference in numpy bit for bit, whatever the path, chunk size and timing.

Hypothesis makes the examples; the ranks live on from one to the next. Set PHOTINUS_EXAMPLES for another number of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.parity.engine_cases import (
    CHUNKS_BYTES,
    DTYPES,
    MOVING,
    PATTERNS,
    PLACES,
    REDUCING,
    REDUCTIONS,
    has_reduction,
    wires_of,
)
from tests.rank_pool import RankPool

WORLD_SIZES = (1, 2, 3, 4)
SEVERAL_HOSTS = ("ab", "abc", "aaab", "abab", "abcd")
FAST_EXAMPLES, SLOW_EXAMPLES, HOSTS_EXAMPLES = 500, 5000, 100

sizes = st.one_of(
    st.integers(0, 70),
    st.integers(0, 5000),
    # About where a path, a chunk or a slot ends.
    st.builds(
        lambda base, by: max(0, base + by), st.sampled_from([512, 1024, 4096, 8192, 16384, 65536]), st.integers(-3, 3)
    ),
    st.integers(0, 200_000),
)
large_sizes = st.one_of(sizes, sizes, sizes, st.integers(200_000, 2_000_000))
places = st.one_of(
    st.sampled_from(PLACES).map(lambda place: [place] * max(WORLD_SIZES)),
    st.lists(st.sampled_from(PLACES), min_size=max(WORLD_SIZES), max_size=max(WORLD_SIZES)),
)


def calls(elems: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    common = {
        "elems": elems,
        "seed": st.integers(0, 2**31),
        "root": st.integers(0, 3),
        "places": places,
    }
    kinds = [(d, r) for d in DTYPES for r in REDUCTIONS if has_reduction(d, r)]

    def reducing(operation: str) -> st.SearchStrategy[dict[str, Any]]:
        # reduce_scatter takes no factor of premul_sum
        allowed = [kind for kind in kinds if operation != "reduce_scatter" or kind[1] != "premul_sum"]
        return st.sampled_from(allowed).flatmap(
            lambda kind: st.fixed_dictionaries(
                {
                    **common,
                    "operation": st.just(operation),
                    "dtype": st.just(kind[0]),
                    "reduction": st.just(kind[1]),
                    "pattern": st.sampled_from(PATTERNS),
                }
            )
        )

    moving = st.fixed_dictionaries({**common, "operation": st.sampled_from(MOVING), "dtype": st.sampled_from(DTYPES)})
    return st.one_of(st.sampled_from(REDUCING).flatmap(reducing), st.sampled_from(REDUCING).flatmap(reducing), moving)


def commands(elems: st.SearchStrategy[int]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "chunk_bytes": st.sampled_from(CHUNKS_BYTES),
            "asynchronous": st.booleans(),
            "sleeps": st.integers(0, 1000),
            "calls": st.lists(calls(elems), min_size=1, max_size=3),
        }
    )


class Pools:
    """One pool for each world size, or placement on hosts, made when it is first needed, and again after it broke."""

    def __init__(self) -> None:
        self._pools: dict[int | str, RankPool] = {}

    def ask(self, world: int | str, command: dict[str, Any]) -> list[str]:
        pool = self._pools.get(world)
        if pool is None or pool.is_broken:
            hosts = "a" * world if isinstance(world, int) else world
            pool = self._pools[world] = RankPool(
                "tests.parity.engine_cases:Answers", world_size=len(hosts), environ={"TEST_HOSTS": hosts}
            )
        answers: list[str] = pool.ask(command)
        return answers

    def close(self) -> None:
        for pool in self._pools.values():
            pool.__exit__(None, None, None)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


def check(pools: Pools, world: int | str, command: dict[str, Any]) -> None:
    first = pools.ask(world, command)
    assert len(set(first)) == 1, f"ranks hold different bits: {command}"
    again = pools.ask(world, {**command, "sleeps": command["sleeps"] + 1})
    assert again == first, f"another run gave other bits: {command}"


def profile(examples: int) -> settings:
    return settings(
        max_examples=int(os.environ.get("PHOTINUS_EXAMPLES", examples)),
        deadline=None,
        database=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


@pytest.mark.timeout(240)
@seed(1)
@profile(FAST_EXAMPLES)
@given(world_size=st.sampled_from(WORLD_SIZES), command=commands(sizes))
def test_every_collective_gives_the_bits_of_the_naive_reference(
    pools: Pools, world_size: int, command: dict[str, Any]
) -> None:
    check(pools, world_size, command)


@pytest.mark.timeout(240)
@seed(2)
@profile(HOSTS_EXAMPLES)
@given(hosts=st.sampled_from(SEVERAL_HOSTS), command=commands(sizes))
def test_over_several_hosts_the_bits_are_those_of_a_tree_over_each_host_and_one_over_hosts(
    pools: Pools, hosts: str, command: dict[str, Any]
) -> None:
    for call in command["calls"]:
        if call["operation"] in REDUCING:
            wires = wires_of(call["dtype"], call["reduction"])
            call["wire"] = wires[call["seed"] % len(wires)]
    check(pools, hosts, command)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@profile(SLOW_EXAMPLES)
@given(world_size=st.sampled_from(WORLD_SIZES), command=commands(large_sizes))
def test_thousands_of_random_programs_give_the_bits_of_the_naive_reference(
    pools: Pools, world_size: int, command: dict[str, Any]
) -> None:
    check(pools, world_size, command)


def one_call(**facts: Any) -> dict[str, Any]:
    call = {"seed": 7, "root": 1, "places": ["arena", "ordinary", "unaligned", "arena"], "pattern": "bits", **facts}
    return {"chunk_bytes": CHUNKS_BYTES[-1], "asynchronous": False, "sleeps": 1, "calls": [call]}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction_of_every_type_on_three_ranks(pools: Pools, dtype: str, place: str) -> None:
    commands = [
        one_call(
            operation=operation, dtype=dtype, reduction=reduction, elems=elems, pattern=pattern, places=[place] * 3
        )
        for operation in REDUCING
        for reduction in REDUCTIONS
        for elems in (77, 20_001)
        for pattern in ("bits", "near")
        if has_reduction(dtype, reduction) and not (operation == "reduce_scatter" and reduction == "premul_sum")
    ]
    for command in commands:
        pools.ask(3, command)


@pytest.mark.parametrize("operation", [*REDUCING, "broadcast", "all_to_all", "messages"])
def test_ten_million_elements_give_the_bits_of_the_naive_reference(pools: Pools, operation: str) -> None:
    elems = 10_000_000 // (3 if operation in ("reduce_scatter", "all_to_all", "messages") else 1)
    pools.ask(3, one_call(operation=operation, dtype="float16", reduction="avg", elems=elems, pattern="near"))
