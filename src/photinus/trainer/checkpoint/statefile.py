"""`photinus.save` and `photinus.load`: states in one file, which plain torch.load reads, too.

The file is what torch.save makes. Before anything is read from it, its own checksums are compared, which torch does not
do. Files that torch.save made without us are taken as well, with weights_only=True.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...errors import CheckpointError
from ...parallel import compare_ranks, strategy_of
from ...parallel.exchange.agreement import check_alike, from_rank_0, gather_per_rank, place_in_group, together
from ...parallel.exchange.tensors import tensors_in
from ...parallel.zero.split_states import copy_state, is_known_split
from ..data.loader import Loader, note_loaded
from . import state_memory
from .durable import (
    DurableFile,
    checksum,
    explain_no_space,
    remove_dead_files,
    replacing,
    require_space,
    temporary_folder,
    verify_archive,
)
from .folder import find_checkpoint, load_file, on_all_ranks, seen_by_all
from .image import Content
from .state_memory import HostImage
from .states import PlainState, apply_states, bytes_held, check_states, local_states, state_of
from .writer import FILE_WRITER, Order

if TYPE_CHECKING:
    from .parts import Parts  # imports much of torch

IN_PARTS = "state"


def save(path: str | os.PathLike[str], *, wait: bool = True, **state: Any) -> None:
    """Save objects in one file, atomically. All ranks call it.

        photinus.save("runs/x/last.pt", model=model, optimizer=optimizer, loader=batches, epoch=epoch)

    When it returns on any rank, the file is complete and on disk. When it raises, it raises on all ranks, and `path` is
    unchanged.

    Args:
        path: path of the file. Missing folders are created.
        wait: False returns when the state is copied: another process writes the file meanwhile. The next `save` or
            `load`, and the end of the session, wait for it; what went wrong is raised there.
        state: by name: objects with state_dict, tensors, numbers, text, and lists and dicts of these. A model may be
            wrapped; the file has the names of the plain model. Of a `photinus.loader` the position is saved, so that
            the order of the samples continues, also inside an epoch.

    Raises:
        TypeError: an object cannot be saved so that it loads safely.
        ModelMismatchError: the ranks hold different weights of a wrapped model, or made different optimizer steps; off
            for models wrapped with check_ranks=False.
        CheckpointError: the file could not be written (disk full: with the path, the bytes needed and the bytes free).
    """
    path = Path(path)
    with together(f"saving {path}", is_long=True):
        finish_writing()
        if not state:
            raise ValueError(f"nothing to save in {path}: give it by name, as in save(path, model=model, epoch=3)")
        compare_ranks([value for value in state.values() if isinstance(value, nn.Module)], f"before saving {path} ")
        real = Path(os.path.realpath(path))  # as torch.save does, what a link leads to is written, and not the link
        image, memory = _hold_parts(real.parent, state), FILE_WRITER.memory
        if image is None:
            states = {name: state_of(value) for name, value in state.items()}  # on all ranks: some exchange for theirs
            if place_in_group()[0] == 0:
                if not wait:
                    copy = memory.plan(Content(states, {}), alone=True)
                    image = memory.share(copy, memory.take(copy), real.parent, alone=True)
                if image is None:
                    write_state_file(path, states)
        if image is not None and image.files:
            _finish_at_exit()
            FILE_WRITER.write(Order(str(real)), image)
            if wait:
                finish_writing()


def _hold_parts(folder: Path, state: Mapping[str, Any]) -> HostImage | None:
    """Copy, on all ranks, what strategies split; None where nothing is, or it is small (see `StateMemory.share`)."""
    trained = [value for value in state.values() if isinstance(value, (nn.Module, torch.optim.Optimizer))]
    if place_in_group()[1] == 1 or not any(strategy_of(each).splits(each) for each in trained):
        return None
    if sum(gather_per_rank(bytes_held(trained))) < state_memory.LEAST_BYTES:
        return None
    loaders = {name: state_of(value) for name, value in state.items() if isinstance(value, Loader)}
    memory, _ = FILE_WRITER.memory, FILE_WRITER.memory.hosts()
    with together(f"copying what to save in {folder}"):
        content = Content(*local_states({**state, **loaders}))
        is_known, copy = all(map(is_known_split, tensors_in(content.own))), memory.plan(content)
    if not is_known:  # only torch can gather it
        return None
    is_split = bool(content.own)
    return memory.share(copy, memory.take(copy, is_split=is_split), folder, is_split=is_split)


def finish_writing() -> None:
    """Waits for the file that `save(wait=False)` is writing on this rank. Raises as `save` does."""
    FILE_WRITER.wait()


@functools.cache
def _finish_at_exit() -> None:
    """For scripts that end without the end of a session: an error makes the exit code 1, as elsewhere."""

    def finish() -> None:
        try:
            finish_writing()
        except Exception as error:  # noqa: BLE001 - Python would print it, and exit with code 0
            print(f"photinus: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)
        FILE_WRITER.close()

    atexit.register(finish)


def load(path: str | os.PathLike[str], *, best: Any = None, step: Any = None, **objects: Any) -> dict[str, Any]:
    """Load what `save` (or torch.save of a dict, or a Loop) wrote: into all objects or into none, on all ranks.

        saved = photinus.load("runs/x/last.pt", model=model, optimizer=optimizer, loader=batches)
        epoch = saved["epoch"]
        photinus.load("runs/x", model=model, best=True)

    Args:
        path: a file, a run's folder, or a checkpoint in it. Ranks that cannot see it get it from rank 0.
        best: in a run's folder, load the best checkpoint: True for the metric of the run's `Saving(best=...)`, or the
            name of a metric ("-loss": the lowest is best).
        step: in a run's folder: load the checkpoint of this step.
        objects: objects with load_state_dict, by the names under which they were saved. Optimizers and schedulers get
            the saved options, as in torch. (A Loop keeps options that the script changed.)

    Returns:
        The entries of the file for which no object was given; tensors on the CPU.

    Raises:
        CheckpointError: the file is missing, damaged or of other objects. It is raised on all ranks if it happens on
            one, and then no object on any rank has changed.
        TypeError: an object has no load_state_dict.
    """
    where = Path(path)
    if callable(getattr(best, "load_state_dict", None)):  # saved under this name
        objects, best = {**objects, "best": best}, None
    check_alike({"path": str(where), "best": best, "step": step}, "the ranks load different checkpoints")
    # Ranks of a host share what they map, so there are not as many whole copies as ranks.
    mapped = place_in_group()[1] > 1
    with contextlib.ExitStack() as ends:

        def is_folder() -> bool:
            finish_writing()
            return where.is_dir()

        if from_rank_0(is_folder, f"looking at {where}", is_long=True):
            checkpoint = ends.enter_context(on_all_ranks(lambda: find_checkpoint(where, best=best, step=step)))
            assert checkpoint is not None, "one was found"
            read = partial(checkpoint.load, mapped=checkpoint.entries if mapped else ())
        else:
            with together(f"loading {path}", is_long=True):
                if best is not None or step is not None:
                    kind = "is a file" if where.exists() else "does not exist"
                    raise ValueError(f"best= and step= choose of a run's folder, but {path} {kind}")
                digest = _verify(where) if where.exists() or place_in_group()[0] == 0 else ""
            place = ends.enter_context(seen_by_all(where, digest))
            read = partial(read_state_file, place, mapped=mapped, verified=place == where)
        with together(f"loading {path}", is_long=True):
            states = read()
            check_states(objects, states, str(path))
        undo = None
        try:
            with together(f"loading {path}", is_long=True):
                undo = apply_states(objects, states, str(path))
        except Exception as error:
            if undo is None:
                raise
            raise CheckpointError(f"{error} {undo()}") from error  # another rank failed
        given = [states[name] for name in objects] or [*states.values()]
        if any(isinstance(each, Mapping) and "param_groups" in each for each in given):
            note_loaded(str(path))
        return {name: copy_state(value) for name, value in states.items() if name not in objects}


def write_state_file(path: Path, states: Mapping[str, Any], parts: Parts | None = None, token: str = "") -> None:
    """Writes plain states into `path`, atomically, replacing what was there. Raises TypeError, CheckpointError.

    Args:
        parts: what is written in place of `states`: a file called IN_PARTS.
        token: ends the name of the folder in which it is written.
    """
    plain = PlainState(dict(states), "state")
    needed_bytes = plain.needed_bytes + (parts.needed_bytes if parts else 0)
    path = Path(os.path.realpath(path))
    try:
        with explain_no_space(path.parent, needed_bytes):
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_dead_files(path)
            require_space(path.parent, needed_bytes)
            with replacing(path) as unfinished:
                if parts is None:
                    with DurableFile(unfinished) as file:
                        torch.save(plain.value, file)  # type: ignore[arg-type]
                else:
                    with temporary_folder(path, token) as folder:
                        parts.write(folder)
                        os.replace(folder / IN_PARTS, unfinished)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}. What it held before is untouched.") from error


def read_state_file(path: Path, *, mapped: bool, verified: bool) -> dict[str, Any]:
    """The states of a file that `write_state_file` or torch.save made.

    Args:
        verified: it has been found good already.
        mapped: tensors are mapped from the file, where its format allows it; copy what is to last.

    Raises:
        CheckpointError: damaged, no dict, or not readable without running code from it.
    """
    if not verified:
        _verify(path)
    states = load_file(path, mapped=mapped)
    if not isinstance(states, dict):
        raise CheckpointError(f"{path} holds a {type(states).__name__}, not a dict of named states")
    return states


def _verify(path: Path) -> str:
    """The checksum of a file that is good. Raises CheckpointError."""
    try:
        if not path.is_file() and path.exists():
            raise CheckpointError(f"{path} is not a file that photinus.save made, but a FIFO or a device")
        with path.open("rb") as file:
            is_archive = file.read(2) == b"PK"
        return verify_archive(path) if is_archive else checksum(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path} (seen from {Path.cwd()})") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
