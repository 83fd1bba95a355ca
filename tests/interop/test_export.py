"""Transformers loads what `photinus export` writes, with tied weights and in another width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import photinus
from photinus.cli.main import main
from tests.small_run import QUIET, Numbered

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_the_file(tmp_path: Path, dtype: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra interop is not installed")
    config = transformers.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    with photinus.init("gloo", "cpu", seed=1):
        plain = transformers.GPT2LMHeadModel(config)
        model, optimizer = photinus.wrap(plain, torch.optim.AdamW(plain.parameters()))
        loop = photinus.Loop(model, optimizer, Numbered(8), batch_size=4, epochs=1, out=tmp_path / "run", report=QUIET)
        for numbers in loop:
            tokens = numbers[:, None].expand(-1, 5)
            loop.backward(model(tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()
    plain.config.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    assert main(["export", str(tmp_path / "run"), "-o", str(path), "--dtype", dtype]) == 0
    loaded, found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    wanted: dict[str, Any] = plain.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.to(getattr(torch, dtype)), wanted[name].to(getattr(torch, dtype))), name
