"""Random states: seeded, captured, restored."""

from __future__ import annotations

import io
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from photinus.trainer.data import rng


def draws() -> tuple[Any, ...]:
    numbers = (random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(3).tolist())
    return (*numbers, torch.rand(3).tolist(), torch.randn(3).tolist())


@pytest.mark.parametrize("drawn_before", range(3))
def test_restored_generators_draw_what_they_would_have_drawn(drawn_before: int) -> None:
    rng.seed_everything(11)
    for _ in range(drawn_before):  # odd numbers of normal numbers leave one in store, which is state, too
        random.gauss(0, 1), np.random.randn(), torch.randn(1)
    state = rng.capture()
    wanted = [draws() for _ in range(3)]
    rng.seed_everything(99)
    rng.restore(state)
    assert [draws() for _ in range(3)] == wanted


def test_the_state_survives_a_file_read_without_running_code() -> None:
    rng.seed_everything(3)
    file = io.BytesIO()
    torch.save(rng.capture(), file)
    wanted = draws()
    file.seek(0)
    rng.restore(torch.load(file, weights_only=True))
    assert draws() == wanted


def test_rank_0_draws_what_a_script_for_one_device_draws() -> None:
    rng.seed_everything(42)
    ours = draws()
    random.seed(42), np.random.seed(42), torch.manual_seed(42)
    assert draws() == ours


def test_ranks_have_different_streams() -> None:
    streams = []
    for rank in range(8):
        rng.seed_everything(42, rank)
        streams.append(draws())
    for column in zip(*streams, strict=True):
        assert len({str(value) for value in column}) == 8


def test_the_whole_range_of_seeds_is_taken() -> None:
    for seed in (0, 1, 2**32, 2**63 - 1):
        rng.seed_everything(seed)
        first = draws()
        rng.seed_everything(seed)
        assert draws() == first
    for wrong, error in ((-1, ValueError), (2**63, ValueError), (1.0, TypeError), (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="seed"):
            rng.seed_everything(wrong)  # type: ignore[arg-type]


def test_derived_seeds_are_fixed_for_ever_and_differ_by_every_part() -> None:
    assert rng.derive_seed(0, "order", 0) == 7983451878373509741
    assert rng.derive_seed(7, "sample", 3, 11) == 2192753459517454284
    assert len({rng.derive_seed(a, b, c) for a in range(3) for b in ("x", "y") for c in range(3)}) == 18
    assert rng.derive_seed(1, 11) != rng.derive_seed(11, 1)


def test_half_a_state_changes_nothing() -> None:
    rng.seed_everything(5)
    good = rng.capture()
    wanted = draws()
    damaged: list[dict[str, Any]] = [
        {},
        {**good, "torch": good["torch"][:-1]},
        {**good, "torch": good["torch"].to(torch.int64)},
        {**good, "python": {**good["python"], "words": good["python"]["words"][:5]}},
        {**good, "python": {**good["python"], "version": 99}},
        {**good, "python": None},
        {**good, "numpy": {**good["numpy"], "position": 4000}},
        {**good, "numpy": {**good["numpy"], "words": good["numpy"]["words"] - 2**40}},
        {**good, "numpy": {"words": good["numpy"]["words"]}},
    ]
    for state in damaged:
        rng.seed_everything(5)
        with pytest.raises(ValueError, match="not a state of the random number generators"):
            rng.restore(state)
        assert draws() == wanted


@pytest.mark.seconds
def test_numpys_generator_is_seeded_and_restored_before_its_first_use(tmp_path: Path) -> None:
    """numpy loads its random module lazily and would seed it from the clock."""
    np.random.seed(8)
    torch.save(rng.capture(), tmp_path / "rng.pt")
    script = f"""
import numpy, torch
from photinus.trainer.data import rng
rng.seed_everything(5)
print(numpy.random.rand())
rng.restore(torch.load({str(tmp_path / "rng.pt")!r}, weights_only=True))
print(numpy.random.rand())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    assert second == np.random.rand()
    np.random.seed(5)
    assert first == np.random.rand()


def test_another_numpy_generator_is_told_not_swallowed() -> None:
    original = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.warns(RuntimeWarning, match="PCG64"):
            assert "numpy" not in rng.capture()
    finally:
        np.random.set_bit_generator(original)


def test_a_cuda_state_on_a_machine_without_is_told() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    rng.seed_everything(5)
    state = {**rng.capture(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    wanted = draws()
    with pytest.warns(RuntimeWarning, match="no CUDA here"):
        rng.restore(state)
    assert draws() == wanted


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_cuda_draws_again_what_it_would_have_drawn() -> None:
    rng.seed_everything(4)
    torch.rand(2, device="cuda")
    state = rng.capture()
    wanted = torch.rand(5, device="cuda").tolist()
    rng.seed_everything(5)
    rng.restore(state)
    assert torch.rand(5, device="cuda").tolist() == wanted
