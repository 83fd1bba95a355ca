"""Images: a state in memory files, cut over the ranks of a host, sealed with a digest, and put together again."""

from __future__ import annotations

import contextlib
import io
import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from photinus.errors import CheckpointError
from photinus.job.worker_files import HEAD_BYTES, Head, read_head, read_progress
from photinus.trainer.checkpoint import image, image_reader
from photinus.trainer.checkpoint.image import Content, Copy, MemoryFile


class Host:
    """The memory files of a host with some ranks."""

    def __init__(self, ranks: int) -> None:
        self.descriptors = [os.memfd_create(f"test-image-{rank}") for rank in range(ranks)]
        self.paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in self.descriptors]
        self.files = [MemoryFile(path) for path in self.paths]

    def write(self, contents: list[Content], step: int = 7) -> list[Copy]:
        copies = []
        for rank, content in enumerate(contents):
            copies.append(Copy(Head("run", step, rank, len(contents), rank, len(contents)), content))
            copies[-1].take(self.files[rank])
            copies[-1].seal_beside()
        for copy in copies:
            copy.wait()
        for path in self.paths:
            image_reader.verify(path)
        return copies

    def close(self) -> None:
        self.files.clear()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host(3)
    yield made
    made.close()


def load(paths: list[str], rank: int | None = None) -> dict[str, Any]:
    return image_reader.load(image_reader.open_files(paths), rank)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5, dtype=torch.float32)
    )
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def addresses(model: nn.Module, optimizer: torch.optim.Optimizer) -> frozenset[int]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return frozenset(tensor.data_ptr() for tensor in [*model.parameters(), *states])


def saved_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def assert_equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
        assert (found.dtype, found.stride()) == (wanted.dtype, wanted.stride())
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for each, other in zip(found, wanted, strict=True):
            assert_equal(each, other)
    else:
        assert found == wanted


def test_state_comes_back_as_it_was_and_each_byte_is_copied_once(host):
    model, optimizer = trained()
    equal = addresses(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "position": {"step": 7, "x": (1, None)}}
    copies = host.write([Content(state, {"rng": {rank: torch.arange(rank)}}, equal) for rank in range(3)])
    found = load(host.paths)
    rng = found.pop("rng")
    assert_equal(found, state)
    assert_equal(rng, {rank: torch.arange(rank) for rank in range(3)})
    assert found["model"]._metadata == state["model"]._metadata
    held = sum(t.nbytes for t in model.state_dict().values())
    held += sum(t.nbytes for s in optimizer.state.values() for t in s.values())
    overhead = sum(HEAD_BYTES + 16 * 1024 for _ in copies)
    assert held < sum(copy.bytes for copy in copies) < held + overhead
    assert max(copy.bytes for copy in copies) < 0.6 * held + overhead


def test_tensors_of_odd_layouts_types_and_sizes_come_back(host):
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "x": {
            "a view": base[1:3, ::2],
            "transposed": base.t(),
            "expanded": torch.ones(1).expand(5),
            "empty": torch.empty(0, 3),
            "a number": torch.tensor(3, dtype=torch.int8),
            "bool": torch.tensor([True, False]),
            "complex": torch.tensor([1 + 2j]).conj(),
            "half": torch.ones(3, dtype=torch.bfloat16),
            "sparse": torch.eye(3).to_sparse(),
        }
    }
    everything = frozenset(each.data_ptr() for each in state["x"].values() if not each.is_sparse)
    for equal in (frozenset(), everything):
        host.write([Content(state, {}, equal)] * 3)
        found = load(host.paths)["x"]
        for name, tensor in state["x"].items():
            assert torch.equal(found[name].to_dense(), tensor.to_dense()), name
        assert found["transposed"].stride() == base.t().stride()


def test_what_was_one_tensor_under_two_names_stays_one(host):
    tied = torch.randn(1000)
    for own in (False, True):
        state = {"model": {"a": tied, "b": tied.detach()}}
        host.write([Content({} if own else state, state if own else {})] * 3)
        found = load(host.paths)["model"]
        assert found["a"] is found["b"]


def test_states_that_ranks_hold_in_parts_are_joined_in_the_order_of_the_parameters(host):
    contents = []
    for rank in range(3):
        state = {index: {"exp_avg": torch.full((4,), float(index))} for index in range(rank, 7, 3)}
        contents.append(Content({"position": 1}, {"optimizer": {"state": state, "param_groups": [{"lr": 0.1}]}}))
    host.write(contents)
    for rank in (None, 1):
        found = load(host.paths, rank)
        assert list(found["optimizer"]["state"]) == list(range(7))
        assert all(float(s["exp_avg"][0]) == index for index, s in found["optimizer"]["state"].items())
        assert found["optimizer"]["param_groups"] == [{"lr": 0.1}]


def test_a_rank_gets_back_what_it_had_of_its_own(host):
    host.write([Content({}, {"model": {"buffer": torch.tensor(rank)}}) for rank in range(3)])
    assert [int(load(host.paths, rank)["model"]["buffer"]) for rank in (None, 0, 1, 2)] == [0, 0, 1, 2]


@pytest.mark.parametrize("size", [1 << 10, 5 << 20])
def test_what_changes_after_it_was_taken_does_not_matter(host, size):
    tensor = torch.zeros(size)
    for cores in (1, 4):
        copy = Copy(Head("run", 1, 0, 1, 0, 1), Content({"x": tensor.zero_()}, {}))
        copy._threads = cores
        copy.take(host.files[0])
        assert read_head(host.paths[0]) is None
        tensor.add_(1)
        copy.seal_beside()
        copy.wait()
        image_reader.verify(host.paths[0])
        assert not load(host.paths[:1])["x"].any()


class FakeStream:
    """A CUDA stream that has done what was queued; its events are numbers."""

    waited_for: ClassVar[list[int]] = []
    recorded: ClassVar[list[int]] = []

    def __init__(self, device: object = None) -> None:
        self.recorded.clear()
        self.waited_for.clear()

    def record_event(self) -> int:
        self.recorded.append(len(self.recorded))
        return self.recorded[-1]

    def wait_event(self, event: int) -> None:
        self.waited_for.append(event)

    def wait_stream(self, stream: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass


def test_what_comes_from_a_gpu_is_staged_in_blocks_that_are_used_again(monkeypatch):
    monkeypatch.setattr(image, "_BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(image, "_MOST_STAGED", 3)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    sources = [torch.randn(70, 60).to(torch.float16), torch.randn(3, 400).t(), torch.arange(5)]
    pieces, at = [], HEAD_BYTES
    for tensor in sources:
        pieces.append((at, tensor, 0, tensor.nbytes))
        at += tensor.nbytes
    memory = torch.zeros(at, dtype=torch.uint8)
    staged = image._Staging(list(image._cut_into_blocks(pieces)), memory)
    wanted = b"".join(bytes(each.as_strided((each.numel(),), (1,)).view(torch.uint8).numpy()) for each in sources)
    for tensor in sources:
        tensor.zero_()
    staged.wait()
    assert bytes(memory.numpy())[HEAD_BYTES:] == wanted
    blocks = 9 + 5 + 1
    assert FakeStream.recorded == list(range(blocks))
    assert FakeStream.waited_for == list(range(blocks - 3))  # block n is free when piece n - 3 is on the host


def test_every_one_of_1000_random_flips_is_refused(host):
    state = {"model": {"weight": torch.randn(3000), "bias": torch.randn(5)}, "position": {"step": 7}}
    host.write([Content(state, {"rng": {rank: 1}}, {state["model"]["weight"].data_ptr()}) for rank in range(3)])
    chance = random.Random(0)
    beside = range(HEAD_BYTES - 24, HEAD_BYTES)  # no part of the image
    for _ in range(1000):
        rank = chance.randrange(3)
        head = read_head(host.paths[rank])
        assert head is not None
        at = chance.choice([chance.randrange(HEAD_BYTES - 24), chance.randrange(HEAD_BYTES, head.bytes)])
        assert at not in beside
        byte = os.pread(host.descriptors[rank], 1, at)
        os.pwrite(host.descriptors[rank], bytes([byte[0] ^ 1 << chance.randrange(8)]), at)
        with pytest.raises(CheckpointError, match="damaged"):
            image_reader.verify(host.paths[rank])
        os.pwrite(host.descriptors[rank], byte, at)
        image_reader.verify(host.paths[rank])


def test_pages_in_a_different_order_are_refused(host):
    weight = torch.randn(30_000)
    host.write([Content({"weight": weight}, {}, {weight.data_ptr()})] * 3)
    pages = [os.pread(host.descriptors[1], 4096, HEAD_BYTES + at) for at in (4096, 8192)]
    os.pwrite(host.descriptors[1], pages[1] + pages[0], HEAD_BYTES + 4096)
    with pytest.raises(CheckpointError, match="damaged"):
        image_reader.verify(host.paths[1])


def test_files_of_two_steps_do_not_make_an_image(host):
    host.write([Content({"x": 1}, {})] * 3, step=7)
    Copy(Head("run", 8, 1, 3, 1, 3), Content({"x": 1}, {})).take(host.files[1])
    with pytest.raises(CheckpointError, match="another image"):
        load(host.paths)


def test_progress_is_kept_beside_the_image(host):
    host.files[0].note_progress(41)
    assert read_progress(host.paths[0]) == 41
    assert [read_progress(path) for path in [host.paths[1], "/nowhere"]] == [-1, -1]
