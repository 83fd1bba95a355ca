"""The command `photinus export`: the weights of a run as a safetensors file, which other libraries read."""

from __future__ import annotations

from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cli.parser import Parser
from ..errors import CheckpointError, UsageError
from ..runlog.units import plural, size

_ABOUT = """\
Write the weights of a run's newest checkpoint as a safetensors file, for
safetensors, Transformers and others. Names are those of your plain model,
whatever the run's strategy was. No GPU is needed.

RUN is the run's folder, or a checkpoint in it."""
_MORE = """\
examples:
  photinus export runs/digits -o model.safetensors
  photinus export runs/digits -o best.safetensors --best --dtype bfloat16
  photinus export runs/digits -o ema.safetensors --average ema

exit code: 0; 2 for wrong use, or if the file could not be written."""


def parser() -> Parser:
    """Return the command line."""
    new, kinds = Parser("export", "RUN -o FILE.safetensors [flags]", about=_ABOUT, more=_MORE), ("float32", "float16")
    new.add("run", SUPPRESS, metavar="RUN")
    new.add("--out -o --output FILE.safetensors", "(or -o) file to write; it must not exist yet", default="")
    new.add("--best", "take the best checkpoint, by Saving(best=...). default: the newest")
    new.add("--dtype TYPE", "convert to float32, float16 or bfloat16. default: as saved", one_of=(*kinds, "bfloat16"))
    new.add("--average NAME", "take the AveragedModel that the loop had in state={NAME: ...}")
    return new


def main(arguments: Sequence[str]) -> int:
    """Write the file, and print what is in it; return the exit code."""
    typed = parser().parse(arguments)
    path, run = Path(typed.out), Path(typed.run)
    if path.suffix != ".safetensors":
        raise UsageError(f"photinus export --out {typed.out or '?'}: needs the name of a file, like model.safetensors.")
    if path.exists() or not path.parent.is_dir():
        why = "that exists already; use another name, or remove it" if path.exists() else f"there is no {path.parent}"
        raise UsageError(f"photinus export --out {path}: {why}.")
    if not run.exists():
        raise UsageError(f"photinus export {run}: there is no such folder.")
    from safetensors.torch import save

    from ..trainer.checkpoint.durable import DurableFile, replacing
    from ..trainer.checkpoint.folder import find_checkpoint

    checkpoint = find_checkpoint(run, best=typed.best or None)
    tensors, tied = _tensors(checkpoint, typed.average, typed.dtype)
    try:
        with replacing(path) as unfinished, DurableFile(unfinished) as file:
            file.write(save(tensors, {"format": "pt", **tied}))
    except (OSError, KeyError) as error:  # a type that the format does not have is a KeyError
        raise UsageError(f"photinus export: {path} could not be written: {error}.") from error
    for name, first in tied.items():
        print(f"{name} is tied to {first}, which is written")
    print(f"{path} ({size(path.stat().st_size)}): {plural(len(tensors), 'tensor')} from {checkpoint.path}")
    return 0


def _tensors(checkpoint: Any, average: str | None, dtype: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors to write, by name; and names that are left out, with the name of the same tensor."""
    import torch

    from ..trainer.checkpoint.states import plain_names

    state = checkpoint.load(only=["model"], mapped=["model"])["model"]
    if average is not None:
        names, state = state.keys(), checkpoint.load(only=[average])[average]
        if not isinstance(state, Mapping) or "n_averaged" not in state:
            raise CheckpointError(f"{average!r} in {checkpoint.path} is not the state of an AveragedModel")
        state = plain_names(state, names)
    tensors: dict[str, Any] = {}
    tied: dict[str, str] = {}
    names_by_place: dict[object, str] = {}
    storages: set[int] = set()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            print(f"{name} is left out: a safetensors file holds plain tensors, and this is a {type(value).__name__}")
            continue
        # Two names for the same memory, which the format refuses: as Transformers does, the first one is written.
        place = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
        if names_by_place.setdefault(place, name) != name:
            tied[name] = names_by_place[place]
            continue
        kind = getattr(torch, dtype) if dtype and value.is_floating_point() else value.dtype
        storage = value.untyped_storage().data_ptr()
        tensors[name] = value.to(kind, copy=storage in storages).contiguous()
        storages.add(storage)
        # In float64, because the 8-bit types have no isfinite().
        if kind != value.dtype and value.double().isfinite().all() and not tensors[name].double().isfinite().all():
            most = float(value.abs().max())
            raise CheckpointError(f"{name} has values up to {most:.4g}, too large for {dtype}: use --dtype bfloat16")
    return tensors, tied
