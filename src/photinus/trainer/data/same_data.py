"""Comparing the data of the ranks by a few samples, so that a split without a seed is an error.

Every rank fetches the same few samples and describes them; the descriptions are exchanged. Numbers with a fraction are
compared by sums, within a tolerance: another processor may round them differently. All else is compared exactly.

Fetching changes nothing for the training. The generators are put back (see workers.py), and so are those that a data
set keeps as attributes. Where workers load the data, one of them fetches the samples, because a data set may open files
that processes cannot share. A sample that differs when it is fetched again, or that cannot be fetched, is not compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import Subset, TensorDataset

from ... import env
from ...job.world import name_ranks
from ...parallel.exchange.collectives import all_gather_bytes, resolve_group
from . import rng
from .workers import BatchRequest

_SAMPLES, _SAMPLES_IN_MEMORY = 4, 16
_LIMIT_S = 1.0  # after which no further sample is begun
_MOST_INDICES = 4096  # of a Subset
_SUMS = 8  # of a sample
_TOLERANCE = 1e-3
_DEPTH = 6  # of a sample
_MOST_OBJECTS, _MOST_ITEMS = 1000, 64  # looked at in search of generators; in a container

# Digest of what is compared exactly; for each sum of fractions, the sum and the root of its squares.
Description = tuple[str, list[tuple[float, float]]]
# A function that yields what another one makes of the samples of each request.
Load = Callable[[Sequence[BatchRequest], Callable[[list[Any]], Description]], Iterator[Description]]

_descriptions: dict[
    int, tuple[weakref.ref[Any], int, dict[str, Description]]
] = {}  # of data sets, by id; see `_describe`


def compare_samples(what: str, dataset: Any, load: Load) -> None:
    """Compare the data sets of all ranks, which have the same length. All ranks of the default group call it.

    Costs an exchange of some hundred bytes, and once for each data set the fetching of at most 16 samples of a list or
    of tensors, or twice 4 of other data sets.

    Args:
        what: name of the data, for the message.

    Raises:
        ValueError: they differ; on all ranks.
    """
    compare_descriptions(what, _describe(dataset, load) if env.COMPARE_DATA.get() else {})


def compare_descriptions(what: str, own: Mapping[str, Description]) -> None:
    """The same for what is described already, by name; ranks need not have the same names."""
    everyone = [json.loads(text) for text in all_gather_bytes(json.dumps(own).encode(), resolve_group(None))]
    for name in dict.fromkeys(name for each in everyone for name in each):
        found = {rank: each[name] for rank, each in enumerate(everyone) if name in each}
        first = next(iter(found))
        others = [rank for rank, each in found.items() if not _agree(found[first], each)]
        if others:
            raise ValueError(
                f"the ranks were given different {what}: {name} on {name_ranks(others)} differs from that on rank "
                f"{first}. All ranks need the same data set, which Photinus divides among them: of one that is divided "
                f"by rank already, samples would be lost. A split or a shuffle without a seed differs on each rank: "
                f"call photinus.init(seed=0) before it, or give its generator a seed. Sort lists of files. If the "
                f"difference is on purpose, set {env.COMPARE_DATA.name}=0."
            )


def _describe(dataset: Any, load: Load) -> dict[str, Description]:
    """Return what is compared of a data set, by name. It is fetched once."""
    count = len(dataset)
    earlier = _descriptions.get(id(dataset))
    if earlier is not None and earlier[0]() is dataset and earlier[1] == count:
        return earlier[2]
    found: dict[str, Description] = {}
    most = min(count, _SAMPLES_IN_MEMORY if type(_inner(dataset)) in (list, tuple, TensorDataset) else _SAMPLES)
    indices = [place * (count - 1) // max(1, most - 1) for place in range(most)]
    # Each one twice, and not as one request: what fetches many at once may leave out the second.
    requests = [BatchRequest(0, [index]) for index in indices for _ in range(2)]
    began_s = time.monotonic()
    # What fails here fails in training, too, which says what is wrong.
    with suppress(Exception), _generators_kept(dataset):
        found |= _subsets(dataset)
        described = load(requests, describe)
        for index in indices:
            first, second = next(described), next(described)
            if not _agree(first, second):
                break
            found[f"sample {index:,} of {count:,}"] = first
            if time.monotonic() - began_s > _LIMIT_S:
                break
    with suppress(TypeError):  # a list, whose samples cost nothing
        _descriptions[id(dataset)] = (weakref.ref(dataset, partial(_forget, id(dataset))), count, found)
    return found


def _forget(key: int, _: object) -> None:
    _descriptions.pop(key, None)


def _inner(dataset: Any) -> Any:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _subsets(dataset: Any) -> dict[str, Description]:
    """Return digests of the indices of torch's Subsets around a data set, which differ where samples look alike."""
    found: dict[str, Description] = {}
    while type(dataset) is Subset:
        subset = dataset.indices
        step = -(-len(subset) // _MOST_INDICES) or 1
        indices = [int(subset[place]) for place in range(0, len(subset), step)]
        which = "the choice of samples of the Subset" + " inside" * len(found)
        found[which] = (hashlib.blake2b(repr(indices).encode(), digest_size=8).hexdigest(), [])
        dataset = dataset.dataset
    return found


def _agree(one: Sequence[Any], other: Sequence[Any]) -> bool:
    pairs = zip(one[1], other[1], strict=False)
    return one[0] == other[0] and all(abs(a - b) <= _TOLERANCE * max(n, m) for (a, n), (b, m) in pairs)


def describe(samples: list[Any]) -> Description:
    """Return a digest of samples, and sums of their numbers with a fraction."""
    description = _Describing()
    description.add(samples)
    sums = zip(description.sums, description.squares, strict=True)
    return description.digest.hexdigest(), [(a, math.sqrt(b)) for a, b in sums if b]


class _Describing:
    def __init__(self) -> None:
        self.digest = hashlib.blake2b(digest_size=8)
        self.sums, self.squares = [0.0] * _SUMS, [0.0] * _SUMS
        self._fractions = 0

    def add(self, value: Any, depth: int = 0) -> None:
        """Add a part of a sample."""
        self.digest.update(f"{type(value).__qualname__};".encode())
        numpy: Any = sys.modules.get("numpy")
        if isinstance(value, torch.Tensor):
            self._add_tensor(value)
        elif numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            self._add_array(numpy.ascontiguousarray(value), depth)
        elif isinstance(value, float):
            self._add_fractions(torch.tensor([value], dtype=torch.float64, device="cpu"))
        elif value is None or isinstance(value, (int, str, bytes, complex)):
            self.digest.update(repr(value).encode(errors="replace"))
        elif isinstance(value, Mapping) and depth < _DEPTH:
            for key in sorted(value, key=repr):
                self.digest.update(repr(key).encode(errors="replace"))
                self.add(value[key], depth + 1)
        elif isinstance(value, (list, tuple)) and depth < _DEPTH:
            self.digest.update(f"{len(value)};".encode())
            for each in value:
                self.add(each, depth + 1)
        elif callable(getattr(value, "tobytes", None)):  # an image
            self.digest.update(value.tobytes())
        elif hasattr(value, "__dict__") and depth < _DEPTH:
            self.add(vars(value), depth + 1)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        self.digest.update(f"{tensor.dtype} {list(tensor.shape)};".encode())
        if tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return
        dense = tensor.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        dense = torch.view_as_real(dense).reshape(-1) if dense.is_complex() else dense
        if dense.is_floating_point():
            self._add_fractions(dense.double())
        else:
            self.digest.update(dense.view(torch.uint8).numpy().tobytes())

    def _add_array(self, array: Any, depth: int) -> None:
        self.digest.update(f"{array.dtype} {list(array.shape)};".encode())
        if array.dtype.kind in "fc":
            self._add_tensor(torch.from_numpy(array.astype("float64" if array.dtype.kind == "f" else "complex128")))
        elif array.dtype.kind == "O":
            self.add(array.reshape(-1).tolist(), depth + 1)
        else:
            self.digest.update(array.tobytes())

    def _add_fractions(self, values: torch.Tensor) -> None:
        values = torch.nan_to_num(values, nan=1.0, posinf=2.0, neginf=3.0)
        weights = (torch.arange(len(values), dtype=torch.float64, device="cpu") + self._fractions).cos()
        place = self._fractions % _SUMS
        self.sums[place] += float(weights @ values)
        self.squares[place] += float(values @ values)
        self._fractions += 1


@contextmanager
def _generators_kept(dataset: Any) -> Iterator[None]:
    """A block that does not change the GPU's generator, nor those that a data set keeps as attributes."""
    found = [state for state in map(rng.state_of, _generators_of(dataset)) if state is not None]
    saved = [(put_back, get()) for get, put_back in found]
    uses_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng([torch.cuda.current_device()] if uses_gpu else []):
            yield
    finally:
        for put_back, state in saved:
            put_back(state)


def _generators_of(dataset: Any) -> Iterator[Any]:
    """Yield the generators in a data set's attributes, in theirs, and in the file of its class."""
    found: dict[int, Any] = {}
    ahead = deque([dataset])
    while ahead and len(found) < _MOST_OBJECTS:
        value = ahead.popleft()
        if id(value) in found:
            continue
        found[id(value)] = value
        if rng.state_of(value) is not None:
            yield value
        elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ITEMS:
            ahead += value.values() if isinstance(value, dict) else value
        elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, torch.Tensor)):
            ahead += vars(value).values()
            code: Any = getattr(type(value), "__getitem__", None)
            ahead += [each for each in getattr(code, "__globals__", {}).values() if rng.state_of(each) is not None]
