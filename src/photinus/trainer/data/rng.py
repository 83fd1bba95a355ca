"""Random number generators: seeds that depend on nothing but what they are for, and states that can be saved.

Two streams per rank. A model has to be initialised alike on all ranks, so `seed_everything(seed)` gives every rank the
same stream, that of rank 0, which is also the one that a plain `torch.manual_seed(seed)` script draws from. Dropout has
to differ between ranks, so once the model stands `seed_everything(seed, rank)` gives each rank a stream of its own.
The order of samples and their augmentation use neither: they have seeds derived from (seed, epoch, sample), see
`derive_seed`, so that they do not move when a rank, a worker or a dropout layer comes or goes.

What numpy's `default_rng()` and torch's `Generator()` make belongs to whoever made it; only the global generators
are seeded, captured and restored here.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from .arguments import check_seed, whole_number

_NUMPY_GENERATOR = "MT19937"  # numpy's legacy global generator; anyone may have replaced it

session_seed = 0  # default of the seeds of loaders; `photinus.init(seed=...)` sets it
_ranks_are_alike = False  # since `photinus.init(seed=...)`, until training begins


def begin_session(seed: int | None) -> None:
    """Seeds all ranks alike, if there is a seed: models are made alike."""
    global session_seed, _ranks_are_alike
    session_seed, _ranks_are_alike = seed or 0, seed is not None
    if seed is not None:
        seed_everything(seed)


def set_ranks_apart(rank: int, *, is_done: bool = False) -> None:
    """Training begins: from the first call on, each rank draws its own numbers, if `photinus.init` gave all a seed.

    Args:
        is_done: the caller has seeded this rank, or restored its numbers.
    """
    global _ranks_are_alike
    if _ranks_are_alike and rank and not is_done:
        seed_everything(session_seed, rank)
    _ranks_are_alike = False


def derive_seed(*parts: int | str) -> int:
    """A seed (0 <= seed < 2**63) that depends on all of `parts` and on nothing else: SHA-256 of their text.

    The same on every machine and with every version of Python, numpy and torch.
    """
    # A hash and not a sum: seeds 1 and 2 of ranks 2 and 1 would be the same, and neighbours give related streams.
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") % (1 << 63)


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seeds the global generators of Python, numpy (when imported) and torch, the latter on all devices.

    Args:
        seed: whole number, 0 <= seed < 2**63. numpy takes its lowest 32 bits.
        rank: 0 (default) seeds with `seed` itself, as a script for one device does: call it so on all ranks before
            the model is made. Any other rank gets a seed derived from both.

    Raises:
        TypeError, ValueError: not such a number.
    """
    # Rank 0 draws what a process that is alone draws, so a run on one rank is the reference for all others.
    seed, rank = check_seed(seed), whole_number("rank", rank)
    if rank:
        seed = derive_seed(seed, "rank", rank)
    seed_host_streams(seed)
    torch.manual_seed(seed)


def seed_host_streams(seed: int) -> None:
    """Seeds Python's, numpy's (when imported) and torch's CPU generator, in some 15 us."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def seed_all_streams(seed: int) -> None:
    """Seeds these, and the generators of CUDA devices where this process uses them: what `torch.manual_seed` seeds.

    That takes 0.6 ms where there is no CUDA, as it keeps a traceback for each kind of device.
    """
    seed_host_streams(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@contextmanager
def keep_generators() -> Iterator[None]:
    """A block that does not change this process's random numbers, which are the training's."""
    python, of_torch = random.getstate(), torch.default_generator.get_state()
    numpy = _numpy()
    of_numpy = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(of_torch)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def state_of(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Return what gets and what sets the state of a random generator of any kind; None for other objects."""
    drawing: Any = sys.modules.get("numpy.random")
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, torch.Generator) or (drawing and isinstance(generator, drawing.RandomState)):
        return generator.get_state, generator.set_state
    if drawing and isinstance(generator, drawing.Generator):
        bits = generator.bit_generator
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def capture() -> dict[str, Any]:
    """The states of this rank's global generators, as types that `torch.load(weights_only=True)` accepts.

    Returns:
        "python": version, words (int64 [625]), gauss; "torch": uint8 bytes; when numpy is imported "numpy": words
        (int64 [624]), position, has_gauss, gauss; when this process uses CUDA "cuda": uint8 bytes, current device.
    """
    # As tensors and numbers, which a checkpoint can hold without code that would have to run.
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss},
        "torch": torch.default_generator.get_state(),
    }
    numpy = _numpy()
    if numpy is not None:
        found = numpy.random.get_state(legacy=False)
        if found["bit_generator"] == _NUMPY_GENERATOR:
            state["numpy"] = {
                "words": torch.tensor(found["state"]["key"].tolist(), dtype=torch.int64, device="cpu"),
                "position": int(found["state"]["pos"]),
                "has_gauss": int(found["has_gauss"]),
                "gauss": float(found["gauss"]),
            }
        else:
            warnings.warn(
                f"numpy's global generator is {found['bit_generator']}, not {_NUMPY_GENERATOR}: its state is not "
                f"saved, so numbers drawn from it differ after a resume",
                RuntimeWarning,
                stacklevel=2,
            )
    # If this process has not used CUDA, nothing was drawn there, and asking would cost a context.
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state().cpu()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Puts the generators back to what `capture` returned: all of them, or none when something is wrong with it.

    numpy is imported when its state was saved. A CUDA state goes to the current device; where there is no CUDA it is
    left out with a warning, since no other device draws the same numbers.

    Raises:
        ValueError: `state` is not what `capture` returns.
    """
    # All is made before anything is set: half of a state would be a run that nobody can repeat.
    try:
        python = state["python"]
        gauss = None if python["gauss"] is None else float(python["gauss"])
        python_state = (int(python["version"]), tuple(_words(python["words"], 625)), gauss)
        torch_state = _bytes_like(state["torch"], torch.default_generator.get_state().numel())
        numpy_state = _numpy_arguments(state["numpy"]) if "numpy" in state else None
        cuda_state = state.get("cuda")
        if cuda_state is not None and torch.cuda.is_available():
            cuda_state = _bytes_like(cuda_state, torch.cuda.get_rng_state().numel())
        random.Random().setstate(python_state)  # raises where it does not fit; a generator that nobody uses
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"this is not a state of the random number generators as photinus saves it "
            f"({type(error).__name__}: {error}); no generator was changed"
        ) from error
    numpy = _numpy()
    if numpy_state is not None and numpy is None:
        try:
            importlib.import_module("numpy")  # the run that saved had it; a later import has to find the state
            numpy = _numpy()
        except ImportError:
            warnings.warn("the state holds numpy's, but numpy is not installed here", RuntimeWarning, stacklevel=2)
    # All of it was checked: from here on nothing raises.
    random.setstate(python_state)
    if numpy_state is not None and numpy is not None:
        numpy.random.set_state(numpy_state)
    torch.default_generator.set_state(torch_state)
    # Last: it goes to the device that is current now, which the session has chosen before.
    if cuda_state is not None:
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda_state)
        else:
            warnings.warn(
                "the checkpoint holds a CUDA random state, but there is no CUDA here: dropout and the like will draw "
                "other numbers than on the GPU",
                RuntimeWarning,
                stacklevel=2,
            )


def _numpy() -> ModuleType | None:
    """numpy, when the process has imported it (torch does, where it is installed).

    numpy loads its random module at first use and seeds it from the clock then; loaded here, it can be seeded.
    """
    if "numpy" not in sys.modules:
        return None
    importlib.import_module("numpy.random")
    return sys.modules["numpy"]


def _numpy_arguments(saved: Mapping[str, Any]) -> tuple[Any, ...]:
    position = int(saved["position"])
    if not 0 <= position <= 624:
        raise ValueError(f"numpy's position {position} is not within 0..624")
    return (_NUMPY_GENERATOR, _words(saved["words"], 624), position, int(saved["has_gauss"]), float(saved["gauss"]))


def _words(tensor: torch.Tensor, count: int) -> list[int]:
    if tensor.shape != (count,) or tensor.dtype != torch.int64:
        raise ValueError(f"words need shape [{count}] and int64, not {list(tensor.shape)} and {tensor.dtype}")
    words: list[int] = tensor.tolist()
    if not all(0 <= word < 2**32 for word in words):
        raise ValueError("a word is not within 0..2**32-1")
    return words


def _bytes_like(tensor: torch.Tensor, count: int) -> torch.Tensor:
    if tensor.shape != (count,) or tensor.dtype != torch.uint8:
        raise ValueError(f"a generator of this torch has {count} uint8, not {list(tensor.shape)} {tensor.dtype}")
    return tensor.cpu()
