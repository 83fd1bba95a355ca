"""Training on data without a length, on real ranks: the same samples in the same steps, the same weights."""

from __future__ import annotations

import json
import os
import random
import signal
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from tests.ranks import run_ranks, values
from tests.small_run import QUIET, fingerprint
from tests.strangers.documents import blocks
from tests.streams import ALL, KINDS

LIFE = "tests.dist.test_streams:life"


def parquet(folder: str) -> Any:
    """The samples of tests.streams in a Parquet file for each of four files, as Hugging Face's datasets reads them."""
    import datasets

    files = sorted(map(str, Path(folder).glob("*.parquet")))
    read = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=folder)
    return read.map(lambda row: {"x": row["x"] + 0})


def write_parquet(folder: Path) -> str:
    pyarrow = pytest.importorskip("pyarrow", reason="reads Parquet files for datasets")
    pytest.importorskip("datasets", reason="Hugging Face's IterableDataset is tested with the package itself")
    from pyarrow.parquet import write_table

    folder.mkdir()
    for file in range(4):
        samples = [sample for sample in ALL if sample // 100 == file]
        write_table(pyarrow.table({"x": samples}), folder / f"{file}.parquet", row_group_size=4)
    return str(folder)


def nodes(shard: int, shards: int) -> Any:
    """torchdata's nodes over a shard."""
    from torchdata.nodes import IterableWrapper, Loader

    return Loader(IterableWrapper(KINDS["function"]()(shard, shards)))


def broken(shard: int, shards: int) -> Any:
    yield from range(9)
    if shard == 1:
        raise OSError("the file is cut off")


def dataset_of(kind: str) -> Any:
    if kind.startswith("shuffled "):  # by the library, whose state does not hold its buffer
        return parquet(kind.removeprefix("shuffled ")).shuffle(seed=1, buffer_size=6)
    functions = {"nodes": nodes, "broken": broken}
    return functions.get(kind) or (KINDS[kind]() if kind in KINDS else parquet(kind))


def number_of(row: Any) -> Any:
    return row["x"] if isinstance(row, dict) else row


def life(
    rank: int,
    world_size: int,
    kind: str,
    out: str | None = None,
    until: int = 10**6,
    kill_at: int = 0,
    start: int = 0,
    epochs: int = 2,
    save_every: int = 1,
    is_weighted: bool = False,
    shards: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """One process's life: trains to the end, or leaves the body of step `until`. Returns which samples it saw when."""
    with photinus.init("auto", "cpu", seed=3):
        torch.manual_seed(1)
        model = torch.nn.Linear(1, 1).double()
        model, optimizer = photinus.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
        batches = photinus.loader(dataset_of(kind), batch_size=8, shards=shards, **options)
        save = photinus.Saving(every_steps=save_every, keep_last=1)
        loop = photinus.Loop(model, optimizer, batches, epochs=epochs, out=out, report=QUIET, save=save)
        seen: dict[int, list[int]] = {}
        for batch in loop:
            numbers = number_of(batch)
            x = (numbers.double() % 10_000 / 400).reshape(-1, 1)
            seen[loop.step] = numbers.tolist() if loop.weight else []
            loop.backward(((model(x) - 3 * x) ** 2).mean(), weight=len(x) if is_weighted else None)
            optimizer.step()
            optimizer.zero_grad()
            if out is not None:
                with open(f"{out}.seen.{start}.{rank}", "a") as file:
                    file.write(json.dumps([loop.step, seen[loop.step]]) + "\n")
            if loop.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if loop.step == until:
                break
        weights = [each.item() for each in model.parameters()]
        rows = [(row["step"], row["loss"]) for row in loop.history]
        return {"seen": seen, "weights": weights, "bits": fingerprint(model), "rows": rows, "step": loop.step}


def merged(ranks: list[dict[str, Any]]) -> list[tuple[int, list[int]]]:
    """The global batch of each step."""
    return [(int(step), list(chain(*(rank["seen"][step] for rank in ranks)))) for step in ranks[0]["seen"]]


def lives(world_size: int, timeout_s: float = 60.0, **arguments: Any) -> list[dict[str, Any]]:
    return values(run_ranks(LIFE, world_size=world_size, backend="photinus", arguments=arguments, timeout_s=timeout_s))


def test_several_ranks_train_as_one_and_go_on_inside_an_epoch_at_another_world_size(tmp_path: Path) -> None:
    options = {"kind": "split", "shards": 4, "shuffle": 3, "save_every": 4}
    alone = lives(1, **options)
    out = str(tmp_path / "run")
    found: list[Any] = []
    for world_size, until in ((3, 5), (2, 10**6)):
        # The losses of a rank that repeats samples have no weight, whatever the body says.
        ranks = lives(world_size, out=out, until=until, is_weighted=until > 5, **options)
        found += [(step, batch) for step, batch in merged(ranks) if step != until]  # a body that is left does not count
    assert found == merged(alone)
    assert sorted(sample % 10_000 for _, batch in found for sample in batch) == sorted(2 * ALL)
    # Shards end at different steps: what ranks repeat counts for nothing.
    assert ranks[0]["weights"] == pytest.approx(alone[0]["weights"], rel=1e-12)
    assert [loss for _, loss in ranks[0]["rows"]] == pytest.approx([loss for _, loss in alone[0]["rows"]], rel=1e-6)
    assert [step for step, _ in ranks[0]["rows"]] == [9, 18]


def stream_of(kind: str, tmp_path: Path) -> str:
    if kind == "nodes":
        pytest.importorskip(
            "torchdata.nodes", reason="torchdata's state_dict protocol is tested with the package itself"
        )
    files = write_parquet(tmp_path / "files") if kind in ("parquet", "shuffled") else kind
    return f"shuffled {files}" if kind == "shuffled" else files


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*KINDS, "parquet", "nodes"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, 5])
def test_each_sample_comes_once_an_epoch_on_1_to_4_ranks(kind: str, workers: int, shuffle: int, tmp_path: Path) -> None:
    options = {"kind": stream_of(kind, tmp_path), "shuffle": shuffle, "num_workers": workers}
    options |= {} if kind == "whole" else {"shards": 4}
    alone = lives(1, timeout_s=200, **options)
    assert sorted(sample % 10_000 for _, batch in merged(alone) for sample in batch) == sorted(2 * ALL)
    for world_size in (2, 3, 4):
        ranks = lives(world_size, timeout_s=200, **options)
        assert merged(ranks) == merged(alone)
        assert ranks[0]["weights"] == pytest.approx(alone[0]["weights"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "workers", "shuffle"),
    [
        ("split", 2, 0),
        ("function", 0, 7),
        ("whole", 2, 5),
        ("parquet", 0, 0),
        ("parquet", 2, 6),
        ("shuffled", 0, 0),
        ("nodes", 2, 0),
    ],
)
def test_after_20_kills_at_random_world_sizes_each_step_had_its_samples(
    kind: str, workers: int, shuffle: int, tmp_path: Path
) -> None:
    options = {"kind": stream_of(kind, tmp_path), "shuffle": shuffle, "num_workers": workers, "epochs": 7}
    options |= {} if kind == "whole" else {"shards": 4}
    undisturbed = dict(merged(lives(1, timeout_s=200, **options)))
    out, draw, done = tmp_path / "run", random.Random(f"{kind} {workers}"), 0
    for start in range(21):
        world_size = draw.choice([1, 2, 4])
        # In the bodies of an epoch's first and last steps, and several in one epoch.
        done = min(len(undisturbed) - 1, done + draw.choice([1, 1, 2, 3, 5]))
        kill_at = done if start < 20 else 0
        expect = dict.fromkeys(range(world_size), -9) if kill_at else {}
        run_ranks(
            LIFE, world_size=world_size, backend="photinus", timeout_s=200, expect=expect,
            arguments={**options, "out": str(out), "kill_at": kill_at, "start": start},
        )  # fmt: skip
        lines = [
            [json.loads(line) for line in Path(f"{out}.seen.{start}.{rank}").read_text().splitlines()]
            for rank in range(world_size)
        ]
        for step in zip(*lines, strict=True):
            assert list(chain(*(batch for _, batch in step))) == undisturbed[step[0][0]], (start, step[0][0])


def plain(rank: int, world_size: int, path: str, goes_on: bool) -> list[list[int]]:
    """A loop of one's own: its batches of an epoch, up to a save; or those after it."""
    with photinus.init("auto", "cpu"):
        batches = photinus.loader(KINDS["split"](), batch_size=8, shuffle=3)
        seen: list[list[int]] = []
        if goes_on:
            photinus.load(path, loader=batches)
        for batch in batches:
            seen.append(batch.tolist() if batches.weight else [])
            if not goes_on and len(seen) == 4:
                photinus.save(path, loader=batches)
        return seen


@pytest.mark.slow
def test_a_saved_loader_has_the_places_of_all_ranks(tmp_path: Path) -> None:
    def run(world_size: int, *, goes_on: bool) -> list[list[int]]:
        arguments = {"path": str(tmp_path / "last.pt"), "goes_on": goes_on}
        call = "tests.dist.test_streams:plain"
        ranks = values(run_ranks(call, world_size=world_size, backend="photinus", arguments=arguments))
        return [list(chain(*step)) for step in zip(*ranks, strict=True)]

    whole = run(4, goes_on=False)
    assert sorted(chain(*whole)) == ALL
    assert run(1, goes_on=True) == run(2, goes_on=True) == whole[4:]


@pytest.mark.slow
def test_a_rank_that_cannot_read_its_shard_is_named_by_the_others() -> None:
    expect = {0: 1, 1: 1}
    arguments = {"kind": "broken"}
    whole, cut = run_ranks(LIFE, world_size=2, backend="photinus", arguments=arguments, expect=expect)
    assert "OSError: the file is cut off" in cut.output
    assert "rank 1 could not read batch 2 of the stream: see its own error. Rank 0 had none" in whole.output


@pytest.mark.slow
def test_the_pages_listing_for_datasets_gives_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (block,) = (each for each in blocks("docs/how-to/streams.md") if "load_dataset" in each.text and each.language)
    place: dict[str, Any] = {"photinus": photinus}
    exec(compile(block.text, block.name, "exec"), place)
    (batch,) = place["batches"]
    assert sorted(batch["x"].tolist()) == ALL
