"""Importing torch knows the backend, and pays next to nothing for it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

import photinus.backend


def _run(script: str, **environ: str) -> str:
    import os

    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env={**os.environ, **environ}
    )
    assert run.returncode == 0, run.stderr
    return run.stdout + run.stderr


def test_registering_again_changes_nothing() -> None:
    before = list(dist.Backend.backend_list)
    photinus.backend.register()
    photinus.backend.register()
    assert dist.Backend.backend_list == before
    assert before.count("photinus") == 1
    assert dist.is_backend_available("photinus")
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"  # scripts that name no backend keep theirs


@pytest.mark.seconds
def test_import_torch_registers_the_backend_without_loading_the_engine() -> None:
    script = """if True:
        import torch, sys
        import torch.distributed as dist
        assert dist.is_backend_available("photinus")
        print([name for name in sys.modules if name.startswith("photinus") and name != "photinus"])
    """
    assert _run(script) == "['photinus.errors', 'photinus.version', 'photinus.backend.name', 'photinus.backend']\n"


@pytest.mark.slow  # a process for each order
def test_every_order_of_imports_works() -> None:
    for first in ("photinus", "photinus.backend", "torch", "torch.distributed"):
        script = f"import {first}; import torch, photinus.backend; print(torch.distributed.Backend.PHOTINUS)"
        assert _run(script) == "photinus\n"


@pytest.mark.seconds
def test_a_registration_that_fails_warns_and_never_breaks_import_torch() -> None:
    script = """if True:
        import torch.distributed as dist, photinus.backend, warnings
        def refuse(*_, **__): raise RuntimeError("another torch")
        dist.Backend.register_backend = refuse
        photinus.backend._registered = False
        photinus.backend.register()
    """
    assert "'photinus' is not available: RuntimeError: another torch" in _run(script)
