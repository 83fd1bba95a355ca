"""A folder of checkpoints: written whole or not at all, verified before they are used, kept as long as needed.

    folder/
      step-00000100/  manifest.json  model.pt  optimizer.pt ...     see manifest.py
      step-00000200/
      .tmp-step-00000300-1f2e3d4c/   a writer at work, or one that died; the next writer removes it
      .writer.lock                   held by the writer, if there is one

Nothing stores which checkpoint is the newest: it is read from the manifests each time, so it cannot be wrong. A
checkpoint is renamed into place when all of it is on disk, and older ones are deleted only after that; whatever moment
a process is killed at, there is a complete one. If the newest was damaged later, the one before is used, with a
warning that says what was wrong.

`CheckpointFolder` is for one process (rank 0 writes); `on_all_ranks` and `seen_by_all` know of other ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...errors import CheckpointError
from ...job.world import name_ranks
from ...parallel.exchange.agreement import JSON, from_rank_0, gather_per_rank, place_in_group, together
from ...parallel.exchange.collectives import control_device, resolve_group
from ..data.arguments import whole_number
from .durable import (
    DurableFile,
    discard,
    explain_no_space,
    lock_folder,
    remove_debris,
    replacing,
    require_space,
    sync_folder,
)
from .manifest import ENTRY, NAME, Manifest, check_files, file_name, read_manifest, record_of, write_manifest
from .states import PlainState, require_whole, state_of

if TYPE_CHECKING:
    from .parts import Parts  # imports much of torch

CHECKPOINTS = "checkpoints"  # in a run's folder
_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")  # the second number: saved again at the same step
_METRIC_NAME = "metric_name"  # in the description
_PIECE_BYTES = 64 << 20  # in which rank 0 sends a checkpoint to ranks that do not see it
_MANIFEST_BYTES = 64 << 10  # allowance for it and the folder, when space is looked for


class Checkpoint:
    """One complete, verified checkpoint. Made by CheckpointFolder.

    Attributes:
        path: its folder.
        step, description, metric: as they were given to `CheckpointFolder.save`.
        serial: how many checkpoints the folder had seen before: later ones have higher numbers.
    """

    def __init__(self, path: Path, place: Path | None = None) -> None:
        """Reads and verifies the checkpoint at `path`, or a copy of it at `place`.

        Raises:
            CheckpointError: it is not complete and good.
        """
        self.path, self._place = path, place or path
        self._manifest = read_manifest(self._place)
        if _STEP.fullmatch(path.name) and _step_in(path.name) != self._manifest.step:
            raise CheckpointError(f"{path} holds step {self._manifest.step}: it was renamed, or mixed from two")
        self.step, self.serial, self.metric = self._manifest.step, self._manifest.serial, self._manifest.metric
        self.description: dict[str, Any] = self._manifest.description
        # Before anybody relies on it: torch.load takes flipped bits for weights, without a word.
        self._verified: list[tuple[int, ...]] = []
        self.verify()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step={self.step})"

    @property
    def entries(self) -> list[str]:
        """Names of the entries of the state."""
        return list(self._manifest.files)

    def verify(self) -> None:
        """Reads all files and compares sizes and checksums. Raises CheckpointError at the first difference."""
        before = self._fingerprints()
        check_files(self._place, self._manifest)
        self._verified = before

    def load(
        self, map_location: Any = "cpu", *, only: Collection[str] | None = None, mapped: Collection[str] = ()
    ) -> dict[str, Any]:
        """The state, by entry; read with weights_only=True, so that no code from the file runs.

        Args:
            map_location: as torch.load's; default: tensors come to the CPU.
            only: these entries; default: all.
            mapped: of these entries, tensors are mapped from the file instead of read (copy what is to last). Ranks of
                a host then share that memory, and pages that a rank does not need are not read.

        Raises:
            CheckpointError: damaged since it was verified, or one of `only` is not in it. Nothing is returned then.
        """
        unknown = [entry for entry in only or () if entry not in self._manifest.files]
        if unknown:
            raise CheckpointError(f"{self.path} has no entry {unknown[0]!r}; it has {', '.join(self.entries)}")
        # To read all again at each load would double its time. A changed file has other times or another inode.
        if self._fingerprints() != self._verified:  # touched since
            self.verify()
        state = {}
        for entry in self.entries if only is None else only:
            state[entry] = load_file(self._place / file_name(entry), map_location, mapped=entry in mapped)
        return state

    def _fingerprints(self) -> list[tuple[int, ...]]:
        """By which a file that was changed is recognised without reading it; an absent one fits no other."""
        prints: list[tuple[int, ...]] = []
        for entry in self._manifest.files:
            try:
                status = (self._place / file_name(entry)).stat()
                prints.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
            except OSError:
                prints.append(())
        return prints


def load_file(path: Path, map_location: Any = "cpu", *, mapped: bool) -> Any:
    """Return what torch.load reads from a file, mapped if possible. Raises CheckpointError."""
    # torch maps zip archives only, and only at paths that are UTF-8.
    mapped = mapped and str(path).encode(errors="replace") == os.fsencode(path) and zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: where they are; made by the first save.
        keep_last: how many of those written last are kept, at least 1.
        best: name of the metric, with "-" before it where the lowest is best; the best one is kept besides. Metrics
            that were saved under another name are not compared with it.

    Raises:
        TypeError, ValueError: `keep_last` is not such a number.
        CheckpointError: `folder` exists and is no folder.
    """

    def __init__(self, folder: Path | str, *, keep_last: int = 2, best: str | None = None) -> None:
        self.folder = Path(folder)
        self.keep_last = whole_number("keep_last", keep_last, least=1)
        self._metric_name = None if best is None else best.removeprefix("-")
        self._sign = 1.0 if best == self._metric_name else -1.0
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file; checkpoints need a folder")

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        description: Mapping[str, JSON],
        metric: float | None = None,
        parts: Parts | None = None,
        token: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> Path:
        """Writes a checkpoint, then deletes those that need no longer be kept. One process at a time, normally rank 0.

        When it returns, the checkpoint is complete and on disk. When it raises, all those from before are as they were
        and nothing half-written is left.

        Args:
            step: of the training; names the folder. Saving a step again replaces what was saved for it.
            state: by entry (letters, digits, `_`, `.`, `-`): objects with state_dict, or plain states.
            description: what a reader wants to know without loading: JSON.
            metric: the value that `best` names; None and NaN: never the best.
            parts: more entries, which other hosts may write, too.
            token: ends the name of the folder while it is written, for them to find it.
            check: called when all is written, before it becomes a checkpoint; may raise to prevent that.

        Raises:
            TypeError, ValueError: an argument cannot be saved.
            CheckpointError: no space (path, needed and free bytes), no permission, or another job writes here.
        """
        step = whole_number("step", step)
        metric = None if metric is None or math.isnan(metric) else float(metric)
        # As it will be read: tuples become lists here, and what is no JSON fails here.
        described = json.loads(json.dumps(dict(description)))  # raises before anything is written
        if metric is not None and self._metric_name is not None:
            described[_METRIC_NAME] = self._metric_name
        wrong = [entry for entry in state if not ENTRY.fullmatch(entry)]
        if wrong or not state:
            told = (
                f"entry {wrong[0]!r} cannot name a file: use letters, digits, '_', '.' and '-'" if wrong else "no state"
            )
            raise ValueError(f"cannot save step {step}: {told}")
        # Only rank 0 is here: it would wait for parts that no other rank sends.
        for entry, value in state.items():
            require_whole(value, entry)
        plain = {entry: PlainState(state_of(value), entry) for entry, value in state.items()}
        needed_bytes = sum(part.needed_bytes for part in plain.values()) + _MANIFEST_BYTES
        needed_bytes += parts.needed_bytes if parts else 0
        try:
            with explain_no_space(self.folder, needed_bytes):
                self.folder.mkdir(parents=True, exist_ok=True)
                # What a killed process has left may be the space that is lacking.
                self.remove_debris()
                with lock_folder(self.folder):
                    path = self._write(step, plain, needed_bytes, described, metric, parts, token, check)
                    # Never before: until the new one is complete, the old ones are all that there is.
                    self._delete_old()
        except OSError as error:
            raise CheckpointError(
                f"step {step} could not be saved in {self.folder}: {error}. Checkpoints written before are untouched."
            ) from error
        return path

    def remove_debris(self) -> None:
        """Removes what a process that was killed has left of a checkpoint. Raises OSError, CheckpointError."""
        if self.folder.exists():
            with lock_folder(self.folder) as has_locks:
                if has_locks:
                    remove_debris(self.folder)

    def newest(self) -> Checkpoint | None:
        """The checkpoint written last that is complete and good; None when there is none at all.

        Each that is newer but damaged is reported by a RuntimeWarning that names file and reason.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged. Beginning from nothing would then hide a loss.
        """
        return self._first_good(self._paths(newest_first=True))

    def best(self) -> Checkpoint | None:
        """The complete and good checkpoint with the best metric (of equals the newest); None when none has that one.

        Warns and raises as `newest` does.
        """
        # A manifest that cannot be read might be the best's: it is tried, and reported, first.
        readable = {path for path, _ in self.readable()}
        unreadable = [path for path in self._paths() if path not in readable and (path / NAME).exists()]
        return self._first_good([*unreadable, *(path for path, _ in self._by_metric())])

    def _write(
        self,
        step: int,
        plain: Mapping[str, PlainState],
        needed_bytes: int,
        description: Any,
        metric: float | None,
        parts: Parts | None,
        token: str,
        check: Callable[[], None],
    ) -> Path:
        require_space(self.folder, needed_bytes)
        path = self._free_path(step)
        with replacing(path, token) as unfinished:
            unfinished.mkdir()
            names = [file_name(entry) for entry in plain]
            if parts is not None:
                parts.write(unfinished)
                names = [*parts.names, *names]
            for entry, part in plain.items():
                with DurableFile(unfinished / file_name(entry)) as file:
                    torch.save(part.value, file)  # type: ignore[arg-type]
            files = {name[:-3]: record_of(unfinished / name) for name in names}
            serial = 1 + max((manifest.serial for _, manifest in self.readable()), default=0)
            check()
            # Last: a folder without a manifest is no checkpoint, so nothing half-written is taken for one.
            write_manifest(unfinished, Manifest(step, serial, files, description, metric))
            sync_folder(unfinished)
        return path

    def _free_path(self, step: int) -> Path:
        # A step that is saved again (after a resume) gets another name: the older one stays until this is complete.
        path, again = self.folder / f"step-{step:08d}", 1
        while path.exists():
            again += 1
            path = self.folder / f"step-{step:08d}-{again}"
        return path

    def _delete_old(self) -> None:
        """Deletes what need not be kept. What was just written is complete and the newest, so it always stays."""
        complete = []
        for path, manifest in self.readable():
            with contextlib.suppress(CheckpointError):  # a damaged one does not count; newest() reports it
                check_files(path, manifest, digests=False)
                complete.append((path, manifest))
        # Two of one step are one place of the training, and must not push an older place out.
        by_step: dict[int, tuple[Path, Manifest]] = {}
        for path, manifest in sorted(complete, key=lambda found: -found[1].serial):
            by_step.setdefault(manifest.step, (path, manifest))  # of those saved twice at one step the later
        current = [*by_step.values()]
        keep = {path for path, _ in current[: self.keep_last]}
        keep |= {path for path, _ in self._by_metric(current)[:1]}
        for path in self._paths():
            if path not in keep and (path / NAME).exists():  # without a manifest it is not ours to delete
                try:
                    read_manifest(path)
                except CheckpointError as error:
                    warnings.warn(
                        f"{error}. This checkpoint is deleted, because a newer one is whole", RuntimeWarning, 3
                    )
                try:
                    discard(path)
                except OSError as error:
                    warnings.warn(f"{path} is no longer needed but cannot be deleted: {error}", RuntimeWarning, 3)

    def _paths(self, *, newest_first: bool = False) -> list[Path]:
        """Whatever looks like a checkpoint by its name, good or not."""
        try:
            paths = [path for path in self.folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
        except FileNotFoundError:
            return []
        if newest_first:
            serials = {path: manifest.serial for path, manifest in self.readable(paths)}
            # A manifest that cannot be read might be the newest: it is tried, and reported, first.
            paths.sort(key=lambda path: (serials.get(path, math.inf), _step_in(path.name)), reverse=True)
        return paths

    def readable(self, paths: Collection[Path] | None = None) -> Iterator[tuple[Path, Manifest]]:
        """Yield checkpoints whose manifests can be read, good or not."""
        for path in self._paths() if paths is None else paths:
            try:
                yield path, read_manifest(path)
            except CheckpointError:  # reported by newest(), which tries it
                continue

    def _by_metric(self, found: Collection[tuple[Path, Manifest]] | None = None) -> list[tuple[Path, Manifest]]:
        """Those that have the metric, the best first."""
        measured = [
            (self._sign * manifest.metric, manifest.serial, path, manifest)
            for path, manifest in (self.readable() if found is None else found)
            if manifest.metric is not None and manifest.description.get(_METRIC_NAME) == self._metric_name
        ]
        return [(path, manifest) for *_, path, manifest in sorted(measured, key=lambda one: one[:2], reverse=True)]

    def _first_good(self, paths: list[Path]) -> Checkpoint | None:
        refused = []
        for path in paths:
            try:
                found = Checkpoint(path)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            # A warning only if another one is used in its place. Otherwise the error below has the reasons.
            for reason in refused:
                warnings.warn(
                    f"a checkpoint was passed over, {found.path} is used instead: {reason}", RuntimeWarning, 3
                )
            return found
        if refused:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(refused)}. To start over, delete them or take "
                f"another folder."
            )
        return None


def find_checkpoint(path: Path, *, best: Any = None, step: int | None = None) -> Checkpoint:
    """The checkpoint at `path`; of a run's folder, or a folder of checkpoints, the newest, the best or that of a step.

    Args:
        best: name of the metric, as a `Loop` was given it: "accuracy", or "-loss" where the lowest is best; True for
            the one that the newest checkpoint's loop was given.

    Raises:
        CheckpointError: nothing is there, nothing usable, or not the one that is asked for.
    """
    if best is True:
        newest = find_checkpoint(path)
        best = newest.load(only=["run"])["run"]["save_best"] if "run" in newest.entries else None
        if best is None:
            raise CheckpointError(f"{path} has no best checkpoint: its run needed save=photinus.Saving(best=...)")
    inside = path / CHECKPOINTS
    folder = CheckpointFolder(inside if inside.is_dir() else path, best=best)
    # Users give what they have: a run, its folder of checkpoints, or one of these.
    found: Checkpoint | None
    is_checkpoint = (path / NAME).exists() and best is None and step is None
    if is_checkpoint or not (inside.is_dir() or folder._paths()):
        if runs := sorted(each.parent.name for each in path.glob(f"*/{CHECKPOINTS}")):
            raise CheckpointError(f"{path} is a folder of runs: name one of them, as in {path / runs[-1]}")
        return Checkpoint(path)
    if step is not None:
        found = folder._first_good([p for p in folder._paths(newest_first=True) if _step_in(p.name) == step])
    else:
        found = folder.newest() if best is None else folder.best()
    if found is None:
        asked = (f" of step {step}" if step is not None else "") + (
            f" with a metric {folder._metric_name!r}" if best else ""
        )
        there = ", ".join(sorted(each.name for each in folder._paths())) or "none"
        raise CheckpointError(f"{folder.folder} holds no checkpoint{asked}; it holds {there}")
    return found


@contextmanager
def on_all_ranks(choose: Callable[[], Checkpoint | None]) -> Iterator[Checkpoint | None]:
    """The checkpoint that `choose` finds on rank 0, opened and verified on every rank. Called by all ranks.

        with on_all_ranks(folder.newest) as checkpoint:
        with on_all_ranks(lambda: find_checkpoint(args.resume)) as checkpoint:

    Ranks that do not see it, or find another in its place, have a copy of rank 0's for the length of the block.

    Raises:
        CheckpointError: on all ranks, when `choose` raises on rank 0, or a rank finds that checkpoint damaged.
    """
    chosen: list[Checkpoint | None] = []

    def path_on_rank_0() -> JSON:
        chosen.append(choose())
        return str(chosen[0].path.absolute()) if chosen[0] is not None else None

    # Rank 0 chooses for all: a network disk may show a new folder to some ranks later than to others.
    name = from_rank_0(path_on_rank_0, "choosing a checkpoint", is_long=True)
    with opened_by_all(name, chosen[0] if chosen else None) as checkpoint:
        yield checkpoint


@contextmanager
def opened_by_all(name: str | None, found: Checkpoint | None) -> Iterator[Checkpoint | None]:
    """The checkpoint that rank 0 `found`, opened and verified on every rank, as `on_all_ranks`. Called by all ranks.

    Args:
        name: its absolute path, which all ranks know; None for none.
    """
    if name is None:
        yield None
        return
    path = Path(name)
    with together(f"opening {path}", is_long=True):
        if found is None and (path / NAME).exists():
            found = Checkpoint(path)
    with seen_by_all(path, _digests(found)) as place:
        with together(f"opening a copy of {path}"):
            if found is None or place != path:
                found = Checkpoint(path, place)
        yield found


def _digests(checkpoint: Checkpoint | None) -> str:
    records = {} if checkpoint is None else checkpoint._manifest.files
    return " ".join(f"{entry}={record.digest}" for entry, record in records.items())


def _step_in(name: str) -> int:
    match = _STEP.fullmatch(name)
    assert match is not None, "only names that match are looked at"
    return int(match[1])


@contextmanager
def seen_by_all(path: Path, digest: str) -> Iterator[Path]:
    """Give the path where this rank can read, inside the block, what rank 0 finds at `path`. Called by all ranks.

    It is `path`, or a copy among this host's temporary files.

    Args:
        digest: of what this rank finds there; "" for nothing.
    """
    digests, rank = gather_per_rank(digest), place_in_group()[0]
    # By content, not by path: each host may have another run of the same name on its own disk.
    lacking = [other for other, found in enumerate(digests) if found != digests[0]]
    if not lacking:
        yield path
        return
    if rank == 0:
        there = "something else" if any(digests[other] for other in lacking) else "nothing"
        text = f"{path} is not shared: {name_ranks(lacking)} found {there} there, so rank 0 sends it"
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def listed() -> JSON:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        return [[str(file.relative_to(path)), file.stat().st_size] for file in files]

    files, place = from_rank_0(listed, f"listing {path}"), path
    group = resolve_group(None)
    with contextlib.ExitStack() as ends:
        with together(f"making room for a copy of {path}"):
            if rank in lacking:
                place = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="photinus-")), path.name)
                for name, size in files:
                    (place / name).parent.mkdir(exist_ok=True)
                    # Room for all before the first byte is sent: a full disk is then an error on all ranks.
                    with open(place / name, "wb") as file:
                        os.posix_fallocate(file.fileno(), 0, max(1, size))
                        file.truncate(size)
        for name, size in files:
            for start in range(0, size, _PIECE_BYTES):
                # Through memory in pieces: the checkpoint may be larger than what a host has.
                piece = torch.empty(min(_PIECE_BYTES, size - start), dtype=torch.uint8, device="cpu")
                if rank == 0:
                    with open(path / name, "rb") as read:
                        read.seek(start)
                        read.readinto(piece.numpy().data)
                sent = piece.to(control_device(group))
                dist.broadcast(sent, 0)
                if rank in lacking:
                    with open(place / name, "r+b") as written:
                        written.seek(start)
                        written.write(sent.cpu().numpy().data)
        yield place
