"""What a process group decides before it meets anyone."""

from __future__ import annotations

import pytest
import torch

from photinus.backend import Options
from photinus.backend.make_group import _check_world_size
from photinus.errors import WorldSizeError
from photinus.job.world import name_ranks


def test_the_world_must_be_as_large_as_the_launcher_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHOTINUS_WORLD_SIZE", raising=False)
    _check_world_size(3)
    monkeypatch.setenv("PHOTINUS_WORLD_SIZE", "3")
    _check_world_size(3)
    with pytest.raises(WorldSizeError, match=r"has 1 rank,.*expects 3 \(PHOTINUS_WORLD_SIZE=3\)"):
        _check_world_size(1)


def test_long_lists_of_ranks_are_cut_in_messages() -> None:
    assert name_ranks([0, 2], 8) == "ranks 0, 2"
    assert name_ranks(range(20), 8) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (20 ranks)"


def test_options_refuse_a_type_in_which_nothing_travels_between_hosts() -> None:
    with pytest.raises(ValueError, match=r"wire_dtype=torch\.float64: values can travel between hosts as"):
        Options(wire_dtype=torch.float64)
