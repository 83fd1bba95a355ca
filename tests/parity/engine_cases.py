"""What a rank does in the tests of the engine's bits: makes data, calls, and compares with a reference in plain numpy.

A command names a chunk size and some calls. Every rank makes all ranks' inputs from the calls' seeds, so it knows what
must come out. It compares only after the last call, so that ranks stay in step when something is wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from photinus import engine

CHUNKS_BYTES = (1024, 4096, 65536, 262144)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool")
REDUCTIONS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor", "premul_sum")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "all_gather", "all_gather_list", "all_to_all", "gather", "scatter", "messages")
PLACES = ("arena", "ordinary", "unaligned", "unaligned arena")
PATTERNS = ("bits", "near", "small")

_GUARD_BYTES, _GUARD = 64, 0xA5


def has_reduction(dtype: str, reduction: str) -> bool:
    """Which reductions mean something on which element types."""
    if reduction in ("band", "bor", "bxor"):
        return not _is_float(dtype)
    if reduction == "premul_sum":
        return _is_float(dtype)
    return not (dtype == "bool" and reduction == "avg")


def _is_float(dtype: str) -> bool:
    return "float" in dtype


def _kind(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)


def make(dtype: str, elems: int, pattern: str, seed: int) -> Any:
    """Elements of any bits (NaN, infinity, subnormals), of near magnitude (much rounding), or small whole numbers."""
    chance = np.random.default_rng(seed)
    kind = _kind(dtype)
    if pattern == "bits":
        return np.frombuffer(chance.bytes(elems * kind.itemsize), kind)
    if dtype == "bool":
        return chance.integers(0, 2, elems, np.uint8).view(bool)
    if pattern == "near" and _is_float(dtype):
        return (chance.random(elems, np.float32) * 4 - 2).astype(kind)
    if pattern == "near":
        info = np.iinfo(dtype)
        return chance.integers(info.min, info.max, elems, dtype, endpoint=True)
    return chance.integers(0 if dtype == "uint8" else -9, 10, elems).astype(kind)


def wires_of(dtype: str, reduction: str) -> tuple[str | None, ...]:
    """The types in which values may cross between hosts such that `reduced` knows the bits; None: their own."""
    computes = reduction in ("sum", "avg", "product", "premul_sum")
    if dtype == "float32" and computes:
        return (None, "bfloat16", "float16")
    return ("float32",) if dtype in ("float16", "bfloat16") and computes else (None,)


def reduced(
    inputs: list[Any],
    dtype: str,
    reduction: str,
    factors: list[float],
    hosts: str,
    wire: str | None = None,
    *,
    scatters: bool = False,
) -> Any:
    """The definition: a binary tree over each host's ranks, and one over hosts, in the type of accumulation.

    It is rounded once. What crosses between hosts as narrower floats is rounded there too: each host's result, and the
    whole one, if it goes to other ranks than its own. (16-bit floats that cross as they are: not told here.)
    """
    kind = inputs[0].dtype
    if dtype == "bool":
        truths = [values.view(np.uint8) != 0 for values in inputs]
        how = {"bxor": np.logical_xor, "min": np.logical_and, "product": np.logical_and, "band": np.logical_and}
        return how.get(reduction, np.logical_or).reduce(truths)
    if _is_float(dtype):
        wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
        terms = [values.astype(wide) for values in inputs]
        if reduction == "premul_sum":
            terms = [term * wide.type(factor) for term, factor in zip(terms, factors, strict=True)]
    else:
        # Of 64 bits, sums wrap around before they are divided.
        wide = np.dtype(np.int64) if reduction == "avg" else kind
        terms = [values.astype(wide) for values in inputs]
    steps: dict[str, Callable[[Any, Any], Any]] = {
        "product": lambda a, b: a * b,
        "min": lambda a, b: np.where((b < a) | (b != b), b, a),
        "max": lambda a, b: np.where((b > a) | (b != b), b, a),
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    step = steps.get(reduction, lambda a, b: a + b)

    def tree(terms: list[Any]) -> Any:
        if len(terms) == 1:
            return terms[0]
        left = 1 << (len(terms) - 1).bit_length() - 1  # the largest power of two below
        return step(tree(terms[:left]), tree(terms[left:]))

    on_host: dict[str, list[Any]] = {}
    for host, term in zip(hosts, terms, strict=True):
        on_host.setdefault(host, []).append(term)

    def crossed(values: Any) -> Any:
        return values if wire is None or len(on_host) == 1 else values.astype(_kind(wire)).astype(wide)

    total = tree([crossed(tree(those)) for those in on_host.values()])
    if reduction == "avg":
        total = total / wide.type(len(terms)) if _is_float(dtype) else _truncated(total, len(terms))
    return (total if scatters else crossed(total)).astype(kind)


def _truncated(total: Any, divisor: int) -> Any:
    """Division towards zero; numpy's goes downwards."""
    return total // divisor + ((total < 0) & (total % divisor != 0))


def difference(got: Any, expected: Any) -> str:
    """Where bits differ, in words; empty when they do not. One NaN is as good as another."""
    bits = np.dtype(f"u{got.dtype.itemsize}")
    differ = got.view(bits) != expected.view(bits)
    if got.dtype.kind in "fV":
        wide = np.float64 if got.dtype == np.float64 else np.float32
        differ &= ~(np.isnan(got.astype(wide)) & np.isnan(expected.astype(wide)))
    places = np.flatnonzero(differ)
    if places.size == 0:
        return ""
    at = places[0]
    return (
        f"{places.size} of {got.size} elements differ, first at {at}: got {got[at]} ({got.view(bits)[at]:#x}), "
        f"expected {expected[at]} ({expected.view(bits)[at]:#x})"
    )


class _Array:
    """Elements somewhere in memory, with guards around them."""

    def __init__(self, dtype: str, elems: int, place: str, content: Any = None) -> None:
        kind = _kind(dtype)
        size, skew = elems * kind.itemsize, int(place.startswith("unaligned"))
        room = size + 2 * _GUARD_BYTES + skew
        if place.endswith("arena"):
            self._memory = np.frombuffer(engine.allocate(room), np.uint8)
        else:
            self._memory = np.empty(room, np.uint8)
        start = _GUARD_BYTES + skew
        self._around = (slice(0, start), slice(start + size, room))
        for around in self._around:
            self._memory[around] = _GUARD
        self.values = self._memory[start : start + size].view(kind)
        self.content = content
        if content is not None:
            self.values.view(np.uint8)[:] = content.view(np.uint8)

    def faults(self, expected: Any) -> str:
        """What is wrong with the elements and around them; `expected` None for those that must not have changed."""
        for around in self._around:
            if (self._memory[around] != _GUARD).any():
                return "bytes around the array were written"
        if expected is None:
            same = bool((self.values.view(np.uint8) == self.content.view(np.uint8)).all())
            return "" if same else "an array that is only read has changed"
        return difference(self.values, expected)


class Answers:
    """Runs commands: {"chunk_bytes", "asynchronous", "sleeps", "calls": [call]}; see the test for what a call holds."""

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self.rank, self.world_size = rank, world_size
        self.communicators: dict[int, engine.Communicator] = {}
        self.hosts = os.environ.get("TEST_HOSTS") or "a" * world_size
        with engine.Communicator(rank, world_size, address, timeout_s=30) as meeting:
            places = self._places(meeting)
            for chunk_bytes in CHUNKS_BYTES:
                further = np.zeros(200, np.uint8)
                if rank == 0:
                    text = np.frombuffer(engine.new_address().encode(), np.uint8)
                    further[: text.size] = text
                meeting.broadcast(further)
                further_address = further.tobytes().rstrip(b"\0").decode()
                self.communicators[chunk_bytes] = engine.Communicator(
                    rank, world_size, further_address, timeout_s=30, chunk_bytes=chunk_bytes, places=places
                )

    def _places(self, meeting: engine.Communicator) -> list[engine.Place]:
        """Where the ranks are, each listening on IPv4 and IPv6; empty for one host."""
        if len(set(self.hosts)) == 1:
            return []
        mine = np.zeros(100, np.uint8)
        text = json.dumps([os.getpid(), engine.listen(["127.0.0.1", "::1"])]).encode()
        mine[: len(text)] = np.frombuffer(text, np.uint8)
        meeting.all_gather(told := np.zeros((self.world_size, mine.size), np.uint8), mine)
        name, texts = socket.gethostname(), [row.tobytes().rstrip(b"\0") for row in told]
        return [engine.Place(host, name, *json.loads(text)) for host, text in zip(self.hosts, texts, strict=True)]

    def __call__(self, command: dict[str, Any]) -> str:
        communicator = self.communicators[command["chunk_bytes"]]
        chance = random.Random(f"{command['sleeps']} {self.rank}")
        works: list[Any] = []
        checks: list[tuple[str, _Array, Any]] = []
        for number, call in enumerate(command["calls"]):
            if command["sleeps"] and chance.random() < 0.5:
                time.sleep(chance.random() * 0.002)
            start, arrays = self._reducing(call) if call["operation"] in REDUCING else self._moving(call)
            works += start(communicator, command["asynchronous"])
            checks += [(f"call {number}, {call['operation']}: {what}", array, want) for what, array, want in arrays]
        for work in works:
            work.wait()
        faults = [f"{what}: {fault}" for what, array, want in checks if (fault := array.faults(want))]
        if faults:
            raise AssertionError("; ".join(faults))
        digest = hashlib.sha256()
        for what, array, want in checks:
            if want is not None and "everywhere" in what:
                digest.update(array.values.view(np.uint8).data)
        return digest.hexdigest()

    def _reducing(self, call: dict[str, Any]) -> Any:
        dtype, elems, reduction, seed = call["dtype"], call["elems"], call["reduction"], call["seed"]
        operation, root, place = call["operation"], call["root"] % self.world_size, call["places"][self.rank]
        ranks = range(self.world_size)
        scatters, wire = operation == "reduce_scatter", call.get("wire")
        inputs = [make(dtype, elems * (len(ranks) if scatters else 1), call["pattern"], seed + r) for r in ranks]
        factors = [random.Random(seed + r).choice([1.0, 0.5, -1.3, 1 / 3, 1e-30, 7.0]) for r in ranks]
        with np.errstate(all="ignore"):
            if scatters:
                mine = slice(self.rank * elems, (self.rank + 1) * elems)
                parts = [values[mine] for values in inputs]
                expected = reduced(parts, dtype, reduction, [1.0] * len(ranks), self.hosts, wire, scatters=True)
            else:
                expected = reduced(inputs, dtype, reduction, factors, self.hosts, wire)
        array = _Array(dtype, inputs[0].size, place, inputs[self.rank])
        if operation == "all_reduce":
            return (
                lambda group, later: [
                    group.all_reduce(
                        array.values, reduction, factor=factors[self.rank], wire_dtype=wire, asynchronous=later
                    )
                ],
                [("everywhere", array, expected)],
            )
        if operation == "reduce":
            return (
                lambda group, later: [
                    group.reduce(
                        array.values, root, reduction, factor=factors[self.rank], wire_dtype=wire, asynchronous=later
                    )
                ],
                [("at the root", array, expected if self.rank == root else None)],
            )
        out = _Array(dtype, elems, call["places"][self.rank - 1])
        return (
            lambda group, later: [
                group.reduce_scatter(out.values, array.values, reduction, wire_dtype=wire, asynchronous=later)
            ],
            [("its part", out, expected), ("input", array, None)],
        )

    def _moving(self, call: dict[str, Any]) -> Any:
        dtype, elems, seed, operation = call["dtype"], call["elems"], call["seed"], call["operation"]
        me, size, root = self.rank, self.world_size, call["root"] % self.world_size
        place, other_place = call["places"][me], call["places"][me - 1]
        sizes = random.Random(seed)
        table = [[sizes.choice([0, 1, elems // 3, elems]) for _ in range(size)] for _ in range(size)]

        def data(source: int, target: int, many: int) -> Any:
            return make(dtype, many, "bits", seed + source * size + target)

        def given(many: int, target: int = 0) -> _Array:
            return _Array(dtype, many, place, data(me, target, many))

        def room(many: int) -> _Array:
            return _Array(dtype, many, other_place)

        if operation == "broadcast":
            array = given(elems)
            want = None if me == root else data(root, 0, elems)
            start = lambda group, later: [group.broadcast(array.values, root, asynchronous=later)]  # noqa: E731
            return start, [("copy", array, want)]
        if operation == "all_gather":
            array, out = given(elems), room(elems * size)
            start = lambda group, later: [group.all_gather(out.values, array.values, asynchronous=later)]  # noqa: E731
            everything = np.concatenate([data(r, 0, elems) for r in range(size)])
            return start, [("everywhere", out, everything), ("input", array, None)]
        if operation in ("all_gather_list", "gather", "scatter"):
            many = table[0]
            if operation == "scatter":
                arrays = [given(many[r], r) for r in range(size)] if me == root else None
                outs = [room(many[me])]
                wanted = [data(root, me, many[me])]
            else:
                arrays = [given(many[me])]
                takes = operation == "all_gather_list" or me == root
                outs = [room(m) for m in many] if takes else []
                wanted = [data(r, 0, many[r]) for r in range(size)] if takes else []

            def start(group: Any, later: bool) -> list[Any]:
                into = [out.values for out in outs]
                if operation == "scatter":
                    each = [a.values for a in arrays] if arrays is not None else None
                    return [group.scatter(into[0], each, root, asynchronous=later)]
                assert arrays is not None
                if operation == "gather":
                    return [group.gather(into or None, arrays[0].values, root, asynchronous=later)]
                return [group.all_gather_list(into, arrays[0].values, asynchronous=later)]

            found = [("part", out, want) for out, want in zip(outs, wanted, strict=True)]
            return start, found + [("input", array, None) for array in arrays or []]
        ins = [given(table[me][r], r) for r in range(size)]
        outs = [room(table[r][me]) for r in range(size)]
        found = [("input", array, None) for array in ins]
        found += [
            ("part", outs[r], data(r, me, table[r][me])) for r in range(size) if operation != "messages" or r != me
        ]

        def exchange(group: Any, later: bool) -> list[Any]:
            if operation == "all_to_all":
                into, each = [a.values for a in outs], [a.values for a in ins]
                return [group.all_to_all(into, each, asynchronous=later)]
            others = [r for r in range(size) if r != me]
            tag = seed % 3
            works = [group.send(ins[r].values, r, tag, asynchronous=True) for r in others]
            works += [group.recv(outs[r].values, r, tag, asynchronous=True) for r in others]
            if not later:
                for work in works:
                    work.wait()
            return works

        return exchange, found
